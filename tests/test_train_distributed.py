"""train.job, train.distributed: who takes part, and two processes of four devices against one of eight."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train import distributed
from train.config import parse
from train.flags import InputError, MeshShape
from train.job import Job, find_job
from train.mesh import by_host, make_mesh

ROOT = Path(__file__).parent.parent
SMALL = [
    *("--platform", "cpu", "--mesh", "data=2,seq=4", "--seq-len", "32", "--hidden-size", "16"),
    *("--intermediate-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2"),
    *("--num-key-value-heads", "1", "--head-dim", "8", "--warmup-steps", "2"),
]
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
INDEXED_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a cluster, and takes those of any other away."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_", "JAX_CO"))]:
        monkeypatch.delenv(name)
    return lambda variables: [monkeypatch.setenv(*item) for item in variables.items()]


@pytest.mark.parametrize(
    "variables, job",
    [
        ({}, None),
        (SLURM, Job("node007:61441", 16, 9, [1])),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, Job("node007:61441", 16, 9)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),  # a batch script, not a step
        (OPEN_MPI, Job("10.96.0.1:62624", 4, 3, [1])),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # any pod
    ],
)
def test_the_environment_says_who_takes_part(environment, variables, job):
    environment(variables)
    assert find_job(parse([])) == job


def test_flags_go_before_the_environment_and_one_process_stays_alone(environment):
    environment(SLURM)
    flags = ["--coordinator", "10.0.0.1:1234", "--num-processes", "2", "--process-id", "1"]
    assert find_job(parse(flags)) == Job("10.0.0.1:1234", 2, 1)
    assert find_job(parse(["--num-processes", "1"])) is None
    assert find_job(parse(["--coordinator", "a:1", "--num-processes", "1", "--process-id", "0"])) is None


@pytest.mark.filterwarnings("ignore:.*Kubernetes environment detected:UserWarning")
def test_an_indexed_job_whose_pods_cannot_find_each_other_is_refused(environment):
    environment(INDEXED_JOB)
    with pytest.raises(InputError, match="HOST:PORT, with --num-processes and --process-id, as JAX cannot tell them"):
        find_job(parse([]))


def test_devices_of_a_host_lie_beside_each_other_whatever_their_processes():
    devices = [SimpleNamespace(slice_index=i % 2, process_index=i, id=i) for i in range(6)]
    assert [device.id for device in by_host(devices)] == [0, 2, 4, 1, 3, 5]


def test_alone_a_process_has_the_whole_batch_and_decides_for_itself():
    sharding = NamedSharding(make_mesh(MeshShape(data=2, seq=4), "cpu"), P("data", "seq"))
    assert distributed.part_of(sharding, (4, 32)) == (slice(0, 4), slice(0, 32))
    batch = {"tokens": np.arange(128, dtype=np.int32).reshape(4, 32)}
    placed = distributed.place(batch, sharding, (4, 32))["tokens"]
    assert placed.sharding == sharding
    np.testing.assert_array_equal(distributed.gather(placed), batch["tokens"])
    assert [distributed.any_process(flag) for flag in (False, True)] == [False, True]
    assert distributed.first_alone("name", lambda: 3) == 3
    assert (distributed.num_processes(), distributed.is_first(), jax.process_count()) == (1, True, 1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def meet(process_id: int, port: int) -> subprocess.Popen:
    """A process that waits two seconds for another one."""
    script = (
        "import sys\nfrom train.job import Job, joined\nfrom train.flags import InputError\n"
        f"try:\n  with joined(Job('127.0.0.1:{port}', 2, {process_id}), seconds=2): pass\n"
        "except InputError as error: sys.exit(f'error: {error}')"
    )
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_processes_that_do_not_meet_end_with_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        children = [meet(1, free_port()), meet(0, free_port()), meet(0, taken.getsockname()[1])]
        said = [child.communicate(timeout=60)[1] for child in children]
    for line, message in zip(said, ("no answer in 2 s", "not all came in 2 s", "a free port here"), strict=True):
        assert message in line and line.startswith("error: --") and line.count("\n") == 1, line


# Two processes, of which one leaves the other alone; that would end with 0 after a minute.
FAILING = """
import os, signal, sys, time
from train import distributed, job
case, process_id, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with job.joined(job.Job(f"127.0.0.1:{port}", 2, process_id)):
    time.sleep(1)
    if process_id == 1:
        if case == "raises":
            raise ValueError("about to fail")
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    elif case == "first":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "late":
        distributed.barrier("a meeting", seconds=1)
    time.sleep(60)
"""


def test_a_process_that_fails_dies_or_is_late_ends_the_others_soon_with_one_line():
    children = {
        case: [
            subprocess.Popen(
                [sys.executable, "-c", FAILING, case, str(i), str(port)], stderr=subprocess.PIPE, text=True, cwd=ROOT
            )
            for i in (0, 1)
        ]
        for case, port in {case: free_port() for case in ("raises", "killed", "first", "late")}.items()
    }
    said = {case: [child.communicate(timeout=110)[1] for child in pair] for case, pair in children.items()}
    codes = {case: [child.returncode for child in pair] for case, pair in children.items()}
    assert codes == {"raises": [6, 1], "killed": [6, -signal.SIGKILL], "first": [-signal.SIGKILL, 6], "late": [6, 6]}, (
        said
    )
    assert said["raises"][1].endswith("ValueError: about to fail\n")
    host = socket.gethostname()
    for case, process_id, line in [
        ("raises", 0, f"error: process 1 ({host}): ValueError: about to fail; started again, the job resumes"),
        ("killed", 0, f"error: process 1 ({host}) is gone without a word"),
        ("first", 1, "error: process 0, which listens at 127.0.0.1:"),
        ("late", 0, f"error: a meeting: process 1 ({host}) did not come within 1 s; started again"),
        ("late", 1, f"error: process 0 ({host}): a meeting: process 1 ({host}) did not come within 1 s"),
    ]:
        assert said[case][process_id].splitlines()[-1].startswith(line), said[case]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the training command on a text of its own."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "text.txt").write_bytes(Path(subprocess.__file__).read_bytes())
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(run_dir: Path, *arguments: str) -> subprocess.Popen:
        flags = [*SMALL, "--data", str(folder / "text.txt"), "--run-dir", str(run_dir), *arguments]
        command = [sys.executable, "-m", "train.llama", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, **pipes, text=True, env=os.environ | cache, cwd=ROOT)

    return start


def values(out: str, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in out.splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


# Four children, of which each imports and compiles: 40 s of one core.
@pytest.mark.timeout(300)
def test_two_processes_train_as_one_and_signals_to_either_make_both_save_and_stop(start, tmp_path):
    pair_dir = tmp_path / "pair"
    job = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--process-id"]
    flags = ["--steps", "100000", "--eval-fraction", "0.02", "--eval-every", "2", "--eval-batches", "1"]
    first, second = (start(pair_dir, *flags, *job, str(i)) for i in (0, 1))
    begun = "".join(first.stdout.readline() for _ in range(4))
    second.send_signal(signal.SIGUSR1)
    while not [path for path in pair_dir.glob("checkpoints/*") if path.name.isdigit()]:
        begun += first.stdout.readline()
    second.send_signal(signal.SIGTERM)
    (out, said), (nothing, wrong) = (child.communicate(timeout=110) for child in (first, second))
    assert (first.returncode, second.returncode) == (0, 0), said + wrong
    assert nothing == ""
    assert "8 virtual CPU device(s) of 2 processes" in said

    out = begun + out
    last = max(values(out, "loss"))
    assert f"stopped after step {last} of 100000; to resume: " in said
    assert len(list((pair_dir / "checkpoints").iterdir())) == 2
    assert said.count("\ncheckpoint ") == 2 and f"\ncheckpoint {last}: state " in said
    assert len(list(pair_dir.glob("events.out.tfevents.*"))) == 1
    assert json.loads((pair_dir / "config.json").read_text())["mesh"] == "data=2,seq=4"

    flags[1] = str(last + 2)
    resumed, said = start(pair_dir, *flags).communicate(timeout=110)
    whole, _ = start(tmp_path / "alone", *flags).communicate(timeout=110)
    assert f"resuming after step {last}" in said
    for name in ("loss", "grad_norm", "eval_loss"):
        expected = values(whole, name)
        assert values(out + resumed, name) == pytest.approx(expected, rel=1e-6, abs=1e-6), name


# Saves two steps, damages what process 1 wrote of the second, and restores.
DAMAGED_IN_PART = """
import sys
import time
from pathlib import Path
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from train.checkpoint import Checkpoints
from train.distributed import is_first
from train.flags import MeshShape
from train.job import Job, joined
from train.mesh import make_mesh

folder, port, process_id = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with joined(Job("localhost:" + port, 2, process_id)):
    sharding = NamedSharding(make_mesh(MeshShape(seq=2), "cpu"), P("seq"))
    make = jax.jit(lambda step: {"x": jnp.arange(4096.0) + step}, out_shardings=sharding)
    checkpoints = Checkpoints(folder)
    assert checkpoints.prepare(make(0), copies=True)
    for step in (1, 2):
        checkpoints.save(step, make(step), {"step": step})
        checkpoints.pending.result()
    if is_first():
        (data,) = (folder / "2" / "state" / "ocdbt.process_1" / "d").iterdir()
        data.write_bytes(data.read_bytes()[:100])
    multihost_utils.sync_global_devices("damaged")
    checkpoints = Checkpoints(folder)
    step, state, position, _ = checkpoints.restore(jax.eval_shape(make, 0))
    own, expected = (x.addressable_data(0) for x in (state["x"], make(step)["x"]))
    print(step, position, bool((own == expected).all()), checkpoints.notes)
"""


def test_a_part_that_only_one_process_finds_damaged_leads_both_to_the_older_checkpoint(tmp_path):
    words = [sys.executable, "-c", DAMAGED_IN_PART, str(tmp_path / "checkpoints"), str(free_port())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen([*words, str(i)], **pipes, text=True, cwd=ROOT) for i in (0, 1)]
    (out, said), (_, wrong) = (child.communicate(timeout=110) for child in children)
    assert [child.returncode for child in children] == [0, 0], said + wrong
    assert out == "1 {'step': 1} True ['checkpoint 2 is not whole, trying an older one (in another process)']\n"
    assert [path.name for path in (tmp_path / "broken").iterdir()] == ["2"]
