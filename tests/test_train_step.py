"""The training step on virtual devices: loss in chunks, one compilation, the same numbers on every mesh."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflash_jax import distflash_attention, trace
from models.config import LlamaConfig
from models.llama import Llama
from train.data import reorder
from train.loss import token_losses
from train.plan import allocated
from train.program import make_remat
from train.sharding import HEADS, bytes_per_device, make_gather
from train.step import OptimizerConfig, build, make_optimizer, make_schedule

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
BATCH, LENGTH = 4, 64


def make_mesh(data, seq, tensor=1):
    return jax.make_mesh(
        (data, seq, tensor),
        ("data", "seq", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
        devices=jax.devices()[: data * seq * tensor],
    )


def build_on(mesh, *, config=CONFIG, loss_chunk=5, accumulate=1, is_packed=False):
    create = functools.partial(
        Llama,
        config,
        attention=functools.partial(distflash_attention, mesh=mesh, spec=HEADS),
        remat=make_remat("layer", mesh),
        gather=make_gather(mesh, jnp.float32),
        dtype=jnp.float32,
    )
    optimizer = OptimizerConfig(
        learning_rate=1e-3, warmup_steps=2, total_steps=10, weight_decay=0.5, z_loss=0.01, accumulate=accumulate
    )
    make = lambda rngs: create(rngs=rngs)
    return build(make, mesh=mesh, optimizer=optimizer, loss_chunk=loss_chunk, is_packed=is_packed)


@functools.cache
def program_on(mesh, accumulate):
    return build_on(make_mesh(*mesh), accumulate=accumulate)


@functools.cache
def initial_state():
    return jax.device_get(program_on((1, 1, 1), 1).init())


def place(state, program):
    """The state on the program's mesh, as a restore would place it."""
    return jax.tree.map(lambda leaf, struct: jax.device_put(leaf, struct.sharding), state, program.state_struct)


def some_batch(seed):
    """Random tokens; how many labels count differs from row to row and worker to worker, down to none."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (BATCH, LENGTH), np.int32)
    share = np.linspace(0.1, 1.0, LENGTH) * np.linspace(0.4, 1.0, BATCH)[:, None]
    labels = np.where(rng.random((BATCH, LENGTH)) < share, np.roll(tokens, -1, axis=1), -1).astype(np.int32)
    labels[0, :16] = labels[:, -1] = -1
    return {"tokens": tokens, "labels": labels}


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses per token before three steps, metrics of each, parameters after the last, JAX's log."""

    losses: np.ndarray
    metrics: list[dict[str, np.ndarray]]
    params: dict
    log: list[str]


@functools.cache
def three_steps(mesh, accumulate):
    program = program_on(mesh, accumulate)
    state, metrics, log = place(initial_state(), program), [], []
    losses = jax.device_get(program.token_losses(state.params, some_batch(0)))
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("jax").addHandler(handler)
    with jax.log_compiles():
        for seed in range(3):
            batch = jax.device_put(some_batch(seed), program.batch_sharding)
            state, step_metrics = program.step(state, batch)
            metrics.append(jax.device_get(step_metrics))
            if seed == 1:
                state = place(jax.device_get(state), program)
    logging.getLogger("jax").removeHandler(handler)
    return Run(losses, metrics, jax.device_get(state.params), log)


@pytest.mark.parametrize(("mesh", "accumulate"), [((1, 2, 1), 1), ((1, 8, 1), 1), ((2, 2, 2), 2)])
def test_losses_and_parameters_are_the_same_on_every_mesh(mesh, accumulate):
    run, one_worker = three_steps(mesh, accumulate), three_steps((1, 1, 1), 1)
    np.testing.assert_allclose(run.losses, one_worker.losses, rtol=0, atol=1e-5)
    for ours, expected in zip(run.metrics, one_worker.metrics, strict=True):
        assert ours["num_tokens"] == expected["num_tokens"]
        assert ours["learning_rate"] == expected["learning_rate"]
        np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(ours["grad_norm"], expected["grad_norm"], rtol=1e-4)
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    jax.tree.map(same, run.params, one_worker.params)


def test_three_steps_move_the_parameters_far_more_than_meshes_differ():
    before, after = initial_state().params, three_steps((1, 1, 1), 1).params
    moved = jax.tree.map(lambda old, new: np.abs(new - old).max(), before, after)
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_the_step_is_traced_and_compiled_once_even_after_a_restore():
    log = three_steps((2, 2, 2), 2).log
    assert sum("Finished tracing step" in message for message in log) == 1
    assert sum("Compiling jit(step)" in message for message in log) == 1


def test_a_device_holds_its_part_of_the_state_and_layers_are_gathered_one_by_one():
    three_steps((2, 2, 2), 2)  # whose log must have the step's compilation, whichever test comes first
    program = program_on((2, 2, 2), 2)
    for path, leaf in jax.tree_util.tree_leaves_with_path(program.state_struct):
        # The vocabulary, 61, does not divide over the two tensor workers; norms have nothing to do with them.
        is_whole = any(word in str(path[-1]) for word in ("norm", "embed_tokens", "lm_head"))
        parts = 1 if leaf.ndim == 0 else 4 if is_whole else 8
        assert np.prod(leaf.sharding.shard_shape(leaf.shape)) * parts == leaf.size, path
    batch = jax.device_put(some_batch(0), program.batch_sharding)
    compiled = program.step.lower(program.state_struct, batch).compile()  # the step's own, from JAX's cache
    local_bytes = bytes_per_device(program.state_struct) + bytes_per_device(batch)
    analysis = compiled.memory_analysis()
    assert analysis.argument_size_in_bytes == pytest.approx(local_bytes, rel=0.02)
    planned = allocated(program, batch_size=BATCH, seq_len=LENGTH)
    assert planned == pytest.approx(local_bytes + analysis.temp_size_in_bytes, rel=0.01)
    text = compiled.as_text()
    gathers = re.findall(r' all-gather\(.*op_name="([^"]*gather/sharding_constraint)"', text)
    # Seven projections, forward and again backward, each inside the loop over micro-batches and that over layers.
    assert [scope.count("/while/body") for scope in gathers] == [2] * 14
    stacked = program.state_struct.params["layers"]
    for name in (name for name in stacked if name.endswith("_proj")):
        assert f"f32[{','.join(map(str, stacked[name].shape))}]" not in text, name


def test_operations_are_named_by_layer_part_and_step():
    """By which a profile is read."""
    three_steps((1, 2, 1), 1)
    program = program_on((1, 2, 1), 1)
    batch = jax.device_put(some_batch(0), program.batch_sharding)
    text = program.step.lower(program.state_struct, batch).compile().as_text()
    names = re.findall(r'op_name="([^"]*layer/attention/[^"]*)"', text)
    steps = {f"{way}_step_{n}/compute" for way in ("forward", "backward") for n in range(3)}
    assert {trace.find_scope(name) for name in names} >= steps | {"forward_step_0/fetch", "backward_step_1/return"}


def test_the_state_starts_the_same_on_every_mesh():
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(program_on((1, 2, 1), 1).init()), initial_state())


def test_the_loss_is_a_global_sum_over_a_global_count():
    run, num_labels = three_steps((1, 2, 1), 1), np.sum(some_batch(0)["labels"] != -1)
    assert run.metrics[0]["num_tokens"] == num_labels
    np.testing.assert_allclose(run.metrics[0]["loss"], run.losses.sum() / num_labels, rtol=1e-6)


def dense_losses(hidden, head, labels):
    logits = jnp.dot(hidden.astype(jnp.float32), head)
    chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    lse = jax.nn.logsumexp(logits, axis=-1)
    return tuple(jnp.where(labels == -1, 0.0, x) for x in (lse - chosen, lse))


def loss_inputs(batch, length, width=16, vocab_size=37):
    keys = jax.random.split(jax.random.key(0), 5)
    labels = jax.random.randint(keys[2], (batch, length), 0, vocab_size)
    return (
        jax.random.normal(keys[0], (batch, length, width)),
        jax.random.normal(keys[1], (width, vocab_size)),
        jnp.where(jax.random.bernoulli(keys[3], 0.3, (batch, length)), -1, labels),
        tuple(jax.random.normal(keys[4], (2, batch, length))),
    )


@pytest.mark.parametrize(
    ("mesh", "batch", "length", "chunk"),
    [((1, 1, 1), 1, 13, 4), ((1, 1, 1), 3, 7, 100), ((2, 2, 2), 2, 20, 5), ((1, 8, 1), 2, 8, 1), ((1, 3, 2), 1, 6, 9)],
)
def test_losses_in_chunks_and_their_gradients_equal_the_dense_ones(mesh, batch, length, chunk):
    """On tensor workers that do not divide the vocabulary too, and data x seq workers that do not divide the width."""
    hidden, head, labels, weights = loss_inputs(batch, length)
    chunked = functools.partial(token_losses, mesh=make_mesh(*mesh), chunk=chunk)

    @functools.partial(jax.jit, static_argnums=0)
    def losses_and_gradients(function, hidden, head):
        losses, pullback = jax.vjp(lambda hidden, head: function(hidden, head, labels), hidden, head)
        return losses, pullback(weights)

    ours = losses_and_gradients(chunked, hidden, head)
    expected = losses_and_gradients(dense_losses, hidden, head)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5), ours, expected)


def test_the_head_gradient_in_bfloat16_does_not_depend_on_the_number_of_chunks():
    hidden, head, labels, weights = loss_inputs(1, 1024)
    hidden = hidden.astype(jnp.bfloat16)

    def head_gradient(function):
        return jax.jit(jax.grad(lambda head: jnp.sum(weights[0] * function(hidden, head, labels)[0])))(head)

    exact = head_gradient(dense_losses)
    errors = []
    for chunk in (1024, 4):
        gradient = head_gradient(functools.partial(token_losses, mesh=make_mesh(1, 1), chunk=chunk))
        assert gradient.dtype == jnp.float32
        errors.append(jnp.max(jnp.abs(gradient - exact)))
    assert errors[1] <= 1.2 * errors[0]


def test_a_step_that_is_not_finite_changes_nothing_though_it_is_one_micro_batch_of_four():
    program = program_on((1, 1, 1), 4)
    good, poisoned = (jax.device_put(some_batch(seed), program.batch_sharding) for seed in (0, 1))
    poisoned["labels"] = poisoned["labels"].at[2, 5].set(CONFIG.vocab_size)
    state, metrics = program.step(place(initial_state(), program), good)
    assert metrics["is_finite"]
    before = jax.device_get(state)
    state, metrics = program.step(state, poisoned)
    assert not metrics["is_finite"] and np.isnan(metrics["loss"]) and metrics["num_tokens"] > 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert before.step == 1 and min(jax.tree.leaves(jax.tree.map(lambda x: np.isfinite(x).all(), before)))


def test_a_label_outside_the_vocabulary_gives_nan_at_its_own_position():
    hidden, head, labels, _ = loss_inputs(1, 8)
    losses, _ = token_losses(hidden, head, labels.at[0, 3].set(37), mesh=make_mesh(1, 1, 2))
    assert np.flatnonzero(np.isnan(losses[0])).tolist() == [3]


def test_a_loss_chunk_of_zero_is_refused_by_name():
    hidden, head, labels, _ = loss_inputs(1, 8)
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        token_losses(hidden, head, labels, mesh=make_mesh(1, 1), chunk=0)


def test_a_batch_without_labels_has_no_loss_and_decays_matrices_only():
    program, before = program_on((1, 2, 1), 1), initial_state().params
    tokens = some_batch(0)["tokens"]
    batch = jax.device_put({"tokens": tokens, "labels": np.full_like(tokens, -1)}, program.batch_sharding)
    state, metrics = program.step(place(initial_state(), program), batch)
    assert (metrics["loss"], metrics["num_tokens"], metrics["grad_norm"]) == (0.0, 0, 0.0)
    for name, after in (state.params | state.params["layers"]).items():
        if name != "layers":
            decay = 1 if name.endswith("norm") else 1 - 0.5 * float(metrics["learning_rate"])
            expected = (before | before["layers"])[name] * np.float32(decay)
            np.testing.assert_allclose(after, expected, rtol=3e-7, err_msg=name)


def test_biases_and_norms_do_not_decay():
    params = {name: jnp.ones(2) for name in ("q_proj", "q_bias", "q_norm")}
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5))
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert {name for name, update in updates.items() if update.any()} == {"q_proj"}


def test_the_step_keeps_shardings_and_donates_its_state():
    def described(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)

    program = program_on((1, 2, 1), 1)
    old = program.init()
    assert described(old) == described(program.state_struct)
    batch = jax.device_put(some_batch(0), program.batch_sharding)
    state, _ = program.step.lower(program.state_struct, batch).compile()(old, batch)  # as the trainer has it
    assert described(state) == described(program.state_struct)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert state.step == 1


def test_a_packed_document_has_the_losses_that_it_has_alone_whatever_is_before_it():
    program = build_on(make_mesh(1, 2, 2), is_packed=True)
    params = place(initial_state(), program).params
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH), np.int32)
    tokens[1, :44] = tokens[0, 20:]
    ids = np.ones((2, LENGTH), np.int32)
    ids[0, 20:], ids[1, 44:] = 2, 0
    batch = {"tokens": tokens, "labels": np.roll(tokens, -1, axis=1), "segment_ids": ids}
    losses = program.token_losses(params, jax.device_put(batch, program.batch_sharding))
    np.testing.assert_allclose(losses[0, 20:-1], losses[1, :43], rtol=1e-5)
    assert not np.allclose(losses[0, :20], losses[1, :20])


def test_tokens_of_packed_documents_have_the_same_losses_on_another_mesh_that_orders_them_otherwise():
    row = {"tokens": np.random.default_rng(0).integers(0, CONFIG.vocab_size, LENGTH, np.int32)}
    row["segment_ids"] = np.repeat([1, 2, 3, 4, 0], [20, 7, 25, 9, LENGTH - 61]).astype(np.int32)
    row["labels"] = np.roll(row["tokens"], -1)
    ordered = reorder(row, np.array([2, 0, 3, 1]))
    losses = []
    for mesh, batch in ((make_mesh(1, 1), row), (make_mesh(1, 2), ordered)):
        program = build_on(mesh, is_packed=True)
        params = place(initial_state(), program).params
        placed = jax.device_put({name: x[None] for name, x in batch.items()}, program.batch_sharding)
        losses.append(np.asarray(program.token_losses(params, placed))[0])
    for old, new in ((1, 2), (2, 4), (3, 1), (4, 3)):
        own, moved = losses[0][row["segment_ids"] == old], losses[1][ordered["segment_ids"] == new]
        np.testing.assert_allclose(moved[:-1], own[:-1], rtol=1e-5)  # the last label is of whatever comes behind


def shapes_in_step(*, num_tokens, vocab_size, loss_chunk):
    """Shapes of all arrays in the lowered step on 8 workers, whole and one worker's part."""
    program = build_on(
        make_mesh(1, 8), config=dataclasses.replace(CONFIG, vocab_size=vocab_size), loss_chunk=loss_chunk
    )
    text = program.step.lower(program.state_struct, program.batch_struct(1, num_tokens)).as_text()
    return {tuple(map(int, shape.split("x")[:-1])) for shape in re.findall(r"tensor<((?:\d+x)+)\w+>", text)}


def is_too_large(shape, *, num_tokens, vocab_size, loss_chunk):
    local_tokens = num_tokens // 8
    has_logits = vocab_size in shape and np.prod(shape) > vocab_size * loss_chunk
    return has_logits or sum(size >= local_tokens for size in shape) > 1 or np.prod(shape) >= local_tokens**2


def test_no_array_is_quadratic_in_the_sequence_or_as_large_as_its_logits():
    sizes = {"num_tokens": 131_072, "vocab_size": 50_021, "loss_chunk": 1024}
    shapes = shapes_in_step(**sizes)
    assert (1, 131_072, CONFIG.hidden_size) in shapes
    assert (1024, 50_021) in shapes
    assert not [shape for shape in shapes if is_too_large(shape, **sizes)]
    assert (16_384, 50_021) in shapes_in_step(**{**sizes, "loss_chunk": 16_384})


def test_the_learning_rate_warms_up_and_follows_a_cosine_down():
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=4, total_steps=24, final_fraction=0.1))
    rates = jnp.array([schedule(step) for step in (0, 1, 3, 4, 14, 24, 99)])
    np.testing.assert_allclose(rates, [0.5, 1.0, 2.0, 2.0, 1.1, 0.2, 0.2], rtol=1e-6)


def test_the_learning_rate_stays_where_no_end_is_given():
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=2))
    rates = [schedule(step) for step in (0, 1, 2, 10_000)]
    np.testing.assert_array_equal(rates, [1.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
        ({"clip_norm": float("nan")}, "clip_norm=nan must be positive"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"warmup_steps": 5, "total_steps": 5}, "total_steps=5 must be more than warmup_steps=5"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must not be negative"),
        ({"z_loss": float("nan")}, "z_loss=nan must not be negative"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"b2": 1.5}, "b2=1.5 must be between 0 and 1"),
    ],
)
def test_an_optimizer_setting_that_cannot_work_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)
