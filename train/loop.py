"""One training run: devices, data, model and the newest checkpoint, then step after step to the last one."""

import contextlib
import dataclasses
import functools
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distflash_jax import overlap, which_implementation, xla_flags
from models import huggingface
from train import data
from train.checkpoint import Checkpoints
from train.config import Config, open_run_dir, run_dir_of
from train.decode import Samples
from train.evaluation import Evaluation
from train.flags import InputError, StepRange
from train.interrupt import Interrupt
from train.mesh import describe, make_mesh, peak_memory
from train.plan import dry_run, explain_exhaustion
from train.program import build_program
from train.report import Report, say
from train.sharding import bytes_per_device
from train.step import Program, TrainState


def run(config: Config, command: list[str]) -> None:
    """Trains to `config.steps` or to the first Ctrl-C, and saves; `command` is what resumes it.

    With `config.dry_run` it prints what a step needs, and that is all.
    """
    # Orbax logs at length what `Checkpoints.notes` says in a line.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    xla_flags.apply(xla_flags.choose() | (xla_flags.PROFILING if config.profile_steps is not None else {}))
    mesh = make_mesh(config.mesh, config.platform)
    config = _resolve(config, mesh)
    if config.dry_run:
        print(dry_run(config, mesh))
        return
    opened = data.open_data(config, cache=run_dir_of(config) / "tokens")
    batches = data.Batches(opened.training, batch_size=config.batch_size, seed=config.seed)
    evaluation = _make_evaluation(config, opened)
    program = build_program(config, mesh)
    samples = Samples(config, mesh, opened) if config.sample_every else None
    run_dir = open_run_dir(config)
    _introduce(config, mesh, opened, evaluation, run_dir)
    size = bytes_per_device(program.state_struct)
    parts = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state_struct)) / size
    say(f"state     {size / 2**20:,.1f} MiB of parameters and optimizer on a device, one part of {parts:.2f}")
    with (
        explain_exhaustion(config, program, mesh),
        Interrupt(lambda: say("stopping after this step; a second signal leaves at once")) as interrupt,
        contextlib.closing(Checkpoints(run_dir / "checkpoints")) as checkpoints,
    ):
        start, state = _start(config, program, checkpoints, batches)
        if start >= config.steps:
            say(f"finished before: {start} of {config.steps} steps are done; a larger --steps continues")
            return
        done = start
        with (
            Report(run_dir, first_step=start + 1, num_steps=config.steps) as report,
            Profile(config.profile_steps, run_dir) as profile,
        ):
            while done < config.steps and not interrupt.requested:
                done += 1
                with profile.step(done):
                    batch = jax.device_put(next(batches), program.batch_sharding)
                    if done == start + 1 and config.platform == "cuda" and config.mesh.seq > 1:
                        # The call below runs what is compiled here.
                        _tell_of_exposed(program.step.lower(state, batch).compile().as_text())
                    state, metrics = program.step(state, batch)
                    metrics = jax.device_get(metrics)
                report.step(done, {name: value.item() for name, value in metrics.items()})
                if done % config.save_every == 0:
                    checkpoints.save(done, state, batches.position)
                if evaluation is not None and (done == config.steps or done % (config.eval_every or config.steps) == 0):
                    report.evaluation(done, evaluation(functools.partial(_token_losses, program, state)))
                if samples is not None and (done == config.steps or done % (config.sample_every or 1) == 0):
                    report.sample(done, samples(state.params))
        if done > start and done % config.save_every != 0:
            checkpoints.save(done, state, batches.position)
    _conclude(report, done, config, run_dir, command)
    peak = peak_memory(mesh)
    if peak is not None:
        say(f"memory    {peak / 2**30:.2f} GiB at most on a device; --dry-run tells what for")


class Profile:
    """Writes the steps of a range as one XLA profile, which TensorBoard finds in the run-dir."""

    def __init__(self, steps: StepRange | None, run_dir: Path) -> None:
        self._steps = steps
        self._run_dir = run_dir
        self._is_running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_running:
            self._stop()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks a step; the profile begins before the first and ends after the last of the range."""
        if self._steps is not None and number in self._steps and not self._is_running:
            jax.profiler.start_trace(self._run_dir)
            self._is_running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._steps is not None and self._is_running and number == self._steps.last:
            self._stop()

    def _stop(self) -> None:
        self._is_running = False
        jax.profiler.stop_trace()


def _resolve(config: Config, mesh: Mesh) -> Config:
    """The configuration with what was left to the machine (platform, dtype) and to the model (lr) decided."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return dataclasses.replace(
        config,
        platform="cpu" if is_cpu else "cuda",
        dtype=config.dtype or ("float32" if is_cpu else "bfloat16"),
        lr=config.lr or {None: 2e-5, "tiny": 6e-3}.get(config.model, 3e-4),
    )


def _make_evaluation(config: Config, opened: data.Data) -> Evaluation | None:
    if not opened.held_out:
        return None
    return Evaluation(
        data.sample(opened.held_out, config.seed),
        batch_size=config.batch_size,
        num_batches=config.eval_batches or 16,
        num_bytes=opened.num_bytes,
        num_workers=config.mesh.seq,
    )


def _token_losses(program: Program, state: TrainState, batch: dict[str, np.ndarray]) -> np.ndarray:
    return jax.device_get(program.token_losses(state.params, jax.device_put(batch, program.batch_sharding)))


def _introduce(config: Config, mesh: Mesh, opened: data.Data, evaluation: Evaluation | None, run_dir: Path) -> None:
    say(f"devices   {describe(mesh)}, mesh {config.mesh}")
    model, name = config.llama, config.model or config.init_from
    say(f"model     {name}, {model.num_parameters:,} parameters, {config.dtype} activations")
    head_dim = model.head_dim
    kernel = which_implementation(mesh=mesh, dtype=jnp.dtype(config.dtype), head_dim=head_dim, scale=head_dim**-0.5)
    say(f"attention {config.strategy}, remat {config.remat}")
    say(f"kernel    {kernel.name}: {kernel.reason}")
    total = sum(share.weight for share in opened.training)
    for share in opened.training:
        tokens = share.tokens
        say(
            f"data      {tokens.source}, {len(tokens.values):,} tokens in rows of {config.seq_len:,}, "
            f"{share.weight / total:.4g} of the samples"
        )
    if evaluation is not None:
        sources = ", ".join(share.tokens.source for share in opened.held_out)
        say(f"evaluates {evaluation.num_rows:,} rows of {sources}")
    say(f"run-dir   {run_dir}")


def _start(config: Config, program: Program, checkpoints: Checkpoints, batches: data.Batches) -> tuple[int, TrainState]:
    """Returns the steps done and the state after them, with `batches` at the batch that comes next."""
    restored = checkpoints.restore(program.state_struct)
    for note in checkpoints.notes:
        say(note)
    if restored is None:
        return 0, program.init() if config.init_from is None else _imported(config.init_from, program)
    step, state, batches.position = restored
    say(f"resuming after step {step}")
    return step, state


def _imported(directory: Path, program: Program) -> TrainState:
    """The state of step 0 with the parameters of a Hugging Face folder, which is checked before anything is made."""
    try:
        params = huggingface.load(directory, program.state_struct.params)
    except ValueError as error:
        raise InputError(f"--init-from {directory}: {error}") from error
    say(f"weights   {directory}")
    return dataclasses.replace(program.init(), params=params)


def _tell_of_exposed(compiled_text: str | None) -> None:
    """One line if the step that was compiled waits for messages of attention."""
    if compiled_text and (warning := overlap.warning(compiled_text)):
        say(f"warning   {warning}")


def _conclude(report: Report, done: int, config: Config, run_dir: Path, command: list[str]) -> None:
    if report.losses:
        say(report.summary)
    if done < config.steps:
        say(f"stopped after step {done} of {config.steps}; to resume: {shlex.join(command)}")
    else:
        say(f"finished {done} steps; a larger --steps continues")
    say(f"run-dir   {run_dir}")
    say(f"curves    tensorboard --logdir {shlex.quote(str(run_dir))}")
