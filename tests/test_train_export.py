"""--init-from and train.export: a Hugging Face model into the trainer and out of it, unchanged and extended."""

import json
import shutil

import jax
import make_huggingface_logits as reference
import numpy as np
import pytest
from test_models_huggingface import read_independently

from models import config_json
from train import data, export
from train.checkpoint import Checkpoints
from train.config import model_of, parse, settings_of
from train.flags import InputError
from train.loop import _imported, _resolve, _tell_of_guessing, build_program
from train.mesh import make_mesh
from train.run_dir import open_run_dir

FLAGS = ["--mesh", "data=2,seq=4", "--platform", "cpu", "--seq-len", "64"]


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """(folder with a model, run-dir with the checkpoint of a run that began with it and made no step)."""
    folder = tmp_path_factory.mktemp("export")
    model, run_dir = folder / "model", folder / "run"
    reference.write_model(model, reference.CONFIGS["qwen-2.5"])
    for name in ("tokenizer.json", "merges.txt"):
        (model / name).write_text(name)
    config = parse([*FLAGS, "--init-from", str(model), "--run-dir", str(run_dir)])
    mesh = make_mesh(config.mesh, "cpu")
    config = _resolve(config, mesh)
    assert config.lr == 2e-5
    program = build_program(config, mesh)
    state = _imported(model, program, program.init)
    checkpoints = Checkpoints(open_run_dir(config) / "checkpoints")
    checkpoints.save(5, state, {})
    checkpoints.close()
    return model, run_dir


@pytest.fixture
def copies(began, tmp_path):
    """The same, to be changed."""
    return tuple(shutil.copytree(folder, tmp_path / folder.name) for folder in began)


def test_an_untouched_model_leaves_the_trainer_as_it_came(began, tmp_path, capsys):
    model, run_dir = began
    assert export.main([str(run_dir), str(tmp_path / "out")]) == 0
    assert "step 5, 70,208 parameters in float32, 1 file(s)" in capsys.readouterr().out
    assert read_independently(tmp_path / "out") == read_independently(model)
    assert config_json.read(tmp_path / "out") == config_json.read(model)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in model.iterdir())
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges.txt"


def test_a_longer_context_is_in_the_export(copies, tmp_path):
    _, run_dir = copies
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(settings | {"rope_scaling": "yarn:32", "rope_theta": 5e6}))
    export.export(run_dir, tmp_path / "out")
    content = config_json.read(tmp_path / "out")
    assert (content["rope_theta"], content["max_position_embeddings"]) == (5e6, 32 * 4096)
    assert content["rope_scaling"]["original_max_position_embeddings"] == 4096


def test_the_export_follows_the_checkpoint_where_the_folder_that_it_began_from_is_gone(copies, tmp_path, capsys):
    model, run_dir = copies
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(settings | {"init_from": "/nowhere"}))
    export.export(run_dir, tmp_path / "out")
    assert "no tokenizer" in capsys.readouterr().out
    assert read_independently(tmp_path / "out") == read_independently(model)


def test_a_model_that_knows_nothing_of_the_data_is_told_of(capsys):
    _tell_of_guessing(3.0, 32000)
    assert capsys.readouterr().err == ""
    _tell_of_guessing(9.9, 32000)
    assert "the first loss, 9.90, is near 10.37, that of a guess among 32,000 tokens" in capsys.readouterr().err


def test_a_run_outlives_the_folder_that_it_began_from_and_refuses_another(began, tmp_path):
    model = shutil.copytree(began[0], tmp_path / "model")
    flags = [*FLAGS, "--init-from", str(model), "--run-dir", str(tmp_path / "run")]
    first = parse(flags)
    open_run_dir(first)
    shutil.rmtree(model)
    assert parse(flags).llama == first.llama
    open_run_dir(parse(flags))
    reference.write_model(model, reference.CONFIGS["qwen-3"])
    with pytest.raises(InputError, match=r"^--init-from .*model: the config.json with which the run in .* began$"):
        open_run_dir(parse(flags))


def test_a_run_of_a_preset_is_exported_too(tmp_path):
    flags = ["--hidden-size", "16", "--num-hidden-layers", "1", "--intermediate-size", "16", "--head-dim", "4"]
    config = parse([*FLAGS, *flags, "--rope-theta", "3e5", "--run-dir", str(tmp_path / "run")])
    shapes = jax.tree.map(
        lambda x: np.ones(x.shape, x.dtype),
        build_program(_resolve(config, make_mesh(config.mesh, "cpu")), make_mesh(config.mesh, "cpu")).state_struct,
    )
    checkpoints = Checkpoints(open_run_dir(config) / "checkpoints")
    checkpoints.save(1, jax.tree.map(jax.numpy.asarray, shapes), {})
    checkpoints.close()
    export.export(tmp_path / "run", tmp_path / "out")
    content = config_json.read(tmp_path / "out")
    assert config_json.from_json(content) == config.llama
    assert (content["model_type"], content["torch_dtype"]) == ("llama", "bfloat16")
    assert {dtype for dtype, _, _ in read_independently(tmp_path / "out").values()} == {"BF16"}


def test_what_cannot_be_exported_is_refused_in_one_line(copies, tmp_path, capsys):
    _, run_dir = copies
    (tmp_path / "there").mkdir()
    shutil.rmtree(run_dir / "checkpoints" / "5" / "state")
    cases = {
        (run_dir, tmp_path / "there"): "there: a name for a new folder",
        (tmp_path, tmp_path / "out"): "a folder with the config.json of a run",
        (run_dir, tmp_path / "out"): "a whole checkpoint 5",
    }
    for (source, target), message in cases.items():
        assert export.main([str(source), str(target)]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(InputError, match="a folder with a checkpoint"):
        export.export(run_dir, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_checkpoint_of_another_model_is_not_exported(copies, tmp_path):
    _, run_dir = copies
    settings = json.loads((run_dir / "config.json").read_text())
    origin = settings["origin"] | {"num_hidden_layers": 3}
    (run_dir / "config.json").write_text(json.dumps(settings | {"origin": origin}))
    with pytest.raises(InputError, match=r"params\.layers\.down_proj is float32\[2,96,64\] in its step 5 and float32"):
        export.export(run_dir, tmp_path / "out")


def test_the_weights_are_checked_against_the_config_before_the_run_begins(began, tmp_path):
    model = shutil.copytree(began[0], tmp_path / "model")
    content = config_json.read(model)
    (model / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 3}))
    config = parse([*FLAGS, "--init-from", str(model), "--run-dir", str(tmp_path / "run")])
    mesh = make_mesh(config.mesh, "cpu")
    program = build_program(_resolve(config, mesh), mesh)
    with pytest.raises(
        InputError, match=r"^--init-from .*model: model\.layers\.2\..* must be in the safetensors files$"
    ):
        _imported(model, program, program.init)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "32"], "--hidden-size 32: no --hidden-size, which config.json decides"),
        (["--qk-norm", "false", "--vocab-size", "9"], "no --qk-norm, which config.json decides"),
    ],
)
def test_flags_do_not_change_the_architecture_of_a_model_that_is_there(began, flags, message):
    with pytest.raises(InputError, match=message):
        parse([*FLAGS, "--init-from", str(began[0]), *flags])


def test_flags_extend_the_context_of_a_model_that_is_there(began):
    flags = [*FLAGS, "--init-from", str(began[0])]
    extended = parse([*flags, "--rope-scaling", "linear:4"]).llama
    assert (extended.rope_scaling.factor, extended.max_position_embeddings) == (4, 4 * 4096)
    flags[flags.index("--seq-len") + 1] = "8192"
    longer = parse([*flags, "--rope-theta", "8e6"]).llama
    assert (longer.rope_theta, longer.max_position_embeddings) == (8e6, 8192)
    both = parse([*flags, "--rope-theta", "8e6", "--rope-scaling", "yarn:4"]).llama
    assert both.max_position_embeddings == 4 * 4096


def test_the_model_of_saved_settings_is_that_of_the_flags(tmp_path):
    config = parse(["--rope-scaling", "yarn:8", "--qkv-bias", "true", "--run-dir", str(tmp_path)])
    open_run_dir(config)
    assert model_of(json.loads((tmp_path / "config.json").read_text())) == config.llama


def test_a_run_may_be_older_than_a_setting_but_not_have_a_model_that_is_no_more():
    settings = settings_of(parse([]))
    newest = {name: value for name, value in settings.items() if name != "rope_scaling"}
    assert model_of(newest) == model_of(settings)
    with pytest.raises(InputError, match=r"^--model llama-0: one of tiny, llama-7b, "):
        model_of(settings | {"model": "llama-0"})


def test_text_is_read_with_the_tokenizer_of_the_model_that_a_run_begins_with(copies, tmp_path):
    model, _ = copies
    (tmp_path / "data.txt").write_text("words")
    config = parse([*FLAGS, "--init-from", str(model), "--data", str(tmp_path / "data.txt")])
    assert data._tokenizer_of(config) == model
    (model / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"^--init-from .*model: tokenizer.json in it, or --tokenizer, to read text$"):
        data._tokenizer_of(config)
    np.save(tmp_path / "tokens.npy", np.arange(100))
    config = parse([*FLAGS, "--init-from", str(model), "--data", str(tmp_path / "tokens.npy")])
    assert data._tokenizer_of(config) is None
