"""Runs in processes of their own: killed at any moment, on several devices, several at once."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import bilevax as bx
from instances import get

ONE_CALL = """
    import sys
    import jax
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", sys.argv[3])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import bilevax as bx
    from bilevax.problems import library
    instance = library.get("unique_saddle")
    path, resume = sys.argv[1], sys.argv[2] == "resume"
    solution = bx.solve(
        instance.problem, instance.start, tolerance=0.03, checkpoint=path,
        resume=path if resume else None,
    )
    print(solution.gradients, solution.point.x1.tobytes().hex())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills processes by POSIX signals")
@pytest.mark.long  # the one below kills processes, too
def test_a_killed_process_is_taken_up_from_its_checkpoint(tmp_path):
    """Killed outright, twice, at moments nobody chose: the checkpoint is whole and leads on."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(ONE_CALL))
    path = tmp_path / "run.state"

    def begin(mode):
        command = [sys.executable, str(script), str(path), mode, str(tmp_path / "cache")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    rng = np.random.default_rng()
    mode = "fresh"
    for _ in range(2):
        process = begin(mode)
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.3)))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        mode = "resume"
    out, _ = begin("resume").communicate(timeout=120)
    gradients, x1 = out.split()
    instance = get("unique_saddle")
    whole = bx.solve(instance.problem, instance.start, tolerance=0.03)
    assert int(gradients) == whole.gradients
    assert x1 == whole.point.x1.tobytes().hex()


SCRIPT = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import numpy as np
import bilevax as bx
from bilevax.problems import library

instance = library.noisy("double_well", deviation=0.3)
inner = bx.SAPD(iterations=2, tau=0.08, sigma=0.08, theta=1.0)
outer = bx.StochasticProximalPoint(iterations=10**6, inner=inner)
solution = bx.solve(
    instance.problem, instance.start, tolerance=1e-7, max_gradients=300_000, progress=False,
    solver=bx.PenaltyMethod(epsilon=0.1, outer=outer), checkpoint=sys.argv[1], resume=sys.argv[1],
    callback=lambda s: print("look", flush=True),
)
leaves = [np.asarray(a).ravel() for a in jax.tree.leaves(solution.state.solver_state)]
print("end", " ".join(a.tobytes().hex() for a in leaves), flush=True)
"""


def run_until(arguments, looks, seconds=0.0):
    """Run the script, killed so long after so many looks; its last line, None if it was killed."""
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for count, line in enumerate(process.stdout, 1):
            if line.startswith("end"):
                process.wait()
                return line
            if looks is not None and count >= looks:
                time.sleep(seconds)  # amid steps, a look or the writing of a state
                process.kill()
                process.wait()
                return None
    raise AssertionError(f"ended with {process.returncode}")


@pytest.mark.skipif(sys.platform == "win32", reason="kills processes by POSIX signals")
@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.long)])
def test_killed_many_times_it_ends_where_an_untouched_run_ends(tmp_path, times):
    cache = tmp_path / "cache"
    whole = run_until((tmp_path / "whole.state", cache), None)
    rng = np.random.default_rng(0)
    file = tmp_path / "killed.state"
    for _ in range(times):
        assert run_until((file, cache), int(rng.integers(1, 4)), rng.uniform(0, 0.05)) is None
    assert run_until((file, cache), None) == whole


SHARDED = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
process, processes, port, checkpoint = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, process)
import dataclasses
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import bilevax as bx
from bilevax.problems import library

mesh = Mesh(np.asarray(jax.devices()), ("batch",))
instance = library.noisy("double_well", deviation=0.3, batch=16)
everywhere = lambda tree: bx.data.replicated(tree, mesh)
source = bx.data.Arrays(
    everywhere(instance.problem.data.arrays), 16,
    sharding=NamedSharding(mesh, PartitionSpec("batch")),
)
problem = dataclasses.replace(instance.problem, data=source)
inner = bx.SAPD(iterations=2, tau=0.08, sigma=0.08, theta=1.0)
solver = bx.PenaltyMethod(
    epsilon=0.1, outer=bx.StochasticProximalPoint(iterations=300, inner=inner)
)
for most in (300, 900):  # the second call goes on from the first one's file
    solution = bx.solve(
        problem, everywhere(instance.start), tolerance=1e-7, solver=solver, max_gradients=most,
        max_seconds=1e6, progress=False, checkpoint=checkpoint, resume=checkpoint,
    )
    if processes > 1:
        from jax.experimental.multihost_utils import sync_global_devices
        sync_global_devices("written")
p = solution.state.solver_state.outer.inner
flat = np.concatenate([np.asarray(a).ravel() for a in jax.tree.leaves((p.x, p.y))])
print("devices", jax.device_count(), "at", *(repr(float(v)) for v in flat), flush=True)
"""


def started(process, processes, port, checkpoint, devices):
    command = [sys.executable, "-c", SHARDED, str(process), str(processes), str(port)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return subprocess.Popen(
        [*command, str(checkpoint)], stdout=subprocess.PIPE, text=True, env=environment
    )


def ended(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    (line,) = [line for line in out.splitlines() if line.startswith("devices")]
    words = line.split()
    return int(words[1]), np.asarray([float(w) for w in words[3:]])


def test_devices_and_processes_give_the_same_iterates(tmp_path):
    import socket

    one = ended(started(0, 1, 0, tmp_path / "one.state", 1))
    eight = ended(started(0, 1, 0, tmp_path / "eight.state", 8))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pair = [started(k, 2, port, tmp_path / "pair.state", 2) for k in (0, 1)]
    first, second = (ended(process) for process in pair)
    assert [one[0], eight[0], first[0], second[0]] == [1, 8, 4, 4]
    np.testing.assert_allclose(eight[1], one[1], atol=1e-10)
    np.testing.assert_allclose(first[1], one[1], atol=1e-10)
    np.testing.assert_array_equal(second[1], first[1])
