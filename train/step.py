"""One training step, compiled once: `build` gives the functions that make, advance and judge a state."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int, Int32

from distflash_jax import unzigzag, zigzag
from train.loss import IGNORED, token_losses
from train.sharding import BLOCK_AXES, TOKENS, state_shardings

Params = dict[str, Any]
Batch = dict[str, Int32[Array, "B T"]]
Metrics = dict[str, Array]


class Model(Protocol):
    """What the step needs of a network: hidden states and the matrix that turns them into logits."""

    @property
    def head(self) -> Float32[Array, "D V"]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "... T"] | None = None,
    ) -> Float[Array, "B T D"]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes."""

    step: Int32[Array, ""]
    params: Params
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, then a cosine down to `final_fraction` of the peak at `total_steps`.

    Without `total_steps` the rate stays at its peak, so that a finished run can be continued.

    Attributes:
        z_loss: times the mean square of the logits' log-sum-exp is added to the loss that is minimised.
        accumulate: micro-batches whose gradients are summed; every token weighs the same, whichever it is in.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 0
    total_steps: int | None = None
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    z_loss: float = 0.0
    accumulate: int = 1

    def __post_init__(self):
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must not be negative")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps={self.total_steps} must be more than warmup_steps={self.warmup_steps}")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("weight_decay", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate} must be at least 1")
        for name in ("final_fraction", "b1", "b2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled side of a training run; all shardings are pinned, so `step` is traced and compiled once.

    Attributes:
        init: makes the state of step 0.
        step: (state, batch) -> (state, metrics), donating the state. Metrics are `loss` (without the z-loss),
            `num_tokens` (labels that count), `grad_norm` (before clipping), `learning_rate`, and `is_finite`: where
            the loss or the gradient is not, the state comes back as it was, its step and schedule included.
        token_losses: (params, batch) -> cross entropy [B T] of every position, 0 where the label is -1.
        state_struct: shapes, dtypes and shardings of the state, for a restore.
        batch_sharding: of `batch["tokens"]` and `batch["labels"]`, int32 [B T], where labels are shifted
            already and -1 counts nothing; of packed documents also `batch["segment_ids"]`. Put batches there with
            jax.device_put: numpy arrays retrace.
        batch_names: those of the arrays of a batch.
    """

    init: Callable[[], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    token_losses: Callable[[Params, Batch], Float32[Array, "B T"]]
    state_struct: TrainState
    batch_sharding: NamedSharding
    batch_names: tuple[str, ...]

    def batch_struct(self, batch_size: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a batch of this size."""
        ids = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32, sharding=self.batch_sharding)
        return dict.fromkeys(self.batch_names, ids)


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate of a step; the first step already moves, with 1 / warmup_steps of the peak."""

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        warmup = jnp.minimum(1.0, (step + 1) / max(config.warmup_steps, 1))
        if config.total_steps is None:
            return config.learning_rate * warmup
        progress = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
        cosine = 0.5 * (1 + jnp.cos(math.pi * jnp.clip(progress, 0.0, 1.0)))
        return config.learning_rate * warmup * (config.final_fraction + (1 - config.final_fraction) * cosine)

    return schedule


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; norm scales and biases do not decay."""

    def decays(params: Params) -> Params:
        return jax.tree.map_with_path(lambda path, _: not path[-1].key.endswith(("norm", "bias")), params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(make_schedule(config), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decays),
    )


def build(
    create_model: Callable[[nnx.Rngs], Model],
    *,
    mesh: Mesh,
    optimizer: OptimizerConfig,
    seed: int = 0,
    loss_chunk: int = 1024,
    is_packed: bool = False,
    is_zigzag: bool = False,
    block_axes: tuple[str, ...] = BLOCK_AXES,
) -> Program:
    """Prepares init and step for a model on a mesh (data, seq, tensor); nothing runs or compiles yet.

    The batch is split over data and seq; parameters and optimizer state lie as `train.sharding` says.

    Args:
        create_model: makes the network from its random streams.
        loss_chunk: tokens whose logits a worker holds at a time.
        is_packed: batches have segment_ids, the numbers of documents that do not see each other.
        is_zigzag: the model takes tokens in the order of distflash_jax.zigzag, into which they are put once a batch.
        block_axes: those that cut the weights of the model's attention and MLP.
    """
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: create_model(nnx.Rngs(seed))))

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(create_model(nnx.Rngs(seed))))
        opt_state = make_optimizer(optimizer).init(params)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state)

    struct = jax.eval_shape(init)
    shardings = state_shardings(struct, mesh, block_axes)
    replicated, batch_sharding = NamedSharding(mesh, P()), NamedSharding(mesh, TOKENS)
    batch_names = ("tokens", "labels", *(("segment_ids",) if is_packed else ()))
    batch_shardings = dict.fromkeys(batch_names, batch_sharding)

    def losses_in_order(params: Params, batch: Batch, positions: Int32[Array, "1 T"] | None = None):
        model = nnx.merge(graphdef, nnx.State(params))
        ids = batch.get("segment_ids")
        if ids is not None:  # gathered once, so that no layer has to
            ids = jax.lax.with_sharding_constraint(ids, NamedSharding(mesh, P(TOKENS[0])))
        hidden = model(batch["tokens"], ids, positions)
        return token_losses(hidden, model.head, batch["labels"], mesh=mesh, chunk=loss_chunk)

    def losses_of(params: Params, batch: Batch):
        if not is_zigzag:
            return losses_in_order(params, batch)
        num_workers, length = mesh.shape["seq"], batch["tokens"].shape[1]
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        order = lambda x, fill=0: zigzag(x, num_workers, fill=fill)
        zigzagged = {name: order(x, IGNORED if name == "labels" else 0) for name, x in batch.items()}
        losses = losses_in_order(params, zigzagged, order(positions))
        return jax.tree.map(lambda x: unzigzag(x, num_workers, length=length), losses)

    def token_losses_of(params: Params, batch: Batch) -> Float32[Array, "B T"]:
        return losses_of(params, batch)[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        num_tokens = jnp.sum(batch["labels"] != IGNORED, dtype=jnp.int32)
        # Known before the first micro-batch, so that each can divide by the tokens of them all.
        share = 1 / jnp.maximum(num_tokens, 1).astype(jnp.float32)

        def loss_of(params: Params, batch: Batch):
            losses, lse = losses_of(params, batch)
            loss = share * jnp.sum(losses)
            return loss + optimizer.z_loss * share * jnp.sum(jnp.square(lse)), loss

        def add(sums: tuple[Array, Params], batch: Batch):
            (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch)
            return jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, sums, (loss, grads)), sums_shardings), None

        sums_shardings = (replicated, shardings.params)
        zeros = jax.tree.map(jnp.zeros_like, (share, state.params))
        (loss, grads), _ = jax.lax.scan(add, zeros, _split(batch, optimizer.accumulate, mesh))
        updated, metrics = _update(state, grads, optimizer)
        # Of any gradient that is not finite neither is the norm. A branch would need both states at a time.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        state = jax.tree.map(functools.partial(jnp.where, is_finite), updated, state)
        return state, {"loss": loss, "num_tokens": num_tokens, **metrics, "is_finite": is_finite}

    return Program(
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(
            step,
            in_shardings=(shardings, batch_shardings),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        ),
        token_losses=jax.jit(
            token_losses_of,
            in_shardings=(shardings.params, batch_shardings),
            out_shardings=batch_sharding,
        ),
        state_struct=jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), struct, shardings),
        batch_sharding=batch_sharding,
        batch_names=batch_names,
    )


def _split(batch: Batch, count: int, mesh: Mesh) -> Batch:
    """Arrays [count, B / count, T] of every count-th row, which each device finds among its own."""

    def split(rows: Int32[Array, "B T"]) -> Int32[Array, "M b T"]:
        micro = rows.reshape(-1, count, rows.shape[1]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(micro, NamedSharding(mesh, P(None, *TOKENS)))

    return jax.tree.map(split, batch)


def _update(state: TrainState, grads: Params, optimizer: OptimizerConfig) -> tuple[TrainState, Metrics]:
    """The state after one optimizer step, and what the step did."""
    # optax raises Python floats to int32 powers, which strict promotion refuses.
    with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
        updates, opt_state = make_optimizer(optimizer).update(grads, state.opt_state, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        metrics = {"grad_norm": optax.tree.norm(grads), "learning_rate": make_schedule(optimizer)(state.step)}
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics
