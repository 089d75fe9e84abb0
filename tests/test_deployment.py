"""What starts the trainer elsewhere: docs/clusters.md, its SLURM script and Kubernetes job, and the Dockerfile."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from train.config import Config, parse

ROOT = Path(__file__).parent.parent
SBATCH = ROOT / "docs" / "slurm.sbatch"
KUBERNETES = ROOT / "docs" / "kubernetes.yaml"


def trained_by(words: list[str]) -> Config:
    """The configuration of a command, which has to be one of the trainer."""
    assert words[words.index("-m") + 1] == "train.llama"
    return parse(words[words.index("-m") + 2 :])


def test_every_command_of_the_page_is_one_of_the_trainer():
    lines = re.findall(r"^    (python -m train\.llama .*)$", (ROOT / "docs" / "clusters.md").read_text(), re.MULTILINE)
    configs = [trained_by(shlex.split(line)) for line in lines]
    assert [config.process_id for config in configs] == list(range(len(configs)))
    assert {config.num_processes for config in configs} == {len(configs)} == {2}
    assert len({(config.coordinator, config.mesh) for config in configs}) == 1


def test_the_slurm_script_trains_on_all_gpus_it_asks_for(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "srun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(tmp_path / "texts")}
    run = subprocess.run(["bash", SBATCH, "--steps", "7"], env=environment, capture_output=True, text=True, check=True)
    config = trained_by(run.stdout.splitlines())
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", SBATCH.read_text(), re.MULTILINE))
    assert int(asked["nodes"]) * int(asked["ntasks-per-node"]) == config.mesh.num_devices
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == str(config.mesh.seq)
    assert (config.steps, config.coordinator) == (7, None)
    assert asked["signal"].startswith("TERM@")
    without_data = subprocess.run(["bash", SBATCH], env={"PATH": environment["PATH"]}, capture_output=True, check=False)
    assert without_data.returncode != 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_accepts_the_slurm_script():
    subprocess.run(["shellcheck", "--shell=bash", SBATCH], check=True)


def test_the_kubernetes_job_is_as_many_processes_as_pods_on_all_their_gpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "texts").mkdir(parents=True)
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    assert (service["kind"], service["apiVersion"], job["kind"], job["apiVersion"]) == (
        *("Service", "v1"),
        *("Job", "batch/v1"),
    )
    # A headless service that selects the pods of the job, which name it as their subdomain.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["restartPolicy"] in ("OnFailure", "Never")

    (container,) = pod["containers"]
    (index,) = container["env"]
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == path
    count = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == count
    for number in range(count):
        words = [word.replace(f"$({index['name']})", str(number)) for word in container["command"] + container["args"]]
        config = trained_by(words)
        assert (config.num_processes, config.process_id) == (count, number)
        assert config.coordinator == f"{job['metadata']['name']}-0.{service['metadata']['name']}:1234"
        assert config.mesh.num_devices == count * container["resources"]["limits"]["nvidia.com/gpu"]

    mounted = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    (folder,) = (words[1] for words in instructions() if words[0] == "WORKDIR")
    assert mounted["runs"] == Path(folder) / "runs"
    (user,) = (words[1] for words in instructions() if words[0] == "USER")
    assert pod["securityContext"]["runAsNonRoot"] and str(pod["securityContext"]["runAsUser"]) == user


def instructions() -> list[list[str]]:
    """The Dockerfile's instructions, each as its words."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def copied() -> list[tuple[str, str]]:
    """(source, target folder or name) of every COPY."""
    return [(source, words[-1]) for words in instructions() if words[0] == "COPY" for source in words[1:-1]]


def test_the_image_is_a_plain_name_with_the_python_of_the_constraints_and_an_ordinary_user():
    names = [words[0] for words in instructions()]
    assert set(names) <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    assert names[0] == "FROM" and names.count("FROM") == 1
    assert re.fullmatch(r"python:3\.12-\w+", instructions()[0][1])
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_the_image_installs_extras_that_there_are_at_the_pinned_versions():
    (install,) = (words for words in instructions() if words[:3] == ["RUN", "pip", "install"])
    assert install[install.index("-c") + 1] == "constraints.txt"
    extras = re.fullmatch(r"\.\[(.*)\]", install[install.index("-e") + 1])
    assert extras is not None
    (default,) = (words[1].removeprefix("CUDA=") for words in instructions() if words[0] == "ARG")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for cuda in {default, "cuda12"}:
        assert set(extras[1].replace("${CUDA}", cuda).split(",")) <= known.keys()
    assert default == "cuda13"


def test_what_the_image_copies_exists_is_sent_to_docker_and_is_enough(tmp_path):
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert allowed[1] == "*"
    assert {f"!{source}" for source, _ in copied()} == {line for line in allowed if line.startswith("!")}
    for source, target in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / target)
        else:
            shutil.copy(ROOT / source, tmp_path / target)
    script = (
        "import pathlib, benchmarks.attention, distflash_jax.plot, train.doctor, train.export, train.loop\n"
        "assert pathlib.Path(train.loop.__file__).parents[1] == pathlib.Path.cwd()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60)
