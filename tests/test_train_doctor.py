"""train.doctor: a line for each thing that a run needs, and what to do where one is amiss."""

import jax
import pytest
from jax.sharding import AxisType

from distflash_jax import xla_flags
from train import doctor


def test_it_tells_of_everything_and_finds_nothing_amiss_here(monkeypatch, capsys):
    monkeypatch.setattr(xla_flags, "refusal", lambda name, value: None)
    monkeypatch.setattr(doctor, "FREE_DISK", 0)
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "nothing stands in the way" and all(line.startswith("ok  ") for line in lines[:-1])
    names = " ".join(line[4:18] for line in lines[:-1])
    assert all(name in names for name in ("versions", "devices", "kernel", "XLA flag", "host memory", "disk"))


@pytest.mark.parametrize(
    "name, value, advice",
    [
        ("cuda_advice", lambda: "make cuda13", "-> make cuda13"),
        ("FREE_DISK", 2**60, "-> few checkpoints fit"),
        ("PACKAGES", ("no-such-package",), "-> pip install '.[train]' in the checkout"),
    ],
)
def test_what_is_amiss_comes_with_what_to_do(name, value, advice, monkeypatch, capsys):
    monkeypatch.setattr(xla_flags, "refusal", lambda name, value: None)
    monkeypatch.setattr(doctor, "FREE_DISK", 0)
    monkeypatch.setattr(doctor, name, value)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert advice in out and out.endswith("1 of these need attention\n")


def test_a_refused_flag_is_told(monkeypatch):
    monkeypatch.setattr(xla_flags, "refusal", lambda name, value: "Unknown flag")
    assert all("refused: Unknown flag" in finding.found and finding.advice for finding in doctor.flags())


def test_the_rate_of_a_link_is_bytes_over_seconds():
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    assert 1e6 < doctor.link_rate(mesh, 1 << 20) < 1e12
