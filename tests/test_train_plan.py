"""train.plan: bytes, FLOPs and the longest sequence, before a run and when one has no memory left."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from counting import equations

from models.config import PRESETS
from train import plan
from train.config import parse
from train.cost import step_flops, step_seconds
from train.flags import InputError
from train.sharding import gathered_spec, make_gather

SMALL = ["--lr", "1", "--vocab-size", "64", "--num-hidden-layers", "3", "--seq-len", "256"]


def configure(*arguments, dtype="float32"):
    config = parse([*SMALL, "--dtype", dtype, *arguments])
    shape = (config.mesh.data, config.mesh.seq, config.mesh.tensor)
    axis_types = (jax.sharding.AxisType.Auto,) * 3
    devices = jax.devices()[: config.mesh.num_devices]
    return config, jax.make_mesh(shape, ("data", "seq", "tensor"), axis_types=axis_types, devices=devices)


@pytest.mark.parametrize(
    ("policy", "on_device", "in_host_memory"),
    [
        ("attention", 128 + 64 + 2, 0),
        ("projections", 128 + 64 + 2 + (64 + 32 + 32) + 128, 0),
        ("offload", 128, 64 + 2),
        ("offload-all", 0, 128 + 64 + 2),
        ("layer", 128, 0),
    ],
)
def test_saved_activations_are_what_the_remat_policy_keeps_on_one_device(policy, on_device, in_host_memory):
    """A token's input of 128, and of the two heads on one tensor worker the outputs of 32 and a log-sum-exp.

    Of projections q, of one head k and v, and the 128 that are the input of the MLP.
    """
    config, mesh = configure("--mesh", "data=2,seq=2,tensor=2", "--accumulate", "2", "--remat", policy)
    layers_and_tokens = 3 * (4 * 256) // (2 * 2 * 2)
    expected = tuple(4 * layers_and_tokens * numbers for numbers in (on_device, in_host_memory))
    assert plan.saved_activations(config, mesh) == expected


@pytest.mark.parametrize("policy", ["attention", "none"])
def test_neither_gathered_nor_rounded_weights_are_kept_for_the_backward(policy):
    config, mesh = configure("--mesh", "seq=2", "--remat", policy, dtype="bfloat16")
    kept = {x.shape for x in plan.residuals(config, mesh)}
    weights = {(3, 128, 4, 32), (3, 128, 2, 32), (3, 4, 32, 128), (3, 128, 384), (3, 384, 128)}
    assert not kept & weights
    assert (3, 4, 256, 128) in kept and ((3, 4, 256, 384) in kept) == (policy == "none")


def test_projections_are_gathered_in_the_dtype_of_activations_and_the_embedding_in_its_own():
    _, mesh = configure("--mesh", "seq=2")
    for name, dtype in (("q_proj", jnp.bfloat16), ("embed_tokens", jnp.float32)):
        gather = functools.partial(make_gather(mesh, jnp.bfloat16), name)
        inside = equations(jax.make_jaxpr(gather)(jnp.ones((8, 4, 2))))
        found = [equation for _, equation in inside if equation.primitive.name == "sharding_constraint"]
        assert found[-1].params["sharding"].spec == gathered_spec(name, (8, 4, 2), mesh)
        assert {equation.invars[0].aval.dtype for equation in found} == {jnp.dtype(dtype)}


def test_a_dry_run_tells_bytes_flops_and_the_longest_sequence_without_a_run_dir(tmp_path, monkeypatch):
    config, mesh = configure("--mesh", "seq=8", "--device-memory", "50GB", "--run-dir", str(tmp_path / "run"))
    monkeypatch.setattr(plan, "allocated", lambda program, *, batch_size, seq_len: 10**9 + 10**6 * seq_len)
    table = plan.dry_run(config, mesh)
    parameters = config.llama.num_parameters * 4 // 8
    for row in (
        rf"parameters +{_kib(parameters)}",
        rf"optimizer +{_kib(2 * parameters + 8)}",
        rf"saved activations +{_kib(4 * 3 * 128 * (128 + 128 + 4))}",
        r"total +1.17 GiB",
        r"in host memory +0 KiB",
        r"FLOPs a step +\d\.\d{3}e\+0\d \(\d+% attention\)",
        r"seconds a step +unknown: no peak FLOP/s known of cpu in float32",
        r"longest sequence +47,104 tokens compiled to fit 46.57 GiB, about 47,104 would",
    ):
        assert re.search(f"^{row}$", table, flags=re.MULTILINE), (row, table)
    assert not (tmp_path / "run").exists()


def _kib(size):
    return f"{-(-size // 1024):,} KiB"


def linear(tried):
    def total(length):
        tried.append(length)
        return 1000 + 10 * length

    return total


@pytest.mark.parametrize("start", [1000, 100_000])
def test_the_search_ends_just_below_the_limit_in_two_compilations(start):
    tried = []
    found, reached = plan.longest(linear(tried), (start, 1000 + 10 * start), limit=500_000, unit=128, seconds=9)
    assert found == reached == tried[-1] and found % 128 == 0
    assert 0.95 * 500_000 <= 1000 + 10 * found <= 500_000
    assert len(tried) == 2


def test_a_search_without_time_or_room_says_so():
    tried = []
    assert plan.longest(linear(tried), (1000, 11_000), limit=500_000, unit=128, seconds=0) == (1920, 48_896)
    assert plan.longest(linear(tried), (1024, 11_240), limit=900, unit=128, seconds=9) == (0, 0)


def test_flops_are_six_a_weight_and_token_and_half_of_the_scores():
    dense, attention = step_flops(PRESETS["llama-7b"], batch_size=2, seq_len=8192)
    assert dense == 6 * (6_738_415_616 - 32_000 * 4096) * 2 * 8192
    assert attention == pytest.approx(12 * 32 * 4096 * 2 * 8192**2 / 2, rel=2e-4)


@pytest.mark.parametrize("window, scores", [(1, 6), (4, 1 + 2 + 3 + 4 + 4 + 4), (6, 21), (9, 21)])
def test_scores_beyond_a_sliding_window_are_no_flops(window, scores):
    model = dataclasses.replace(PRESETS["tiny"], sliding_window=window)
    assert step_flops(model, batch_size=1, seq_len=6)[1] == 12 * 2 * 4 * 32 * scores


def test_a_step_takes_longer_where_more_is_done_again():
    seconds = [
        step_seconds(10**15, 10**15, remat=remat, num_devices=1, device_kind="NVIDIA H200")
        for remat in ("none", "attention", "layer")
    ]
    assert seconds[0] < seconds[1] < seconds[2]


OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
BY_CLASS = {"parameters": 1, "optimizer": 2, "saved": 3, "temporaries": 4, "host": 0}


@pytest.mark.parametrize(
    ("arguments", "largest", "message"),
    [
        (
            "--remat attention",
            "saved",
            "a step takes 11.00 GiB and gaps, most of it saved activations, 8.00 GiB; try --remat off",
        ),
        ("--remat offload-all", "saved", "try --accumulate 2"),
        ("--remat layer", "temporaries", "most of it temporaries, 8.00 GiB; try --accumulate 2"),
        ("--remat layer --accumulate 4", "temporaries", "try more devices, such as --mesh data=1,seq=2"),
        ("--remat none", "optimizer", "most of it optimizer, 8.00 GiB; try more devices, such as --mesh data=1,seq=2"),
    ],
)
def test_an_out_of_memory_error_names_the_largest_class_and_the_flag_to_try(arguments, largest, message, monkeypatch):
    config, mesh = configure("--mesh", "seq=1", *arguments.split())
    sizes = dict.fromkeys(BY_CLASS, 2**30) | {largest: 8 * 2**30}
    monkeypatch.setattr(plan, "measure", lambda *_: plan.Memory(**sizes))
    with (
        pytest.raises(InputError, match=message),
        plan.explain_exhaustion(config, plan.build_program(config, mesh), mesh),
    ):
        raise OUT_OF_MEMORY


def test_other_errors_of_jax_stay_as_they_are():
    config, mesh = configure("--mesh", "seq=1")
    error = jax.errors.JaxRuntimeError("INTERNAL: broken")
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="broken"),
        plan.explain_exhaustion(config, plan.build_program(config, mesh), mesh),
    ):
        raise error
