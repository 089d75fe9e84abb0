"""train.config, train.run_dir: what the command line means, what it refuses in one line, and who owns a run-dir."""

import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from models.config import PRESETS
from models.rope import Llama3RopeScaling
from train import llama
from train.config import Config, parse
from train.flags import InputError, MeshShape, Source, StepRange
from train.run_dir import default_run_dir, open_run_dir

ROOT = Path(__file__).parent.parent
REFUSED = [
    ("--steps abc", "--steps abc: a whole number from 1 to 2147483647"),
    ("--steps=0", "--steps 0: a whole number from 1 to 2147483647"),
    ("--steps 3.5", "--steps 3.5: a whole number from 1 to 2147483647"),
    ("--steps", "--steps: a value after the flag"),
    ("--steps inf", "--steps inf: a whole number from 1 to 2147483647"),
    ("--steps 99999999999", "--steps 99999999999: a whole number from 1 to 2147483647"),
    ("--steps 3 --seed 1 --steps=4", "--steps: once, found 2 times; --data alone may be repeated"),
    ("--seq_len 64 --seq-len 64", "--seq-len: once, found 2 times"),
    ("--lr inf", "--lr inf: a finite number above 0"),
    ("--lr=-1e-4", "--lr -1e-4: a finite number above 0"),
    ("--clip-norm 1,5", "--clip-norm 1,5: a finite number above 0"),
    ("--batch-size -1", "--batch-size -1: a whole number from 1 to 2147483647"),
    ("--warmup-steps -1", "--warmup-steps -1: a whole number from 0 to 2147483647"),
    ("--lr nan", "--lr nan: a finite number above 0"),
    ("--lr 0", "--lr 0: a finite number above 0"),
    ("--seed 2147483648", "--seed 2147483648: a whole number from 0 to 2147483647"),
    ("--save-every 0", "--save-every 0: steps such as 500, or a time such as 90s, 10m or 1h"),
    ("--save-every 10d", "--save-every 10d: steps such as 500, or a time"),
    ("--keep 0", "--keep 0: a whole number from 1"),
    ("--accept lrr", "--accept lrr: names of settings, perhaps lr"),
    ("--remat half", "--remat half: one of attention, projections, offload, offload-all, layer, none\n"),
    (
        "--remat offlaod",
        "--remat offlaod: one of attention, projections, offload, offload-all, layer, none; perhaps offload\n",
    ),
    ("--strategy zigzg", "--strategy zigzg: one of auto, balanced, balanced_unsplit, ring, "),
    ("--platform tpu", "--platform tpu: one of auto, cpu, cuda"),
    ("--dtype float16", "--dtype float16: one of float32, bfloat16"),
    ("--model gpt", "--model gpt: one of tiny, "),
    ("--model lama-7b", "llama-100m; perhaps llama-7b"),
    ("--log wandbb", "--log wandbb: one of wandb, trackio; perhaps wandb"),
    ("--hidden-size x", "--hidden-size x: a whole number from 1 to 2147483647"),
    ("--rope-scaling ntk:4", "--rope-scaling ntk:4: yarn:FACTOR, linear:FACTOR, llama3:FACTOR or llama3 with a factor"),
    ("--rope-scaling llama3:x", "--rope-scaling llama3:x: yarn:FACTOR, linear:FACTOR, llama3:FACTOR or llama3"),
    ("--rope-scaling yarn", "--rope-scaling yarn: yarn:FACTOR"),
    (
        "--rope-scaling linear:0.5",
        "--rope-scaling linear:0.5: yarn:FACTOR, linear:FACTOR, llama3:FACTOR or llama3 with",
    ),
    ("--model tiny --init-from /nowhere", "--model tiny: not with --init-from /nowhere, which has a model"),
    ("--init-from /nowhere", "--init-from /nowhere: config.json must be a file of JSON"),
    ("--tie-word-embeddings yes", "--tie-word-embeddings yes: true or false"),
    ("--num-key-value-heads 3", "--num-key-value-heads 3: num_attention_heads=4 must be a multiple of"),
    ("--head-dim 7", "--head-dim 7: head_dim=7 must be even"),
    ("--mesh seq=0", "--mesh seq=0: axes data, seq and tensor, once and at least 1 each"),
    ("--mesh seq", "--mesh seq: axes data, seq and tensor"),
    ("--mesh model=2", "--mesh model=2: axes data, seq and tensor"),
    ("--mesh data=2,sqe=4", "such as data=2,seq=4, perhaps seq\n"),
    ("--mesh seq=-1", "--mesh seq=-1: axes data, seq and tensor, once and at least 1 each"),
    ("--mesh seq=２", "--mesh seq=２: axes data, seq and tensor, once and at least 1 each"),
    ("--mesh=", "--mesh : axes data, seq and tensor"),
    ("--mesh seq=2,seq=4", "--mesh seq=2,seq=4: axes data, seq and tensor, once"),
    ("--mesh tensor=4", "--mesh data=1,seq=1,tensor=4: a tensor axis that divides the model's 2 key/value heads"),
    ("--accumulate 3", "--accumulate 3: --batch-size 4 must be a multiple of it times the data axis"),
    ("--decay-steps 10", "--decay-steps 10: more than --warmup-steps 10"),
    ("--device-memory 140", "--device-memory 140: a size in GiB or GB, such as 140GiB"),
    ("--z-loss -1", "--z-loss -1: a finite number of at least 0"),
    ("--seq-len 100", "--seq-len 100: a multiple of the seq axis of --mesh data=1,seq=8"),
    ("--seq-len 4", "--seq-len 4: a multiple of the seq axis of --mesh data=1,seq=8"),
    ("--mesh data=2 --batch-size 3", "--batch-size 3: a multiple of the data axis of --mesh data=2,seq=1"),
    ("--profile-steps 5:3", "--profile-steps 5:3: FIRST:LAST with 1 <= FIRST <= LAST"),
    ("--profile-steps 0:3", "--profile-steps 0:3: FIRST:LAST with 1 <= FIRST <= LAST"),
    ("--profile-steps 3:5 --steps 4", "--profile-steps 3:5: within the steps of the run, --steps 4"),
    ("--data /nowhere", "--data /nowhere: a file or folder that exists"),
    ("--data READNE.md", "with :WEIGHT above 0, perhaps README.md\n"),
    ("--data=", "--data '': a path that is not empty"),
    (f"--data {'x' * 256}", "a path that can be looked up (File name too long)"),
    ("--data Grüße.txt", "--data Grüße.txt: a file or folder that exists"),
    ("--data /dev/null:nan", "--data /dev/null:nan: a file or folder that exists, or one with :WEIGHT above 0"),
    ("--data /dev/null:0", "--data /dev/null:0: a file or folder that exists, or one with :WEIGHT above 0"),
    ("--tokenizer /nowhere", "--tokenizer /nowhere: a file or folder that exists"),
    ("--tokenizer test", "--tokenizer test: a file or folder that exists, perhaps tests\n"),
    ("--init-from=", "--init-from '': a path that is not empty"),
    ("--eval-data /nowhere", "--eval-data /nowhere: a file or folder that exists"),
    ("--eval-fraction 1", "--eval-fraction 1: a number between 0 and 1"),
    ("--eval-fraction 0.1 --eval-data README.md", "--eval-fraction 0.1: either this or --eval-data, not both"),
    ("--eval-every 5", "--eval-every 5: something to evaluate, --eval-data or --eval-fraction"),
    ("--eval-batches 5", "--eval-batches 5: something to evaluate, --eval-data or --eval-fraction"),
    ("--run-dir /dev/null", "--run-dir /dev/null: a folder, or a name for a new one"),
    ("--run-dir=", "--run-dir '': a path that is not empty"),
    ("--config /nowhere", "--config /nowhere: what a run or --print-config wrote (No such file or directory)"),
    ("--config pyproject.tml", "(No such file or directory), perhaps pyproject.toml\n"),
    ("--config README.md", "--config README.md: what a run or --print-config wrote (Expecting value"),
    ("--config tests", "--config tests: what a run or --print-config wrote (Is a directory)"),
    ("--config", "--config: a value after the flag"),
    ("--dry-run=yes", "yes: a flag of this command"),
    ("--no-dry-run", "--no-dry-run: a flag of this command, perhaps --dry-run"),
    ("--größe 3", "--größe: a flag of this command, see --help"),
    ("--coordinator 10.0.0.1", "--coordinator 10.0.0.1: HOST:PORT with a port from 1 to 65535"),
    ("--coordinator a:70000", "--coordinator a:70000: HOST:PORT with a port from 1 to 65535"),
    ("--coordinator a:1", "--coordinator a:1: with --num-processes and --process-id"),
    ("--process-id 0 --num-processes 2", "--num-processes 2 --process-id 0: with --coordinator"),
    ("--num-processes 2", "--num-processes 2: with --coordinator and --process-id"),
    ("--coordinator a:1 --num-processes 2 --process-id 2", "--process-id 2: from 0 to below --num-processes 2"),
    ("--stpes 3", "--stpes: a flag of this command, perhaps --steps"),
    ("--hiden-size=3", "--hiden-size=3: a flag of this command, perhaps --hidden-size"),
    ("now", "now: a flag of this command, see --help"),
]


@pytest.mark.parametrize("line, message", REFUSED, ids=[line for line, _ in REFUSED])
def test_a_wrong_argument_exits_with_2_and_one_line_of_flag_value_and_what_is_allowed(
    line, message, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert llama.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err


def test_a_message_stays_one_line_whatever_a_value_holds(capsys):
    assert llama.main(["--data", "a\nb\x85c"]) == 2
    assert capsys.readouterr().err.startswith("error: --data a b c: a file or folder")


def test_help_and_refusals_need_no_jax():
    script = (
        "import sys; from train import llama; llama.main(['--steps', 'x']); llama.main(['--print-config']); "
        "assert sys.modules.keys().isdisjoint({'jax', 'tokenizers', 'pyarrow', 'tensorboardX'})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    "flags, code, seconds", [(["--help"], 0, 1), (["--print-config"], 0, 1), (["--lr", "0"], 2, 1)]
)
def test_an_answer_that_needs_no_jax_takes_less_than_a_second(flags, code, seconds):
    """Of a processor; others may use it meanwhile."""
    start = children_seconds()
    child = subprocess.run([sys.executable, "-m", "train.llama", *flags], capture_output=True, cwd=ROOT, timeout=60)
    assert child.returncode == code
    assert children_seconds() - start < 1.5


def test_the_reason_is_the_last_line_whatever_a_library_prints_as_python_ends():
    script = (
        "import atexit, runpy, sys; atexit.register(print, 'too late', file=sys.stderr); "
        "sys.argv = ['llama', '--steps', 'x']; runpy.run_module('train.llama', run_name='__main__')"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert child.returncode == 2
    assert child.stderr.startswith("error: --steps x: ") and child.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_fault_of_ours():
    child = subprocess.Popen(
        [sys.executable, "-m", "train.llama", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    child.stdout.close()
    assert child.communicate(timeout=60)[1] == b"error: stdout: its reader is gone\n"
    assert child.returncode == 1


def children_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def print_config(arguments, capsys):
    assert llama.main([*arguments, "--print-config"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_printed_configuration_is_complete_and_says_the_same_again(tmp_path, capsys):
    (tmp_path / "a").write_text("text")
    flags = f"--mesh data=2,seq=2 --model llama-7b --data {tmp_path}/a:0.5 --data {tmp_path}/a --rope-scaling yarn:4"
    flags += " --qk-norm true --z-loss 1e-4 --packing --eval-fraction 0.1 --seed 3 --rope-theta 123456.789"
    printed = print_config(flags.split(), capsys)
    assert (printed["lr"], printed["mesh"], printed["dtype"], printed["origin"]) == (3e-4, "data=2,seq=2", None, None)
    (tmp_path / "config.json").write_text(json.dumps(printed))
    again = ["--config", str(tmp_path / "config.json")]
    assert print_config(again, capsys) == printed
    assert dataclasses.replace(parse(again), config=None) == parse(flags.split())


def test_a_flag_takes_the_place_of_what_is_saved_of_it_and_of_its_alternative(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("text")
    flags = ["--data", f"{tmp_path}/a", "--eval-fraction", "0.1", "--steps", "5", "--hidden-size", "64", "--lr", "1"]
    open_run_dir(parse([*flags, "--run-dir", str(tmp_path)]))
    own = [f"--config={tmp_path}/config.json"]
    config = parse([*own, "--steps", "6", "--data", f"{tmp_path}/b", "--eval-data", f"{tmp_path}/b"])
    assert (config.steps, config.data, config.eval_fraction) == (6, (Source(tmp_path / "b"),), None)
    assert (config.llama.hidden_size, config.lr) == (64, 1)
    # The same settings are the same run, and with more steps they continue it.
    assert open_run_dir(parse([*own, "--steps", "9", "--run-dir", str(tmp_path)])) == tmp_path
    with pytest.raises(InputError, match=r"--lr was 1\.0 and is 2\.0; --accept lr goes on so$"):
        open_run_dir(parse([*own, "--lr", "2", "--run-dir", str(tmp_path)]))


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"step": 3}', "settings of this command, found step, perhaps steps"),
        ('{"steps": "many"}', "--steps many: a whole number"),
        ('{"mesh": {"seq": 8}}', "--mesh {'seq': 8}: axes data, seq and tensor"),
        ('{"data": [["a"]]}', r"--data \['a'\]: a file or folder that exists"),
        ("[1]", "what a run or --print-config wrote"),
        ("{", "what a run or --print-config wrote"),
        ("\udcff", "what a run or --print-config wrote"),
    ],
)
def test_a_saved_configuration_is_checked_as_flags_are(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(InputError, match=message) as refusal:
        parse(["--config", str(tmp_path / "config.json")])
    assert "\n" not in str(refusal.value)


def test_flags_become_values():
    flags = ["--mesh", "data=2,seq=4", "--batch-size=4", "--profile-steps", "3:5", "--lr", "1e-4"]
    config = parse([*flags, "--dtype", "bfloat16"])
    assert (config.mesh, config.profile_steps) == (MeshShape(2, 4), StepRange(3, 5))
    assert (config.batch_size, config.lr, config.dtype) == (4, 1e-4, "bfloat16")
    assert config.mesh.num_devices == 8


def test_data_may_be_given_again_and_with_a_weight(tmp_path):
    for name in ("a", "b:2"):
        (tmp_path / name).write_text("text")
    flags = [word for name in ("a:0.7", "b:2", "b:2:3") for word in ("--data", f"{tmp_path}/{name}")]
    a, b = tmp_path / "a", tmp_path / "b:2"
    assert parse(flags).data == (Source(a, 0.7), Source(b), Source(b, 3))
    assert parse([]).data == ()


def test_a_model_flag_replaces_one_field_of_the_preset():
    model = parse(["--model", "llama-7b", "--num-hidden-layers", "2", "--tie-word-embeddings", "true"]).llama
    assert (model.num_hidden_layers, model.tie_word_embeddings) == (2, True)
    assert model.hidden_size == PRESETS["llama-7b"].hidden_size


def test_rope_scaling_is_a_flag_that_the_run_dir_keeps(tmp_path):
    config = parse(["--rope-scaling", "llama3:4", "--run-dir", str(tmp_path)])
    assert config.llama.rope_scaling == Llama3RopeScaling(factor=4, original_max_position_embeddings=4096)
    open_run_dir(config)
    open_run_dir(config)
    with pytest.raises(InputError, match="--rope-scaling was"):
        open_run_dir(parse(["--run-dir", str(tmp_path)]))


def test_the_default_run_dir_follows_what_matters_and_nothing_else():
    first = default_run_dir(Config())
    assert first.parts[0] == "runs"
    assert first.name.startswith("tiny-")
    assert default_run_dir(parse(["--steps", "7", "--save-every", "2", "--profile-steps", "1:2"])) == first
    assert default_run_dir(Config(lr=6e-3)) == first
    assert default_run_dir(parse(["--dry-run", "--device-memory", "80GiB"])) == first
    assert default_run_dir(parse(["--coordinator", "a:1", "--num-processes", "2", "--process-id", "1"])) == first
    for line in ("--lr 1", "--seed 1", "--mesh seq=4", "--hidden-size 64", "--remat none"):
        assert default_run_dir(parse(line.split())) != first


def test_a_run_dir_accepts_its_own_configuration_again_and_more_steps(tmp_path):
    own = ["--run-dir", str(tmp_path / "run")]
    assert open_run_dir(parse(own)) == tmp_path / "run"
    open_run_dir(parse([*own, "--steps", "500", "--save-every", "3", "--profile-steps", "1:2"]))
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["steps"], saved["mesh"], saved["hidden_size"]) == (500, "data=1,seq=8", None)


def test_a_run_dir_of_another_configuration_is_refused_with_each_difference(tmp_path):
    own = ["--run-dir", str(tmp_path)]
    open_run_dir(parse(own))
    message = r"--hidden-size was None and is 64, --lr was 0\.006 and is 0\.1; --accept hidden-size,lr goes on so$"
    with pytest.raises(InputError, match=message):
        open_run_dir(parse([*own, "--lr", "0.1", "--hidden-size", "64"]))
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 6e-3


def test_a_run_may_go_on_with_what_is_accepted_and_with_another_way_to_compute_the_same(tmp_path):
    own = ["--run-dir", str(tmp_path)]
    open_run_dir(parse(own))
    open_run_dir(parse([*own, "--mesh", "data=2,seq=2", "--remat", "layer", "--accumulate", "2", "--keep", "1"]))
    with pytest.raises(InputError, match=r"; --clip-norm was 1\.0 and is 2\.0; --accept clip-norm goes on so$"):
        open_run_dir(parse([*own, "--clip-norm", "2", "--lr", "1", "--accept", "lr"]))
    open_run_dir(parse([*own, "--clip-norm", "2", "--lr", "1", "--accept", "lr,clip-norm"]))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["lr"], saved["clip_norm"], saved["mesh"]) == (1, 2, "data=1,seq=8")
    assert not {"accept", "checkpoint"} & saved.keys()


def test_processes_other_than_the_first_find_its_run_dir_and_write_nothing(tmp_path):
    config = parse(["--run-dir", str(tmp_path / "run")])
    with pytest.raises(InputError, match="a folder that all processes share"):
        open_run_dir(config, is_first=False)
    assert not (tmp_path / "run").exists()
    open_run_dir(config)
    saved = (tmp_path / "run" / "config.json").stat()
    assert open_run_dir(config, is_first=False) == tmp_path / "run"
    assert (tmp_path / "run" / "config.json").stat().st_mtime_ns == saved.st_mtime_ns


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_broken_config_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"with a whole config\.json"):
        open_run_dir(parse(["--run-dir", str(tmp_path)]))


def test_a_run_dir_that_cannot_be_made_is_refused():
    with pytest.raises(InputError, match=r"--run-dir /proc/run: a folder that can be written"):
        open_run_dir(Config(run_dir=Path("/proc/run")))
