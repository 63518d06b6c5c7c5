"""Small faults of the source, one at a time, each of which the short suite must notice.

    python tests/mutants.py [WORD …]

takes those whose file or text has one of the words, or all. A fault that survives, or whose text is
not found exactly once, is an error. First the tests that are named must pass without any fault.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
# At the same time; each takes a core and up to 2 GB.
PARALLEL = 2
# A method with a fault may never end, which is noticed, too. In seconds.
PATIENCE = 300.0


class Fault(NamedTuple):
    """In `file`, `old` becomes `new`, and one of `tests` fails."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CERTIFICATES = "tests/programs/test_certificates.py::"
CONSTRAINED = "tests/programs/test_constrained_certificates.py::"
OUTSIDE = "tests/programs/test_outside.py::"
ATTACKS = "tests/programs/test_attacks.py::"
CUT = OUTSIDE + "test_cut_saved_and_resumed_it_is_the_same_run[cuts2]"
DEFINITION = CERTIFICATES + "test_lines_agree_with_the_definition[matrix_game]"
CONSTRAINED_DEFINITION = CONSTRAINED + "test_lines_agree_with_the_definition[upper]"
SCHEDULE = "tests/unit/test_schedule.py::"
TERMS = "tests/programs/test_terms.py::"
LEARN = "tests/apps/test_learn_fit.py::"
SERVING = "tests/apps/test_serving.py::"
DEEP = "tests/apps/test_deep_methods.py::"

FAULTS = [
    # Certificates that would say yes where they should say no.
    Fault("certificates/residuals.py", '"response_z1": z1,', '"response_z1": 0 * z1,',
          (DEFINITION,)),
    Fault("certificates/residuals.py", "y1 + y2 + rise + fall", "y1 + y2 + rise - fall",
          (DEFINITION,)),
    Fault("certificates/residuals.py", "trees.norm((x1, y1, y2))", "trees.norm((x1, y1))",
          (DEFINITION,)),
    Fault("certificates/residuals.py", "trees.axpy(rho, trees.subtract(a1, b1), f1)",
          "trees.axpy(rho, trees.subtract(b1, a1), f1)", (DEFINITION,)),
    Fault("certificates/rounding.py", "MISSES / 2)) / LARGER", "MISSES / 2)) / (1e9 * LARGER)",
          ("tests/unit/test_rounding.py",)),
    Fault("certificates/rerounding.py", "results if _is_exact(eqn) else", "results if True else",
          (ATTACKS + "test_every_operation_is_rounded_anew",)),
    Fault("certificates/breaches.py", "if shortfall > 0]", "if shortfall > 1e9]",
          (ATTACKS + "test_what_is_not_convex_is_named",)),
    Fault("certificates/around.py", "EXPLAINED = 2.0", "EXPLAINED = 1e9",
          (ATTACKS + "test_a_kink_with_a_zero_multiplier_is_no_candidate",)),
    Fault("certificates/constrained.py", "_product(absolute(multipliers), absolute(values), dtype)",
          "_product(multipliers, values, dtype)",
          (ATTACKS + "test_complementarity_does_not_cancel",)),
    Fault("driver/loop.py", "if not self.verdicts.may_leave:", "if True:",
          (ATTACKS + "test_a_run_goes_on_from_a_local_maximum",)),
    Fault("certificates/kkt.py", 'trees.all_finite(terms) & jnp.isfinite(objective)',
          'jnp.isfinite(objective)',
          (CERTIFICATES + "test_outside_the_domain_epsilon_is_infinite",)),
    Fault("certificates/stationarity.py", "problem.y.residual(point.y, trees.scale(-1, gy))",
          "problem.y.residual(point.y, gy)",
          (CERTIFICATES + "test_stationarity_agrees_with_the_definition",)),
    Fault("certificates/constrained.py", "problem.y.value(point.y) + fall",
          "problem.y.value(point.y)", (CONSTRAINED + "test_the_lower_gap_is_a_bound[upper]",)),
    Fault("certificates/constrained.py", "jnp.all(leaf >= 0)", "jnp.all(leaf >= -1e9)",
          (CONSTRAINED + "test_multipliers_of_the_wrong_sign_certify_nothing[upper]",)),
    Fault("certificates/constrained.py", "_feasibility(here.at_z, dtype)",
          "_feasibility(here.at_y, dtype)", (CONSTRAINED_DEFINITION,)),
    Fault("certificates/constrained.py", "axpy(-rho, e.below[0]", "axpy(rho, e.below[0]",
          (CONSTRAINED_DEFINITION,)),
    Fault("certificates/definition.py", "inside & ~jnp.isnan(v)", "inside",
          (CERTIFICATES + "test_nan_in_a_term_certifies_nothing",
           CERTIFICATES + "test_stationarity_that_is_not_a_number_certifies_nothing")),
    Fault("certificates/certificate.py", "return max(math.inf if", "return min(math.inf if",
          (CERTIFICATES + "test_epsilon_is_the_largest_line",)),
    Fault("certificates/certificate.py", "return all(value <=", "return any(value <=",
          ("tests/programs/test_tolerances.py::test_a_line_may_have_its_share_on_top",)),
    Fault("certificates/certificate.py", "size if math.isfinite(size) else 0.0", "size",
          ("tests/programs/test_tolerances.py::test_a_line_may_have_its_share_on_top",)),
    Fault("certificates/sampled.py", "{name: v + self.radii[name] for", "{name: v for",
          ("tests/unit/test_sentences.py::test_a_certificate_from_samples_says_how_sure_it_is",)),
    Fault("certificates/sampled.py", "cost = estimation_cost(count, alpha) ** 2", "cost = 1.0",
          ("tests/programs/test_sampled.py::"
           "test_the_radius_is_chebyshevs_times_students_quantile",)),
    Fault("certificates/sampled.py", "return self.largest_share > largest_normal_share",
          "return self.largest_share > 1 + largest_normal_share",
          ("tests/unit/test_sentences.py::test_heavy_tails_are_told",)),
    # The user's functions.
    Fault("functions.py", "return self if now in self._readings else", "return self if now else",
          ("tests/programs/test_readings.py::test_a_change_is_seen_and_its_taking_back_too",)),
    Fault("functions.py", "function._accept(reading(function.function))", "pass",
          ("tests/programs/test_readings.py::"
           "test_nothing_is_compiled_for_a_function_that_reads_the_same",)),
    # The suite.
    Fault("bench/records.py", "y_bounds_in_lower_level=inside is not False",
          "y_bounds_in_lower_level=inside is True",
          ("tests/unit/test_suite_problems.py::"
           "test_bounds_on_y_of_which_nothing_is_said_are_the_lower_levels",)),
    # The driver.
    Fault("driver/schedule.py", "moves < STALL_MOVES", "moves <= STALL_MOVES",
          (SCHEDULE + "test_the_numbers_of_the_rule",)),
    Fault("driver/schedule.py", "max(following, self.next_check + self.between)", "following",
          (SCHEDULE + "test_the_first_check_is_early_and_the_others_grow_apart",)),
    Fault("driver/schedule.py", "return before - now >", "return now - before >",
          (SCHEDULE + "test_a_method_with_a_theorem_is_spared_while_its_objective_falls",)),
    Fault("driver/limits.py", "self.begun = clock.seconds", "self.begun = 0.0",
          ("tests/unit/test_limits.py::test_seconds_count_from_the_beginning_of_a_call",)),
    Fault("driver/sentences.py", "worst = max(lines", "worst = min(lines",
          ("tests/unit/test_sentences.py::test_the_hint_names_the_largest_line",)),
    Fault("driver/checkpoint.py", 'if not intact or hashlib.sha256(rest).hexdigest() != '
          'header.get("sha256"):', "if not intact:",
          ("tests/unit/test_checkpoint.py::test_one_changed_byte_is_noticed",)),
    Fault("driver/checkpoint.py", "encode() + flat[::every].tobytes()", "encode()",
          ("tests/unit/test_checkpoint.py::test_fingerprints_tell_runs_apart",)),
    Fault("driver/judging.py", "excess(certificate) <= self.judge.excess(self.certificate)",
          "excess(certificate) >= self.judge.excess(self.certificate)",
          (OUTSIDE + "test_the_default_solver_finds_the_closed_form",)),
    Fault("driver/resuming.py", "run.earlier, run.earlier_solves = saved.earlier, ",
          "run.earlier_solves = ",
          ("tests/programs/test_fallback.py::test_a_run_that_fell_back_is_resumed_bit_for_bit",)),
    Fault("solvers/semismooth.py", "equation.solved(-equation.rest[first:, None], first)",
          "equation.solved(equation.rest[first:, None], first)",
          ("tests/programs/test_newton.py::test_the_direction_is_that_of_numpy",)),
    Fault("solvers/semismooth.py", "of_a = alone - coupled @ of_b[y2]", "of_a = alone",
          ("tests/unit/test_semismooth.py",)),
    Fault("solvers/semismooth.py", "changed = None if change is None else c.chosen(share * change)",
          "changed = None if change is None else c.chosen(change)",
          ("tests/programs/test_newton.py::test_the_tangent_leads_to_the_new_solution",)),
    Fault("solvers/endgame.py", "fell = left <= FALL * now", "fell = left <= 1e9 * now",
          ("tests/programs/test_endgame.py",)),
    Fault("solvers/model.py", "for k in range(11))", "for k in range(1))",
          ("tests/unit/test_model.py",)),
    Fault("solvers/semismooth.py", "rest + (held - pushed) / s", "rest",
          ("tests/programs/test_newton.py::test_the_direction_is_that_of_numpy",)),
    Fault("solvers/newton.py", "rose = seen.repaired >", "rose = seen.repaired + 1e9 <",
          ("tests/programs/test_newton.py::"
           "test_a_small_penalty_does_not_lead_away_where_the_lower_level_is_hardly_curved",)),
    Fault("certificates/settling.py", "arrived = left / s <=", "arrived = 1e-9 * left / s <=",
          ("tests/unit/test_settling.py",)),
    Fault("certificates/constrained.py", "above = jax.tree.map(lambda c: jnp.maximum(c, 0)",
          "above = jax.tree.map(lambda c: jnp.minimum(c, 0)", ("tests/programs/test_culprits.py",)),
    Fault("solvers/newton.py", "linear_solves=s.linear_solves + 1,",
          "linear_solves=s.linear_solves + 2,",
          ("tests/programs/test_newton.py::test_it_gives_up_by_itself_and_says_so",)),
    Fault("solvers/newton.py", "well >= TAKEN)", "well >= -1e9)",
          ("tests/programs/test_newton.py::"
           "test_a_move_after_which_the_objective_is_higher_is_taken_back",)),
    Fault("driver/pieces.py", "min(limit, _quick_mark(problem, state)) if quickly else limit",
          "limit",
          ("tests/programs/test_compilation.py::"
           "test_a_run_is_the_same_wherever_it_is_cut_around_the_change_of_programs[cuts4]",)),
    Fault("driver/nonfinite.py", "low, last = middle, piece", "low = middle",
          ("tests/programs/test_solve.py::"
           "test_not_finite_is_said_and_located_even_on_the_last_step[0]",)),
    # Problems and tools.
    Fault("problems/point.py", "Point(**(self._blocks | blocks))",
          "Point(**(blocks | self._blocks))",
          ("tests/unit/test_point.py::test_a_point_does_not_change",)),
    Fault("problems/validation.py", "        if not inside:\n", "        if inside:\n",
          (OUTSIDE + "test_terms_of_both_sides_meet",)),
    Fault("problems/reformulations.py", "y1 = rho * problem.y1", "y1 = problem.y1",
          ("tests/programs/test_problems.py::test_the_penalty_is_the_papers_formula",)),
    Fault("functions.py", "self._recorded = jax.jit(traced, inline=True)",
          "self._recorded = traced",
          ("tests/unit/test_functions.py",)),
    Fault("terms/sets.py", "<= roundings(x) * total", "<= x.size**0.5 * roundings(x) * total",
          ("tests/unit/test_rounding.py",)),
    Fault("driver/judging.py", "self.confirmed, self.certificate = attempt, True",
          "self.confirmed, self.certificate = attempt, False", ("tests/unit/test_judging.py",)),
    Fault("programs.py", "> most // 2", "> most", ("tests/unit/test_programs.py",)),
    Fault("cache.py", "stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH", ("tests/unit/test_cache.py",)),
    Fault("files.py", "os.fsync(file.fileno())", "pass", ("tests/unit/test_files.py",)),
    # Solvers.
    Fault("solvers/base.py", "s.gradients + self.gradients_per_step <= limit",
          "s.gradients <= limit", (CUT,)),
    Fault("solvers/extragradient.py", "prox(s.iterate - s.step_size * there)",
          "prox(s.iterate - s.step_size * here)",
          ("tests/programs/test_solvers.py::test_extragradient_solves_to_the_certificate",)),
    Fault("solvers/optfom.py", "gamma = 8 / sigma_x", "gamma = 4 / sigma_x",
          ("tests/programs/test_solvers.py::test_optfom_follows_the_paper_step_by_step",)),
    Fault("solvers/proximal_point.py", "first(self.x_weight, 2 * smoothness)",
          "first(self.x_weight, smoothness)",
          ("tests/programs/test_solvers.py::test_proximal_point_follows_the_paper[start]",)),
    Fault("solvers/continuation.py", "& (gap > FOLLOWED * self.before[1])", "",
          ("tests/unit/test_continuation.py",)),
    Fault("solvers/sapd.py", "beta = min(0.5, sy / sx, sx / sy)", "beta = min(0.5, sy / sx)",
          ("tests/programs/test_sapd.py::test_constants_at_extreme_condition_numbers",)),
    Fault("solvers/multipliers.py", "    if fixed(problem):\n        touched",
          "    if not fixed(problem):\n        touched",
          ("tests/programs/test_constrained.py::test_a_bound_grows_unless_it_is_the_one_given",)),
    Fault("theory/bounds.py", "sigma_y = eps / (2 * Dq)", "sigma_y = eps / Dq",
          ("tests/unit/test_theory.py",)),
    Fault("solvers/penalty.py", "y_weight=epsilon / (2 * diameter)", "y_weight=epsilon / diameter",
          ("tests/unit/test_theory.py",)),
    # Terms, data, classifiers, networks.
    Fault("terms/norms.py", "v - lax.clamp(-shrink, v, shrink)", "v - lax.clamp(-shrink, v, 0 * v)",
          (TERMS + "test_prox_and_projection_agree_with_cvxpy[L1]",)),
    Fault("terms/norms.py", "return (a + pull * c) / (1 + pull)", "return (a + c) / (1 + pull)",
          (TERMS + "test_prox_and_projection_agree_with_cvxpy[Ridge-center]",)),
    Fault("data/memory.py", "state.drawn + self.batch), self.rows(indices)",
          "state.drawn + 1), self.rows(indices)",
          ("tests/programs/test_data.py::test_the_state_holds_arrays_and_counts_samples",)),
    Fault("learn/_risk.py", "(free > 0) & (free < self.cap)", "free > 0",
          (LEARN + "test_derivatives_are_those_of_finite_differences",
           LEARN + "test_weights_satisfy_their_optimality_conditions")),
    Fault("learn/_risk.py", "eta / 2 * far.sum()", "eta * far.sum()",
          (LEARN + "test_derivatives_are_those_of_finite_differences",)),
    Fault("learn/columns.py", "(-number if minus else number)", "number",
          (SERVING + "test_cells_say_what_they_say[cells1-number-says1]",)),
    Fault("learn/columns.py", 'r"([+-]?\\d+)\\.0"', 'r"([+-]?\\d+)\\.0+"',
          (SERVING + "test_one_decimal_comma_says_what_points_mean_in_other_columns",)),
    Fault("learn/serving.py", "moved.sum() / 2 < LEAST_MOVED", "moved.sum() / 2 < 0",
          (SERVING + "test_shares_of_groups_drift_by_more_than_chance_or_not",)),
    Fault("learn/export.py", "len(frequent) if len(rare) else -1", "-1",
          (SERVING + "test_the_graph_of_categories_alone",)),
    Fault("deep/methods.py", "- self.eta * far", "+ self.eta * far", (DEEP + "test_group_dro",)),
    Fault("deep/bilevel.py", "(1 + theta) * s - theta * last", "s", (DEEP + "test_bilevel_dro",)),
]  # fmt: skip


def passes(source: Path, tests: list[str], limit: float | None = None) -> tuple[bool, str]:
    """Whether these tests pass on this source within so many seconds; the end of their output."""
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", *tests]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=limit, **options)
    except subprocess.TimeoutExpired:
        return False, f"not done after {limit} s"
    if done.returncode not in (0, 1):  # pytest could not run, which proves nothing
        raise RuntimeError(done.stdout + done.stderr)
    return done.returncode == 0, done.stdout[-300:]


def survives(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory(prefix="bilevax-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "bilevax" / fault.file
        file.write_text(file.read_text().replace(fault.old, fault.new))
        return passes(source, list(fault.tests), PATIENCE)[0]


def main(words: list[str]) -> int:
    chosen = [f for f in FAULTS if not words or any(w in f.file or w in f.old for w in words)]
    wrong = [f for f in chosen if (SOURCE / "bilevax" / f.file).read_text().count(f.old) != 1]
    for fault in wrong:
        print(f"not found exactly once: {fault.file}: {fault.old!r}")
    if wrong or not chosen:
        return 1
    fine, end = passes(SOURCE, sorted({test for fault in chosen for test in fault.tests}))
    if not fine:
        print(f"the tests fail without any fault:\n{end}")
        return 1
    begun, survived = time.monotonic(), 0
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        for fault, alive in zip(chosen, pool.map(survives, chosen)):
            survived += alive
            name = "SURVIVED" if alive else "killed  "
            print(f"{name} {fault.file}: {fault.old.strip()!r} → {fault.new.strip()!r}", flush=True)
    print(f"{len(chosen)} faults, {survived} survived, {time.monotonic() - begun:.0f} s")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
