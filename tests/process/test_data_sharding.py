"""Minibatches spread over several devices."""

import os
import subprocess
import sys
from pathlib import Path

import bilevax as bx

SHARDED = """
import jax, numpy as np, equinox as eqx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from bilevax.data import Arrays, Stratified
assert len(jax.devices()) == 8
data = {"i": np.arange(20), "x": np.arange(40.0).reshape(20, 2)}
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
rows = NamedSharding(mesh, P("data"))
groups = np.arange(20) % 2
scan = eqx.filter_jit(lambda s, state: jax.lax.scan(lambda c, _: s.draw(c), state, length=4)[1])
for make in (
    lambda **options: Arrays(data, 8, **options),
    lambda **options: Stratified(data, groups=groups, batch=8, **options),
):
    plain, spread = make(), make(sharding=rows)
    a, b = scan(plain, plain.init(0)), scan(spread, spread.init(0))
    assert all(np.array_equal(a[k], b[k]) for k in data)
    _, one = eqx.filter_jit(spread.draw)(spread.init(0))
    assert one["x"].sharding.is_equivalent_to(rows, 2), one["x"].sharding
    assert one["x"].addressable_shards[0].data.shape == (2, 2)
explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
for refused, name in (
    ((6, rows), "batch=6 rows of arrays['i']; its mesh axis must divide"),
    ((8, NamedSharding(mesh, P("data", None))), "rank at least 2"),
    ((8, NamedSharding(explicit, P("data"))), "must divide batch and be Auto"),
):
    try:
        Arrays(data, refused[0], sharding=refused[1])
    except ValueError as error:
        assert name in str(error), error
    else:
        raise AssertionError(name)
print("sharded")
"""


def test_sharded_batches_have_the_same_rows_on_eight_devices():
    fast = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {fast}"}
    flags |= {"JAX_PLATFORMS": "cpu"}
    found = {"PYTHONPATH": os.pathsep.join([str(Path(bx.__file__).parents[1]), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED],
        env=os.environ | flags | found,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.strip() == "sharded", run.stderr
