"""A trained model continues rows of tokens: how it is restored, how a next token is chosen, the samples of a run."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, Int32

from distflash_jax import xla_flags
from models import config_json, huggingface
from models.config import LlamaConfig
from models.llama import Cache, Llama
from train import config
from train.checkpoint import Checkpoints, by_name
from train.data import Data
from train.export import read_settings
from train.flags import InputError, MeshShape, Source
from train.mesh import make_mesh
from train.program import make_model, model_maker
from train.sharding import HEADS, TOKENS
from train.step import OptimizerConfig, Params, Program, build
from train.tokenizer import Tokenizer, load_tokenizer

_SAMPLED = 128
_SHOWN = 64

CreateModel = Callable[[nnx.Rngs], Llama]


@dataclasses.dataclass(frozen=True)
class Restored:
    """A model with its weights, spread over a mesh.

    Attributes:
      origin: what it is, for people.
      data: the settings --data of its run, as far as they are paths that exist.
      program: of its training, of which nothing is needed here but how parameters and batches lie, and the loss.
    """

    origin: str
    llama: LlamaConfig
    tokenizer: Tokenizer
    data: list[Path]
    mesh: Mesh
    create_model: CreateModel
    program: Program
    params: Params

    def token_losses(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Cross entropy [B T] in nats of tokens and labels, as those of a training; the mesh divides B and T."""
        placed = jax.device_put(batch, self.program.batch_sharding)
        return jax.device_get(self.program.token_losses(self.params, placed))


def restore(directory: Path, shape: MeshShape, platform: config.Platform) -> Restored:
    """Reads the newest checkpoint of a run-dir, its parameters alone, or a Hugging Face folder.

    Has to be the first use of JAX. Activations are float32 on CPUs and bfloat16 on GPUs.

    Raises:
      InputError: neither is there, or it cannot be read, or the mesh does not fit.
    """
    is_run = (directory / "checkpoints").is_dir()
    settings = read_settings(directory) if is_run else None
    try:
        llama = config.model_of(settings) if settings else config_json.from_json(config_json.read(directory))
    except ValueError as error:
        raise InputError(f"RUN_DIR {directory}: a run with a checkpoint, or a Hugging Face model; {error}") from error
    config.check_heads(shape, llama)
    tokenizer = load_tokenizer(_tokenizer_of(directory, settings))
    xla_flags.apply(xla_flags.choose())
    mesh = make_mesh(shape, platform)
    dtype = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16
    create_model = functools.partial(make_model, llama, mesh, dtype=dtype)
    program = build(create_model, mesh=mesh, optimizer=OptimizerConfig())
    struct = program.state_struct.params
    if settings:
        named = by_name({"params": struct})
        step, read = Checkpoints(directory / "checkpoints").newest(named)
        params = jax.tree.unflatten(jax.tree.structure(struct), map(read, named))
        origin = f"step {step} of {directory}"
    else:
        try:
            params, origin = huggingface.load(directory, struct), str(directory)
        except ValueError as error:
            raise InputError(f"RUN_DIR {directory}: {error}") from error
    sources = [Source.parse(text).path for text in (settings or {}).get("data", [])]
    data = [path for path in sources if path.exists()]
    return Restored(origin, llama, tokenizer, data, mesh, create_model, program, params)


def _tokenizer_of(directory: Path, settings: dict | None) -> Path | None:
    """Where the tokenizer is of which the model has its tokens; None for bytes."""
    name = directory if settings is None else settings["tokenizer"] or settings["init_from"]
    if name is None:
        return None
    folder = Path(name)
    if not (folder / "tokenizer.json" if folder.is_dir() else folder).exists():
        raise InputError(f"RUN_DIR {directory}: a model whose tokenizer.json is in {folder}")
    return folder


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a token is chosen: at temperature 0 the likeliest one, else drawn.

    Attributes:
      top_k: only the k likeliest are drawn.
      top_p: only the likeliest are drawn that together, without the last of them, have less than this probability.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __call__(self, logits: Float32[Array, "B V"], key: Array) -> Int32[Array, " B"]:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None:
            smallest = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            likelihood = jax.nn.softmax(ordered, axis=-1)
            is_kept = jnp.cumsum(likelihood, axis=-1) - likelihood < self.top_p
            smallest = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)


class Decoder:
    """Continues a prompt: read at once by the attention of the mesh, then token by token from a cache.

    The cache lies as the prompt: its tokens over seq, its heads over tensor. Each token gathers the weights of a layer
    after the other, as training does; a row is repeated over the data axis.
    """

    def __init__(self, create_model: CreateModel, mesh: Mesh, choice: Choice) -> None:
        graphdef = nnx.split(nnx.eval_shape(lambda: create_model(nnx.Rngs(0))))[0]
        self._mesh = mesh
        whole = NamedSharding(mesh, P())
        cached = (NamedSharding(mesh, P(None, *HEADS)),) * 2

        def choose(model: Llama, hidden: Array, position: Array, seed: Array) -> Array:
            logits = jnp.dot(hidden, model.head.astype(hidden.dtype), preferred_element_type=jnp.float32)
            return choice(logits, jax.random.fold_in(jax.random.key(seed), position))

        def prefill(params: Params, tokens: Array, length: Array, seed: Array) -> tuple[Array, Cache]:
            model = nnx.merge(graphdef, nnx.State(params))
            hidden, cache = model.prefill(tokens)
            # A sum over the workers, of which one has the last token: a slice would gather the tokens of all.
            is_last = jnp.arange(tokens.shape[1], dtype=jnp.int32) == length - 1
            last = jnp.sum(jnp.where(is_last[:, None], hidden, 0), axis=1)
            return choose(model, last, length, seed), cache

        def decode(params: Params, cache: Cache, token: Array, position: Array, seed: Array) -> tuple[Array, Cache]:
            model = nnx.merge(graphdef, nnx.State(params))
            hidden, cache = model.decode(token[:, None], position, cache)
            return choose(model, hidden[:, 0], position + 1, seed), cache

        self._prefill = jax.jit(prefill, out_shardings=(whole, cached))
        self._decode = jax.jit(decode, out_shardings=(whole, cached), donate_argnums=1)

    def __call__(self, params: Params, prompt: np.ndarray, num_tokens: int, *, seed: int = 0) -> Iterator[int]:
        """Yields `num_tokens` tokens after the prompt, which has at least one; compiled once for each total length."""
        length, num_workers = len(prompt), self._mesh.shape["seq"]
        total = math.ceil((length + num_tokens) / num_workers) * num_workers
        rows = np.zeros((self._mesh.shape["data"], total), np.int32)
        rows[:, :length] = prompt
        tokens = jax.device_put(rows, NamedSharding(self._mesh, TOKENS))
        token, cache = self._prefill(params, tokens, np.int32(length), np.uint32(seed))
        yield int(jax.device_get(token)[0])
        for position in range(length, length + num_tokens - 1):
            token, cache = self._decode(params, cache, token, np.int32(position), np.uint32(seed))
            yield int(jax.device_get(token)[0])


class Samples:
    """What a model of a training writes, from its parameters: the same prompt and the same draws each time.

    Raises:
      InputError: a prompt in words where nobody knows which tokens they are.
    """

    def __init__(self, settings: config.Config, mesh: Mesh, data: Data) -> None:
        self._tokenizer, self._seed = data.tokenizer, settings.seed
        self._num_tokens = min(_SAMPLED, max(settings.seq_len // 2, 1))
        if settings.sample_prompt is None:
            row = (data.held_out or data.training)[0].rows[0]["tokens"]
            self._prompt = row[: settings.seq_len - self._num_tokens]
        elif data.tokenizer is None:
            raise InputError(f"--sample-prompt {settings.sample_prompt}: --tokenizer, to make tokens of it")
        else:
            self._prompt = data.tokenizer.prompt(settings.sample_prompt)
        # Tokens lie in their order here, whatever the strategy that trains.
        reading = dataclasses.replace(settings, strategy="balanced")
        self._decoder = Decoder(model_maker(reading, mesh), mesh, Choice())

    def __call__(self, params: Params) -> str:
        """The end of the prompt, a bar, and how it goes on; numbers of tokens where the tokenizer is not known."""
        end = self._tokenizer.end if self._tokenizer else ()
        tokens = self._decoder(params, self._prompt, self._num_tokens, seed=self._seed)
        written = list(itertools.takewhile(lambda token: token not in end, tokens))
        return f"{self._text(self._prompt[-_SHOWN:].tolist())}|{self._text(written)}"

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return "".join(map(self._tokenizer.stream(), tokens))
