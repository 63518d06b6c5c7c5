"""Write benchmarks/README.md from the result files, so that no number in it is typed by hand.

python benchmarks/tables.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from colour_tables import colour_mnist
from deep_tables import deep_ablation, deep_cost, deep_dominoes
from deep_variance_tables import deep_variance
from hierarchical_tables import hierarchical
from meta_tables import meta, meta_problem
from paper_tables import exponents, published
from robust_tables import robust, robust_fast, robust_large, robust_threads
from stochastic_tables import (
    coverage,
    minibatches,
    out_of_memory,
    sapd_overhead,
    stochastic,
    stochastic_constrained,
)
from table_text import HERE, read, table

QUARTILES = ("least", "quarter", "median", "three_quarters", "worst")


def optfom_overhead() -> str:
    record = read("optfom_overhead")
    rows = [
        [
            f"{r['n']:,}",
            f"{r['m']:,}",
            f"{r['loop_microseconds']:.2f}",
            f"{r['bare_microseconds']:.2f}",
            f"{r['loop_over_bare']:.2f}",
        ]
        for r in record["results"]
    ]
    header = ["n", "m", "in OptFOM's loop, µs", "bare, µs", "ratio (target ≤ 2)"]
    return f"""## What OptFOM's loop costs beyond its gradients

One gradient of ½‖x‖² + cᵀx + yᵀAx − 0.05‖y‖² (x of n entries, y of m), inside OptFOM's compiled
loop with all that it does, and inside a compiled loop that does nothing else; the best of seven
rounds each, taken in turns. `{record["command"]}`

{table(header, rows)}
"""


def library() -> str:
    record = read("library")
    rows = [
        [
            r["instance"],
            r["method"],
            f"{r['tolerance']:g}",
            r["status"],
            f"{r['epsilon']:.1e}",
            f"{r['gradients']:,}",
            f"{r['theorem_N']:.0e}" if r["method"] == "paper" else "",
            f"{r['seconds']:.1f}",
            f"{r['distance_to_answer']:.1e}",
        ]
        for r in record["results"]
    ]
    header = ["instance", "method", "ε", "status", "certified ε", "gradients", "theorem's N", "s"]
    header += ["miss"]
    both = {(r["instance"], r["method"]): r for r in record["results"] if r["tolerance"] == 0.01}
    names = dict.fromkeys(r["instance"] for r in record["results"])
    pairs = [(both[n, "paper"], both[n, "adaptive"]) for n in names]
    reached = [(p, a) for p, a in pairs if p["status"] == a["status"] == "certified"]
    ratios = [p["gradients"] / a["gradients"] for p, a in reached]
    return f"""## The library

`PenaltyMethod()` with the paper's constants and `Adaptive()`, both until the certificate holds.
`miss` is the distance of (x1, y1) to the closed form: of the order of ε with the paper's penalty
1/ε, of √ε at most with one that is only as large as the gap needs. At ε = 0.01, which both reach
on {len(ratios)} of {len(pairs)} problems, the paper's method takes {min(ratios):,.0f} to
{max(ratios):,.0f} times the gradients. `{record["command"]}`

{table(header, rows)}
"""


def exact_arithmetic() -> str:
    record = read("exact_arithmetic")
    known = record["has_allowances"]

    def spread(values: list[float] | None) -> str:
        short = lambda v: f"{float(f'{v:.2g}'):,g}" if abs(v) < 1e5 else f"{v:.0e}"
        return "–" if values is None else " / ".join(map(short, values))

    def row(r: dict[str, Any], *names: str) -> list[str]:
        ratios = ("allowance_over_error", "allowance_over_vector_error")
        ratios = ratios if known else ("excess_over_vector_error",)
        worst = f"{r['worst_share']:.0e}" if r["understated"] else "–"
        cells = [f"{r['lines']:,}", f"{r['infinite']:,}", f"{r['understated']:,}", worst]
        return [*(r[name] for name in names), *cells, *(spread(r[ratio]) for ratio in ratios)]

    header = ["lines", "infinite", "understated", "by at most, relative"]
    if known:
        header += ["allowance over true error", "over the error of its vector"]
    else:
        header += ["excess of the claim over the error of its vector"]
    beneath = sum(r["beneath_the_gap"] for r in record["results"])
    return f"""## Lines of certificates in exact arithmetic

{record["count"]:,} random problems of each law, half with random points, half with points where all
distances are zero but for rounding. Every line that a certificate claims is compared with the same
line in 80-bit arithmetic (60 digits where these leave open which is larger), of the numbers as
given. Understated is a line below the exact one by more than 1e-15 of it. For gaps, whose lines are
bounds by tangents, these bounds are compared; {beneath} of the claims are even below a lower bound
of the gap itself. Ratios are the 5 %, 50 % and 95 % quantiles; the error of a line's vector is one
in whatever direction it points, by JAX's gradients. `{record["command"]}`

{table(["law", "line", *header], [row(r, "law", "line") for r in record["results"]])}

The same lines by how the lower level's loss is written:

{table(["law", "loss", *header], [row(r, "law", "loss") for r in record["by_loss"]])}
"""


def linear() -> str:
    record = read("linear")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for r in record["records"]:
        groups.setdefault((r["n"], r["m"], r["l"], r["method"]), []).append(r)

    def mean(rows: list[dict[str, Any]], field: str, form: str) -> str:
        known = [r[field] for r in rows if r[field] is not None]
        return format(statistics.mean(known), form) if len(known) == len(rows) else "–"

    rows = []
    for (n, m, rows_below, method), several in groups.items():
        certified = sum(r["status"] == "certified" for r in several)
        unproven = "" if all(r["optimum_proven"] for r in several) else "*"
        rows.append(
            [
                f"{n}",
                f"{m}",
                f"{rows_below}",
                method,
                f"{certified} of {len(several)}",
                mean(several, "objective", ".2f"),
                mean(several, "repaired_objective", ".2f"),
                mean(several, "optimum", ".2f") + unproven,
                mean(several, "relative_error", ".1e"),
                f"{statistics.median(r['gradients'] for r in several):,.0f}",
                f"{statistics.median(r['seconds'] for r in several):.1f}",
            ]
        )
    header = ["n", "m", "l", "method", "certified", "objective", "repaired", "exact optimum"]
    header += ["relative error", "gradients", "s"]
    return f"""## The paper's linear experiment

Means over the instances; gradients and seconds are medians. An objective below the optimum is a
violation exploited, not a better answer: `repaired` keeps x and solves the lower level exactly, and
the error compares that with the optimum. A dash: for some instance no answer of the lower level
exists at the x found. `{record["command"]}`

{table(header, rows)}

![Objective, lower-level gap and infeasibility against gradients](results/linear.png)
"""


def linear_tight() -> str:
    """Adaptive on the linear experiment at three tolerances, and against the paper's method."""
    records = {name: read(name) for name in ("linear", "linear_1e-4", "linear_1e-6")}
    rows = []
    for record in records.values():
        for n, several in by_size(record, "adaptive"):
            certified = [r for r in several if r["status"] == "certified"]
            errors = [r["relative_error"] for r in several]
            worst = "–" if None in errors else f"{max(map(abs, errors)):.1e}"
            count = f"{len(certified)} of {len(several)}"
            gradients = [r["gradients"] for r in several]
            shown = [f"{statistics.median(gradients):,.0f}", f"{max(gradients):,}", worst]
            rows.append([f"{n}", f"{tolerance(record):g}", count, *shown])
    header = ["n", "ε", "certified", "gradients, median", "largest", "largest relative error"]
    # By size: the second file gives the paper's method more time where the first gave too little.
    against = {}
    for name in ("linear", "linear_paper"):
        if not (HERE / "results" / f"{name}.json").exists():
            continue
        record = read(name)
        for (n, paper), (_, adaptive) in zip(by_size(record, "paper"), by_size(record, "adaptive")):
            ours, theirs = ([r["gradients"] for r in many] for many in (adaptive, paper))
            certified = sum(r["status"] == "certified" for r in paper)
            ratios = [a / b for a, b in zip(theirs, ours)]
            reached = statistics.median(r["epsilon"] for r in paper)
            cells = [f"{statistics.median(ours):,.0f}", f"{statistics.median(theirs):,.0f}"]
            cells += [f"{statistics.median(ratios):,.0f}", f"{certified} of {len(paper)}"]
            against[n] = [f"{n}", *cells, f"{reached:.1f}"]
    heads = ["n", "Adaptive", "paper", "ratio", "paper certified", "paper's ε at the end"]
    commands = ", ".join(f"`{record['command']}`" for record in records.values())
    return f"""## Adaptive on the linear experiment, to tighter tolerances

All with default settings. The error is that of the repaired objective against the optimum.
{commands}

{table(header, rows)}

Against the paper's method, at ε = 0.01 in the same run: how many times Adaptive's gradients it was
given, and what it reached with them, as medians. Where it certified nothing, the ratio of gradients
to the certificate is larger than that.

{table(heads, list(against.values()))}
"""


def tolerance(record: dict[str, Any]) -> float:
    words = record["command"].split()
    return float(words[words.index("--tolerance") + 1])


def by_size(record: dict[str, Any], method: str) -> list[tuple[int, list[dict[str, Any]]]]:
    mine = [r for r in record["records"] if r["method"] == method]
    return [(n, [r for r in mine if r["n"] == n]) for n in dict.fromkeys(r["n"] for r in mine)]


def adaptive_loop() -> str:
    record = read("adaptive_loop")
    rows = [
        [
            f"{r['n']:,}",
            f"{r['loop_microseconds']:.1f}",
            f"{r['numpy_microseconds']:.1f}",
            f"{r['loop_over_numpy']:.2f}",
        ]
        for r in record["results"]
    ]
    header = ["n", "in Adaptive's loop, µs", "six products in NumPy, µs", "ratio (target ≤ 2)"]
    return f"""## What a gradient costs inside Adaptive's loop

Of bilevel linear problems; against its six bare matrix-vector products, in the same run.
`{record["command"]}`

{table(header, rows)}
"""


def first_answer() -> str:
    record = read("first_answer")
    rows = []
    by_key = {(r["version"], r["case"], r["cache"]): r for r in record["results"]}
    for (version, case, cache), row in by_key.items():
        if version == "this":
            other = by_key.get(("other", case, cache), {})
            cells = [
                f"{known(row.get(name), form)} / {known(other.get(name), form)}"
                for name, form in (("cpu_seconds", ".2f"), ("programs", ".0f"), ("traces", ".0f"))
            ]
            rows.append([case, cache, *cells])
    header = ["case", "cache", "CPU seconds", "programs", "traces of one function, at most"]
    return f"""## From imports to the first answer

In new processes, this version / the other, medians. `import` is what `import bilevax` adds to
`import jax, equinox`. `{record["command"]}`

{table(header, rows)}
"""


def same_path() -> str:
    record = read("same_path")
    found = record["comparison"]
    rows = [
        [part, str(r["solves"]), str(r["same"]), *(f"{r[name]:.3f}" for name in QUARTILES)]
        for part, r in found["ratios"].items()
        if r is not None
    ]
    header = ["part", "certified by both", "same count", *QUARTILES]
    prices = {
        r["key"].split()[1]: r["system_gradients"]
        for r in record["these"]
        if r["status"] == "price"
    }
    totals: dict[str, list[float]] = {}
    for side, name in enumerate(("these", "others")):
        for r in record[name]:
            if r["status"] == "price":
                continue
            sums = totals.setdefault(r["key"].rpartition("=")[2], [0.0, 0.0, 0.0, 0.0])
            sums[side] += r.get("gradients", 0)
            if name == "these":
                sums[2] += r["linear_solves"]
                sums[3] += 2 * prices[r["key"].split()[1]] * r["linear_solves"]
    summed = [
        [
            bound,
            f"{own:,.0f}",
            f"{systems:,.0f}",
            f"{priced:,.0f}",
            f"{other:,.0f}",
            f"{own / other:.2f}",
            f"{(own + priced) / other:.2f}",
        ]
        for bound, (own, other, systems, priced) in totals.items()
    ]
    priced = ", ".join(f"{size}: {price:,.0f}" for size, price in prices.items())
    return f"""## The same path in two versions

Gradients of this version over those of 0.1.0 on the linear problems, default settings. Of
{found["solves"]} solves, {len(found["lost"])} lost a certificate and {len(found["gained"])} gained
one. Single counts differ both ways, since small programs are compiled with other options and
rounding decides where a path goes. First-order steps end by linear systems; what one costs in
gradients was measured ({priced}). `{record["command"]}`

{table([name.replace("_", " ") for name in header], rows)}

All instances together; `priced` is twice what the systems cost:

{table(["ε", "gradients", "systems", "priced", "0.1.0", "ratio", "ratio, priced"], summed)}
"""


def together() -> str:
    record = read("vmap_linear")
    rows = [
        [
            f"{r['n']}",
            r["method"],
            f"{r['alone_microseconds']:.1f}",
            f"{r['together_microseconds']:.1f}",
            f"{r['alone_over_together']:.2f}",
        ]
        for r in record["results"]
    ]
    header = ["n", "method", "alone, µs a gradient", "together, µs", "alone / together"]
    return f"""## Five linear problems together under vmap

`bilevax bench linear` runs together what is faster so. `{record["command"]}`

{table(header, rows)}
"""


def certifying() -> str:
    record = read("certifying")
    by_key = {(row["case"], row["version"]): row for row in record["certificates"]}
    rows = []
    for (name, version), this in by_key.items():
        if version != "this":
            continue
        other = by_key.get((name, "other"), {})
        cells = [name]
        for measure in ("first", "again"):
            ratio = f"{this[measure] / other[measure]:.2f}" if other else "–"
            cells += [f"{this[measure]:.4f}", f"{other[measure]:.4f}" if other else "–", ratio]
        rows.append([*cells, f"{this['first_look']:.3f}", f"{this['look']:.4f}"])
    header = ["case", "first", "0.1.0", "ratio", "again", "0.1.0", "ratio", "first look", "look"]
    solves = [
        [r["case"], f"{r['solve']:.2f}", f"{r['looking']:.2f}", f"{r['looking'] / r['solve']:.2f}"]
        for r in record["solves"]
    ]
    return f"""## What a certificate costs

CPU seconds of `certify` for a point with its witnesses, in a process of its own: the first time,
which is compilation, and again; beside 0.1.0. Looking around comes on top. `{record["command"]}`

{table(header, rows)}

What looking around adds to a solve in a fresh process, in CPU seconds:

{table(["case", "solve", "looking", "ratio"], solves)}
"""


def model_problem() -> str:
    record = read("model_problem")
    rows = [
        [
            r["case"],
            str(r["seed"]),
            r["status"],
            f"{r['epsilon']:.0e}",
            str(r["linear_solves"]),
            f"{r['seconds']:.1f}",
            f"{r['compile_seconds']:.1f}",
            f"{r['objective']:.5f}",
            f"{r['own_objective']:.5f}",
        ]
        for r in record["results"]
    ]
    header = ["table", "seed", "status", "ε", "systems", "seconds", "compiling", "F", "estimator's"]
    return f"""## What the tuned classifiers solve, through `bilevax.solve`

`TunedGroupDROClassifier().problem(…)` at 1,500 training rows and a tolerance of 10⁻⁵. F, the worst
validation loss, may be another local minimum than the estimator's, which has starts of its own.
`{record["command"]}`

{table(header, rows)}
"""


def people() -> str:
    results = read("people")["results"]
    before = ", ".join(read("people").get("earlier", []))
    earlier = f"All of these, and 0.1.0's runs, are of an earlier run: {before}. " if before else ""
    names = list(dict.fromkeys(r["name"] for r in results))
    of = lambda name, method: [r for r in results if (r["name"], r["method"]) == (name, method)]
    certified = lambda r: r["status"] == "certified"
    # From several starts the best one stands for all.
    best = {
        name: min(of(name, "bilevax"), key=lambda r: (not certified(r), r["off"] or 0.0))
        for name in names
    }

    def beside(name: str, method: str) -> str:
        runs = of(name, method)
        if not runs:
            return "–"
        run = runs[0]
        answer = run["status"] if run["off"] is None else f"{run['off']:+.0e}"
        return answer if run.get("seconds") is None else f"{run['seconds']:.2g} s, {answer}"

    def row(name: str) -> list[str]:
        r, other = best[name], of(name, "bilevax, other")
        shown = lambda key, form: known(r.get(key), form)
        starts = of(name, "bilevax")
        status = r["status"] if len(starts) == 1 else f"{sum(map(certified, starts))} certified"
        return [
            name,
            status,
            shown("epsilon", ".0e"),
            shown("rho", ".0e"),
            shown("linear_solves", ",d"),
            shown("gradients", ",d"),
            shown("seconds", ".2g"),
            shown("compile_seconds", ".1f"),
            shown("off", "+.0e"),
            beside(name, "ipopt"),
            beside(name, "nested"),
            other[0]["status"] if other else "–",
        ]

    done = [r for r in best.values() if certified(r)]
    steps = [r["linear_solves"] for r in done]
    raced = [(best[n], of(n, "ipopt")[0]) for n in names if of(n, "ipopt") and certified(best[n])]
    ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in raced]
    missed = sum((r.get("above_local") or 0) > 1e-6 for r in done)
    first = ["problem", "status", "ε", "ρ", "systems", "gradients", "seconds", "compiling", "off"]
    return f"""## The problems that people bring

The problems of `people_problems.py` with default settings at 10⁻⁶ and at most 60 s, from each of
their starts. {len(done)} of {len(names)} are certified from a start, with {middle(steps, ".0f")}
linear systems in the median and {max(steps)} at most. `off` is how much the upper objective, with
the lower level solved again at x, is above the least that was found by searches from many starts,
as a share; where it is large, the answer is another local minimum: a local search from the x found,
of at most 5 s and without slopes, gets lower by more than 10⁻⁶ of F on {missed} of them. Seconds do
not have compilation in them; those of short runs are of a second one in the same process. Of
{len(raced)} that are certified here and that IPOPT can state, bilevax took at most IPOPT's time on
{sum(ratio <= 1 for ratio in ratios)} and at most three times as long on
{sum(ratio <= 3 for ratio in ratios)}. IPOPT solves the lower level's conditions, relaxed; `nested`
is L-BFGS on the upper objective with the lower level solved exactly each time. 0.1.0 had 10 s.
{earlier}`{read("people")["command"]}`

{table([*first, "IPOPT, off", "nested, off", "0.1.0"], [row(name) for name in names])}

![Share of problems solved within a multiple of the fastest method's time](results/people.png)
"""


def suite() -> str:
    record = read("suite")
    rows = []
    for o in record["outcomes"]:
        known = "unknown" if o["best_known"] is None else f"{o['best_known']:.6g}"
        best = o["best"]
        if best is None:
            rows.append([o["name"], "refused", "–", "–", "–", known, "–", "–"])
            continue
        verdict = o["verdict"]
        gap = "infeasible" if best["gap"] is None else f"{best['gap']:.1e}"
        shown = [f"{best['epsilon']:.1e}", f"{best['F']:.6g}", known, gap]
        rows.append([o["name"], verdict, best["status"], *shown, f"{best['gradients']:,}"])
    reached = sum(o["reached"] for o in record["outcomes"])
    false = sum(o["false_certificates"] for o in record["outcomes"])
    falls = sum(o.get("falls", 0) for o in record["outcomes"])
    header = ["problem", "", "status", "ε", "F", "best known", "gap", "gradients"]
    refusals = [f"- {o['name']}: {o['refused']}" for o in record["outcomes"] if o["refused"]]
    certified = lambda o: any(a["status"] == "certified" for a in o["attempts"])
    never = [o for o in record["outcomes"] if not certified(o)]
    failures = [[o["name"], str(len(o["attempts"])), why(o)] for o in never]
    return f"""## Published problems

The problems of a public suite (BASBLib, CC0) whose lower level is convex, each from several starts;
the best attempt of each. `gap` comes from an independent, exact solve of the lower level at x.
{reached} of {len(rows)} reach the best known F within 1e-2 relative with a gap of at most 1e-4;
{false} false certificates; {falls} certified points near which F falls, by other solvers of the
lower level. `{record["command"]}`

{table(header, rows)}

{chr(10).join(["Refused:", *refusals]) if refusals else ""}

Certified from no start: {len(never)} of {len(rows)}.

{table(["problem", "starts", "why"], failures)}
"""


def why(outcome: dict[str, Any]) -> str:
    """What kept a published problem from its certificate."""
    if outcome["refused"]:
        return outcome["refused"]
    least = min(outcome["attempts"], key=lambda a: a["epsilon"])
    return f"{least['status']} after {least['gradients']:,} gradients, ε = {least['epsilon']:.1e}"


def growth_epsilon() -> str:
    record = read("growth_epsilon")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for r in record["epsilon"]["runs"]:
        groups.setdefault((r["method"], r["tolerance"]), []).append(r)
    rows = []
    for (method, tolerance), several in groups.items():
        certified = [r for r in several if r["status"] == "certified"]
        reached = [r["epsilon"] for r in several if r["epsilon"] is not None]
        rows.append(
            [
                method,
                f"{tolerance:g}",
                f"{len(certified)} of {len(several)}",
                middle([r["gradients"] for r in certified], ",.0f"),
                middle([r["gradients"] for r in several], ",.0f"),
                f"{max(reached):.1e}" if reached else "–",
            ]
        )
    fits = []
    for f in record["epsilon"]["fits"]:
        law = "no fit" if f["exponent"] is None else f"(1/ε)^{f['exponent']:.2f}"
        fits.append([f["method"], law, f"{f['runs']} of {f['all_runs']}"])
    header = [
        "method",
        "ε",
        "certified",
        "gradients, certified",
        "gradients, all",
        "largest ε reached",
    ]
    return f"""## Gradients against ε

Medians over the instances. Each ε is a run of its own, as every method sets itself up for the ε it
is asked for. The exponent is fitted to certified runs only: with few of them it says little.
`{record["command"]}`

{table(header, rows)}

{table(["method", "gradients grow as", "runs certified"], fits)}

![Gradients to the certificate against 1/ε](results/growth_epsilon.png)
"""


def growth_size() -> str:
    record = read("growth_size")
    rows = [
        [
            r["data"],
            f"{r['n']:,}",
            r["status"],
            known(r["epsilon"], ".1e"),
            known(r["gradients"], ",d"),
            known(r["seconds"], ".2f"),
            known(r["compile_seconds"], ".1f"),
            known(r["setup_seconds"], ".1f"),
            known(r["data_bytes"] and r["data_bytes"] / 1e6, ",.2f"),
            known(r["peak_bytes"] and r["peak_bytes"] / 1e6, ",.0f"),
        ]
        for r in sorted(record["size"]["runs"], key=lambda r: r["data"])
    ]
    header = ["data", "n", "status", "ε", "gradients", "s", "compilation, s", "setting up, s"]
    header += ["data, MB", "peak memory, MB"]
    refused = [r for r in record["size"]["runs"] if r["status"] == "refused"]
    return f"""## Time and memory against size

`Adaptive` to ε = 0.01, l = n/20, each run in a process of its own; the peak of its memory includes
JAX and the compiler. Setting up, whose time no limit counts, is compilation, and work that grows
with n, such as that on first multiplier bounds.
`{record["command"]}`

{table(header, rows)}
{"".join(f"{chr(10)}Refused: n = {r['n']}, {r['data']}: {r['sentence']}{chr(10)}" for r in refused)}
![Seconds to the certificate against n](results/growth_size.png)
"""


def growth_exact() -> str:
    record = read("growth_exact")
    rows = [
        [
            f"{r['n']:,}",
            r["status"],
            known(r["seconds"], ".2f"),
            known(r["compile_seconds"], ".1f"),
            known(r["setup_seconds"], ".1f"),
            known(r["repaired_objective"], ".4f"),
            "proven" if r["milp_proven"] else "not proven",
            f"{r['milp_seconds']:.2f}",
            known(r["milp_objective"], ".4f"),
            known(r["relative_difference"], ".1e"),
            known(r["lp_objective"], ".4f"),
        ]
        for r in record["exact"]["runs"]
    ]
    header = ["n", "Adaptive", "s", "compilation, s", "setting up, s", "repaired", "HiGHS", "s"]
    header += ["objective", "relative difference", "LP"]
    first, whole = (record["exact"][f"faster_from{end}"] for end in ("", "_whole_call"))
    say = lambda n: "not at the largest n" if n is None else f"from n = {n} on"
    return f"""## Against an exact solver

`Adaptive` to ε = 0.0001, and HiGHS on the MILP of the lower level's KKT conditions, on the same
problems. `repaired` is what Adaptive's x is worth once the lower level answers exactly, and the
difference compares that with what HiGHS found. The LP's value, which only the law of these problems
allows, judges both. Where either came to its end, Adaptive is faster {say(first)}; if all of its
call counts, compilation too, {say(whole)}. `{record["command"]}`

{table(header, rows)}

![Seconds of Adaptive and of HiGHS against n](results/growth_exact.png)
"""


def accelerator() -> str:
    record = read("accelerator")
    speed = lambda r, name: f"{r[f'{name}_bytes_per_second'] / 1e9:,.0f}"
    rows = [
        [
            f"{r['n']:,}",
            f"{r['l']:,}",
            f"{r['gradient_microseconds']:,.0f}",
            speed(r, "loop"),
            speed(r, "copy"),
            f"{r['loop_over_copy']:.2f}",
            speed(r, "read"),
            f"{r['loop_over_read']:.2f}",
        ]
        for r in record["results"]
    ]
    header = ["n = m", "l", "µs a gradient", "GB/s", "copy, GB/s", "ratio (target ≥ 0.9)"]
    header += ["reading, GB/s", "ratio"]
    solves = [
        f"n = {r['n']:,}: {r['solve']['status']}, ε = {r['solve']['epsilon']:.2g} after "
        f"{r['solve']['gradients']:,} gradients and {r['solve']['seconds']:.0f} s."
        for r in record["results"]
        if "solve" in r
    ]
    return f"""## On an accelerator

{record["where"]["device"]}, float64. The bytes of both matrices, once forwards and once backwards,
over the time of one gradient inside Adaptive's loop, against a plain copy, and against a
matrix-vector product, which only reads. `{record["command"]}`

{table(header, rows)}

Solving to ε = 0.01 there: {" ".join(solves)}
"""


def many() -> str:
    records = [read("many")]
    if (HERE / "results" / "many_cpu.json").exists():
        records.append(read("many_cpu"))
    rows = [
        [
            record["where"]["device"],
            f"{r['n']:,}",
            str(r["count"]),
            f"{r['one_seconds']:.3f}",
            f"{r['slowest_seconds']:.3f}",
            f"{r['together_seconds']:.3f}",
            f"{r['together_over_one']:.1f}",
        ]
        for record in records
        for r in record["results"]
    ]
    header = ["device", "n", "problems", "one, s", "the slowest, s", "together, s"]
    header += ["ratio (target ≤ 10)"]
    return f"""## Many at once

Bilevel linear problems to ε = 0.01 by Adaptive, alone (the mean) and all under `vmap`.
`{records[0]["command"]}`

{table(header, rows)}
"""


def inner() -> str:
    record = read("inner")
    results, shares = record["results"], record["shares"]
    names = list(results[0]["gradients"])

    def against_anchored(name: str, k: int) -> str:
        counts = [(r["gradients"][name][k], r["gradients"]["anchored"][k]) for r in results]
        both = [mine / theirs for mine, theirs in counts if mine and theirs]
        ratio = f"{statistics.geometric_mean(both):.2f}" if both else "–"
        reached = sum(mine is not None for mine, _ in counts)
        return ratio if reached == len(counts) else f"{ratio} ({reached} of {len(counts)})"

    summary = [[n, *(against_anchored(n, k) for k in range(len(shares)))] for n in names]
    rows = [
        [
            r["instance"],
            f"{r['center']}, {r['start']}",
            *(" / ".join(known(c, ",.0f") for c in r["gradients"][name]) for name in names),
        ]
        for r in results
    ]
    levels = [f"to {share:g}" for share in shares]
    uneven = sum(not r["monotone"] for r in results)
    return f"""## Which method should solve Adaptive's subproblems

Gradients until the residual of a subproblem is a share of what it was at first, at most
{record["most"]:,}. The subproblems are {len(results)}, of which {uneven} not monotone; all methods
work in the same metric, from the same start. `anchored` is what Adaptive does. Of APDB, here
`primal-dual`, partial gradients count half each and its backtracking nothing: with full gradients
at both points of a step, which give all that it needs, its numbers double. OptFOM is told its
constants and the distance to the solution. First the geometric means of gradients over those of
`anchored`, over the subproblems solved so far, with how many these are if not all; then each
subproblem. “end, end” is what Adaptive would solve next. `{record["command"]}`

{table(["method", *levels], summary)}

{table(["instance", "center, start", *names], rows)}

The cells have the gradients {", ".join(levels)}.

Adaptive stays with `anchored`: a partial gradient costs half of a whole one only where levels are
coupled bilinearly, and there a step of APDB has to read the coupling's matrix four times, where
a whole gradient reads it twice. Counted as whole gradients, what it saves is a quarter at most.
"""


def known(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def middle(values: list[float | None], form: str) -> str:
    found = [value for value in values if value is not None]
    return format(statistics.median(found), form) if found else "–"


def measured(*sections: Callable[[], str]) -> list[str]:
    """Those sections whose results, of the same name, are there."""
    there = lambda section: (HERE / "results" / f"{section.__name__}.json").exists()
    return [section() for section in sections if there(section)]


def main() -> None:
    intro = """# Measurements

Each section names the command that made it, most of them part of `make bench`. Where no other
device is named, it ran on a shared machine with two cores, float64: times do not repeat, ratios
within one run do. Every number below is read from `results/` by `tables.py`.
"""
    growing = (published, exponents, growth_epsilon, growth_size, growth_exact)
    others = measured(
        first_answer,
        people,
        model_problem,
        same_path,
        exact_arithmetic,
        certifying,
        *growing,
        adaptive_loop,
        inner,
        accelerator,
        many,
        stochastic,
        stochastic_constrained,
        minibatches,
        out_of_memory,
        coverage,
        sapd_overhead,
    )
    others += measured(
        robust, robust_large, robust_fast, robust_threads, hierarchical, meta, meta_problem
    )
    others += measured(deep_dominoes, deep_ablation, deep_variance, deep_cost)
    others += measured(colour_mnist)
    parts = [linear(), linear_tight(), *others, suite(), together(), optfom_overhead(), library()]
    (HERE / "README.md").write_text("\n".join([intro, *parts]))


if __name__ == "__main__":
    main()
