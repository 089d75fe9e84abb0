"""What is found in programs compiled for two H200s and in their profiles (tests/data/overlap), and what is advised."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from distflash_jax import attention, distflash_attention, overlap, trace, xla_flags
from distflash_jax.trace import Activity
from train import loop

DATA = Path(__file__).parent / "data/overlap"
FLAGS = " ".join(f"--{name}={value}" for name, value in xla_flags.choose().items())


def compiled(name: str) -> str:
    """The permutes and kernels of balanced attention: both_default is forward and backward under XLA's own flags."""
    return (DATA / f"{name}.txt").read_text()


def activities(mode: str) -> list[Activity]:
    """One execution of the forward pass of 32K tokens, times in microseconds."""
    with open(DATA / f"trace_{mode}.csv", newline="") as file:
        number = {"device": int, "start": float, "stop": float, "run": int, "num_bytes": int, "destination": int}
        rows = list(csv.DictReader(file))
    return [
        Activity(**{k: number.get(k, str)(v) if v or k not in number else None for k, v in x.items()}) for x in rows
    ]


def test_with_the_flags_every_message_of_the_forward_is_hidden():
    operations = overlap.order(compiled("forward_full"))
    assert [operation.kind for operation in operations].count("kernel") == 3
    found = overlap.messages(operations)
    assert [message.scope for message in found] == ["forward_step_0/fetch"] * 3 + ["forward_step_1/return"] * 2
    assert all(message.is_hidden and not message.is_synchronous for message in found)


def test_with_xlas_own_flags_some_are_synchronous_or_end_before_a_kernel():
    found = overlap.messages(overlap.order(compiled("both_default")))
    assert [message.name for message in found if message.is_synchronous] == [f"ppermute.{n}.2" for n in (46, 55, 54)]
    waited_for = [message.name for message in found if not (message.is_hidden or message.is_synchronous)]
    assert waited_for == [f"collective-permute-start.{n}" for n in (2, 1, 9)]


@pytest.mark.parametrize("kind", ["all-to-all", "all-gather", "reduce-scatter"])
def test_collectives_of_other_strategies_are_messages(kind):
    scope = 'metadata={op_name="jit(f)/forward_step_0/fetch/x"}'
    lines = [f"  %a = f32[4] {kind}-start(%x), {scope}", f"  %b = f32[4] {kind}-done(%a), {scope}"]
    found = overlap.messages(overlap.order("\n".join([*lines, f"  %c = f32[4] {kind}(%b), {scope}"])))
    assert [(x.name, x.is_synchronous, x.is_hidden) for x in found] == [("a", False, False), ("c", True, False)]


def test_a_kernel_that_a_fusion_gives_a_slice_runs_where_the_fusion_does():
    scope = 'metadata={op_name="jit(f)/forward_step_1/compute/x"}'
    text = f"""
%dynamic-slice-fusion (p0: bf16[8]) -> f32[4] {{
  ROOT %kernel.1 = f32[4] custom-call(%slice.1), custom_call_target="mosaic_gpu_v2", {scope}
}}

ENTRY %main (x: bf16[8]) -> f32[4] {{
  %a = bf16[8] collective-permute-start(%x)
  %b = f32[4] fusion(%x), kind=kCustom, calls=%dynamic-slice-fusion, metadata={{}}
  %c = bf16[8] collective-permute-done(%a)
}}"""
    operations = overlap.order(text)
    assert [x.kind for x in operations] == ["start", "kernel", "done"] and overlap.messages(operations)[0].is_hidden


def test_a_loop_in_the_scope_of_a_kernel_is_one():
    loop_of_kernel, of_layers = ("compute/while", "while")
    for path, kinds in ((f"forward_step_0/{loop_of_kernel}", ["kernel"]), (of_layers, [])):
        line = (
            f'  %while.1 = (s32[], f32[4,4]{{1,0}}) while(%tuple.1), body=%body, metadata={{op_name="jit(f)/{path}"}}'
        )
        assert [operation.kind for operation in overlap.order(line)] == kinds


@pytest.mark.parametrize(
    "name, flags, expected",
    [
        ("forward_full", "", None),
        ("both_default", FLAGS, "before JAX starts"),
        ("both_full", "", "before JAX starts"),
        ("both_full", FLAGS, "the flags are set"),
    ],
)
def test_the_warning_names_steps_and_what_to_do(name, flags, expected, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    warning = overlap.warning(compiled(name))
    assert (warning is None) == (expected is None)
    if warning:
        assert expected in warning and "backward_step_0/fetch (1)" in warning and "\n" not in warning


def test_the_trainer_says_the_warning(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    loop._tell_of_exposed(compiled("forward_full"))
    assert capsys.readouterr().err == ""
    loop._tell_of_exposed(compiled("both_default"))
    assert "6 of 10 messages of attention travel behind no kernel" in capsys.readouterr().err


def test_missing_flags_are_told_on_several_gpus_only(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_collective_permute_mode=local")
    attention._check_flags(None, 2)
    monkeypatch.setattr(attention, "_first_device", lambda mesh: SimpleNamespace(platform="gpu"))
    attention._check_flags(None, 1)
    with pytest.warns(RuntimeWarning, match="lacks xla_gpu_experimental_parallel_collective_overlap_limit: unless"):
        attention._check_flags(None, 2)
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    attention._check_flags(None, 2)


@pytest.mark.parametrize("is_inside", [False, True])
def test_flags_are_checked_at_the_door(is_inside, monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "_check_flags", lambda mesh, num_workers: seen.append(num_workers))
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    attend = lambda x: distflash_attention(x, x, x, mesh=None if is_inside else mesh)
    if is_inside:
        attend = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    jax.eval_shape(attend, jnp.zeros((1, 8, 2, 4)))
    assert seen == [1]


def test_with_the_flags_a_profile_has_no_wait():
    messages, steps = trace.measure(activities("full"))
    assert [(x.scope, x.num_bytes) for x in messages] == [
        *[("forward_step_0/fetch", 2**26)] * 3,
        ("forward_step_1/return", 2**27),
        ("forward_step_1/return", 2**20),
    ]
    assert {x.transport for x in messages} == {"copy"} and not any(x.is_synchronous for x in messages)
    # At the start of a pass a GPU may have nothing else to do yet.
    assert all(x.exposed == 0 for x in messages if x.scope != "forward_step_0/fetch")
    assert sum(x.exposed for x in messages) < 0.03 * sum(x.time for x in messages)
    assert [x.step for x in steps] == [f"forward_step_{n}" for n in range(3)]
    assert [round(x.idle_share, 3) for x in steps[1:]] == [0.001, 0.001]
    assert overlap.advise(messages, steps, 2)[1] == "Nothing to do."


def test_with_xlas_own_flags_a_profile_has_waits():
    messages, steps = trace.measure(activities("default"))
    assert [x.op for x in messages if x.is_synchronous] == ["ppermute.19.2"]
    # The fetches start one after the other, each when the one before has ended; a kernel hides the last alone.
    assert [round(x.exposed) for x in messages] == [159, 181, 0, 13, 0]
    assert [round(x.exposed) for x in steps] == [340, 0, 13]
    assert steps[0].idle_share > 0.15
    assert "1 of 5 messages are synchronous: export XLA_FLAGS=" in overlap.advise(messages, steps, 2)[1]


def activity(stream, path, start, stop, **fields) -> Activity:
    fields = {"device": 0, "name": "kernel", "op": path} | fields
    return Activity(stream=stream, path=f"jit(f)/{path}", start=start, stop=stop, **fields)


def pass_of(fetch: tuple[float, float], *kernels: tuple[float, float], device=0, **fields) -> list[Activity]:
    """A GPU that computes a step after the other while it copies what the second needs."""
    copy = activity("b", "forward_step_0/fetch/ppermute", *fetch, device=device, **({"name": "MemcpyP2P"} | fields))
    steps = [activity("a", f"forward_step_{n}/compute/k", *time, device=device) for n, time in enumerate(kernels)]
    return [copy, *steps]


@pytest.mark.parametrize(
    "fetch, exposed",
    [
        ((0, 10), 0),  # ends under the first kernel
        ((0, 30), 10),  # the stream idles from 20 to 32: the kernel at 32 has waited for the message
        ((22, 30), 8),
        ((0, 50), 0),  # the kernel at 32 did not wait for it, so the idle time had another reason
    ],
)
def test_exposed_is_the_idle_time_that_lasts_until_a_message_ends(fetch, exposed):
    (message,), steps = trace.measure(pass_of(fetch, (1, 20), (32, 60)))
    assert (message.exposed, message.hidden) == (exposed, fetch[1] - fetch[0] - exposed)
    assert [(x.span, x.compute, x.exposed) for x in steps] == [(20 - min(fetch[0], 1), 19, 0), (40, 28, exposed)]


def test_the_gpu_that_receives_waits_too():
    sender = pass_of((0, 30), (1, 40), (40, 60), destination=1)
    (message,), _ = trace.measure([*sender, *pass_of((0, 1), (1, 20), (32, 60), device=1)[1:]])
    assert (message.device, message.exposed) == (1, 10)


def test_arrays_that_xla_sends_as_one_are_one_message():
    fields = {"name": "MemcpyP2P", "num_bytes": 8, "destination": 1, "run": 3}
    second = activity("b", "forward_step_0/fetch/ppermute", 8, 12, **fields)
    (message,), _ = trace.measure([second, *pass_of((0, 6), (1, 20), (32, 60), **fields)])
    assert (message.num_bytes, message.time) == (16, 10)


def test_medians_are_over_executions():
    executions = [
        x._replace(start=x.start + 100 * n, stop=x.stop + 100 * n, run=n)
        for n, stop in enumerate((12, 24, 28))
        for x in pass_of((0, stop), (1, 20), (32, 60))
    ]
    (message,), steps = trace.measure(executions)
    assert (message.time, message.exposed) == (24, 4)
    assert [x.span for x in steps] == [20, 40]


def test_a_message_that_outlasts_its_kernel_asks_for_more_tokens():
    lines = overlap.advise(*trace.measure(pass_of((0, 50), (0, 20), (51, 80))), 1)
    assert lines == [
        "Messages hold up 37.5% of the time.",
        "They outlast the kernels beside them: 2.5 times as many tokens per GPU hide them.",
    ]


def run_command(run_dir: Path, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["overlap", str(run_dir)])
    return overlap.main()


def test_the_command_tells_of_the_newest_profile(tmp_path, monkeypatch, capsys):
    assert run_command(tmp_path, monkeypatch) == 2
    assert "--profile-steps" in capsys.readouterr().err
    file = tmp_path / "plugins/profile/2026_01_01/host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(overlap, "read", lambda path: [])
    assert run_command(tmp_path, monkeypatch) == 2
    assert "names no message on a GPU" in capsys.readouterr().err
    monkeypatch.setattr(overlap, "read", lambda path: activities("default"))
    assert run_command(tmp_path, monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{file}: 2 GPUs")
    assert sum(line.endswith("  synchronous") for line in lines) == 1
