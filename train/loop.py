"""One training run: devices, data, model and the newest checkpoint, then step after step to the last one."""

import contextlib
import dataclasses
import functools
import json
import math
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distflash_jax import explain_strategy, overlap, schedule, which_implementation, xla_flags
from distflash_jax.cost import MACHINES, Shape
from distflash_jax.packing import idle_share
from distflash_jax.table import Schedule
from distflash_jax.timeline import Timeline, simulate
from models import huggingface
from train import data, distributed
from train.checkpoint import Checkpoints, by_name, quiet
from train.checks import BadSteps, checked
from train.config import Config, settings_of
from train.decode import Samples
from train.evaluation import Evaluation
from train.exits import Stop
from train.faults import fault
from train.flags import InputError, without
from train.interrupt import Interrupt
from train.job import leave
from train.mesh import describe, keep_compiled, make_mesh, peak_memory
from train.plan import dry_run, explain_exhaustion, ideal_seconds, lower_step
from train.program import build_program
from train.report import Clock, Pace, Profile, Report, say
from train.run_dir import check_run_dir, locked, open_run_dir, run_dir_of
from train.saving import Saver
from train.sharding import HEADS, bytes_per_device
from train.sinks import Sink, TensorBoard, Tracker
from train.step import Params, Program, TrainState
from train.watchdog import Watchdog


def run(config: Config, command: list[str]) -> None:
    """Trains to `config.steps` or to the first Ctrl-C, and saves; `command` is what resumes it.

    With `config.dry_run` it prints what a step needs, and that is all.
    """
    clock = Clock()
    flags = xla_flags.choose(num_processes=distributed.num_processes())
    xla_flags.apply(flags | (xla_flags.PROFILING if config.profile_steps is not None else {}))
    xla_flags.apply(xla_flags.DETERMINISTIC if config.deterministic else {})
    mesh = make_mesh(config.mesh, config.platform)
    config = _resolve(config, mesh)
    keep_compiled(config.compile_cache, config.platform)
    if config.dry_run:
        print(dry_run(config, mesh))
        return
    with quiet(), contextlib.ExitStack() as stack:

        def enter() -> None:
            if distributed.is_first():
                check_run_dir(config)
                stack.enter_context(locked(run_dir_of(config), say))

        distributed.first_alone("check", enter)
        _train(config, mesh, clock, command)


def _train(config: Config, mesh: Mesh, clock: Clock, command: list[str]) -> None:
    """A run in a run-dir that is this one's alone."""
    with clock.phase("data"):
        opened = distributed.first_alone("data", lambda: data.open_data(config, cache=run_dir_of(config) / "tokens"))
        evaluation = _make_evaluation(config, opened)
    program = build_program(config, mesh)
    shape, table = (config.batch_size, config.seq_len), _table(config)
    part = distributed.part_of(program.batch_sharding, shape)
    batches = data.Batches(
        opened.training,
        batch_size=config.batch_size,
        seed=config.seed,
        part=part,
        tokenizer=opened.tokenizer and opened.tokenizer.fingerprint,
        spread=_spread(config, table),
    )
    samples = Samples(config, mesh, opened) if config.sample_every else None
    run_dir = distributed.first_alone("run-dir", lambda: open_run_dir(config, is_first=distributed.is_first()))
    _introduce(config, mesh, opened, evaluation, run_dir, program.state_struct)
    with (
        Interrupt(
            lambda: say("stopping after this step; a second signal leaves at once"),
            run_dir / "SAVE" if distributed.is_first() else None,
        ) as interrupt,
        Watchdog(clock, config.stuck_after),
        _open_checkpoints(run_dir / "checkpoints", config.keep, clock) as checkpoints,
        explain_exhaustion(config, program, mesh),
    ):
        start, state = _start(config, program, checkpoints, batches, clock)
        if start >= config.steps:
            say(f"finished before: {start} of {config.steps} steps are done; a larger --steps continues")
            return
        done, pace, process = start, Pace(clock), jax.process_index()
        bad_steps = BadSteps(config.max_bad_steps)
        saver = Saver(checkpoints, config.save_every, interrupt, pace, step=start)
        with (
            Report(
                clock,
                _make_sinks(config, run_dir, first_step=start + 1) if distributed.is_first() else [],
                first_step=start + 1,
                num_steps=config.steps,
                ideal_seconds=ideal_seconds(config, mesh),
            ) as report,
            Profile(config.profile_steps if distributed.is_first() else None, run_dir) as profile,
        ):
            with clock.phase("compile"):
                fault("compile", process=process)
                take_step, evaluate = _compile(config, program, evaluation, clock)
                _prepare(config, checkpoints, state)
            stop = saver.after_step(done, state, batches.position)
            while done < config.steps and not stop:
                done += 1
                fault("step", done, process)
                with profile.step(done):
                    with clock.phase("data"):
                        fault("data", done, process)
                        rows = next(batches)
                        batch = distributed.place(rows, program.batch_sharding, shape, part)
                    with clock.phase("step"):
                        state, metrics = take_step(done, state, batch)
                        metrics = jax.device_get(metrics)
                metrics = {name: value.item() for name, value in metrics.items()}
                bad_steps.check(done, metrics, batches.last)
                if done == 1 and config.init_from is not None:
                    _tell_of_guessing(metrics["loss"], config.llama.vocab_size)
                report.step(done, metrics | pace.metrics | _memory(mesh) | _idle(config, table, rows))
                stop = saver.after_step(done, state, batches.position)
                is_last = done == config.steps
                if evaluate is not None and (is_last or done % (config.eval_every or config.steps) == 0):
                    with clock.phase("evaluate"):
                        fault("evaluate", done, process)
                        metrics = evaluate(state)
                    report.evaluation(done, metrics)
                if samples is not None and (is_last or done % (config.sample_every or 1) == 0):
                    with clock.phase("evaluate"):
                        text = samples(state.params)
                    report.sample(done, text)
        saver.finish(done, state, batches.position)
    _conclude(report, done, config, run_dir, without(command, "--checkpoint", "--accept"))
    if memory := _memory(mesh):
        say(f"memory    {memory['peak_memory_gib']:.2f} GiB at most on a device; --dry-run tells what for")
    _tell_of_time(clock, run_dir, steps=(start + 1, done))


@contextlib.contextmanager
def _open_checkpoints(folder: Path, keep: int, clock: Clock) -> Iterator[Checkpoints]:
    """Waits at the end for the save that is under way."""
    checkpoints = Checkpoints(folder, keep=keep)
    try:
        yield checkpoints
    except Exception as error:
        # That save needs all processes, of which this one is to tell the others first.
        if distributed.num_processes() > 1 and not isinstance(error, Stop):
            leave(error)
        raise
    finally:
        with clock.phase("save"):
            checkpoints.close()


def _resolve(config: Config, mesh: Mesh) -> Config:
    """The configuration with what was left to the machine decided: platform and dtype."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return dataclasses.replace(
        config,
        platform="cpu" if is_cpu else "cuda",
        dtype=config.dtype or ("float32" if is_cpu else "bfloat16"),
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


def _compile(
    config: Config, program: Program, evaluation: Evaluation | None, clock: Clock
) -> tuple[Callable, Callable[[TrainState], dict[str, float]] | None]:
    """(number, state, batch) -> the step, compiled ahead; and the evaluation of a state if there is one, which compiles
    as it meets a shape.
    """
    compiled_step = lower_step(program, batch_size=config.batch_size, seq_len=config.seq_len).compile()
    step = checked(compiled_step, config.check_determinism, by_name)
    if config.platform == "cuda" and config.mesh.seq > 1:
        _tell_of_exposed(compiled_step.as_text())
    if evaluation is None:
        return step, None
    compiled: dict[tuple[int, ...], Callable] = {}

    def token_losses(params: Params, batch: dict[str, np.ndarray]) -> np.ndarray:
        shape = batch["tokens"].shape
        placed = distributed.place(batch, program.batch_sharding, shape)
        if shape not in compiled:
            with clock.phase("compile"):
                compiled[shape] = program.token_losses.lower(params, placed).compile()
        return distributed.gather(compiled[shape](params, placed))

    return step, lambda state: evaluation(functools.partial(token_losses, state.params))


def _prepare(config: Config, checkpoints: Checkpoints, state: TrainState) -> None:
    """What would hold up the first save; one line if each will wait for the state to come off the devices."""
    # What is offloaded may need all pinned memory.
    copies = config.platform == "cuda" and not config.remat.startswith("offload")
    if not checkpoints.prepare(state, copies=copies):
        say(
            "warning   each save will wait until the state is off the devices, as the host's pinned memory has no room "
            "for it; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB sets that of a process, 64 by default"
        )


def _make_sinks(config: Config, run_dir: Path, *, first_step: int) -> list[Sink]:
    settings = settings_of(config)
    # First what may not start.
    trackers = [] if config.log is None else [Tracker(config.log, run_dir, first_step=first_step, settings=settings)]
    tensorboard = TensorBoard(run_dir, first_step=first_step)
    if first_step == 1:
        tensorboard.describe(settings, _timeline(config))
    return [tensorboard, *trackers]


def _timeline(config: Config) -> Timeline | None:
    """When the attention of a device's rows and heads would run on H200s, whose rates hold for what is drawn: a head
    dim of 128, and chunks of 4096 tokens or more. None if the strategy is not a table.
    """
    if config.strategy not in schedule.TABLES:
        return None
    machine, mesh, model = MACHINES["h200-nvlink"], config.mesh, config.llama
    heads, kv_heads = (n // mesh.tensor for n in (model.num_attention_heads, model.num_key_value_heads))
    rows = config.batch_size // (mesh.data * config.accumulate)
    shape = Shape(max(config.seq_len, 4096 * mesh.seq), heads, kv_heads, machine.head_dim, rows)
    table = schedule.choose(config.strategy, mesh.seq, kv_heads=kv_heads)
    return simulate(table, shape, machine, ("forward", "backward"))


def _table(config: Config) -> Schedule | None:
    """That of attention, if there is one and packed documents alone say what is visible."""
    is_double = config.strategy == "burst" and config.mesh.num_nodes > 1
    is_alone = config.packing and config.llama.sliding_window is None
    if config.strategy not in schedule.TABLES or is_double or not is_alone:
        return None
    kv_heads = config.llama.num_key_value_heads // config.mesh.tensor
    return schedule.choose(config.strategy, config.mesh.seq, kv_heads=kv_heads)


def _spread(config: Config, table: Schedule | None) -> data.Spread | None:
    """How packed documents are ordered in their rows; None where that makes no difference."""
    num_rows = config.batch_size // config.mesh.data
    return data.Spread(table, num_rows, config.accumulate) if table and config.mesh.seq > 1 else None


def _idle(config: Config, table: Schedule | None, batch: dict[str, np.ndarray]) -> dict[str, float]:
    """How unevenly packed documents spread attention over the workers of a table, where this process has all rows."""
    if table is None or (ids := batch["segment_ids"]).shape != (config.batch_size, config.seq_len):
        return {}
    return {"attention_idle_share": idle_share(ids, table, groups=config.mesh.data, accumulate=config.accumulate)}


def _memory(mesh: Mesh) -> dict[str, float]:
    """The most memory that a device had in use so far, where JAX knows it."""
    peak = peak_memory(mesh)
    return {} if peak is None else {"peak_memory_gib": peak / 2**30}


def _introduce(
    config: Config, mesh: Mesh, opened: data.Data, evaluation: Evaluation | None, run_dir: Path, struct: TrainState
) -> None:
    say(f"devices   {describe(mesh)}, mesh {config.mesh}")
    model, name = config.llama, config.model or config.init_from
    say(f"model     {name}, {model.num_parameters:,} parameters, {config.dtype} activations")
    head_dim = model.head_dim
    kernel = which_implementation(mesh=mesh, dtype=jnp.dtype(config.dtype), head_dim=head_dim, scale=head_dim**-0.5)
    say(f"attention {_strategy(config, mesh)}, remat {config.remat}")
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
    size = bytes_per_device(struct)
    parts = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(struct)) / size
    say(f"state     {size / 2**20:,.1f} MiB of parameters and optimizer on a device, one part of {parts:.2f}")


def _strategy(config: Config, mesh: Mesh) -> str:
    """Its name, and what auto takes."""
    if config.strategy != "auto":
        return config.strategy
    model, rows = config.llama, config.batch_size // config.accumulate
    q, k = (
        jax.ShapeDtypeStruct((rows, config.seq_len, heads, model.head_dim), jnp.dtype(config.dtype))
        for heads in (model.num_attention_heads, model.num_key_value_heads)
    )
    return f"auto: {explain_strategy(q, k, mesh=mesh, spec=HEADS).chosen}"


def _start(
    config: Config, program: Program, checkpoints: Checkpoints, batches: data.Batches, clock: Clock
) -> tuple[int, TrainState]:
    """Returns the steps done and the state after them, with `batches` at the batch that comes next."""
    with clock.phase("restore"):
        fault("restore", process=jax.process_index())
        restored = checkpoints.restore(program.state_struct, step=config.checkpoint)
    for note in checkpoints.notes:
        say(note)
    if restored is None:
        with clock.phase("compile"):
            init = program.init.lower().compile()
        return 0, init() if config.init_from is None else _imported(config.init_from, program, init)
    batches.seek(restored.position, accepted=config.accept)
    say(f"resuming after step {restored.step}: state {restored.checksum}")
    return restored.step, restored.state


def _imported(directory: Path, program: Program, init: Callable[[], TrainState]) -> TrainState:
    """The state of step 0 with the parameters of a Hugging Face folder, which is checked before anything is made."""
    try:
        params = huggingface.load(directory, program.state_struct.params)
    except ValueError as error:
        raise InputError(f"--init-from {directory}: {error}") from error
    say(f"weights   {directory}")
    return dataclasses.replace(init(), params=params)


def _tell_of_guessing(loss: float, vocab_size: int) -> None:
    """One line if a model that was trained elsewhere knows next to nothing of the data."""
    if loss > 0.7 * math.log(vocab_size):
        say(
            f"warning   the first loss, {loss:.2f}, is near {math.log(vocab_size):.2f}, that of a guess among "
            f"{vocab_size:,} tokens: weights, config.json and tokenizer may not belong together"
        )


def _tell_of_exposed(compiled_text: str | None) -> None:
    """One line if the step that was compiled waits for messages of attention."""
    if compiled_text and (warning := overlap.warning(compiled_text)):
        say(f"warning   {warning}")


def _tell_of_time(clock: Clock, run_dir: Path, *, steps: tuple[int, int]) -> None:
    """One line, and the same as a line of JSON that is added to time.jsonl, which so has one for each session."""
    spent = clock.spent
    seconds = {phase: nanoseconds / 1e9 for phase, nanoseconds in spent.items()}
    total = sum(spent.values()) / 1e9
    say(f"time      {total:.1f} s: " + ", ".join(f"{phase} {part:.1f}" for phase, part in seconds.items()))
    if distributed.is_first():
        with contextlib.suppress(OSError), (run_dir / "time.jsonl").open("a") as file:
            file.write(json.dumps({"first_step": steps[0], "last_step": steps[1], "total": total, **seconds}) + "\n")


def _conclude(report: Report, done: int, config: Config, run_dir: Path, command: list[str]) -> None:
    if report.losses:
        say(report.summary)
    if report.save_seconds:
        say(f"saves     held up the steps for {report.save_seconds:.3f} s")
    if done < config.steps:
        say(f"stopped after step {done} of {config.steps}; to resume: {shlex.join(command)}")
    else:
        say(f"finished {done} steps; a larger --steps continues")
    say(f"run-dir   {run_dir}")
    say(f"curves    tensorboard --logdir {shlex.quote(str(run_dir))}")
