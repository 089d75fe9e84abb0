"""Which flags are set, and that the installed jaxlib takes them."""

import subprocess
import sys

import pytest

from distflash_jax import xla_flags


def test_flags_of_the_user_stay():
    flags = {"xla_gpu_b": "4", "xla_gpu_a": ""}
    assert xla_flags.add(flags, "") == "--xla_gpu_b=4 --xla_gpu_a="
    assert xla_flags.add(flags, "--xla_gpu_b=1 --xla_gpu_bc=2") == "--xla_gpu_b=1 --xla_gpu_bc=2 --xla_gpu_a="


def test_copies_between_peers_are_for_one_process():
    one, many = xla_flags.choose(), xla_flags.choose(num_processes=8)
    assert set(one) - set(many) == {"xla_gpu_collective_permute_mode"} and many.items() <= one.items()


def test_flags_that_come_too_late_are_not_taken_silently(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_b=4")
    xla_flags.apply({"xla_gpu_b": "1"})  # nothing to add
    with pytest.warns(RuntimeWarning, match="set them before"):
        xla_flags.apply({"xla_gpu_a": "1"})


def test_the_installed_jaxlib_takes_every_flag():
    command = [sys.executable, "-m", "distflash_jax.xla_flags", "--check"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert child.returncode == 0, child.stdout
    assert child.stdout.count("  accepted  ") == sum(
        map(len, (xla_flags.FLAGS, xla_flags.PROFILING, xla_flags.DETERMINISTIC))
    )


def test_a_refused_flag_is_named():
    assert "Unknown flag in XLA_FLAGS: --xla_gpu_no_such=1" in xla_flags.refusal("xla_gpu_no_such", "1")
