"""A run that is killed and taken up again: python killed_run.py CHECKPOINT CACHE GRADIENTS."""

import sys

import jax
import numpy as np

import bilevax as bx
from bilevax.problems import library


def end_of_run(path, gradients, callback=None):
    """The bits of the state where the run ends, from its checkpoint on if there is one."""
    instance = library.noisy("double_well", deviation=0.3)
    inner = bx.SAPD(iterations=2, tau=0.08, sigma=0.08, theta=1.0)
    outer = bx.StochasticProximalPoint(iterations=10**6, inner=inner)
    solution = bx.solve(
        instance.problem,
        instance.start,
        tolerance=1e-7,
        max_gradients=gradients,
        progress=False,
        solver=bx.PenaltyMethod(epsilon=0.1, outer=outer),
        checkpoint=path,
        resume=path,
        callback=callback,
    )
    leaves = [np.asarray(a).ravel() for a in jax.tree.leaves(solution.state.solver_state)]
    return " ".join(leaf.tobytes().hex() for leaf in leaves)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    look = lambda _: print("look", flush=True)
    print("end", end_of_run(sys.argv[1], int(sys.argv[3]), look), flush=True)
