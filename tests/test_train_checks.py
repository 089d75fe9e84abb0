"""train.checks: what a run says of numbers that are wrong, and when it ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train.checks import BadSteps, checked
from train.exits import Exit, Stop

GOOD = {"is_finite": True, "loss": 2.0, "grad_norm": 1.0}
BAD = {"is_finite": False, "loss": float("nan"), "grad_norm": float("inf")}


def test_bad_steps_name_their_batch_and_end_the_run_only_in_a_row(capsys):
    steps = BadSteps(3)
    for number, metrics in enumerate([BAD, BAD, GOOD, BAD, BAD], start=1):
        steps.check(number, metrics, "rows 7, 3 of a.txt")
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[:3] for line in said] == [["warning", "step", str(step)] for step in (1, 2, 4, 5)]
    assert said[0].endswith("changed nothing; its batch: rows 7, 3 of a.txt")
    with pytest.raises(
        Stop, match=r"step 6 has the loss nan .* norm inf, .* rows 5 of b; that makes 3 in a row"
    ) as stop:
        steps.check(6, BAD, "rows 5 of b")
    assert stop.value.code == Exit.NOT_FINITE


@pytest.fixture(scope="module")
def make_state():
    """A state of a matrix that is cut over seq and replicated over data, and a replicated vector."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"matrix": P("seq"), "vector": P()}

    def make():
        return {name: jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, spec)) for name, spec in specs.items()}

    return make


def with_flip(array, device):
    """The array with another element in the copy on one device."""
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[device][-1, -1] = np.nextafter(parts[device][-1, -1], 2)
    placed = [jax.device_put(part, shard.device) for part, shard in zip(parts, array.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def take_three(make_state, every, after=lambda call, state: state):
    """Steps 1 to 3, where `after` changes what a call gives; returns the number of calls."""
    calls = []
    add = jax.jit(lambda state, batch: jax.tree.map(lambda x: x + batch, state), donate_argnums=0)

    def step(state, batch):
        calls.append(batch)
        return after(len(calls), add(state, batch)), {}

    take, state = checked(step, every, lambda state: state), make_state()
    for number in (1, 2, 3):
        state, _ = take(number, state, 1.0)
    assert float(state["matrix"][0, 0]) == 4
    return len(calls)


def test_steps_that_come_out_the_same_are_taken_twice_only_where_they_are_checked(make_state):
    assert [take_three(make_state, every) for every in (None, 2, 1)] == [3, 4, 6]


def test_one_element_of_one_device_that_comes_out_otherwise_the_second_time_ends_the_run(make_state):
    def flip_third(call, state):
        return state | {"matrix": with_flip(state["matrix"], 5)} if call == 3 else state

    line = "step 2, taken twice on the same batch, gave another matrix on cpu:5 of process 0: a device"
    with pytest.raises(Stop, match=line) as stop:
        take_three(make_state, 2, flip_third)
    assert stop.value.code == Exit.NOT_DETERMINISTIC


@pytest.mark.parametrize("name, device, other", [("matrix", 6, 2), ("vector", 3, 0)])
def test_one_element_of_one_replica_that_is_another_ends_the_run(make_state, name, device, other):
    def flip(call, state):
        return state | {name: with_flip(state[name], device)} if call in (2, 3) else state

    line = f"after step 2, {name} on cpu:{device} of process 0 is not what it is on cpu:{other} of"
    with pytest.raises(Stop, match=line):
        take_three(make_state, 2, flip)
