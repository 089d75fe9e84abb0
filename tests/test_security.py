"""What SECURITY.md promises of a run: it runs nothing that weights, tokenizer and data hold, and listens to nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import make_huggingface_logits as reference
import pytest
import tokenizers

from train import mesh
from train.exits import Exit, Stop, one_line, tell
from train.flags import InputError

ROOT = Path(__file__).parent.parent
# Runs the command twice, the second time as a resume, and tells what no run may do: the audit events of running
# something, files of the user that are run, and sockets that listen while it reads a batch.
AUDITED = """
import json, sys, threading
from pathlib import Path

folder, *arguments = sys.argv[1:]
from train import data, llama, loop

found, sockets = set(), set()
RUNNING = "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect"

def audit(event, values):
    if event in RUNNING:
        found.add(f"{event} {values}")
    elif event == "exec" and str(getattr(values[0], "co_filename", "")).startswith(folder):
        found.add(f"{event} {values}")

def listening(_, read=data.Batches.__next__):
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                sockets.add(words[1])
    return read(_)

data.Batches.__next__ = listening
sys.addaudithook(audit)
codes = [llama.main([*arguments, "--steps", steps]) for steps in ("1", "2")]
print(json.dumps({"codes": codes, "found": sorted(found), "sockets": sorted(sockets)}))
"""
SECRETS = {"HF_TOKEN": "hf_0123456789secret", "WANDB_API_KEY": "0123456789abcdef0123", "DB_PASSWORD": "do-not-tell"}


TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.fixture
def model(tmp_path):
    """A folder of a Hugging Face model with a tokenizer and a chat template, and conversations beside it."""
    reference.write_model(tmp_path, reference.CONFIGS["qwen-3"] | {"vocab_size": 280, "num_hidden_layers": 1})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["hello world\n"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE, "auto_map": {"AutoTokenizer": "remote.Code"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "remote.py").write_text("raise SystemExit('it ran')")
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello world" * 9}]}
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    return tmp_path


@pytest.mark.timeout(300)
def test_a_run_and_its_resume_run_nothing_of_the_files_they_read_and_listen_to_nobody(model):
    flags = (
        f"--platform cpu --mesh seq=1 --seq-len 32 --init-from {model} --data {model}/chat.jsonl --run-dir {model}/run"
    )
    command = [sys.executable, "-c", AUDITED, str(model), *flags.split()]
    run = subprocess.run(command, env=os.environ | SECRETS, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert "resuming after step 1" in run.stderr
    assert run.stderr.count("that of a guess") == 1, "its weights are random"
    assert told == {"codes": [0, 0], "found": [], "sockets": []}
    written = [path.read_bytes() for path in (model / "run").rglob("*") if path.is_file()]
    assert len(written) > 5
    for text in (run.stdout.encode(), run.stderr.encode(), *written):
        assert not [name for name, secret in SECRETS.items() if secret.encode() in text]


def test_secrets_of_the_environment_are_left_out_of_errors(monkeypatch, capsys):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("PATH_TO_DATA", "a-long-path")
    message = f"no login with {' '.join(SECRETS.values())} at a-long-path"
    expected = "no login with [HF_TOKEN] [WANDB_API_KEY] [DB_PASSWORD] at a-long-path"
    assert one_line(Stop(Exit.ERROR, message)) == expected
    assert tell(ValueError(message)) == Exit.ERROR
    assert capsys.readouterr().err.endswith(f"ValueError: {expected}\n")


def test_compiled_programs_are_kept_where_nobody_else_can_write(tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(mesh.jax.config, "update", kept.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh.keep_compiled(None, "cpu")
    assert not kept
    mesh.keep_compiled(None, "cuda")
    folder = tmp_path / "distflash_jax" / "compiled"
    assert kept == {"jax_compilation_cache_dir": str(folder)} and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(
        InputError, match=r"--compile-cache .*/compiled: a folder of yours that not everybody can write"
    ):
        mesh.keep_compiled(None, "cuda")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    with pytest.raises(InputError, match=r"^JAX_COMPILATION_CACHE_DIR"):
        mesh.keep_compiled(None, "cpu")
    with pytest.raises(InputError, match=r"^--compile-cache /proc/x: a folder that can be made"):
        mesh.keep_compiled(Path("/proc/x"), "cpu")
