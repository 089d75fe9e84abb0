"""train.run_dir: one run in a run-dir."""

import os
import subprocess
import sys

import pytest

from train.flags import InputError
from train.run_dir import locked


def test_a_second_run_is_told_who_has_the_run_dir_and_may_have_it_afterwards(tmp_path):
    with locked(tmp_path, print), pytest.raises(InputError, match=rf"no other run is in; process {os.getpid()} on .*"):  # noqa: SIM117
        with locked(tmp_path, print):
            pass
    with locked(tmp_path, print):
        pass


def test_the_lock_of_a_process_that_was_killed_is_nobodys(tmp_path):
    script = (
        "import pathlib, sys\nfrom train.run_dir import locked\nwith locked(pathlib.Path(sys.argv[1]), print): input()"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE)
    while not (tmp_path / "lock").exists() or not (tmp_path / "lock").read_text():
        assert child.poll() is None
    with pytest.raises(InputError, match=f"process {child.pid} on"), locked(tmp_path, print):
        pass
    child.kill()
    child.wait()
    child.stdin.close()
    with locked(tmp_path, print):
        pass


def test_a_lock_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "lock").mkdir()
    message = r"--run-dir .*: a folder whose file lock can be written \(Is a directory\)"
    with pytest.raises(InputError, match=message), locked(tmp_path, print):
        pass


def test_what_a_killed_run_left_half_written_is_removed_and_named(tmp_path):
    (tmp_path / "tokens").mkdir()
    for name in ("config.partial", "config.json", "tokens/a.12.partial", "tokens/a.int32", "tokens/a.starts.npy"):
        (tmp_path / name).touch()
    (tmp_path / "tokens" / "a.starts.12.npy").touch()
    said = []
    with locked(tmp_path, said.append):
        assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
            *("a.int32", "a.starts.npy", "config.json", "lock")
        ]
    assert len(said) == 3 and said[0] == "removed config.partial, left by a run that was killed"
