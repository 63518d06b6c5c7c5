"""What one bilevel step of a ResNet-50 costs on an accelerator, against an ERM step.

    python benchmarks/deep_cost.py --json benchmarks/results/deep_cost.json

Both see the same 256 images of 224 × 224 in bfloat16; the bilevel method takes half of them as
training and half as validation rows. The matrix rate is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from bilevax.deep.bilevel import BilevelDRO
from bilevax.deep.methods import ERM, Batch, GroupDRO, Optimizer, direction
from bilevax.deep.networks import model

#: What a kernel's name says of its work; the first that fits counts.
KINDS = (
    ("batch norm: sums", ("reduce",)),
    ("layout: copies, transposes", ("copy", "transpose", "nchwToNhwc", "nhwcToNchw", "Memcpy")),
    (
        "convolutions, matrix products",
        ("conv", "cudnn", "xmma", "gemm", "cutlass", "nvjet", "sm90", "wgrad", "dgrad", "fprop"),
    ),
    ("pointwise: batch norm, ReLU, steps", ("fusion",)),
)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def matrix_rate(times: int = 20) -> float:
    """FLOP/s of a bfloat16 product of random matrices."""
    side = 512 if jax.default_backend() == "cpu" else 8192
    a, b = (jax.random.normal(jax.random.key(k), (side, side), jnp.bfloat16) for k in (0, 1))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready([product(a, b) for _ in range(times)])
        seconds.append((time.perf_counter() - began) / times)
    return 2 * side**3 / float(np.median(seconds))


def compiled_steps(method: Any, state: Any, batch: Batch, steps: int) -> Any:
    """`steps` steps on the same batch as one program, and its floating-point operations."""

    def run(state: Any, method: Any, batch: Batch) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, s: method.step(s, batch), state)

    flops = operations(jax.make_jaxpr(lambda s, m, b: m.step(s, b))(state, method, batch).jaxpr)
    return jax.jit(run, donate_argnums=0).lower(state, method, batch).compile(), flops


def operations(jaxpr: Any) -> float:
    """Floating-point operations of the convolutions and matrix products, 2 for each product."""
    total = 0.0
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            total += operations(inner)
        out = equation.outvars[0].aval
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * np.prod(out.shape) * np.prod([left[axis] for axis in contracted])
        elif equation.primitive.name == "conv_general_dilated":
            numbers = equation.params["dimension_numbers"]
            kernel = equation.invars[1].aval.shape
            per_output = np.prod([kernel[axis] for axis in numbers.rhs_spec[1:]])
            # A gradient's convolution meets only zeros between the entries of a dilated input.
            zeros = np.prod(equation.params["lhs_dilation"])
            total += 2 * np.prod(out.shape) * per_output / zeros
    return float(total)


def timed(
    program: Any, state: Any, method: Any, batch: Batch, args: argparse.Namespace
) -> tuple[Any, list]:
    state = jax.block_until_ready(program(state, method, batch))
    seconds = []
    for _ in range(args.repeats):
        began = time.perf_counter()
        state = jax.block_until_ready(program(state, method, batch))
        seconds.append((time.perf_counter() - began) / args.steps)
    return state, seconds


def profile(
    program: Any, state: Any, method: Any, batch: Batch, args: argparse.Namespace
) -> dict[str, Any]:
    """Seconds a step by kind of kernel, from JAX's own trace of the device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(state, method, batch))
        files = list(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0]))
        names: Counter[str] = Counter()
        for plane in data.planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if "Stream" not in line.name:
                    continue
                for event in line.events:
                    names[event.name] += event.duration_ns
    kinds: Counter[str] = Counter()
    for name, nanoseconds in names.items():
        kind = next((k for k, parts in KINDS if any(p in name for p in parts)), "other")
        kinds[kind] += nanoseconds
    per_step = 1e-9 / args.steps
    return {
        "kinds": {k: v * per_step for k, v in kinds.most_common()},
        "kernels": {k[:120]: v * per_step for k, v in names.most_common(40)},
    }


def main(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((args.batch, args.size, args.size, 3), np.float32)
    label = (np.arange(args.batch) // 2 % 2).astype(np.int32)
    group = (np.arange(args.batch) % 4).astype(np.int32)
    begin = model(args.network, 2, jax.random.key(0))
    sgd = Optimizer(direction("sgd", 0.9), 1e-3)
    methods = {
        "erm": ERM(groups=4, optimizer=sgd, l2=1e-4),
        "group dro": GroupDRO(counts=jnp.full(4, 100.0), optimizer=sgd, l2=1e-4),
        "bilevel": BilevelDRO(groups=4, l2=1e-4),
        "bilevel, optax": BilevelDRO(groups=4, optimizer=sgd, l2=1e-4),
    }
    rate = matrix_rate()
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **{k: v for k, v in vars(args).items() if k != "json"},
        "matrix_tflops": rate / 1e12,
        "methods": {},
    }
    print(f"matrix rate {rate / 1e12:.0f} TFLOP/s", flush=True)
    programs = {}
    for name, method in methods.items():
        began = time.perf_counter()
        method = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), method)
        half = args.batch // 2 if method.takes_validation else args.batch
        batch = Batch(
            jnp.asarray(images, jnp.bfloat16), jnp.asarray(label), jnp.asarray(group), half
        )
        state = jax.tree.map(jnp.copy, method.init(begin))
        program, flops = compiled_steps(method, state, batch, args.steps)
        compiling = time.perf_counter() - began
        programs[name] = [program, state, method, batch]
        results["methods"][name] = {"flops": flops, "compile_seconds": compiling, "seconds": []}
        print(f"{name}: compiled in {compiling:.0f} s", flush=True)
    for _ in range(2):  # in turns, so that a slow minute is everyone's
        for name, held in programs.items():
            held[1], seconds = timed(held[0], held[1], held[2], held[3], args)
            results["methods"][name]["seconds"] += seconds
    for name, held in programs.items():
        found = results["methods"][name]
        step = float(np.median(found["seconds"]))
        found["step_seconds"] = step
        found["images_per_second"] = args.batch / step
        found["share_of_matrix_rate"] = found["flops"] / step / rate
        found["ratio_to_erm"] = step / results["methods"]["erm"]["step_seconds"]
        print(
            f"{name:16} {1e3 * step:7.2f} ms  {args.batch / step:7.0f} images/s  "
            f"{100 * found['share_of_matrix_rate']:.0f} % of the matrix rate  "
            f"{found['ratio_to_erm']:.3f} × ERM", flush=True,
        )  # fmt: skip
        if jax.default_backend() == "gpu" and name in ("erm", "bilevel"):
            found["profile"] = profile(held[0], held[1], held[2], held[3], args)
            for kind, seconds in found["profile"]["kinds"].items():
                print(f"    {1e3 * seconds:7.2f} ms  {kind}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(arguments())
