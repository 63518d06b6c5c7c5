"""A run on all devices of one or more processes: python sharded_run.py K PROCESSES PORT FILE."""

import dataclasses
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import bilevax as bx
from bilevax.problems import library


def end_of_run(checkpoint, between=lambda: None):
    """Where the iterates end; a second call goes on from the file of the first."""
    mesh = Mesh(np.asarray(jax.devices()), ("batch",))
    instance = library.noisy("double_well", deviation=0.3, batch=16)
    everywhere = lambda tree: bx.data.replicated(tree, mesh)
    source = bx.data.Arrays(
        everywhere(instance.problem.data.arrays),
        16,
        sharding=NamedSharding(mesh, PartitionSpec("batch")),
    )
    problem = dataclasses.replace(instance.problem, data=source)
    inner = bx.SAPD(iterations=2, tau=0.08, sigma=0.08, theta=1.0)
    outer = bx.StochasticProximalPoint(iterations=300, inner=inner)
    for most in (300, 900):
        solution = bx.solve(
            problem,
            everywhere(instance.start),
            tolerance=1e-7,
            solver=bx.PenaltyMethod(epsilon=0.1, outer=outer),
            max_gradients=most,
            max_seconds=1e6,
            progress=False,
            checkpoint=checkpoint,
            resume=checkpoint,
        )
        between()
    last = solution.state.solver_state.outer.inner
    return np.concatenate([np.asarray(a).ravel() for a in jax.tree.leaves((last.x, last.y))])


def main(process, processes, port, checkpoint):
    jax.config.update("jax_enable_x64", True)
    between = lambda: None
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)
        from jax.experimental.multihost_utils import sync_global_devices

        between = lambda: sync_global_devices("written")
    flat = end_of_run(checkpoint, between)
    print("devices", jax.device_count(), "at", *(repr(float(v)) for v in flat), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
