PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long mutants browser format bench clean

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/core: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/learn: .venv/core
	$(BIN)/python -m pip install --quiet --editable ".[learn]"
	touch $@

.venv/dev: .venv/core
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# Solve a small bilevel minimax problem, print its certificate, save a plot of its convergence; then
# train robust classifiers on scikit-learn's digits and write a report.
demo: .venv/learn
	$(BIN)/bilevax demo
	$(BIN)/bilevax robust --demo --out demo --overwrite

# A browser to look at reports with. Only a container gets one unasked; without one its tests skip.
browser:
	@for name in chromium google-chrome chromium-browser; do command -v $$name > /dev/null && exit 0; done; \
	test ! -f /.dockerenv || (apt-get update -qq && timeout 300 apt-get install -y -qq chromium) > /dev/null 2>&1 || true

# Most of the tests' time is XLA's, which takes a third less of it with its older code generator;
# `make test-long` has the one that users get. The tests of a file share programs: each file is for
# one process.
COMPILE_FAST := XLA_FLAGS="--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"

# Everything that CI checks.
test: .venv/dev browser
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(COMPILE_FAST) $(BIN)/pytest -n 2 --dist loadfile --durations=25

# The tests that `make test` leaves out for their length, too.
test-long: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal -m "long or not long"

# Small faults of the source, one at a time: the short tests must fail on each of them.
mutants: .venv/dev
	$(BIN)/python tests/mutants.py

format: .venv/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Measure, and write the tables of benchmarks/README.md anew. OTHER=PYTHON is the interpreter of an
# environment with another version, to be measured in the same run.
OTHER ?=
beside = $(if $(OTHER),--other $(OTHER))
bench: .venv/dev
	$(BIN)/python benchmarks/first_answer.py $(beside) --json benchmarks/results/first_answer.json
	test -z "$(OTHER)" || $(BIN)/python benchmarks/same_path.py $(beside) --json benchmarks/results/same_path.json
	$(BIN)/python benchmarks/exact_arithmetic.py --json benchmarks/results/exact_arithmetic.json
	$(BIN)/python benchmarks/certifying.py $(beside) --json benchmarks/results/certifying.json
	$(BIN)/python benchmarks/optfom_overhead.py --json benchmarks/results/optfom_overhead.json
	$(BIN)/python benchmarks/library.py --json benchmarks/results/library.json
	$(BIN)/python benchmarks/many.py --json benchmarks/results/many_cpu.json
	$(BIN)/python benchmarks/adaptive_loop.py $(beside) --json benchmarks/results/adaptive_loop.json
	$(BIN)/bilevax bench linear --max-seconds 8 --json benchmarks/results/linear.json --plot benchmarks/results/linear.png
	for tolerance in 1e-4 1e-6; do $(BIN)/bilevax bench linear --methods adaptive --tolerance $$tolerance --json benchmarks/results/linear_$$tolerance.json || exit 1; done
	$(BIN)/bilevax bench linear --methods paper adaptive --sizes 400 500 --instances 3 --max-seconds 40 --json benchmarks/results/linear_paper.json
	$(BIN)/python benchmarks/published.py --json benchmarks/results/published.json --plot benchmarks/results/published.png
	$(BIN)/python benchmarks/exponents.py --json benchmarks/results/exponents.json --plot benchmarks/results/exponents.png
	for part in epsilon size exact; do $(BIN)/bilevax bench growth --parts $$part --json benchmarks/results/growth_$$part.json --plot benchmarks/results/growth_$$part.png || exit 1; done
	$(BIN)/python benchmarks/inner.py --json benchmarks/results/inner.json
	$(BIN)/python benchmarks/stochastic.py --json benchmarks/results/stochastic.json --plot benchmarks/results/stochastic.png
	$(BIN)/python benchmarks/stochastic_constrained.py --json benchmarks/results/stochastic_constrained.json
	$(BIN)/python benchmarks/coverage.py --batches 8 16 64 --json benchmarks/results/coverage.json
	$(BIN)/python benchmarks/coverage.py --batches 1024 --repetitions 500 --json benchmarks/results/coverage_many.json
	$(BIN)/python benchmarks/out_of_memory.py --json benchmarks/results/out_of_memory.json
	$(BIN)/python benchmarks/sapd_overhead.py --json benchmarks/results/sapd_overhead.json
	test ! -d ../shared/data || $(BIN)/python benchmarks/robust.py --json benchmarks/results/robust.json
	test ! -d ../shared/data || $(BIN)/python benchmarks/meta.py --cases 'sinusoid, 5 shots' 'sinusoid, 10 shots' 'adult by occupation, 20 rows' --json benchmarks/results/meta.json
	test ! -d ../shared/data || $(BIN)/python benchmarks/meta.py --cases 'images, 5-way 1-shot' 'images, 5-way 5-shot' --json benchmarks/results/meta_images.json
	test ! -d ../shared/data || $(BIN)/python benchmarks/people.py $(beside) --json benchmarks/results/people.json --plot benchmarks/results/people.png
	test ! -d ../shared/data || $(BIN)/python benchmarks/model_problem.py --json benchmarks/results/model_problem.json
	$(BIN)/python benchmarks/meta_problem.py --json benchmarks/results/meta_problem.json
	test ! -d ../shared/data || $(BIN)/python benchmarks/minibatches.py --json benchmarks/results/minibatches.json
	$(BIN)/python benchmarks/robust_large.py --json benchmarks/results/robust_large.json
	$(BIN)/python benchmarks/robust_fast.py --json benchmarks/results/robust_fast.json
	$(BIN)/python benchmarks/robust_threads.py --json benchmarks/results/robust_threads.json
	# On an accelerator (its results are kept): benchmarks/deep_cost.py, benchmarks/deep_variance.py and
	# benchmarks/deep_dominoes.py, which makes deep_dominoes.json and, with --ablation, deep_ablation.json.
	$(BIN)/python benchmarks/vmap_linear.py --json benchmarks/results/vmap_linear.json
	test ! -f ../shared/data/basblib.json || $(BIN)/bilevax bench suite ../shared/data/basblib.json --tolerance 1e-6 --json benchmarks/results/suite.json
	$(BIN)/python benchmarks/tables.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .benchmarks
