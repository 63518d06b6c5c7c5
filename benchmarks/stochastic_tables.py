"""The sections of benchmarks/README.md on minibatches."""

from __future__ import annotations

from stochastic import fitted
from table_text import HERE, read, table


def stochastic() -> str:
    record = read("stochastic")
    return "\n".join([_nearly(record), _default(record), _growth(record)])


def stochastic_constrained() -> str:
    record = read("stochastic_constrained")
    rows = [
        [
            part,
            f"{r['n']}",
            f"{r['seed']}",
            r["noisy"],
            f"{r['scale']:g}",
            f"{r['gradients']:,.0f}",
            f"{r['mean_distance']:.3f}",
            f"{r['mean_nearby_epsilon']:.3f}",
            f"{r['mean_nearly_epsilon']:.3f}",
            f"{r['largest_nearly_epsilon']:.3f}",
            f"{r['median_above_optimum']:.4f}",
        ]
        for part in ("named", "default")
        for r in record[part]
    ]
    header = ["method", "n", "seed", "noise on", "scale", "gradients", "distance", "ε there"]
    header += ["larger of both (target ≤ 0.1)", "largest", "x above the optimum"]
    most = {
        p: sum(r["mean_nearly_epsilon"] <= 0.1 for r in record[p]) for p in ("named", "default")
    }
    return f"""## Constrained lower levels whose rows are samples

The paper's linear problems, n = m, with {record["samples"]:,} samples of their rows (noise as large
as the entries themselves) or of their objectives, in batches of {record["batch"]}. `named` is the
paper's stochastic method with practical constants and ρ = {1 / record["own_epsilon"]:g}, polished
by a deterministic method: means over {record["keys"]} keys, and the largest; {most["named"]} of
{len(record["named"])} reach the target. `default` is `bx.solve` at {record["own_epsilon"]:g} on
{record["keys"]} draws of as many rows, whose mean is not the instance: how nearly ε-KKT its answer
is for the instance; {most["default"]} of {len(record["default"])} reach the target. Its ρ is larger
(about 50), which brings x nearer to the optimum and magnifies what the rows are off. `scale`
multiplies the lower level, rows and noise: the same bilevel problem, with a lower level that weighs
more against an absolute 0.1. The last column is what x is worth with the lower level's exact
answer, less the exact optimum, in the median. `{record["command"]}`

{table(header, rows)}
"""


def minibatches() -> str:
    record = read("minibatches")
    found = record["results"]
    row = lambda r: [
        r["case"],
        f"{r['tolerance']:g}",
        "all rows" if r["batch"] is None else f"{r['batch']}",
        r["status"],
        f"{r['epsilon']:.1e}",
        f"{r['passes']:.1f}",
        "" if r["batch"] is None else f"{r['ratio']:.2f}",
        f"{r['linear_solves']}",
        f"{r['seconds']:.1f}",
        f"{r['wall_seconds']:.0f}",
        f"{r['objective']:.5f}",
    ]
    certified = sum(r["status"] == "certified" for r in found if r["batch"])
    ratios = [r["ratio"] for r in found if r["batch"]]
    loose = {r["case"] for r in found if r["batch"] and r["tolerance"] == 1e-2}
    half = {
        name
        for name in loose
        if all(
            r["ratio"] < 0.5
            for r in found
            if r["case"] == name and r["batch"] and r["tolerance"] == 1e-2
        )
    }
    header = ["problem", "tolerance", "batch", "status", "ε", "passes", "of all rows'", "systems"]
    return f"""## Rows as minibatches, or all at once

Problems that people bring and three generated ones, with default settings; the rows are a source of
minibatches, or plain data (`all rows`). A pass is a gradient of all rows, checks left out. With a
source {certified} of {len(ratios)} runs are certified; they take {max(ratios):.2f} times the passes
of plain data at most, and at 0.01 less than half of them on {len(half)} of {len(loose)} problems:
those with more than 2²² numbers. Smaller ones are taken at once, since more programs would take
longer to compile than they save. Wall seconds have compilation in them; it was run in
{record["run"]}. `{record["command"]}`

{table([*header, "seconds", "wall", "F"], [row(r) for r in found])}
"""


def _nearly(record: dict) -> str:
    rows = [
        [
            r["instance"],
            "plain" if r["momentum"] is None else "recursive",
            f"{r['samples']:,.0f}",
            f"{r['mean_distance']:.3f}",
            f"{r['mean_nearby_epsilon']:.3f}",
            f"{r['mean_nearly_epsilon']:.3f}",
            f"{r['largest_nearly_epsilon']:.3f}",
        ]
        for r in record["nearly"]
    ]
    header = [
        "problem",
        "estimates",
        "samples",
        "distance",
        "ε there",
        "larger of both (target ≤ 0.1)",
    ]
    return f"""## Nearly ε-KKT from minibatches

Library problems with noise (δ = {record["deviation"]} a sample, batches of {record["batch"]}), the
paper's stochastic method with constant steps at ε = 0.1, its random answer, polished by a
deterministic method: means over {record["keys"]} keys, and the largest.
`{record["commands"]["nearly"]}`

{table([*header, "largest"], rows)}
"""


def _default(record: dict) -> str:
    rows = [
        [
            r["instance"],
            f"{r['certified']} of {r['keys']}",
            f"{r['median_gradients']:,.0f}",
            f"{r['largest_gradients']:,}",
            f"{r['mean_epsilon']:.3f}",
        ]
        for r in record["default"]
    ]
    header = ["problem", "certified", "gradients, median", "largest", "ε, mean"]
    return f"""## Minibatches without any setting

`bx.solve(problem, start, tolerance=0.1)` on the same problems and keys; ε is exact, on all samples,
of the answer itself. A gradient is of one minibatch. `{record["commands"]["default"]}`

{table(header, rows)}
"""


def _growth(record: dict) -> str:
    plain, recursive = (
        {(r["instance"], r["epsilon"]): r for r in record["growth"] if r["recursive"] == which}
        for which in (False, True)
    )
    averaged = {(r["instance"], r["epsilon"]): r for r in record["average"]}
    shown = lambda r: f"{'' if r['reached'] else '> '}{r['samples']:,.0f}"
    again = lambda r: f"{r['mean_nearly_epsilon_with_other_keys']:.3f}"

    def ratio(one: dict, other: dict) -> str:
        both = one["reached"] and other["reached"]
        return f"{one['samples'] / other['samples']:.1f}" if both else "–"

    rows = [
        [name, f"{eps:g}", shown(r), shown(v), shown(a), ratio(v, a), again(r), again(v), again(a)]
        for (name, eps), r in plain.items()
        for v, a in [(recursive[name, eps], averaged[name, eps])]
    ]
    exponent = lambda e: "–" if e is None else f"{e:.2f}"
    fits = [
        [f["instance"], "recursive" if f["recursive"] else "plain", exponent(f["exponent"])]
        for f in record["fits"]
    ]
    for name in dict.fromkeys(r["instance"] for r in record["average"]):
        reached = [r for r in record["average"] if r["instance"] == name and r["reached"]]
        fits.append([name, "default", exponent(fitted(reached))])
    header = ["problem", "ε", "plain, samples", "recursive", "default", "recursive / default"]
    header += ["plain, other keys", "recursive", "default"]
    return f"""## Samples against ε: plain, with variance reduction, and by default

Until the last iterate is nearly ε-KKT in the mean over {record["keys"]} keys, with ρ = 1/ε and the
best of twelve choices of constants for each estimator; `default` is `bx.solve` on the mean over so
many samples, each of which it evaluates as often as it needs; it has no constants to choose and
finds its own ρ. The last columns are the means with {record["keys"]} other keys at those samples.
`{record["commands"]["growth"]}`, `{record["commands"]["average"]}`

{table(header, rows)}

Samples grow as (1/ε) to the power:

{table(["problem", "estimates", "exponent"], fits)}

![Samples against 1/ε](results/stochastic.png)
"""


def sapd_overhead() -> str:
    there = [
        n for n in ("sapd_overhead", "sapd_overhead_gpu") if (HERE / f"results/{n}.json").exists()
    ]
    records = [read(name) for name in there]
    rows = [
        [
            record["device"],
            r["method"],
            str(r["batch"]),
            f"{r['step_microseconds']:,.0f}",
            f"{r['gradients_microseconds']:,.0f}",
            f"{100 * r['overhead']:.1f} %",
        ]
        for record in records
        for r in record["results"]
    ]
    header = [
        "device",
        "method",
        "batch",
        "µs a step",
        "µs its gradients",
        "on top (target ≤ 15 %)",
    ]
    return f"""## What a step of SAPD costs beyond its gradients

A network of {records[0]["results"][0]["parameters"]:,} parameters against the weights of four
groups, in float32, samples drawn inside the loop; against a bare loop that draws the same and
computes the same partial gradients. `{records[0]["command"]}`

{table(header, rows)}
"""


def coverage() -> str:
    records = [read("coverage"), read("coverage_many")]
    results = [r for record in records for r in record["results"]]
    found = {(r["losses"], r["rows"], r["batches"], r["confidence"]): r for r in results}
    draws = " or ".join(f"{record['repetitions']:,}" for record in records)
    losses, rows, batches, confidences = (list(dict.fromkeys(k)) for k in zip(*found))

    def cells(name: str, row: int, count: int) -> list[str]:
        sure = [found[name, row, count, confidence] for confidence in confidences]
        covered, unsaid = ([f"{r[k]:.3f}" for r in sure] for k in ("covered", "missed_unsaid"))
        return [name, str(row), str(count), *covered, f"{sure[0]['heavy_tailed']:.3f}", *unsaid]

    body = [cells(name, row, count) for name in losses for row in rows for count in batches]
    header = ["losses", "rows a minibatch", "minibatches"]
    header += [f"covered at {c}" for c in confidences] + ["called heavy-tailed"]
    header += [f"missed unsaid at {c}" for c in confidences]
    return f"""## How often certificates from minibatches keep their word

The share of {draws} draws in which the line of a `SampledCertificate` is at least that of all
samples, for two confidences; in which it is called heavy-tailed; and in which the line is too small
and it is not. 1,024 minibatches are looked at in 64 groups, with radii from Gaussian concentration;
fewer have Chebyshev's. `{records[0]["command"]}`, `{records[1]["command"]}`

{table(header, body)}
"""


def out_of_memory() -> str:
    record = read("out_of_memory")
    settings, lines = record["settings"], list(record["results"][0]["lines"])
    row = lambda r: [
        str(r["seed"]),
        r["status"],
        *(f"{r['lines'][k]:.4f} / {r['fresh'][k]:.4f}" for k in lines),
        f"{r['rho']:.2f}",
        f"{r['rows_read'] / 1e6:.1f}",
        f"{r['gigabytes_read']:.1f}",
        f"{r['seconds']:.0f}",
        f"{r['peak_gibibytes']:.2f}",
    ]
    header = ["seed", "status", *lines, "ρ", "million rows read", "GB", "seconds", "peak GiB"]
    return f"""## More rows than memory holds

Group-robust logistic regression with a tuned ridge, {settings["rows"] / 1e6:g} million rows of 50
columns in both levels together, made as they are read from a `Host` source with minibatches of
{settings["batch"]}. `bx.solve` with tolerance {settings["tolerance"]:g} and confidence
{settings["confidence"]:g}, nothing else set; seconds have compilation in them. Each line is as
certified / as it is on {settings["fresh"] / 1e6:g} million fresh rows, in plain NumPy, without any
radius. It was run {record["run"]}; with JAX for CPUs alone the peak is about half a GiB lower.
`{record["command"]}`

{table(header, [row(r) for r in record["results"]])}
"""
