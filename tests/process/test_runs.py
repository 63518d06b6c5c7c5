"""Runs in processes of their own: killed at any moment, on several devices, several at once."""

import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import killed_run
import sharded_run

CPU = os.environ | {"JAX_PLATFORMS": "cpu"}


def run_until(file, gradients, looks, seconds=0.0):
    """Run it in a process, killed so long after so many looks; its end, None if it was killed."""
    command = [sys.executable, killed_run.__file__, str(file)]
    command += [str(jax.config.jax_compilation_cache_dir), str(gradients)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=CPU) as process:
        assert process.stdout is not None
        for count, line in enumerate(process.stdout, 1):
            if line.startswith("end"):
                process.wait()
                return line.removeprefix("end ").strip()
            if looks is not None and count >= looks:
                time.sleep(seconds)  # amid steps, a look or the writing of a state
                process.kill()
                process.wait()
                return None
    raise AssertionError(f"ended with {process.returncode}")


@pytest.mark.skipif(sys.platform == "win32", reason="kills processes by POSIX signals")
@pytest.mark.parametrize(
    ("times", "gradients"), [(1, 30_000), pytest.param(10, 300_000, marks=pytest.mark.long)]
)
def test_killed_many_times_it_ends_where_an_untouched_run_ends(tmp_path, times, gradients):
    whole = killed_run.end_of_run(
        tmp_path / "whole.state", gradients
    )  # its programs serve the others, too
    rng = np.random.default_rng(0)
    file = tmp_path / "killed.state"
    for _ in range(times):
        assert run_until(file, gradients, int(rng.integers(1, 4)), rng.uniform(0, 0.05)) is None
    assert file.exists()
    assert run_until(file, gradients, None) == whole


def started(process, processes, port, checkpoint, devices):
    command = [sys.executable, sharded_run.__file__, str(process), str(processes), str(port)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    flags += " --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    return subprocess.Popen(
        [*command, str(checkpoint)],
        stdout=subprocess.PIPE,
        text=True,
        env=CPU | {"XLA_FLAGS": flags},
    )


def ended(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    (line,) = [line for line in out.splitlines() if line.startswith("devices")]
    words = line.split()
    return int(words[1]), np.asarray([float(w) for w in words[3:]])


@pytest.mark.long  # the next test has four devices
def test_devices_of_one_process_give_the_same_iterates(tmp_path):
    one = sharded_run.end_of_run(tmp_path / "one.state")
    count, eight = ended(started(0, 1, 0, tmp_path / "eight.state", 8))
    assert [jax.device_count(), count] == [1, 8]
    np.testing.assert_allclose(eight, one, atol=1e-10)


def test_devices_of_processes_give_the_same_iterates(tmp_path):
    one = sharded_run.end_of_run(tmp_path / "one.state")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pair = [started(k, 2, port, tmp_path / "pair.state", 2) for k in (0, 1)]
    first, second = (ended(process) for process in pair)
    assert [first[0], second[0]] == [4, 4]
    np.testing.assert_allclose(first[1], one, atol=1e-10)
    np.testing.assert_array_equal(second[1], first[1])
