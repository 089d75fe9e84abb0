"""train.decode, train.generate, train.needle: a cache changes no token, how tokens are drawn, and the commands."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import make_huggingface_logits as reference
import numpy as np
import pytest
import tokenizers
from flax import nnx
from jax.sharding import AxisType, Mesh

from models import huggingface
from models.config import LlamaConfig
from train import decode, generate, needle
from train.checkpoint import Checkpoints
from train.config import parse
from train.data import open_data
from train.decode import Choice, Decoder, Restored, Samples, restore
from train.flags import InputError, MeshShape
from train.loss import IGNORED
from train.program import make_model
from train.run_dir import open_run_dir
from train.step import OptimizerConfig, build
from train.tokenizer import SEPARATOR, ByteTokenizer

SMALL = LlamaConfig(
    vocab_size=264,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
FLAGS = ["--hidden-size", "16", "--intermediate-size", "16", "--head-dim", "8", "--num-hidden-layers", "1"]


def make_mesh(shape: MeshShape, platform: str = "cpu") -> Mesh:
    """As `train.mesh.make_mesh`, which has to be the first use of JAX."""
    sizes = (shape.data, shape.seq, shape.tensor)
    types = (AxisType.Auto,) * 3
    return jax.make_mesh(sizes, ("data", "seq", "tensor"), types, devices=jax.devices()[: shape.num_devices])


@pytest.fixture(autouse=True)
def any_mesh(monkeypatch):
    monkeypatch.setattr(decode, "make_mesh", make_mesh)
    monkeypatch.setattr(decode.xla_flags, "apply", lambda flags: None)


def prepare(llama, shape: str, temperature=1.0):
    """(program, decoder, what makes their model) on a mesh."""
    mesh = make_mesh(MeshShape.parse(shape))
    create_model = functools.partial(make_model, llama, mesh, dtype=jnp.float32)
    decoder = Decoder(create_model, mesh, Choice(temperature))
    return build(create_model, mesh=mesh, optimizer=OptimizerConfig()), decoder, create_model


def loud_params(program):
    """Weights so large that the likeliest tokens differ by more than rounding."""
    return jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, program.init().params)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of one layer whose newest checkpoint is step 3."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    config = parse([*FLAGS, "--mesh", "seq=2", "--seq-len", "16", "--run-dir", str(folder)])
    program, _, _ = prepare(config.llama, "seq=2")
    checkpoints = Checkpoints(open_run_dir(config) / "checkpoints")
    checkpoints.save(3, program.init(), {})
    checkpoints.close()
    return folder


@pytest.mark.parametrize("shape, window", [("seq=1", None), ("data=2,seq=2,tensor=2", 4), ("seq=4", None)])
def test_greedy_tokens_from_the_cache_are_those_of_the_whole_forward(shape, window):
    llama = dataclasses.replace(SMALL, sliding_window=window)
    program, decoder, create_model = prepare(llama, shape, temperature=0)
    params, num_rows = loud_params(program), MeshShape.parse(shape).data
    graphdef = nnx.split(nnx.eval_shape(lambda: create_model(nnx.Rngs(0))))[0]

    @jax.jit
    def likeliest(params, tokens):
        model = nnx.merge(graphdef, nnx.State(params))
        return jnp.argmax(model(tokens) @ model.head, axis=-1)

    for length in (5, 1):
        prompt = np.arange(7, 7 + length)
        # Read from the whole row: a causal model's token at a place does not depend on those behind it.
        row = np.zeros((num_rows, 16), np.int32)
        row[:, :length] = prompt
        for place in range(length, 13):
            row[:, place] = likeliest(params, row)[:, place - 1]
        assert list(decoder(params, prompt, 13 - length)) == row[0, length:13].tolist()
        assert len(set(row[0, length:13])) > 3


def test_the_prompt_and_its_cache_stay_spread_over_the_workers():
    program, decoder, _ = prepare(SMALL, "seq=4")
    params = program.state_struct.params
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32, sharding=program.batch_sharding)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    prefill = decoder._prefill.lower(params, tokens, number, seed).compile()
    token, cache = prefill.output_shardings
    struct = jax.ShapeDtypeStruct((2, 1, 4096, 2, 8), jnp.float32)
    cache = tuple(struct.update(sharding=sharding) for sharding in cache)
    assert {x.sharding.shard_shape(x.shape) for x in cache} == {(2, 1, 1024, 2, 8)}
    decode = decoder._decode.lower(params, cache, jax.ShapeDtypeStruct((1,), jnp.int32, sharding=token), number, seed)
    for compiled in (prefill, decode.compile()):
        gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
        assert gathers and not any("4096" in line for line in gathers)


def drawn(choice, logits, count=200):
    keys = jax.random.split(jax.random.key(0), count)
    return jax.vmap(lambda key: choice(logits, key))(keys)[:, 0].tolist()


def test_a_token_is_drawn_from_the_likeliest():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    assert set(drawn(Choice(temperature=0), logits)) == {1}
    assert set(drawn(Choice(), logits)) == {0, 1, 2, 3}
    assert set(drawn(Choice(top_k=2), logits)) == {1, 3}
    assert set(drawn(Choice(top_k=9), logits)) == {0, 1, 2, 3}
    assert set(drawn(Choice(top_p=0.3), logits)) == {1}
    assert set(drawn(Choice(top_p=0.75), logits)) == {1, 2, 3}
    cold, warm = (drawn(Choice(temperature=temperature), logits).count(1) for temperature in (0.2, 1.0))
    assert cold > 150 > warm


def test_the_command_continues_a_text_alike_on_every_mesh(run_dir, tmp_path, capsys):
    def run(*flags):
        assert generate.main([str(run_dir), "--platform", "cpu", "--max-tokens", "6", *flags]) == 0
        return capsys.readouterr()

    out, err = run("--prompt", "def")
    assert "model     step 3 of" in err and "4 tokens of prompt" in err and "tokens/s" in err
    (tmp_path / "prompt.txt").write_text("def")
    assert run("--prompt-file", str(tmp_path / "prompt.txt"), "--mesh", "seq=4").out == out


def test_generation_stops_at_the_end_of_a_text(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(Decoder, "__call__", lambda *_, **__: iter([104, 195, 169, SEPARATOR, 104]))
    assert generate.main([str(run_dir), "--platform", "cpu", "--prompt", ""]) == 0
    out, err = capsys.readouterr()
    assert out == "hé\n" and "generated 4 tokens" in err


def test_a_hugging_face_folder_is_read_with_its_tokenizer(tmp_path):
    reference.write_model(tmp_path, reference.CONFIGS["qwen-2.5"])
    with pytest.raises(InputError, match=r"a model whose tokenizer.json is in "):
        restore(tmp_path, MeshShape(), "cpu")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 9})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    restored = restore(tmp_path, MeshShape(seq=2), "cpu")
    assert restored.tokenizer.prompt("a").tolist() == [0] and restored.tokenizer.end == {9}
    expected = huggingface.load(tmp_path, restored.program.state_struct.params)
    jax.tree.map(np.testing.assert_array_equal, restored.params, expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--prompt, --prompt-file: one of them"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt, --prompt-file: one of them"),
        (["--prompt-file", "/nowhere"], "--prompt-file /nowhere: a readable file (No such file or directory)"),
        (["--prompt", "\udc80"], "--prompt: text in UTF-8"),
        (["--prompt", "a", "--top-p", "2"], "--top-p 2: a number between 0 and 1"),
        (["--prompt", "a", "--mesh", "tensor=4"], "--mesh data=1,seq=1,tensor=4: a tensor axis that divides"),
        (["--prompt", "a", "--promt", "b"], "--promt: a flag of this command, perhaps --prompt"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(run_dir, capsys, flags, message):
    assert generate.main([str(run_dir), "--platform", "cpu", *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path, capsys):
    assert generate.main([str(tmp_path), "--prompt", "a"]) == 2
    assert generate.main(["--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert "a run with a checkpoint, or a Hugging Face model" in err and "error: RUN_DIR: to be given" in err
    assert err.count("\n") == 2


def test_samples_continue_the_beginning_of_a_row(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some words of a text")
    flags = [*FLAGS, "--mesh", "seq=2", "--sample-every", "1", "--data", str(tmp_path / "text.txt")]
    config = dataclasses.replace(parse([*flags, "--seq-len", "16"]), dtype="float32")
    mesh, opened = make_mesh(config.mesh), open_data(config, tmp_path)
    monkeypatch.setattr(
        Decoder, "__call__", lambda _, params, prompt, count, seed: iter([*prompt[:count], SEPARATOR, 1])
    )
    assert Samples(config, mesh, opened)({}) == "some wor|some wor"
    unknown = dataclasses.replace(opened, tokenizer=None)
    assert Samples(config, mesh, unknown)({}).startswith("115 111 109 101")
    with pytest.raises(InputError, match="--sample-prompt a: --tokenizer"):
        Samples(dataclasses.replace(config, sample_prompt="a"), mesh, unknown)


def test_bytes_become_text_once_a_character_is_whole():
    stream = ByteTokenizer().stream()
    assert [stream(byte) for byte in [*"aé".encode(), SEPARATOR, 263]] == ["a", "", "é", "", ""]


def test_a_fact_is_hidden_at_its_depth_and_asked_for_at_the_end():
    encode = lambda text: np.frombuffer(text.encode(), np.uint8)
    haystack = np.full(300, ord("."), np.uint8)
    texts = {}
    for depth in (0, 0.5, 1, None):
        row, count = needle.hide(encode, haystack, 200, depth, 7)
        texts[depth] = bytes(row.astype(np.uint8)).decode()
        assert len(row) == 200 and re.fullmatch(r" \d{5}", texts[depth][-count:])
    fact = re.search(r"\nThe secret number of (\w+) is( \d+)\.\n", texts[0])
    asked = f"\nThe secret number of {fact[1]} is{fact[2]}"
    assert all(text.endswith(asked) and text.count(asked) == 1 + (depth is not None) for depth, text in texts.items())
    room = 200 - len(fact[0]) - len(asked)
    assert [texts[depth].index(fact[0]) for depth in (0, 0.5, 1)] == [0, round(room / 2), room]
    with pytest.raises(InputError, match=r"--lengths 50: at least \d\d tokens"):
        needle.hide(encode, haystack, 50, 0, 7)


def test_needles_are_told_by_depth_and_length(run_dir, tmp_path, capsys):
    flags = ["--platform", "cpu", "--lengths", "96", "--depths", "0.5", "--repeats", "2", "--mesh", "data=2"]
    assert needle.main([str(run_dir), *flags, "--out", str(tmp_path / "table.png")]) == 0
    header, half, none, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["depth", "96"]
    assert re.fullmatch(r"0\.5 +0% \d\.\d\d", half) and re.fullmatch(r"none +0% \d\.\d\d", none)
    assert (tmp_path / "table.png").stat().st_size > 1000


def test_needles_that_are_written_are_counted(run_dir, monkeypatch):
    monkeypatch.setattr(Decoder, "__call__", lambda _, params, prompt, count: iter([0] * count))
    monkeypatch.setattr(Restored, "token_losses", lambda _, batch: 1.0 * (batch["labels"] != IGNORED))
    monkeypatch.setattr(needle, "hide", lambda *_: (np.array([5, 0, 0], np.int32), 2))
    settings = needle.Settings(run_dir, lengths=(3,), depths=(1,), platform="cpu")
    assert needle.measure(settings) == {(1, 3): needle.Found(1, 1), (None, 3): needle.Found(1, 1)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "63", "--mesh", "seq=2"], "--lengths 63: a multiple of the seq axis of --mesh data=1,seq=2"),
        (["--repeats", "3", "--mesh", "data=2"], "--repeats 3: a multiple of the data axis"),
        (["--depths", "2"], "--depths 2: numbers from 0 to 1"),
        (["--out", "table.jpg"], "--out table.jpg: a name that ends in .png"),
    ],
)
def test_needles_that_cannot_be_hidden_are_refused_in_one_line(run_dir, capsys, flags, message):
    assert needle.main([str(run_dir), *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
