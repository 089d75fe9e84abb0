"""The benchmarks without a GPU: cases and their work, what is measured how often, rows, table, picture, tile sizes."""

import csv
import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from benchmarks import (
    assemble,
    attention,
    cases,
    far,
    harness,
    kernel,
    paper,
    peers,
    plot,
    tables,
    train_step,
    tune,
)
from benchmarks.cases import KERNEL, KERNEL_DEFAULT, Case, select
from benchmarks.kernel import Key
from distflash_jax import schedule
from distflash_jax.packing import idle_share
from pallas_kernels import BlockAttention, block_sizes, xla
from pallas_kernels.block_sizes import CANDIDATES, TABLE, ForwardBlocks
from train.data import Rows

SMALL = {
    "full": Case(60, 4, 2, 64, is_causal=False),
    "causal": Case(60, 4, 2, 64, is_causal=True),
    "window": Case(60, 4, 2, 64, is_causal=True, window=17),
    "late": Case(60, 4, 2, 64, is_causal=False, window=17),
    "packed": Case(60, 4, 2, 64, is_causal=True, documents=(7, 30, 23)),
    "both": Case(60, 4, 2, 64, is_causal=True, window=17, documents=(7, 30, 23)),
}


def write_sample(path, case_names, implementations=("hopper", "cudnn"), rate=400.0):
    """Rows as a run writes them: forward at `rate`, backward at half of it, cuDNN at 4/5 of ours."""
    rows = []
    for name in case_names:
        for implementation in implementations:
            for mode, factor in (("forward", 1.0), ("backward", 0.5)):
                row = {"benchmark": "kernel", "case": name, "implementation": implementation, "mode": mode}
                p50 = rate * factor * (0.8 if implementation == "cudnn" else 1)
                rows.append(row | {"workers": 1, "p20": p50, "p50": p50, "p80": p50, "bound": 700.0})
    harness.write_rows(path, rows)


@pytest.mark.parametrize("name", SMALL)
def test_the_scores_that_count_are_those_that_the_mask_shows(name):
    case = SMALL[name]
    inputs = kernel.random_inputs(case)
    _, _, mask = kernel.operands(case, inputs, inputs.q)
    rows = jnp.arange(case.T)
    assert case.visible_scores == mask.visible(rows, rows).sum()


def test_documents_and_windows_hide_what_a_dense_mask_hides():
    q, k = np.arange(60)[:, None], np.arange(60)[None, :]
    document = np.repeat(np.arange(3), (7, 30, 23))
    dense = (k <= q) & (k > q - 17) & (document[:, None] == document[None, :])
    assert SMALL["both"].visible_scores == dense.sum()


def test_the_grid_has_the_sizes_that_its_names_say():
    assert len(KERNEL) == 8 * 3 * 3 + 2 * 2 + 2 * 5 + 2
    for name, case in KERNEL.items():
        tokens, head_dim, heads, _ = name.split("_")
        assert (int(tokens[:-1]) * 1024, int(head_dim[1:])) == (case.T, case.H) and case.B == 1
        assert {"mha": (16, 16), "gqa": (32, 8)}[heads] == (case.N, case.K)
    packed, window = KERNEL["64k_d128_mha_packed12"], KERNEL["64k_d128_mha_window4k"]
    assert sum(packed.documents) == packed.T and len(set(packed.documents)) == 12 and window.window == 4096
    assert {name for name, case in cases.ATTENTION.items() if case.documents or case.window} == {
        f"{tokens}k_d128_mha_{mask}"
        for tokens in (64, 128)
        for mask in ("packed12", "packed100", "window1k", "window4k", "window32k")
    }


def test_lengths_with_a_long_tail_fill_the_row_and_few_are_long():
    lengths = cases.long_tailed(100, 65536)
    assert sum(lengths) == 65536 and len(lengths) == 100 and min(lengths) > 0
    assert sum(sorted(lengths)[-20:]) > 65536 / 2 and lengths == cases.long_tailed(100, 65536)


@pytest.mark.parametrize("name", ["balanced", attention.UNORDERED, "all_gather"])
def test_packed_documents_and_windows_are_measured_on_two_workers_and_on_one(name, monkeypatch, capsys):
    monkeypatch.setattr(harness, "TURN", 1e-4)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    rows = attention.measure(SMALL["both"], "forward_backward", [name, "zigzag", attention.TORCH], None)
    assert [(row["implementation"], row["workers"]) for row in rows] == [("balanced", 1), (name, 2)]
    assert not attention.can_take(attention.UNORDERED, SMALL["window"]) and capsys.readouterr().out


def test_documents_are_ordered_for_the_workers_that_share_them():
    case = cases.ATTENTION["64k_d128_mha_packed12"]
    ids = {name: attention.document_ids(case, 2, name) for name in ("balanced", attention.UNORDERED)}
    assert {tuple(sorted(np.bincount(x[0])[1:])) for x in ids.values()} == {tuple(sorted(case.documents))}
    idle = {name: idle_share(x, schedule.balanced(2)) for name, x in ids.items()}
    assert idle["balanced"] < 0.01 < idle[attention.UNORDERED]


def test_patterns_select_cases_once_and_in_the_order_of_the_grid():
    assert len(select(["*_d64_mha_*"])) == 17
    assert [case.name for case in select(["4k_d64_gqa_causal", "1k_d64_gqa_*", "?k_d64_gqa_causal"])] == [
        f"{tokens}k_d64_gqa_causal" for tokens in (1, 2, 4, 8)
    ]
    assert len(select(KERNEL_DEFAULT)) == 12
    with pytest.raises(ValueError, match=r"case '3k_\*': must name or match"):
        select(["16k_d128_mha_full", "3k_*"])


def test_a_long_call_is_made_three_times_and_a_short_one_fills_its_turns():
    rounds, calls = harness.plan_turns({"long": 0.6, "short": 1e-4})
    assert (rounds, calls) == (3, {"long": 1, "short": 1000})
    assert harness.plan_turns({"middle": 0.2}) == (5, {"middle": 1})
    assert harness.plan_turns({"short": 1e-3}) == (7, {"short": 100})


def test_functions_take_turns_after_two_calls_each(monkeypatch):
    monkeypatch.setattr(harness, "plan_turns", lambda seconds: (3, {"a": 2, "b": 1}))
    order = []
    seconds = harness.time_in_turns({name: lambda name=name: order.append(name) for name in "ab"})
    assert "".join(order) == "aabb" + "aaabb" * 3
    assert all(x.p20 <= x.p50 <= x.p80 for x in seconds.values())


def test_a_case_is_measured_beside_its_peers_and_a_peer_that_raises_costs_one_line(monkeypatch, capsys):
    def halves(q, k, v):
        assert q.dtype == k.dtype == v.dtype == jnp.float16
        return q * 2

    def refuse(*_):
        raise NotImplementedError("not\nthis one")

    forward_only = jax.custom_vjp(lambda q, k, v: q)
    forward_only.defvjp(refuse, refuse)
    backward_only = jax.custom_vjp(refuse)
    backward_only.defvjp(lambda q, k, v: (q, (k, v)), lambda kv, dout: (dout, *kv))
    present = {
        "halves": peers.Peer("jax.nn", lambda case, module: halves, jnp.float16, has_scale=False),
        "forward_only": peers.Peer("jax.nn", lambda case, module: forward_only),
        "backward_only": peers.Peer("jax.nn", lambda case, module: backward_only),
    }
    monkeypatch.setattr(harness, "TURN", 1e-4)
    rows = kernel.measure(SMALL["causal"], present, list(kernel.WORK), 7.0, {"xla": xla.ATTENTION})
    complete = {(name, mode) for name in ("xla", "halves") for mode in ("forward", "backward", "both")}
    alone = {("xla", "deterministic"), ("forward_only", "forward")}
    assert {(row["implementation"], row["mode"]) for row in rows} == complete | alone
    assert all(row["bound"] == 7 and row["case"] == "0k_d64_gqa_causal" for row in rows)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "0k_d64_gqa_causal        both      forward_only left out, NotImplementedError: not this one",
        "0k_d64_gqa_causal        forward   backward_only left out, NotImplementedError: not this one",
    ]


def test_a_peer_that_does_not_scale_is_given_scaled_queries():
    inputs = kernel.random_inputs(SMALL["packed"])
    given = inputs.of(peers.PEERS["in_tree"])
    np.testing.assert_allclose(given.q.astype(jnp.float32), inputs.q.astype(jnp.float32) / 8, rtol=1e-2)
    assert given.q.dtype == given.dout.dtype == jnp.float16 and inputs.of(peers.PEERS["cudnn"]).q.dtype == jnp.bfloat16


def test_a_peer_that_is_not_installed_is_named_once(monkeypatch, capsys):
    monkeypatch.setitem(peers.PEERS, "tokamax", peers.Peer("no_such_package", peers.tokamax))
    assert list(peers.available(("cudnn", "tokamax", "in_tree"))) == ["cudnn", "in_tree"]
    assert capsys.readouterr().out == "tokamax: left out, ModuleNotFoundError: No module named 'no_such_package'\n"


def test_cudnn_is_given_the_window_and_refuses_documents():
    nn = ModuleType("nn")
    nn.dot_product_attention = lambda *arrays, **options: options
    assert peers.cudnn(SMALL["window"], nn)()["local_window_size"] == (16, 0)
    assert peers.cudnn(SMALL["full"], nn)()["local_window_size"] is None
    with pytest.raises(NotImplementedError, match="packed"):
        peers.cudnn(SMALL["packed"], nn)


def test_the_backward_of_a_peer_is_both_minus_forward():
    case = SMALL["full"]
    quantiles = lambda p50: harness.Quantiles(p50 * 0.9, p50, p50 * 1.2)
    seconds = {Key("cudnn", "forward"): quantiles(1.0), Key("cudnn", "both"): quantiles(3.0)}
    rows = {row["mode"]: row for row in kernel.make_rows(case, seconds, ["backward", "both"], bound=1.0)}
    assert rows.keys() == {"backward", "both"}
    assert rows["backward"]["p50"] == pytest.approx(2.5 * case.forward_flops / 2 / 1e12)
    assert rows["backward"]["p20"] < rows["backward"]["p50"] < rows["backward"]["p80"]
    assert rows["both"]["p50"] == pytest.approx(3.5 * case.forward_flops / 3 / 1e12)


def test_our_calls_lower_for_cuda():
    inputs = jax.eval_shape(lambda: kernel.random_inputs(SMALL["both"]))
    functions = kernel.make_functions(SMALL["both"], {}, ["both"], {"hopper": kernel.IMPLEMENTATIONS["hopper"]})
    assert functions.keys() == {Key("hopper", "forward"), Key("hopper", "both")}
    both = jax.jit(functions[Key("hopper", "both")]).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "hopper_forward" in both and "hopper_backward" in both


def test_more_kernels_of_ours_are_measured_beside_each_other(monkeypatch):
    monkeypatch.setattr(harness, "TURN", 1e-4)
    kernels = {"xla": xla.ATTENTION, "other": xla.ATTENTION}
    rows = kernel.measure(SMALL["causal"], {}, ["forward", "backward"], 7.0, kernels)
    assert [(row["implementation"], row["mode"]) for row in rows] == [
        ("xla", "forward"), ("other", "forward"), ("xla", "backward"), ("other", "backward"),
    ]  # fmt: skip


def test_the_table_shows_the_newest_rows(tmp_path):
    path = tmp_path / "kernel.csv"
    names = ["16k_d64_mha_full", "64k_d128_mha_packed12"]
    write_sample(path, names[:1], rate=100)
    write_sample(path, names[:1], ("hopper", "cudnn", "in_tree"))
    write_sample(path, names[1:], ("hopper",))
    header, _, *lines = kernel.make_table(harness.newest_rows(path), select(KERNEL_DEFAULT)).splitlines()
    assert header.startswith("| case | forward: ours | cuDNN | tokamax | in-tree | ours / cuDNN | backward: ours |")
    assert lines == [
        "| 16k_d64_mha_full | 400 | 320 | – | 400 | 1.25 | 200 | 160 | – | 200 | 1.25 |",
        "| 64k_d128_mha_packed12 | 400 | – | – | – | – | 200 | – | – | – | – |",
    ]


def test_the_command_prints_the_table_without_measuring(tmp_path, monkeypatch, capsys):
    write_sample(tmp_path / "kernel.csv", ["16k_d64_mha_full"])
    monkeypatch.setattr("sys.argv", ["kernel", "--table", "--out", str(tmp_path / "kernel.csv"), "--cases", "*_d64_*"])
    kernel.main()
    assert capsys.readouterr().out.count("\n") == 3


def test_the_picture_draws_each_implementation_and_the_bound(tmp_path):
    path = tmp_path / "kernel.csv"
    write_sample(path, [case.name for case in select(["*_d128_mha_causal"])], ("hopper", "cudnn", "tokamax"))
    figure = plot.draw_kernels(harness.newest_rows(path))
    forward = figure.axes[1]
    assert [len(line.get_xdata()) for line in forward.lines] == [8, 8, 8, 2]
    assert list(forward.lines[0].get_xdata()) == list(cases.TOKENS) and forward.lines[-1].get_ydata()[0] == 700
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours", "cuDNN", "tokamax", "matrix product"]
    assert not figure.axes[0].lines
    figure.savefig(tmp_path / "kernel.png", dpi=40)
    assert (tmp_path / "kernel.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_attention_shows_the_share_of_the_bound_of_the_rows_on_two_gpus(tmp_path):
    common = {"benchmark": "attention", "case": "32k_d128_gqa_causal", "mode": "forward_backward"}
    rows = [
        common
        | {"implementation": name, "workers": workers, "p20": seconds, "p50": seconds, "p80": seconds, "bound": 1.0}
        for name, workers, seconds in (("balanced", 2, 1.25), ("torch_cp", 2, 2.0), ("balanced", 1, 1.0))
    ]
    harness.write_rows(tmp_path / "attention.csv", rows)
    figure = plot.draw_attention(harness.newest_rows(tmp_path / "attention.csv", num_workers=2))
    ours, theirs, bound = figure.axes[3].lines
    assert (ours.get_xydata().tolist(), theirs.get_xydata().tolist()) == ([[32768, 0.8]], [[32768, 0.5]])
    assert set(bound.get_ydata()) == {1} and all(len(axes.lines) == 1 for axes in figure.axes[:3])


def test_every_row_of_the_results_has_all_fields():
    for path in harness.RESULTS.glob("*.csv"):
        with path.open() as file:
            assert all(list(row) == list(harness.FIELDS) and all(row.values()) for row in csv.DictReader(file)), (
                path.name
            )


@pytest.mark.parametrize("kind", block_sizes.ALL_KINDS)
def test_a_tuned_case_is_one_for_which_its_entry_is_looked_up(kind):
    for tokens in (100, 16384, 2**17):
        case = tune.make_case(("forward", 64, "float16", kind), tokens, heads=16)
        inputs = jax.eval_shape(lambda case=case: kernel.random_inputs(case, "float16"))
        mask = kernel.operands(case, inputs, inputs.q)[2]
        assert kind in (mask.kind, "short") and inputs.q.dtype == jnp.float16
        assert block_sizes.forward_kind(mask, 64, case.N, case.T, case.T) == kind or tokens == 100
        assert case.documents == () or (sum(case.documents), case.documents[0]) == (tokens, min(tokens, 4300))


def test_the_entry_of_the_table_is_kept_unless_another_is_two_percent_faster():
    entry, other, third = ForwardBlocks(), ForwardBlocks(stages=3), ForwardBlocks(stages=4)
    assert tune.winner(entry, {entry: 1.01, other: 1.0, third: 1.005}) == entry
    assert tune.winner(entry, {entry: 1.03, other: 1.0, third: 0.99}) == third
    assert tune.winner(entry, {other: 1.0, third: 1.005}) == other


def test_tuning_prints_a_line_for_each_case_and_writes_what_the_kernels_then_find(tmp_path, monkeypatch, capsys):
    """A candidate that raises costs a line, and where all do nothing is written: the table holds."""
    key, broken = ("backward", 64, "bfloat16", "causal"), ("forward", 64, "bfloat16", "causal")
    entry = TABLE[key]
    too_large, other = dataclasses.replace(entry, stages=9), dataclasses.replace(entry, staging=7)

    def forward(*arguments, blocks=None):
        if blocks is not None:
            raise ValueError("forward\nblocks")
        return xla.forward(*arguments)

    def backward(*arguments, blocks):
        if blocks == too_large:
            raise ValueError("9 stages")
        return xla.backward(*arguments)

    monkeypatch.setitem(kernel.IMPLEMENTATIONS, "hopper", BlockAttention(forward, backward))
    monkeypatch.setitem(CANDIDATES, ("backward", 64), (too_large, other))
    monkeypatch.setitem(CANDIDATES, ("forward", 64), ())
    monkeypatch.setattr(harness, "TURN", 1e-4)
    monkeypatch.setattr(tune, "winner", lambda entry, seconds: list(seconds)[-1])
    path = tmp_path / "block_sizes.json"
    tune.tune([key, broken], 60, 2, path, "hopper")
    left_out, rates, failed, use = capsys.readouterr().out.splitlines()
    assert left_out == f"{tune.title(key)}  stages=9 left out, ValueError: 9 stages"
    assert rates.split() == ["backward", "64", "bfloat16", "causal", "0", "table", "0*", "staging=7"]
    assert failed == f"{tune.title(broken)}  table left out, ValueError: forward blocks"
    assert f"{block_sizes.FILE_VARIABLE}={path}" in use and f"{block_sizes.FILE_VARIABLE}=" in tune.__doc__
    monkeypatch.setenv(block_sizes.FILE_VARIABLE, str(path))
    assert block_sizes.find(*key) == other
    assert block_sizes.find(*broken) == TABLE[broken]


def test_an_unknown_entry_of_a_file_of_block_sizes_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "block_sizes.json"
    block_sizes.write(path, "hopper", {("forward", 80, "bfloat16", "causal"): ForwardBlocks()})
    monkeypatch.setenv(block_sizes.FILE_VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"block_sizes\.json: no entry 'forward 80 bfloat16 causal' of hopper"):
        block_sizes.find("forward", 128, jnp.bfloat16, "full")


def test_an_unknown_field_of_a_file_is_refused_with_those_that_there_are(tmp_path, monkeypatch):
    path = tmp_path / "block_sizes.json"
    path.write_text('{"hopper": {"forward 128 bfloat16 causal": {"kyes": 64}}}')
    monkeypatch.setenv(block_sizes.FILE_VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"has the fields \['kyes'\], must be some of .*'keys'"):
        block_sizes.find("forward", 128, jnp.bfloat16, "full")


@pytest.mark.parametrize("direction, head_dim", CANDIDATES)
def test_every_candidate_lowers_for_an_h200_and_fits_in_shared_memory(direction, head_dim):
    key = (direction, head_dim, "bfloat16", "causal")
    case = tune.make_case(key, 16384, heads=16)
    inputs = jax.eval_shape(lambda: kernel.random_inputs(case))
    functions = tune.make_functions(case, key, "hopper")
    assert functions.keys() == {TABLE[key], *CANDIDATES[direction, head_dim]}
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for function in (function for blocks, function in functions.items() if blocks != TABLE[key]):
            text = jax.jit(function).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
            assert f"hopper_{direction}" in text


def test_tuning_without_a_gpu_that_fits_is_refused_in_one_line(monkeypatch, capsys):
    def refuse(*_, **__):
        raise ValueError("hopper needs a GPU")

    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setattr(tune, "which_implementation", refuse)
    with pytest.raises(SystemExit):
        tune.main()
    assert capsys.readouterr().err.endswith("error: hopper needs a GPU\n")


def test_the_assemblers_report_is_read_and_must_be_there():
    text = """ptxas info    : (C7519) warpgroup.arrive is injected in around line 1684
        ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized
        104 bytes stack frame, 96 bytes spill stores, 120 bytes spill loads"""
    assert assemble.read(text) == (96, {"C7513"})
    with pytest.raises(ValueError, match="printed no report: no such symbol"):
        assemble.read("no such symbol")


@pytest.mark.parametrize("direction", assemble.DIRECTIONS)
def test_there_is_one_module_to_assemble_for_each_entry(direction):
    key = (direction, 64, "bfloat16", "segments")
    (module,) = assemble.modules(key, TABLE[key])
    assert module.startswith(b"ML")  # MLIR's bytecode


def test_ulysses_around_the_kernel_of_others_computes_the_same():
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (1, 128, heads, 16)) for key, heads in zip(keys, (8, 4, 4, 8), strict=True)]
    whole = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    both = lambda attend, q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout)
    gradients = jax.jit(functools.partial(both, attention.ulysses(mesh, whole)))(*arrays)
    for gradient, wanted in zip(gradients, both(whole, *arrays), strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-5)


def test_a_code_is_told_in_the_first_eighth_and_asked_for_in_the_last_half_of_each_other():
    rows = far.with_codes(np.arange(2000) % 256, 50, seed=0)
    is_code = rows >= far.FIRST_CODE
    assert is_code[:, : far.SIZE].all() and (rows[is_code].reshape(50, -1) == rows[:, :1]).all()
    asked, places = np.nonzero(rows == far.QUESTION)
    assert is_code[asked, places + 1].all() and (is_code[:, far.SIZE :].sum(axis=1) == 7).all()
    assert sorted(set((places + 1) // far.SIZE)) == list(range(1, 8))
    assert far.is_cut(far.LENGTH)[places + 1].all() and far.is_cut(far.LENGTH)[places].all()


def test_what_is_far_shows_in_rows_and_in_the_picture(tmp_path):
    """A reader that knows an answer once it has seen more than an eighth of the row, and guesses before."""
    losses = lambda batch: np.where(
        batch["labels"] == -1, 0, np.where(np.arange(batch["labels"].shape[1]) < far.SIZE, 4.0, 1.0)
    )
    stream = far.with_codes(np.arange(2000) % 256, 3, seed=0)
    rows = Rows(stream.reshape(-1), far.LENGTH)
    curves = {name: far.evaluate(losses, [rows[i] for i in range(3)], name) for name in ("text", "code")}
    assert curves["code"].is_scored.sum() == 3 * 7
    made = [row for name, of in curves.items() for row in far.to_rows(name, of)]
    assert [(row["case"], row["mode"], row["metric"], row["p50"]) for row in made] == [
        (f"512_tiny_{name}", *figure)
        for name in ("text", "code")
        for figure in (("full", "loss", 1.0), ("cut_to_64", "loss", 4.0), ("full", "gain", 3.0))
    ]
    far.draw(curves).savefig(tmp_path / "far.png")
    assert (tmp_path / "far.png").stat().st_size > 10_000


def test_every_case_of_a_training_step_is_a_configuration_that_works():
    cases = [case for cases in train_step.SETS.values() for case in cases]
    for case in cases:
        assert case.config(2).llama.num_hidden_layers == case.layers or case.layers is None
    assert len({case.name for case in cases}) > 12
    cut = train_step.Case.parse("llama-2h@8:64:megatron")
    assert (cut.name, cut.seq_len, cut.remat) == ("llama-2h@8_64k", 65536, "attention")
    assert cut.config(2).llama.num_hidden_layers == 8


def test_the_papers_tables_are_what_the_command_prints_and_its_seconds_near_the_published():
    document = paper.DOCUMENT.read_text()
    assert tables.update(document, paper.make_tables()) == document, "run python -m benchmarks.paper --write"
    errors = {
        system: [abs(x.error) for x in paper.step_cells() if x.system == system] for system in ("Megatron", "DFA")
    }
    assert max(errors["DFA"]) < 0.15 and sorted(errors["Megatron"])[-2] < 0.07 and max(errors["Megatron"]) < 0.12
    assert all(abs(cell.error) < 0.07 for cell in paper.rival_cells() if cell.system == "Ulysses")
    assert paper.longest("balanced", paper.model_of("2H"), 16, 40e9) == 8 * paper.longest(
        "megatron-dp", paper.model_of("2H"), 16, 40e9
    )
