"""What shows only after the command line is read, such as in the data: exit code 2 and one line, soon."""

import json
import os
import subprocess
import sys
import time
import types

import jax
import make_huggingface_logits as reference
import numpy as np
import pytest
from test_train_config import ROOT, children_seconds
from test_train_report import SMALL, devices_of

from train import llama, loop, mesh
from train.config import parse
from train.flags import InputError, MeshShape
from train.run_dir import open_run_dir

SETTINGS = SMALL[:-2]  # without --data


def write(folder, files):
    """Files by name; the content of None is a folder."""
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


TEXT = {"a.txt": "some text\n" * 50}
# Files, flags in which @ is their folder, and what the line says.
CASES = {
    "a file is empty": ({"a.txt": ""}, "--data @/a.txt", "--data @/a.txt: at least 2 tokens, found 0"),
    "a folder is empty": ({"a": None}, "--data @/a", "--data @/a: at least 2 tokens, found 0"),
    "a text is too short to predict": ({"a.txt": "a"}, "--data @/a.txt", "at least 2 tokens, found 1"),
    "one row cannot be shared": (
        {"a.txt": "ab"},
        "--data @/a.txt --eval-fraction 0.5",
        "--eval-fraction 0.5: at least 2 rows of 32 tokens, found 1 in @/a.txt",
    ),
    "evaluated data are empty": (
        TEXT | {"b.txt": ""},
        "--data @/a.txt --eval-data @/b.txt",
        "--eval-data @/b.txt: at least 2 tokens, found 0",
    ),
    "binary data are no tokens": ({"a.npy": b"\x93NUMPY\x01\x00\xff"}, "--data @/a.npy", "a readable file of tokens"),
    "a token has half its bytes": ({"a.bin": b"abc"}, "--data @/a.bin", "its size is odd"),
    "a token is outside the vocabulary": (
        {"a.bin": b"\xff\xff" * 99},
        "--data @/a.bin",
        "--data @/a.bin: tokens from 0 to 263 (--vocab-size 264), found 65535 at position 0",
    ),
    "a byte is outside the vocabulary": (
        TEXT,
        "--data @/a.txt --vocab-size 100",
        "tokens from 0 to 99 (--vocab-size 100), found 115 at position 0",
    ),
    "a line is cut": (
        {"a.jsonl": '{"text": "a"}\n\n{"text": "b'},
        "--data @/a.jsonl",
        "--data @/a.jsonl: line 3 is a JSON object with",
    ),
    "a line has no text": (
        {"a.jsonl": '{"body": "a"}\n'},
        "--data @/a.jsonl",
        "@/a.jsonl: line 1 is a JSON object with",
    ),
    "a line is binary": ({"a.jsonl": b"\x00\xff\n"}, "--data @/a.jsonl", "@/a.jsonl: line 1 is a JSON object with"),
    "a broken line in a folder": (
        {"Grüße.jsonl": "[]\n"},
        "--data @",
        "--data @/Grüße.jsonl: line 1 is a JSON object with",
    ),
    "pyarrow is missing": ({"a.parquet": b"PAR1"}, "--data @/a.parquet", "pip install 'distflash_jax[parquet]'"),
    "a folder has no tokenizer": (
        TEXT | {"t": None},
        "--data @/a.txt --tokenizer @/t",
        "--tokenizer @/t: a tokenizer.json, or a folder that holds one",
    ),
    "a tokenizer is broken": (
        TEXT | {"tokenizer.json": "{"},
        "--data @/a.txt --tokenizer @/tokenizer.json",
        "--tokenizer @/tokenizer.json: ",
    ),
    "a run-dir has another configuration": (
        TEXT,
        "--data @/a.txt --lr 0.5 --run-dir @/other",
        "--run-dir @/other: a folder of the same configuration; --data was ['README.md:1'] and is ['@/a.txt:1'],",
    ),
    "a run-dir has a broken config.json": (
        TEXT | {"run": None, "run/config.json": "{"},
        "--data @/a.txt --run-dir @/run",
        "--run-dir @/run: a folder that can be written, with a whole config.json",
    ),
    "a run-dir is below a file": (TEXT, "--data @/a.txt --run-dir @/a.txt/run", "--run-dir @/a.txt/run: a folder that"),
    "a run-dir cannot be made": (
        TEXT,
        "--data @/a.txt --run-dir /proc/run",
        "--run-dir /proc/run: a folder that can be",
    ),
    "nothing is there to export from": ({"m": None}, "--init-from @/m", "--init-from @/m: config.json must be a file"),
    "a rope is of another kind": (
        {
            "m": None,
            "m/config.json": json.dumps(reference.CONFIGS["qwen-2.5"] | {"rope_scaling": {"rope_type": "ntk"}}),
        },
        "--init-from @/m",
        "--init-from @/m: ",
    ),
}


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Runs the command on the devices that the tests have; returns the one line it ends with, @ for the folder."""
    monkeypatch.setattr(loop, "make_mesh", lambda shape, _: devices_of(shape))
    monkeypatch.setattr(loop.xla_flags, "apply", lambda flags: None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    def run(*arguments):
        assert llama.main([word.replace("@", str(tmp_path)) for word in arguments]) == 2
        out, err = capsys.readouterr()
        line = err.splitlines()[-1]
        assert out == "" and line.startswith("error: --")
        return line.replace(str(tmp_path), "@"), len(err.splitlines())

    return run


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_read_is_refused_in_one_line_before_anything_is_compiled(name, tmp_path, refusal, monkeypatch):
    files, flags, message = CASES[name]
    write(tmp_path, files)
    if "--run-dir @/other" in flags:
        open_run_dir(parse([*SMALL, "--run-dir", str(tmp_path / "other")]))
    own = [] if "--run-dir" in flags else ["--run-dir", "@/run"]
    settings = ["--mesh", "seq=2", "--seq-len", "32"] if "--init-from" in flags else SETTINGS
    monkeypatch.setattr(loop, "build_program", None)
    start = time.process_time()
    line, num_lines = refusal(*settings, *flags.split(), *own)
    assert message in line
    assert num_lines == 1
    assert time.process_time() - start < 3
    assert "--run-dir" in flags or not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: path.write_bytes(b"\xff" * 100), "must be a whole safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "must be a whole safetensors file"),
        (lambda path: path.unlink(), "safetensors"),
    ],
)
def test_broken_weights_are_refused_in_one_line(damage, message, tmp_path, refusal):
    model = tmp_path / "model"
    reference.write_model(model, reference.CONFIGS["qwen-2.5"])
    damage(sorted(model.glob("*.safetensors"))[0])
    np.save(tmp_path / "a.npy", np.ones(64, np.int32))
    flags = ["--mesh", "seq=2", "--seq-len", "32", "--init-from", "@/model", "--data", "@/a.npy", "--run-dir", "@/run"]
    assert message in refusal(*flags)[0]


@pytest.mark.parametrize(
    "found, platform, advice, message",
    [
        (
            "gpu",
            "auto",
            None,
            "--mesh data=1,seq=8: as many devices as there are, found 2 x H200; --mesh seq=2 would fit",
        ),
        (
            "cpu",
            "auto",
            "make cuda13",
            "--platform auto: with the NVIDIA GPU of this machine, which JAX lacks; make cuda13",
        ),
        (None, "cuda", "make cuda13", "--platform cuda: cpu or auto, as JAX finds no cuda device; make cuda13"),
        (None, "cuda", None, "--platform cuda: cpu or auto, as JAX finds no cuda device"),
    ],
)
def test_devices_that_are_not_there_are_refused(found, platform, advice, message, monkeypatch):
    def devices():
        if found is None:
            raise RuntimeError("Unknown backend\nin lines")
        return [types.SimpleNamespace(platform=found, device_kind="H200", process_index=0, id=0)] * 2

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(mesh, "cuda_advice", lambda: advice)
    with pytest.raises(InputError) as refusal:
        mesh.make_mesh(MeshShape(seq=8), platform)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "plugins, advice", [([], "make cuda13, or pip install 'distflash"), (["xla_cuda13"], "JAX's CUDA")]
)
def test_the_advice_on_cuda_follows_what_is_installed(plugins, advice, monkeypatch):
    monkeypatch.setattr(mesh, "has_nvidia_gpu", lambda: False)
    assert mesh.cuda_advice() is None
    monkeypatch.setattr(mesh, "has_nvidia_gpu", lambda: True)
    named = [types.SimpleNamespace(name=name) for name in plugins]
    monkeypatch.setattr(mesh.importlib.metadata, "entry_points", lambda group: named)
    assert mesh.cuda_advice().startswith(advice)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--platform cpu --run-dir /proc/run", "--run-dir /proc/run: a folder that can be written"),
        ("--platform cuda", "--platform cuda: cpu or auto, as JAX finds no cuda device"),
    ],
)
def test_the_command_refuses_within_seconds(flags, message):
    start = children_seconds()
    words = [sys.executable, "-m", "train.llama", *SETTINGS, *flags.split()]
    child = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (child.returncode, child.stdout, child.stderr.count("\n")) == (2, "", 1)
    assert message in child.stderr
    # Of a processor, two or three as a rule: JAX is imported.
    assert children_seconds() - start < 8
