"""Sources of minibatches: exactly once an epoch, the same again from any saved position."""

import gc
import io
import itertools
import math
import re
import threading
import time
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from bilevax.data import Arrays, DataError, Host, LevelBatch, Levels, Source, Stratified
from bilevax.data.checks import numeric
from bilevax.data.shuffle import permuted
from bilevax.data.source import as_key
from bilevax.deep.feed import Batches

GROUPS = np.array([0, 2, 1, 1, 2, 1, 1, 0, 1, 1, 2])  # sizes 2, 6, 3


def batches_of(epoch, count=5, rows=3):
    """An epoch of batches that no other epoch has."""
    for number in range(count):
        start = (epoch * count + number) * rows
        yield {"i": np.arange(start, start + rows), "x": np.full((rows, 2), 0.5 + number + epoch)}


def samples(count):
    return {"i": np.arange(count), "x": np.arange(2.0 * count).reshape(count, 2)}


def make_source(name):
    """A new source of each kind; what it gives depends on nothing outside."""
    return {
        "arrays": lambda: Arrays(samples(11), 4),
        "stratified": lambda: Stratified(samples(11), groups=GROUPS, batch=7),
        "levels": lambda: Levels(upper=Arrays(samples(5), 2), lower=Arrays(samples(11), 3)),
        "host": lambda: Host(batches_of, batch=3, buffer=4),
        "levels_host": lambda: Levels(Host(batches_of, batch=3, buffer=2), Arrays(samples(5), 2)),
    }[name]()


SOURCES = ["arrays", "stratified", "levels", "host", "levels_host"]


def drawn(source, state, count):
    """The next batches, drawn one by one, refilled whenever it is needed."""
    draw = type(source).draw
    if not isinstance(source, Host):  # every new one would be compiled anew
        draw = eqx.filter_jit(draw)
    batches = []
    for _ in range(count):
        if not source.ready(state):
            state = source.refilled(state)
        state, batch = draw(source, state)
        batches.append(batch)
    return state, batches


def first_batches(source, count, key=0):
    return drawn(source, source.init(key), count)[1]


def indices(source, key, count):
    batches = first_batches(source, count, key)
    return np.concatenate([np.asarray(batch["i"]) for batch in batches])


def same(a, b):
    equal = jax.tree.map(lambda u, v: u.dtype == v.dtype and bool(jnp.array_equal(u, v)), a, b)
    return jax.tree.all(equal)


# Arrays


@given(st.integers(1, 12), st.data())
@settings(max_examples=8, deadline=None)
def test_each_sample_comes_exactly_once_an_epoch(count, data):
    batch = data.draw(st.integers(1, count))
    epochs = 3
    stream = indices(Arrays(samples(count), batch), 0, -(-epochs * count // batch))
    for epoch in stream[: epochs * count].reshape(epochs, count):
        assert sorted(epoch) == list(range(count))


def orders(count, keys, epochs=1):
    """The first permutations of many streams."""
    source = Arrays({"i": np.arange(count)}, count)

    @jax.jit
    @jax.vmap
    def several(key):
        state, seen = source.init(key), []
        for _ in range(epochs):
            state, batch = source.draw(state)
            seen.append(batch["i"])
        return jnp.stack(seen)

    return np.asarray(several(jax.random.split(jax.random.key(0), keys)))


def chi_squared(counts, expected):
    return np.sum((np.asarray(counts) - expected) ** 2) / expected


def test_epochs_are_swap_or_not_permutations_of_the_key():
    """In plain Python, with integers that do not overflow."""

    def mixed(x):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return x ^ (x >> 16)

    key = jax.random.key(3)
    a, b = (int(word) for word in jax.random.key_data(key))
    stream = indices(Arrays(samples(11), 4), key, 9)
    for epoch in range(3):
        one = mixed(mixed((a + epoch) & 0xFFFFFFFF) ^ b)
        other = mixed(mixed((b + epoch) & 0xFFFFFFFF) ^ a)
        expected = []
        for i in range(11):
            for r in range(4 * 8):
                counted = r * 0x9E3779B9 & 0xFFFFFFFF
                mirror = (mixed((one + counted) & 0xFFFFFFFF) >> 16) * 11 >> 16
                partner = (mirror - i) % 11
                if mixed(max(i, partner) ^ mixed(other ^ counted)) >> 31:
                    i = partner
            expected.append(i)
        assert list(stream[11 * epoch : 11 * (epoch + 1)]) == expected


@pytest.mark.parametrize(("count", "limit"), [(2, 10.9), (3, 20.6), (4, 49.8)])
def test_all_orders_are_equally_likely(count, limit):
    """Up to a limit that χ² of count! − 1 degrees of freedom exceeds once in a thousand."""
    keys, many = 24_000, math.factorial(count)
    counts = Counter(map(tuple, orders(count, keys)[:, 0].tolist()))
    assert len(counts) == many
    assert chi_squared(list(counts.values()), keys / many) < limit


def test_orders_have_no_pattern():
    """Places of a sample, neighbours, and sums over the first fifth are as for random orders."""
    count, keys = 100, 4_000
    found = orders(count, keys, epochs=2)
    for epoch in (0, 1):
        order = found[:, epoch]
        for place in (0, 1, count // 2, count - 1):
            assert chi_squared(np.bincount(order[:, place], minlength=count), keys / count) < 149
        apart = np.bincount(((order[:, 1:] - order[:, :-1]) % count).ravel(), minlength=count)[1:]
        assert chi_squared(apart, keys) < 148
        few = count // 5
        for values in (np.arange(count), (-1.0) ** np.arange(count), np.arange(count) < 50):
            sums = np.sum(values[order[:, :few]], axis=1)
            right = few * (count - few) / (count - 1) * np.var(values)
            assert np.var(sums) == pytest.approx(right, rel=0.12)  # five times its own deviation
    # One epoch says nothing of the next.
    same_place = np.mean(np.sum(found[:, 0] == found[:, 1], axis=1))
    assert same_place == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("name", ["arrays", "stratified"])
def test_the_key_decides_the_order(name):
    source = make_source(name)
    assert np.array_equal(indices(source, 1, 6), indices(source, jax.random.key(1), 6))
    assert not np.array_equal(indices(source, 1, 6), indices(source, 2, 6))


def test_the_rows_of_all_arrays_belong_together():
    batches = first_batches(Arrays(samples(11), 4), 5)
    for batch in batches:
        assert np.array_equal(batch["x"][:, 0], 2.0 * np.asarray(batch["i"]))


def test_a_key_of_another_generator_is_taken():
    source = Arrays(samples(11), 4)
    assert source.init(jax.random.key(0, impl="rbg")).stream.keys.shape == (1, 2)


@pytest.mark.parametrize("key", [True, 0.5, None, jax.random.key_data(jax.random.key(0))])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(TypeError, match=r"key must be jax.random.key\(seed\) or a whole number"):
        Arrays(samples(11), 4).init(key)


def test_many_keys_are_refused():
    with pytest.raises(TypeError, match="key must be one key"):
        Arrays(samples(11), 4).init(jax.random.split(jax.random.key(0)))


# What all sources share


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("position", [0, 4, 9])
def test_a_saved_state_goes_on_identically_with_a_new_source(name, position):
    source = make_source(name)
    _, expected = drawn(source, source.init(5), position + 6)
    state, _ = drawn(source, source.init(5), position)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    fresh = make_source(name)
    loaded = eqx.tree_deserialise_leaves(file, fresh.init(0))
    assert int(loaded.drawn) == position * source.batch
    _, rest = drawn(fresh, loaded, 6)
    assert same(rest, expected[position:])


@pytest.mark.parametrize("name", SOURCES)
def test_the_state_holds_arrays_and_counts_samples(name):
    source = make_source(name)
    state = source.init(0)
    assert all(type(leaf) is type(jnp.zeros(1)) for leaf in jax.tree.leaves(state))
    assert not any(
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)
    )
    assert int(state.drawn) == 0
    after, batches = drawn(source, state, 3)
    assert int(after.drawn) == 3 * source.batch
    assert isinstance(source, Source)
    for batch in batches:
        rows = [batch.upper, batch.lower] if isinstance(batch, LevelBatch) else [batch]
        assert sum(part["i"].shape[0] for part in rows) == source.batch
    assert source.ready(state).dtype == bool
    assert source.ready(state).shape == ()


@pytest.mark.parametrize("name", SOURCES)
def test_draws_inside_compiled_loops_are_the_same(name):
    source = make_source(name)
    begin = source.refilled(source.init(2))
    most = 4 if name == "host" else 2 if name == "levels_host" else 7

    @eqx.filter_jit
    def scanned(source, state):
        return lax.scan(lambda s, _: source.draw(s), state, length=most)

    @eqx.filter_jit
    def looped(source, state):
        def body(carry):
            state, total = carry
            state, batch = source.draw(state)
            add = jax.tree.map(lambda a: jnp.sum(a).astype(float), batch)
            return state, jax.tree.map(jnp.add, total, add)

        zero = jax.tree.map(lambda a: jnp.zeros(()), jax.eval_shape(source.draw, state)[1])
        going = lambda c: source.ready(c[0]) & (c[0].drawn < most * source.batch)
        return lax.while_loop(going, body, (state, zero))

    end, one_by_one = drawn(source, begin, most)
    scan_end, stacked = scanned(source, begin)
    assert same(jax.tree.map(lambda *rows: jnp.stack(rows), *one_by_one), stacked)
    loop_end, total = looped(source, begin)
    assert same(total, jax.tree.map(lambda a: jnp.sum(a).astype(float), stacked))
    assert same(end, scan_end)
    assert same(end, loop_end)


@pytest.mark.parametrize(
    "make",
    [
        lambda a: Arrays(a, 4),
        lambda a: Stratified(a, groups=GROUPS, batch=7),
        lambda a: Levels(Arrays(a, 4), Arrays(a, 5)),
    ],
)
def test_data_are_arguments_of_the_compiled_program(make):
    traces = []

    @eqx.filter_jit
    def draw(source, state):
        traces.append(1)
        return source.draw(state)

    for scale in (1.0, 2.0):
        source = make({"x": scale * np.arange(11.0)})
        draw(source, source.init(0))
    assert len(traces) == 1


def test_in_memory_sources_give_everything_and_need_no_host():
    for name in ("arrays", "stratified"):
        source = make_source(name)
        assert same(source.everything(), jax.tree.map(jnp.asarray, samples(11)))
        state = source.init(0)
        assert source.refilled(state) is state
        assert source.ready(state)
    assert make_source("host").everything() is None


# Stratified


@pytest.mark.parametrize(
    ("sizes", "quotas"),
    [
        ([2, 6, 3], [3, 4, 1]),
        ([3, 4, 3, 9, 1], [2, 2, 2, 2, 2]),  # the sizes 3, 4 and 3 share one program
        ([3, 2, 4, 4], [7, 1, 7, 7]),
    ],
)
def test_every_batch_has_its_quotas_and_each_group_its_own_epochs(sizes, quotas):
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    source = Stratified(samples(sum(sizes)), groups=groups, per_group=quotas)
    assert source.batch == sum(quotas)
    rows = indices(source, 0, 24).reshape(24, -1)
    labels = np.repeat(np.arange(len(sizes)), quotas)
    assert np.array_equal(groups[rows], np.tile(labels, (24, 1)))
    for group, size in enumerate(sizes):
        stream = rows[:, labels == group].reshape(-1)
        epochs = stream[: len(stream) // size * size].reshape(-1, size)
        assert len(epochs) >= 5
        members = np.flatnonzero(groups == group)
        assert np.array_equal(np.sort(epochs), np.tile(members, (len(epochs), 1)))


def test_a_group_of_one_fills_any_quota():
    source = Stratified(samples(4), groups=[0, 1, 1, 1], per_group=[9, 1])
    assert Counter(indices(source, 0, 3).tolist()) == {0: 27, 1: 1, 2: 1, 3: 1}


def test_shares_are_equal_and_the_remainder_goes_to_the_largest_groups():
    assert Stratified(samples(11), groups=GROUPS, batch=6).per_group == (2, 2, 2)
    assert Stratified(samples(11), groups=GROUPS, batch=7).per_group == (2, 3, 2)
    assert Stratified(samples(11), groups=GROUPS, batch=8).per_group == (2, 3, 3)
    assert Stratified(samples(4), groups=[0, 0, 1, 1], batch=3).per_group == (2, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"groups": [0, 3, 0, 1]}, ValueError, "group 2 has no sample, but there is a group 3"),
        ({"groups": [0, -1, 0, 1]}, ValueError, r"must be ≥ 0, but groups\[1\] is -1"),
        ({"groups": [0, 1]}, ValueError, "groups must be 4 whole numbers, one per sample"),
        ({"groups": [0.0, 1, 0, 1]}, ValueError, "dtype float64"),
        ({"groups": [0, 1, 2, 1], "batch": 2}, ValueError, "batch must be at least 3"),
        ({"groups": [0, 1, 0, 1], "batch": 2.5}, TypeError, "batch must be a whole number"),
        ({"groups": [0, 1, 0, 1], "per_group": [1]}, ValueError, "each of 2 groups, not 1"),
        ({"groups": [0, 1, 0, 1], "per_group": [1, 0]}, ValueError, r"per_group\[1\] must be a"),
    ],
)
def test_bad_groups_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Stratified(samples(4), **options)


# The same rows on the host


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 5), st.data())
@settings(max_examples=25, deadline=None)
def test_batches_on_the_host_have_every_row_once_an_epoch(sizes, extra, data):
    """Batch i follows from the key and i alone, whatever was asked for before."""
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = 1000 + np.arange(len(groups))
    stratified = data.draw(st.booleans())
    batch = len(sizes) + extra
    make = lambda key: Batches(rows, batch, key, groups if stratified else None)
    batches = make(3)
    assert len(batches) == -(-len(rows) // batch)
    taken = batches.several(0, 24)
    assert taken.dtype == np.int32
    ends = np.cumsum(batches.per_group)[:-1]
    for group, part in enumerate(np.split(taken, ends, axis=1)):
        members = rows[groups == group] if stratified else rows
        stream = part.reshape(-1)
        epochs = stream[: len(stream) // len(members) * len(members)].reshape(-1, len(members))
        assert np.array_equal(np.sort(epochs), np.tile(members, (len(epochs), 1)))
    again = make(3)
    for i in (23, 7, 8, 0):
        assert np.array_equal(again[i], taken[i])
    assert np.array_equal(again.several(5, 9), taken[5:14])


def test_the_host_draws_the_rows_that_programs_draw():
    """Beyond the first epochs, and with a key of more than 31 bits."""
    key, numbers = 2**32 - 1, np.arange(11)
    for name in ("arrays", "stratified"):
        source = make_source(name)
        host = Batches(numbers, source.batch, key, GROUPS if name == "stratified" else None)
        drawn_rows = indices(source, key, 9).reshape(9, -1)
        assert np.array_equal(host.several(0, 9), drawn_rows)
    upper, lower = jax.random.split(as_key(key))
    source = Levels(Stratified(samples(11), groups=GROUPS, batch=7), Arrays(samples(11), 4))
    batches = first_batches(source, 5, key)
    above, below = Batches(numbers, 7, upper, GROUPS), Batches(numbers, 4, lower)
    for i, batch in enumerate(batches):
        assert np.array_equal(batch.upper["i"], above[i])
        assert np.array_equal(batch.lower["i"], below[i])


def test_permutations_are_the_same_far_into_a_stream():
    """Where the epoch no longer fits 31 bits, NumPy and JAX wrap around alike."""
    keys = np.array([[1, 2], [3, 4]], np.uint32)
    epochs = np.array([5, 2**31 + 7]).astype(np.int32, casting="unsafe")
    given = (np.array([0, 70_000]), np.array([9, 70_001]), keys, epochs)
    found = permuted(*given, 56)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, permuted(*(jnp.asarray(a) for a in given), 56))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"groups": np.arange(6) % 3, "batch": 2}, ValueError, "batch must be at least 3"),
        ({"groups": [0, 0, 2, 2, 0, 0]}, ValueError, "group 1 has no sample"),
        ({"groups": [0, 1]}, ValueError, "groups must be 6 whole numbers"),
        ({"groups": [0, -1, 0, 0, 0, 0]}, ValueError, r"must be ≥ 0, but groups\[1\] is -1"),
        ({"rows": np.array([], int)}, ValueError, "at least one row number"),
        ({"batch": 0}, ValueError, "batch must be a whole number ≥ 1"),
        ({"key": 0.5}, TypeError, "key must be"),
    ],
)
def test_bad_batches_on_the_host_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Batches(**({"rows": np.arange(6), "batch": 4} | options))


def test_batches_on_the_host_are_numbered_from_zero():
    with pytest.raises(IndexError, match="numbered from 0, not -1"):
        Batches(np.arange(3), 2)[-1]


# Levels


def test_levels_have_streams_of_their_own():
    part = Arrays(samples(11), 4)
    source = Levels(upper=part, lower=part)
    assert source.batch == 8
    batches = first_batches(source, 4)
    assert isinstance(batches[0], LevelBatch)
    upper = np.stack([batch.upper["i"] for batch in batches])
    lower = np.stack([batch.lower["i"] for batch in batches])
    assert not np.array_equal(upper, lower)
    assert same(source.everything(), LevelBatch(part.everything(), part.everything()))


def test_levels_are_ready_when_both_are_and_whole_when_both_are():
    source = make_source("levels_host")
    state = source.init(0)
    assert not source.ready(state)
    state = source.refilled(state)
    assert source.ready(state)
    assert source.everything() is None


def test_bad_levels_are_refused():
    host = make_source("host")
    with pytest.raises(TypeError, match="lower must be a source such as"):
        Levels(upper=host, lower=samples(3))
    with pytest.raises(ValueError, match="upper and lower are the same source"):
        Levels(upper=host, lower=host)


# Arrays that cannot be used


@pytest.mark.parametrize("kind", [Arrays, lambda a, b=2: Stratified(a, groups=[0, 1, 0], batch=b)])
@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({}, ValueError, "must be a pytree of arrays, but {} holds none"),
        ({"x": np.zeros((0, 2))}, ValueError, r"arrays\['x'\] is empty"),
        ({"x": 1.0}, ValueError, r"arrays\['x'\] is a single number"),
        (
            {"x": np.zeros(3), "y": np.zeros((2, 3))},
            ValueError,
            r"arrays\['y'\] has 2 rows, but arrays\['x'\] has 3",
        ),
        ({"x": np.array(["a", "b", "c"])}, TypeError, r"arrays\['x'\] must be an array of numbers"),
        ({"x": [0.0, np.inf, 0.0]}, ValueError, r"arrays\['x'\]\[0\] is a single number"),
        (jax.random.split(jax.random.key(0), 3), TypeError, "arrays must be an array of numbers"),
    ],
)
def test_arrays_that_are_no_samples_are_refused(kind, arrays, error, message):
    with pytest.raises(error, match=message):
        kind(arrays)


@pytest.mark.parametrize("to", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, jnp.bfloat16, np.complex64])
def test_a_sample_that_is_not_finite_is_named(to, dtype):
    x = np.zeros((5, 2, 2))
    x[3, 1, 0], x[4] = np.nan, np.inf
    with pytest.raises(DataError, match=r"Arrays: arrays\['x'\] has NaN or infinity in row 3") as e:
        Arrays({"i": np.arange(5), "x": to(x.astype(dtype))}, 2)
    assert (e.value.epoch, e.value.batch, e.value.index) == (None, None, 3)


def test_an_overflow_on_the_way_to_float32_is_seen():
    with jax.enable_x64(False), pytest.raises(DataError, match="row 1"):
        Arrays(np.array([1.0, 1e300]), 1)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (12, ValueError, "batch must be at most the 11 samples, not 12"),
        (0, ValueError, "batch must be a whole number ≥ 1, not 0"),
        (2.5, TypeError, "batch must be a whole number"),
        (None, TypeError, "batch must be a whole number"),
    ],
)
def test_bad_batches_are_refused(batch, error, message):
    with pytest.raises(error, match=message):
        Arrays(samples(11), batch)


def test_numbers_of_all_kinds_are_samples():
    kinds = [bool, np.int8, np.uint32, np.float16, jnp.bfloat16, np.complex128]
    arrays = {np.dtype(kind).name: np.ones(4).astype(kind) for kind in kinds}
    _, batch = Arrays(arrays, 3).draw(Arrays(arrays, 3).init(0))
    assert {name: leaf.dtype.name for name, leaf in batch.items()} == {n: n for n in arrays}


# Sharding


def test_what_is_no_sharding_is_refused():
    with pytest.raises(TypeError, match=r"sharding must be a jax\.sharding\.Sharding"):
        Arrays(samples(11), 4, sharding="data")


# Host


def test_make_is_called_once_an_epoch_and_refills_do_not_skip():
    opened, read = [], []

    def make(epoch):
        opened.append(epoch)
        for number, batch in enumerate(batches_of(epoch)):
            read.append((epoch, number))
            yield batch

    stream = indices(Host(make, batch=3, buffer=2), 0, 15)
    assert np.array_equal(stream, np.arange(45))
    assert opened[:3] == [0, 1, 2]
    assert read[:15] == [(epoch, number) for epoch in range(3) for number in range(5)]


def test_a_list_a_function_and_a_generator_function_are_taken():
    epoch = list(batches_of(0))
    assert np.array_equal(indices(Host(epoch, batch=3), 0, 10), np.tile(np.arange(15), 2))
    assert np.array_equal(indices(Host(lambda e: epoch, batch=3), 0, 5), np.arange(15))
    assert np.array_equal(indices(Host(batches_of, batch=3), 0, 10), np.arange(30))
    first = Host(lambda e: itertools.cycle(batches_of(e)), batch=3, batches_per_epoch=3)
    assert np.array_equal(indices(first, 0, 6), [*range(9), *range(15, 24)])


def test_a_grain_dataset_is_taken():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(10).shuffle(seed=1).batch(4, drop_remainder=True)
    expected = np.concatenate(list(dataset))
    for make in (dataset, dataset.to_iter_dataset(), lambda epoch: dataset.seed(epoch)):
        source = Host(make, batch=4, buffer=3)
        assert np.array_equal(np.concatenate(first_batches(source, 2)), expected)


def test_with_an_example_nothing_is_read_before_the_first_refill():
    opened = []

    def make(epoch):
        opened.append(epoch)
        return batches_of(epoch)

    for example in (next(batches_of(7)), jax.eval_shape(lambda: next(batches_of(7)))):
        source = Host(make, batch=3, example=example)
        state = source.init(0)
        assert opened == []
        assert not source.ready(state)
        assert same(state, Host(batches_of, batch=3).init(0))


def test_only_what_was_used_up_is_refilled():
    source = Host(batches_of, batch=3, buffer=4)
    state = source.refilled(source.init(0))
    assert source.refilled(state) is state
    state, _ = drawn(source, state, 3)
    full = source.refilled(state)
    assert np.array_equal(full.buffer["i"][:, 0], [9, 12, 15, 18])
    assert (int(full.cursor), int(full.epoch), int(full.fetched)) == (0, 1, 2)


def test_a_draw_without_a_batch_at_hand_is_not_the_last_batch_again():
    source = Host(batches_of, batch=3, buffer=2)
    state = source.refilled(source.init(0))
    assert source.ready(state, 2)
    state, _ = source.draw(state)
    assert source.ready(state)
    assert not source.ready(state, 2)
    state, _ = source.draw(state)
    assert not source.ready(state)
    assert np.isnan(source.draw(state)[1]["x"]).all()


def test_an_older_state_can_be_gone_on_from_with_the_same_source():
    source = Host(batches_of, batch=3, buffer=2)
    old, _ = drawn(source, source.init(0), 7)
    _, expected = drawn(source, old, 5)
    _, again = drawn(source, old, 5)
    assert same(again, expected)


def test_an_iterator_may_use_its_arrays_again():
    def make(epoch):
        x = np.zeros(2)
        for number in range(6):
            x[:] = number
            yield x

    batches = first_batches(Host(make, batch=2), 6)
    assert [float(batch[0]) for batch in batches] == [0, 1, 2, 3, 4, 5]


def test_a_thread_reads_ahead_and_ends_with_its_source():
    before = set(threading.enumerate())
    started = lambda: len(set(threading.enumerate()) - before)
    read = []

    def make(epoch):
        for batch in batches_of(epoch):
            read.append(1)
            yield batch

    def until(condition):
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        return condition()

    source = Host(make, batch=3, buffer=4)
    state = source.refilled(source.init(0))
    assert until(lambda: len(read) == 4 + 4 + 1)  # at hand, ahead, and one waiting to be ahead
    assert started() == 1
    source.refilled(source.init(0))  # from another position: the first thread ends
    assert until(lambda: started() == 1)
    del source, state
    gc.collect()
    assert until(lambda: started() == 0)


def test_the_form_of_a_host_source_is_the_same_in_every_process():
    structures = [str(jax.tree.structure(make_source("host"))) for _ in range(2)]
    assert structures[0] == structures[1]
    assert "0x" not in structures[0]


def altered(number, change, epoch=1):
    """A function that makes the usual batches, one of them changed."""

    def make(e):
        for n, batch in enumerate(batches_of(e)):
            yield change(batch) if (e, n) == (epoch, number) else batch

    return make


def not_a_number(batch):
    batch["x"][1, 0] = np.nan
    return batch


def failing(batch):
    raise OSError("disk gone")


def ends(count):
    return lambda e: itertools.islice(batches_of(e), count if e == 1 else None)


@pytest.mark.parametrize(
    ("make", "message", "place"),
    [
        (
            altered(2, not_a_number),
            "batch 2 of epoch 1: batch['x'] has NaN or infinity in row 1; drop or repair",
            (1, 2, 1),
        ),
        (
            altered(4, lambda b: jax.tree.map(lambda a: a[:2], b)),
            "batch 4 of epoch 1: batch['i'] has 2 rows, not batch=3; drop or pad it",
            (1, 4, None),
        ),
        (
            altered(4, lambda b: b | {"x": np.ones((4, 2))}),
            "batch 4 of epoch 1: batch['x'] has 4 rows, not batch=3; cut it",
            (1, 4, None),
        ),
        (
            altered(4, lambda b: b | {"x": 1.0}),
            "batch 4 of epoch 1: batch['x'] has no rows, not batch=3; drop or pad it",
            (1, 4, None),
        ),
        (
            altered(3, lambda b: b | {"x": np.ones((3, 4))}),
            "batch['x'] has shape (3, 4) and dtype float64, not (3, 2) and float64 like the first",
            (1, 3, None),
        ),
        (
            altered(3, lambda b: b | {"x": np.ones((3, 2), np.float32)}),
            "batch['x'] has shape (3, 2) and dtype float32, not (3, 2) and float64 like the first",
            (1, 3, None),
        ),
        (
            altered(1, lambda b: {"i": b["i"]}),
            "batch 1 of epoch 1 has the structure PyTreeDef({'i': *}); it must hold arrays",
            (1, 1, None),
        ),
        (
            altered(1, lambda b: b | {"x": np.array(["a"] * 3)}),
            "batch 1 of epoch 1: batch['x'] must be an array of numbers, not ndarray",
            (1, 1, None),
        ),
        (
            altered(3, lambda b: next(batches_of(1))),
            "batch 3 of epoch 1 repeats batch 0",
            (1, 3, None),
        ),
        (
            altered(2, failing),
            "batch 2 of epoch 1 could not be read: OSError('disk gone')",
            (1, 2, None),
        ),
        (ends(0), "epoch 1 gave no batch at all; make(epoch) must return a new", (1, 0, None)),
        (ends(3), "epoch 1 ended after 3 batches, not batches_per_epoch=5", (1, 3, None)),
        (lambda e: 3, "batch 0 of epoch 0 could not be read: TypeError(", (0, 0, None)),
        (lambda e: iter([{}]), "batch 0 of epoch 0 has the structure", (0, 0, None)),
    ],
)
def test_a_bad_batch_is_named(make, message, place):
    source = Host(make, batch=3, buffer=2, batches_per_epoch=5)
    for _ in range(2):  # a source that raised does so again, and does not hang
        with pytest.raises(DataError, match=re.escape(message)) as e:
            drawn(source, source.init(0), 12)
        assert (e.value.epoch, e.value.batch, e.value.index) == place


def test_batches_before_a_bad_one_are_still_given():
    source = Host(altered(2, not_a_number, epoch=0), batch=3, buffer=5)
    state, batches = drawn(source, source.init(0), 2)
    assert np.array_equal(np.concatenate([b["i"] for b in batches]), np.arange(6))
    assert not source.ready(state)
    with pytest.raises(DataError, match="batch 2 of epoch 0"):
        source.refilled(state)


def test_a_repeated_batch_is_found_also_behind_a_resumed_position():
    make = altered(3, lambda b: next(batches_of(1)))
    source = Host(make, batch=3, buffer=2)
    state, _ = drawn(source, source.init(0), 7)
    fresh = Host(make, batch=3, buffer=2)
    with pytest.raises(DataError, match="batch 3 of epoch 1 repeats batch 0"):
        drawn(fresh, state, 4)


def test_a_state_from_longer_epochs_is_refused():
    source = Host(batches_of, batch=3, buffer=2)
    state, _ = drawn(source, source.init(0), 4)
    shorter = Host(lambda e: batches_of(e, count=2), batch=3, buffer=2)
    with pytest.raises(
        DataError, match=r"ended after 2 batches, but the state .* had read 4 of it"
    ):
        shorter.refilled(state)


def test_a_batch_unlike_the_example_is_refused():
    source = Host(batches_of, batch=3, example={"i": np.arange(3), "x": np.ones((3, 5))})
    with pytest.raises(
        DataError, match=re.escape("has shape (3, 2) and dtype float64, not (3, 5)")
    ):
        source.refilled(source.init(0))


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (batches_of(0), {}, TypeError, "generator, which can be read only once; pass a function"),
        (iter([1]), {}, TypeError, "which can be read only once"),
        (3, {}, TypeError, r"make must be a function make\(epoch\) that returns an iterable"),
        (lambda: [], {}, TypeError, r"make must take the epoch, as in make\(0\)"),
        (batches_of, {"batch": 0}, ValueError, "Host: batch must be a whole number ≥ 1"),
        (batches_of, {"buffer": 1}, ValueError, "Host: buffer must be a whole number ≥ 2"),
        (batches_of, {"batches_per_epoch": 1.5}, TypeError, "batches_per_epoch must be a whole"),
        (
            batches_of,
            {"example": {"x": np.ones((4, 2))}},
            ValueError,
            r"example\['x'\] must have batch=3 rows, but has shape \(4, 2\)",
        ),
    ],
)
def test_bad_arguments_of_host_are_refused(make, options, error, message):
    with pytest.raises(error, match=message):
        Host(make, **({"batch": 3} | options))


def test_bfloat16_batches_are_told_apart():
    make = lambda e: [np.full(3, n).astype(jnp.bfloat16) for n in range(3)]
    batches = first_batches(Host(make, batch=3), 3)
    assert [float(batch[0]) for batch in batches] == [0, 1, 2]
    assert numeric(make(0)[0], "x").dtype == jnp.bfloat16
