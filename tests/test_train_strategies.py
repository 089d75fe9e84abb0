"""Every --strategy of the trainer: the losses and gradients of one worker, and what Megatron's layers send."""

import functools
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import collective_bytes

from distflash_jax.schedule import STRATEGIES, split_heads
from train import megatron
from train.config import Strategy, parse
from train.flags import InputError, MeshShape
from train.plan import saved_activations
from train.program import build_program

SMALL = (
    *("--vocab-size", "61", "--hidden-size", "32", "--intermediate-size", "40", "--num-attention-heads", "4"),
    *("--head-dim", "8", "--seq-len", "48", "--batch-size", "2", "--dtype", "float32"),
)


def configure(strategy, shape, *arguments):
    config = parse([*SMALL, "--strategy", strategy, "--mesh", shape, *arguments])
    sizes = (config.mesh.data, config.mesh.seq, config.mesh.tensor)
    axis_types = (jax.sharding.AxisType.Auto,) * 3
    devices = jax.devices()[: config.mesh.num_devices]
    return config, jax.make_mesh(sizes, ("data", "seq", "tensor"), axis_types=axis_types, devices=devices)


def losses_of(program):
    """(parameters, batch) -> (sum of the losses, losses)."""

    def losses(params, batch):
        per_token = program.token_losses(params, batch)
        return jnp.sum(per_token * jnp.cos(jnp.arange(per_token.size).reshape(per_token.shape))), per_token

    return losses


def some_batch(program):
    tokens = np.random.default_rng(0).integers(0, 61, (2, 49), np.int32)
    return jax.device_put({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, program.batch_sharding)


@functools.cache
def initial_params():
    return jax.device_get(build_program(*configure("balanced", "seq=1")).init().params)


@functools.cache
def run(strategy, shape, *, is_differentiated):
    """(losses, gradients) of the first parameters; without gradients None in their place."""
    program = build_program(*configure(strategy, shape))
    struct = program.state_struct.params
    params = jax.tree.map(lambda leaf, struct: jax.device_put(leaf, struct.sharding), initial_params(), struct)
    function = losses_of(program)
    if is_differentiated:
        (_, losses), gradients = jax.jit(jax.value_and_grad(function, has_aux=True))(params, some_batch(program))
        return jax.device_get((losses, gradients))
    return jax.device_get(program.token_losses(params, some_batch(program))), None


@pytest.mark.parametrize(
    ("strategy", "shape", "is_differentiated"),
    [
        *(
            (strategy, "seq=2", False)
            for strategy in ("auto", "balanced_unsplit", "ring", "ulysses", "all_gather", "rsa")
        ),
        *(("balanced", "seq=2x2", False), ("burst", "seq=2x2", False), ("hybrid", "seq=2x2", True)),
        ("zigzag", "seq=2", True),
        *(("megatron", shape, True) for shape in ("data=2,seq=2", "seq=3", "seq=4")),
    ],
)
def test_every_strategy_has_the_losses_and_gradients_of_one_worker(strategy, shape, is_differentiated):
    """Of Megatron's workers, three have padded heads and width, and of four two each have the same key/value head."""
    losses, gradients = run(strategy, shape, is_differentiated=is_differentiated)
    expected = run("balanced", "seq=1", is_differentiated=True)
    np.testing.assert_allclose(losses, expected[0], rtol=0, atol=1e-5)
    if is_differentiated:
        difference = jax.tree.map(lambda x, y: np.abs(x - y).max() / np.abs(y).max(), gradients, expected[1])
        assert max(jax.tree.leaves(difference)) < 1e-5


def test_the_trainer_has_every_strategy_of_the_library_and_megatron():
    assert {*get_args(Strategy)} == {*STRATEGIES, "megatron"}


def test_zigzag_pads_rows_that_it_cannot_cut_and_gives_losses_in_their_own_order():
    rows = np.random.default_rng(0).integers(0, 61, (2, 52), np.int32)
    losses = []
    for strategy, shape in (("zigzag", "seq=3"), ("balanced", "seq=1")):
        program = build_program(*configure(strategy, shape))
        batch = jax.device_put({"tokens": rows[:, :-1], "labels": rows[:, 1:]}, program.batch_sharding)
        params = jax.device_put(initial_params(), jax.tree.map(lambda x: x.sharding, program.state_struct.params))
        losses.append(jax.device_get(program.token_losses(params, batch)))
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "shape", "workers", "heads"), [("hybrid", "seq=2x2", 4, 4), ("megatron", "seq=3", 3, 6)]
)
def test_a_dry_run_counts_what_each_strategy_saves_padded_heads_included(strategy, shape, workers, heads):
    of_token = 32 + heads * (8 + 1)  # of two layers and rows
    assert saved_activations(*configure(strategy, shape)) == (4 * 2 * 2 * 48 // workers * of_token, 0)


@functools.cache
def compiled_text(strategy, *arguments):
    config, mesh = configure(strategy, "seq=4", "--num-key-value-heads", "4", *arguments)
    program = build_program(config, mesh)
    gradients = jax.jit(jax.grad(losses_of(program), has_aux=True))
    return gradients.lower(program.state_struct.params, program.batch_struct(2, 48)).compile().as_text()


def test_megatron_sends_eleven_times_the_activations_and_balanced_less_than_three_times():
    """In elements a token of width d on P workers: (P-1)/P d a collective. The paper counts 14 for Megatron.

    Forward two all-gathers and two reduce-scatters, backward as many; again forward in the backward two and one, as
    nothing needs the output of the last one, and what was gathered again serves the gradient of the weights too.
    """
    tokens, header = 2 * 48 * 32, "num_partitions=4"

    def times_the_tokens(text, pattern):
        lines = [line for line in text.splitlines() if re.search(pattern, line)]
        return len(lines), collective_bytes("\n".join([header, *lines])) / 4 / tokens

    text = compiled_text("megatron")
    assert times_the_tokens(text, r"= f32\[2,48,32\]\S* all-gather\(") == (6, 6 * 3 / 4)
    assert times_the_tokens(text, r"= f32\[2,12,32\]\S* reduce-scatter\(") == (5, 5 * 3 / 4)
    assert 1 < times_the_tokens(compiled_text("balanced"), r" collective-permute\(")[1] < 3 * 3 / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategy hybrid --mesh seq=4", "--strategy hybrid: a seq axis of two parts in --mesh data=1,seq=4, such"),
        ("--strategy hybrid --mesh seq=1x8", "--strategy hybrid: a seq axis of two parts in --mesh data=1,seq=8"),
        ("--strategy hybrid --mesh seq=2x8", "--strategy hybrid: at most 4 devices, one a head, in a part of --mesh"),
        ("--strategy megatron --mesh seq=2,tensor=2", "--strategy megatron: no tensor axis in --mesh data=1,"),
        ("--strategy zigzag --packing", "--strategy zigzag: not with --packing, balanced"),
        ("--strategy burst --mesh seq=2x4 --packing", "--strategy burst: not with --packing, balanced"),
        ("--strategy zigzag --sliding-window 8", "--strategy zigzag: not with --sliding-window, balanced"),
    ],
)  # fmt: skip
def test_what_a_strategy_cannot_take_is_refused_by_name(arguments, message):
    with pytest.raises(InputError, match=message):
        parse([*SMALL, *arguments.split()])


def test_a_seq_axis_of_two_parts_is_as_long_as_both_together():
    shape = MeshShape.parse("data=2,seq=2x4")
    assert (shape.data, shape.seq, shape.num_nodes, str(shape)) == (2, 8, 2, "data=2,seq=2x4")
    with pytest.raises(InputError, match="--mesh data=2x4: axes data, seq and tensor"):
        MeshShape.parse("data=2x4")


@pytest.mark.parametrize(("heads", "kv_heads", "P"), [(33, 33, 8), (32, 8, 16), (12, 4, 8), (2, 2, 8)])
def test_dealt_heads_attend_as_before(heads, kv_heads, P):
    """Each query head that is no padding reads the key/value head that it read before."""
    split = split_heads(heads, kv_heads, P)
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    number = lambda count: 1.0 + jnp.arange(count, dtype=jnp.float32)[None, :, None]
    q, k = (
        megatron.deal(mesh, split, name, number(n))[0, :, 0] for name, n in (("q_proj", heads), ("k_proj", kv_heads))
    )
    assert (len(q), len(k)) == (P * split.q_heads, P * split.kv_heads) and len(q) // len(k) == split.group
    read = {int(head) - 1: int(k[place // split.group]) - 1 for place, head in enumerate(q) if head}
    assert read == {head: head * kv_heads // heads for head in range(heads)}
