"""Config: every setting of a training run, read from the command line and kept in run-dir/config.json.

Imports no JAX, so that `--help` and a wrong flag are answered at once.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tyro

from models import config_json
from models.config import PRESETS, LlamaConfig
from models.rope import RopeExtension
from train import flags
from train.flags import InputError, MeshShape, SaveEvery, Source, StepRange, perhaps, perhaps_beside

Remat = Literal["attention", "projections", "offload", "offload-all", "layer", "none"]
Attention = Literal[
    "auto", "balanced", "balanced_unsplit", "ring", "ulysses", "all_gather", "hybrid", "zigzag", "burst", "rsa"
]
Strategy = Literal[Attention, "megatron"]
Platform = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Tracker = Literal["wandb", "trackio"]
_EIGHT_WORKERS = MeshShape(seq=8)
_HUNDRED_STEPS = SaveEvery(steps=100)


@dataclasses.dataclass(frozen=True)
class ModelOverrides:
    """Fields of the model that the command line replaces; None keeps the model's value."""

    vocab_size: Annotated[int | None, flags.whole] = None
    hidden_size: Annotated[int | None, flags.whole] = None
    intermediate_size: Annotated[int | None, flags.whole] = None
    num_hidden_layers: Annotated[int | None, flags.whole] = None
    num_attention_heads: Annotated[int | None, flags.whole] = None
    num_key_value_heads: Annotated[int | None, flags.whole] = None
    head_dim: Annotated[int | None, flags.whole] = None
    rms_norm_eps: Annotated[float | None, flags.positive] = None
    rope_theta: Annotated[float | None, flags.positive] = None
    rope_scaling: Annotated[RopeExtension | None, flags.parsed(RopeExtension.parse, "KIND:FACTOR")] = None
    """yarn:32, linear:4 or llama3: stretches the context of the model by a factor, of llama3 8."""
    tie_word_embeddings: Annotated[bool | None, flags.parsed(flags.boolean, "true|false")] = None
    qkv_bias: Annotated[bool | None, flags.parsed(flags.boolean, "true|false")] = None
    qk_norm: Annotated[bool | None, flags.parsed(flags.boolean, "true|false")] = None
    sliding_window: Annotated[int | None, flags.whole] = None
    max_position_embeddings: Annotated[int | None, flags.whole] = None


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a Llama on real text, with every sequence spread over the devices of a mesh."""

    mesh: Annotated[MeshShape, flags.parsed(MeshShape.parse, "data=N,seq=N,tensor=N")] = _EIGHT_WORKERS
    """Devices per axis: data splits the batch, seq each sequence, tensor the heads and the MLP's width. Parameters
    and optimizer are cut over all of them. seq=2x4 is seq=8, of which strategies may tell 2 parts of 4 apart."""
    model: Annotated[str | None, flags.choice(*PRESETS)] = None
    """Preset, whose fields the flags below from --vocab-size on replace; without it and --init-from: tiny."""
    init_from: Annotated[Path | None, flags.path("DIR")] = None
    """Folder of a Hugging Face model (config.json and safetensors) that the run begins with."""
    seq_len: Annotated[int, flags.whole] = 1024
    """Tokens in a row of the batch."""
    batch_size: Annotated[int, flags.whole] = 4
    """Rows in a batch, over all devices."""
    steps: Annotated[int, flags.whole] = 80
    """Optimizer steps in total; a larger number continues a finished run."""
    lr: Annotated[float | None, flags.positive] = None
    """Learning rate after the warm-up; without it: 6e-3 for tiny, 3e-4 for the other presets, 2e-5 with
    --init-from."""
    warmup_steps: Annotated[int, flags.whole_or_zero] = 10
    """Steps in which the learning rate rises; afterwards it is constant, or follows --decay-steps."""
    decay_steps: Annotated[int | None, flags.whole] = None
    """Step at which a cosine from the end of the warm-up has brought the learning rate down to a tenth."""
    clip_norm: Annotated[float, flags.positive] = 1.0
    """Largest global norm of the gradient; a longer one is scaled down to it."""
    z_loss: Annotated[float, flags.at_least_zero] = 0.0
    """Weight of the squared log-sum-exp of the logits in the loss, such as 1e-4."""
    accumulate: Annotated[int, flags.whole] = 1
    """Micro-batches, one after the other, into which a batch is cut to save memory."""
    remat: Annotated[Remat, flags.choice(*get_args(Remat))] = "attention"
    """What the backward keeps of a layer: its input and attention outputs (on the device; or these offloaded
    to the host, or with offload-all both), with them what attention and the MLP read (projections), its input
    alone (layer), or everything (none)."""
    strategy: Annotated[Strategy, flags.choice(*get_args(Strategy))] = "balanced"
    """How attention is spread over the seq axis; auto takes what is predicted to be the fastest. hybrid needs an
    axis of parts, such as seq=2x4, on which burst is a double ring; zigzag puts the tokens of each batch into its
    order; megatron spreads the MLP too: a worker has some of the heads and of the width, for all tokens."""
    data: tyro.conf.UseAppendAction[tuple[Annotated[Source, flags.parsed(Source.parse, "PATH[:WEIGHT]")], ...]] = ()
    """Text, .jsonl or .parquet file, folder of them, or tokens as .npy or .bin (little-endian uint16); with
    several, samples are drawn in proportion to the weights. Lines and rows hold a text, or messages, or prompt
    and completion, of which the answers alone are learned. Without it: the source files of Python's standard
    library."""
    max_bad_lines: Annotated[int, flags.whole_or_zero] = 0
    """Lines and rows of each source that are skipped because they hold no document; one more ends the run."""
    packing: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Attention ends where a document ends, and positions begin anew; without it documents see those before them in
    the row."""
    tokenizer: Annotated[Path | None, flags.path("PATH")] = None
    """tokenizer.json, or a folder with it, its tokenizer_config.json and chat template; without it: that of
    --init-from, else one token a byte."""
    eval_data: Annotated[Path | None, flags.path("PATH")] = None
    """Data of the kinds of --data on which the loss is evaluated."""
    eval_fraction: Annotated[float | None, flags.fraction] = None
    """Share of the rows of each source that is never trained on but evaluated, in place of --eval-data."""
    eval_every: Annotated[int | None, flags.whole] = None
    """Steps between two evaluations; without it after the last step only, where there is always one."""
    eval_batches: Annotated[int | None, flags.whole] = None
    """Most batches of one evaluation; without it: 16."""
    sample_every: Annotated[int | None, flags.whole] = None
    """Steps between two samples of what the model writes, and one after the last step; without it: none."""
    sample_prompt: Annotated[str | None, flags.parsed(str, "TEXT")] = None
    """Text that samples continue; without it: the beginning of a row that is evaluated, or else trained on."""
    run_dir: Annotated[Path | None, flags.path("PATH")] = None
    """Folder of config, checkpoints, scalars and profiles; without it: runs/MODEL-HASH, by configuration."""
    save_every: Annotated[SaveEvery, flags.parsed(SaveEvery.parse, "N|TIME")] = _HUNDRED_STEPS
    """Steps, or time such as 90s, 10m or 1h, between two checkpoints; the last step is always saved, and SIGUSR1, or a
    file of the name SAVE in the run-dir, asks for one more."""
    keep: Annotated[int, flags.whole] = 3
    """Checkpoints that stay; an older one goes once a newer one is whole."""
    checkpoint: Annotated[int | None, flags.whole] = None
    """Step of the checkpoint to resume from, instead of the newest that is whole; newer ones are moved to later/."""
    accept: Annotated[tuple[str, ...], flags.parsed(lambda word: tuple(word.split(",")), "NAME,NAME")] = ()
    """Settings that may be others than those with which the run in the run-dir began, such as lr,clip-norm; data and
    tokenizer also where their content has changed."""
    log: Annotated[Tracker | None, flags.choice(*get_args(Tracker))] = None
    """Where scalars go beside the TensorBoard files of the run-dir; each has an extra of its name."""
    profile_steps: Annotated[StepRange | None, flags.parsed(StepRange.parse, "FIRST:LAST")] = None
    """Steps to profile, both included, for `tensorboard --logdir RUN_DIR`."""
    deterministic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The same bits in every run on the same devices, at some cost on GPUs; on CPUs it is so anyway."""
    check_determinism: Annotated[int | None, flags.whole] = None
    """Steps between two that are taken twice and compared bit by bit, the copies on all devices too; a difference ends
    the run with exit code 5. On GPUs with --deterministic."""
    max_bad_steps: Annotated[int, flags.whole] = 3
    """Steps in a row without a finite loss and gradient, which change nothing, that end the run with exit code 4."""
    stuck_after: Annotated[float, flags.at_least_zero] = 60.0
    """Seconds after which a step that does not end ends the run with exit code 13 and the stacks of its threads, and
    five times the median step if that is longer; 60 times as many for a compilation, 30 times for a save, a restore
    or an evaluation. 0: never."""
    seed: Annotated[int, flags.whole_or_zero] = 0
    """Decides the initial weights and the order of the data."""
    platform: Annotated[Platform, flags.choice(*get_args(Platform))] = "auto"
    """auto is cuda where a GPU is found, otherwise as many virtual CPU devices as the mesh needs."""
    dtype: Annotated[Dtype | None, flags.choice(*get_args(Dtype))] = None
    """Dtype of activations; without it: bfloat16 on a GPU, float32 on a CPU. Weights stay float32."""
    compile_cache: Annotated[Path | None, flags.path("DIR")] = None
    """Folder in which compiled programs are kept; without it: on GPUs one in ~/.cache, on CPUs none."""
    config: Annotated[Path | None, flags.path("PATH")] = None
    """config.json of a run-dir, or what --print-config printed: its settings hold where no flag is given."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print all settings as JSON, and do nothing else; null is left to the machine."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compile the step and print what it needs, without data or run-dir: bytes of each kind on a device, FLOPs,
    seconds, and the longest sequence that fits."""
    device_memory: Annotated[int | None, flags.parsed(flags.num_bytes, "SIZE")] = None
    """Memory of a device for --dry-run, such as 140GiB; without it: what JAX may use of the GPU."""
    coordinator: Annotated[str | None, flags.parsed(flags.address, "HOST:PORT")] = None
    """Where process 0 listens, if the run is one of many processes; without it: what SLURM, Open MPI or
    Kubernetes say, else a process on its own."""
    num_processes: Annotated[int | None, flags.whole] = None
    """Processes of the run, with --coordinator; 1 by itself: a process on its own, whatever started it."""
    process_id: Annotated[int | None, flags.whole_or_zero] = None
    """Which of them this one is, from 0, with --coordinator."""
    overrides: Annotated[ModelOverrides, tyro.conf.arg(name="")] = ModelOverrides()

    def __post_init__(self) -> None:
        if self.init_from is None:
            object.__setattr__(self, "model", self.model or "tiny")
        elif self.model is not None:
            raise InputError(f"--model {self.model}: not with --init-from {self.init_from}, which has a model")
        if self.lr is None:
            object.__setattr__(self, "lr", {None: 2e-5, "tiny": 6e-3}.get(self.model, 3e-4))
        if self.seq_len % self.mesh.seq != 0:
            raise InputError(f"--seq-len {self.seq_len}: a multiple of the seq axis of --mesh {self.mesh}")
        if self.batch_size % self.mesh.data != 0:
            raise InputError(f"--batch-size {self.batch_size}: a multiple of the data axis of --mesh {self.mesh}")
        if self.batch_size % (self.mesh.data * self.accumulate) != 0:
            raise InputError(
                f"--accumulate {self.accumulate}: --batch-size {self.batch_size} must be a multiple of it times the "
                f"data axis of --mesh {self.mesh}"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise InputError(f"--decay-steps {self.decay_steps}: more than --warmup-steps {self.warmup_steps}")
        if self.profile_steps is not None and self.profile_steps.last > self.steps:
            raise InputError(f"--profile-steps {self.profile_steps}: within the steps of the run, --steps {self.steps}")
        paths = [("--data", source.path, ", or one with :WEIGHT above 0") for source in self.data]
        for flag, path, more in (*paths, ("--tokenizer", self.tokenizer, ""), ("--eval-data", self.eval_data, "")):
            if path is not None and not path.exists():
                raise InputError(f"{flag} {path}: a file or folder that exists{more}{perhaps_beside(path)}")
        if self.strategy == "hybrid" and self.mesh.num_nodes == 1:
            raise InputError(f"--strategy hybrid: a seq axis of two parts in --mesh {self.mesh}, such as seq=2x4")
        if self.strategy == "megatron" and self.mesh.tensor > 1:
            raise InputError(f"--strategy megatron: no tensor axis in --mesh {self.mesh}, seq cuts heads and MLP")
        if self.packing and self.strategy == "zigzag":
            raise InputError("--strategy zigzag: not with --packing, balanced takes packed documents")
        self._check_evaluation()
        self._check_processes()
        for name in self.accept:
            if name not in (allowed := {flags.flag_name(name)[2:] for name in _names()}):
                raise InputError(f"--accept {name}: names of settings{perhaps(name, allowed)}")
        if self.sample_prompt is not None and self.sample_every is None:
            raise InputError(f"--sample-prompt {self.sample_prompt}: with --sample-every N")
        if self.run_dir is not None and self.run_dir.exists() and not self.run_dir.is_dir():
            raise InputError(f"--run-dir {self.run_dir}: a folder, or a name for a new one")
        if self.log is not None and importlib.util.find_spec(self.log) is None:
            raise InputError(f"--log {self.log}: an installed package, pip install 'distflash_jax[{self.log}]'")

    def _check_evaluation(self) -> None:
        if self.eval_data is not None and self.eval_fraction is not None:
            raise InputError(f"--eval-fraction {self.eval_fraction:g}: either this or --eval-data, not both")
        if self.eval_data is None and self.eval_fraction is None:
            for flag, number in (("--eval-every", self.eval_every), ("--eval-batches", self.eval_batches)):
                if number is not None:
                    raise InputError(f"{flag} {number}: something to evaluate, --eval-data or --eval-fraction")

    def _check_processes(self) -> None:
        values = (self.coordinator, self.num_processes, self.process_id)
        given = dict(zip(("--coordinator", "--num-processes", "--process-id"), values, strict=True))
        missing = [flag for flag, value in given.items() if value is None]
        if missing and values not in ((None, None, None), (None, 1, None)):
            words = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
            raise InputError(f"{words}: with {' and '.join(missing)}")
        if self.process_id is not None and self.process_id >= (self.num_processes or 1):
            raise InputError(f"--process-id {self.process_id}: from 0 to below --num-processes {self.num_processes}")

    @functools.cached_property
    def origin(self) -> config_json.Json | None:
        """The config.json of --init-from, or what --run-dir kept of it should it be gone; None for a preset."""
        if self.init_from is None:
            return None
        try:
            return config_json.read(self.init_from)
        except ValueError as error:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                kept = json.loads((cast(Path, self.run_dir) / "config.json").read_text())
                if kept["init_from"] == str(self.init_from):
                    return kept["origin"]
            raise InputError(f"--init-from {self.init_from}: {error}") from error

    @functools.cached_property
    def llama(self) -> LlamaConfig:
        """The model with the overrides of the command line."""
        return model_of(settings_of(self))


def parse(arguments: Sequence[str]) -> Config:
    """Returns the configuration that the command line describes.

    Raises:
      InputError: a flag or its value is not allowed.
    """
    given = set(flags.given(arguments))
    words = [*_saved_arguments(arguments, given), *arguments]
    config = flags.cli(Config, words, "python -m train.llama", ModelOverrides, repeatable={"--data"})
    check_heads(config.mesh, config.llama)
    heads, inner = config.llama.num_attention_heads // config.mesh.tensor, config.mesh.seq // config.mesh.num_nodes
    if config.strategy == "hybrid" and heads < inner:
        raise InputError(f"--strategy hybrid: at most {heads} devices, one a head, in a part of --mesh {config.mesh}")
    if config.strategy == "zigzag" and config.llama.sliding_window is not None:
        raise InputError("--strategy zigzag: not with --sliding-window, balanced takes windows")
    return config


def check_heads(mesh: MeshShape, model: LlamaConfig) -> None:
    """Refuses a mesh whose tensor axis does not divide the key/value heads, by an InputError."""
    if (heads := model.num_key_value_heads) % mesh.tensor != 0:
        raise InputError(f"--mesh {mesh}: a tensor axis that divides the model's {heads} key/value heads")


# A flag of the command line takes the place of its alternative in a saved configuration too.
_ALTERNATIVES = (("--model", "--init-from"), ("--eval-data", "--eval-fraction"))


def _saved_arguments(arguments: Sequence[str], given: Set[str]) -> list[str]:
    """The settings of the file after --config as arguments, without those that are given."""
    following = dict(itertools.pairwise(word for argument in arguments for word in argument.split("=", 1)))
    if "--config" not in given or not (name := following.get("--config")) or name.startswith("--"):
        return []
    path = Path(name)
    try:
        saved = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        near = "" if path.exists() else perhaps_beside(path)
        raise InputError(f"--config {path}: what a run or --print-config wrote ({reason}){near}") from None
    if unknown := saved.keys() - _names() - {"origin"}:
        near = perhaps(min(unknown), _names())
        raise InputError(f"--config {path}: settings of this command, found {min(unknown)}{near}")
    replaced = {flag for pair in _ALTERNATIVES if given & set(pair) for flag in pair} | given
    switches = {field.name for field in dataclasses.fields(Config) if field.default is False}
    return [
        flags.flag_name(name)
        if name in switches
        else f"{flags.flag_name(name)}={json.dumps(value) if isinstance(value, bool) else value}"
        for name, values in saved.items()
        if name != "origin" and flags.flag_name(name) not in replaced
        for value in (values if isinstance(values, list) else [values])
        if value is not None and not (name in switches and value is False)
    ]


def _names() -> set[str]:
    """All settings, which are all flags."""
    return {field.name for field in dataclasses.fields(Config) + dataclasses.fields(ModelOverrides)} - {"overrides"}


def model_of(settings: dict[str, Any]) -> LlamaConfig:
    """The model of a run whose settings are those of its config.json.

    Raises:
      InputError: there is no such model, or it cannot read rows of this length.
    """
    names = [field.name for field in dataclasses.fields(ModelOverrides)]
    given = {name: settings[name] for name in names if settings.get(name) is not None}  # a run may be older than a name
    source = f"--model {settings['model']}" if settings["origin"] is None else f"--init-from {settings['init_from']}"
    words = "".join(f" {flags.flag_name(name)} {value}" for name, value in given.items())
    if settings["origin"] is not None and (fixed := given.keys() - {"rope_theta", "rope_scaling"}):
        raise InputError(f"{source}{words}: no {flags.flag_name(min(fixed))}, which config.json decides")
    if settings["origin"] is None and settings["model"] not in PRESETS:  # as it may be in an older run
        raise InputError(f"{source}: one of {', '.join(PRESETS)}")
    extension = given.pop("rope_scaling", None)
    try:
        base = PRESETS[settings["model"]] if settings["origin"] is None else config_json.from_json(settings["origin"])
        if "rope_theta" in given and extension is None:
            given = {"max_position_embeddings": max(base.max_position_embeddings, settings["seq_len"])} | given
        model = dataclasses.replace(base, **given)
        return model if extension is None else model.extended(RopeExtension.parse(extension))
    except ValueError as error:
        raise InputError(f"{source}{words}: {error}") from error


# These are not of the training; without run_dir, a run-dir can be moved.
_NOT_SAVED = (
    *("overrides", "run_dir", "checkpoint", "accept", "config", "print_config", "dry_run", "device_memory"),
    *("coordinator", "num_processes", "process_id", "compile_cache"),
)


def settings_of(config: Config) -> dict[str, Any]:
    """What config.json holds of a run: every setting of training by name, and the config.json of --init-from."""
    settings = dataclasses.asdict(config) | dataclasses.asdict(config.overrides)
    for name in _NOT_SAVED:
        del settings[name]
    return settings | {
        "mesh": str(config.mesh),
        "data": [str(source) for source in config.data],
        "tokenizer": config.tokenizer and str(config.tokenizer),
        "eval_data": config.eval_data and str(config.eval_data),
        "init_from": config.init_from and str(config.init_from),
        "save_every": str(config.save_every),
        "profile_steps": config.profile_steps and str(config.profile_steps),
        "rope_scaling": config.overrides.rope_scaling and str(config.overrides.rope_scaling),
        "origin": config.origin,
    }
