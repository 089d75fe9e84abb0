"""On GPUs: numbers, the trainer against the CPU's, and what a profile shows. `pytest --platform cuda -m gpu`."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import oracle
import pytest
from oracle import Case
from test_distflash_attention import assert_matches, attend
from test_distflash_masks import assert_equals_dense, documents
from test_distflash_remat import WITH_POLICY, arguments, network
from test_distflash_strategies import spread
from test_kernels import skip_unless_it_runs

from distflash_jax import overlap, trace, xla_flags
from pallas_kernels import triton_attention

ROOT = Path(__file__).parent.parent
TINY = ["--seq-len", "512", "--batch-size", "2", "--dtype", "float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(8, 2), (3, 1)], ids=["heads_cut", "rows_cut"])
@pytest.mark.parametrize("num_workers", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
def test_attention_and_all_gradients_equal_dense(num_workers, heads, dtype):
    assert_matches(Case(B=1, T=1501, N=heads[0], K=heads[1], H=64, dtype=dtype), attend(num_workers))


@pytest.mark.parametrize("num_workers", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
@pytest.mark.parametrize(
    "options", [{"window": 300}, {"window": 1100, "softcap": 5.0}, {"sinks": jnp.arange(4.0)}, {}], ids=str
)
def test_masks_equal_dense(num_workers, options):
    case = Case(B=1, T=1501, N=4, K=2, H=64, dtype="bfloat16")
    ids = None if "sinks" in options else documents(1501, 300, 7, 1000, 150)[None]
    attention = attend(num_workers, segment_ids=ids, **options)
    assert_equals_dense(case, attention, segment_ids=ids, error=2e-2, **options)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["ulysses", "all_gather", "zigzag"])
def test_strategies_that_are_no_table_equal_dense(strategy):
    assert_matches(Case(B=1, T=1501, N=6, K=3, H=64, dtype="bfloat16"), spread(strategy, 2))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("implementation", ["xla", "hopper", "triton"])
def test_repeats_are_bitwise_equal(implementation):
    """But for the hopper kernel's dq, whose additions come in no fixed order."""
    skip_unless_it_runs(implementation)
    arrays = oracle.inputs(Case(T=2048, N=8, H=128, dtype="bfloat16"))
    run = jax.jit(functools.partial(oracle.results, attend(2, implementation=implementation)))
    first = run(*arrays).named()
    for _ in range(5):
        again = run(*arrays).named()
        for name in first:
            if implementation != "hopper" or not name.startswith("dq"):
                assert bool((first[name] == again[name]).all()), name


def compile_on_two(compiler_options, **options):
    """(both passes of deterministic attention on two GPUs, arrays)."""
    arrays = oracle.inputs(Case(B=1, T=4096, N=8, K=4, H=128, dtype="bfloat16"))[:4]
    attention = attend(2, deterministic=True, **options)

    def both(q, k, v, dout):
        (out, lse), pull_back = jax.vjp(attention, q, k, v)
        return out, *pull_back((dout, lse))

    return jax.jit(both, compiler_options=compiler_options).lower(*arrays).compile(), arrays


# As xla_flags has them, with the name that compiler_options has for "peer".
OVERLAPPING = xla_flags.choose() | {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


@pytest.mark.gpu(2)
def test_copies_between_peers_are_bitwise_those_of_the_default_transport():
    (run, arrays), (run_default, _) = compile_on_two(OVERLAPPING), compile_on_two(None)
    same = jax.jit(lambda a, b: jnp.array([(x == y).all() for x, y in zip(a, b, strict=True)]))
    for _ in range(200):
        results = run(*arrays)
        assert same(results, run_default(*arrays)).all()
        out, dq, dk, dv = ((x / jnp.abs(x).max()).astype(x.dtype) for x in results)
        arrays = out, dk, dv, dq


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["balanced", "ring"])
def test_every_message_travels_behind_a_kernel(strategy):
    """In the order in which the compiled program runs; of the ring's gradients the last must return at the end."""
    text = compile_on_two(OVERLAPPING, strategy=strategy)[0].as_text()
    found = overlap.messages(overlap.order(text))
    assert found and not any(message.is_synchronous for message in found)
    assert all(message.is_hidden for message in found) == (strategy == "balanced")


@pytest.mark.gpu(1)
def test_offloaded_attention_outputs_leave_the_device():
    memory = {
        name: jax.jit(jax.grad(network(1, WITH_POLICY[name]))).lower(*arguments(T=16384)).compile().memory_analysis()
        for name in ("save", "offload")
    }
    kept = 3 * 16384 * 4 * (8 + 1) * 4  # layers x tokens x heads x (out, lse) x bytes
    assert memory["save"].temp_size_in_bytes - memory["offload"].temp_size_in_bytes > 0.5 * kept
    assert memory["offload"].host_temp_size_in_bytes >= kept


def losses(run_dir: Path, *flags: str, kernel: str | None = None) -> list[float]:
    command = [sys.executable, "-m", "train.llama", *TINY, "--steps", "20", "--run-dir", str(run_dir), *flags]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    if kernel is not None and triton_attention.is_installed():
        assert f"kernel    {kernel}: " in child.stderr
    return [json.loads(line)["loss"] for line in child.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_workers", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
def test_the_trainers_losses_are_the_cpus(num_workers, tmp_path):
    mesh = ["--mesh", f"seq={num_workers}"]
    on_gpu = losses(tmp_path / "gpu", *mesh, "--platform", "cuda", kernel="triton")  # of float32, if it is there
    on_cpu = losses(tmp_path / "cpu", *mesh, "--platform", "cpu")
    assert on_gpu == pytest.approx(on_cpu, rel=2e-3)
    assert on_gpu[-1] < on_gpu[0] - 1


LARGE = ["--platform", "cuda", "--mesh", "seq=1", "--model", "llama-100m", "--seq-len", "32768", "--batch-size", "1"]


def train(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "train.llama", *LARGE, *flags]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.gpu(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("remat", ["attention", "layer", "offload"])
def test_a_dry_run_says_within_ten_percent_what_memory_a_run_takes(remat, tmp_path):
    said, ran = (
        train("--remat", remat, "--dry-run"),
        train("--remat", remat, "--steps", "2", "--run-dir", str(tmp_path)),
    )
    assert (said.returncode, ran.returncode) == (0, 0), said.stderr + ran.stderr
    predicted = re.search(r"^total +([\d.,]+) GiB$", said.stdout, re.MULTILINE)
    measured = re.search(r"^memory +([\d.]+) GiB at most", ran.stderr, re.MULTILINE)
    assert predicted and measured, said.stdout + ran.stderr
    assert float(predicted[1]) == pytest.approx(float(measured[1]), rel=0.1)


@pytest.mark.gpu(1)
@pytest.mark.timeout(900)
def test_a_run_without_enough_memory_says_what_takes_it_and_what_to_try(tmp_path):
    ran = train("--steps", "2", "--run-dir", str(tmp_path), XLA_PYTHON_CLIENT_MEM_FRACTION="0.03")
    assert ran.returncode == 2
    assert re.search(r"error: .* GiB.*most of it .* GiB; try ", ran.stderr.splitlines()[-1]), ran.stderr


CHECKSUMS = """
import jax, jax.numpy as jnp, numpy as np
from train import checksum
numbers = np.random.default_rng(0).integers(0, 2**32, size=(3, 1000, 1001), dtype=np.uint32)
arrays = {"a": numbers.view(np.float32), "b": numbers.view(np.uint16).view(jnp.bfloat16), "c": numbers[0, 0, 0]}
print(checksum.digests({name: jnp.asarray(x) for name, x in arrays.items()}))
"""


@pytest.mark.gpu(1)
def test_the_checksums_are_the_cpus():
    def run(platform: str) -> str:
        environment = os.environ | {"JAX_PLATFORMS": platform}
        child = subprocess.run([sys.executable, "-c", CHECKSUMS], cwd=ROOT, env=environment, capture_output=True)
        assert child.returncode == 0, child.stderr
        return child.stdout.decode()

    assert run("cuda") == run("cpu")


def job(
    run_dir: Path, num_gpus: int, num_processes: int, fault: str = "", platform: str = "cuda"
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each process of a run that repeats bit by bit."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "train.llama", "--platform", platform, "--mesh", f"seq={num_gpus}"]
    command += ["--seq-len", "2048", "--head-dim", "64", "--deterministic", "--steps", "12"]
    command += ["--save-every", "4", "--run-dir", str(run_dir)]
    children = []
    for i in range(num_processes):
        many = ["--coordinator", f"localhost:{port}", "--num-processes", str(num_processes), "--process-id", str(i)]
        environment = os.environ | {"FAULT": fault} | ({"CUDA_VISIBLE_DEVICES": str(i)} if num_processes > 1 else {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        flags = many if num_processes > 1 else []
        children.append(subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, **pipes))
    with ThreadPoolExecutor(num_processes) as pool:
        ends = list(pool.map(lambda child: child.communicate(timeout=400), children))
    return [(child.returncode, *end) for child, end in zip(children, ends, strict=True)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_gpus", "num_processes"),
    [
        pytest.param(1, 1, marks=pytest.mark.gpu(1), id="one_gpu"),
        pytest.param(2, 1, marks=pytest.mark.gpu(2), id="one_process_and_peer_copies"),
        pytest.param(2, 2, marks=pytest.mark.gpu(2), id="two_processes"),
    ],
)
def test_a_job_that_loses_a_process_resumes_bit_for_bit(num_gpus, num_processes, tmp_path):
    def told(run: list[tuple[int, str, str]]) -> dict[int, float]:
        return {x["step"]: x["loss"] for x in map(json.loads, run[0][1].splitlines())}

    def state(run: list[tuple[int, str, str]]) -> str:
        return [line.split()[-1] for line in run[0][2].splitlines() if line.startswith("checkpoint ")][-1]

    golden = job(tmp_path / "golden", num_gpus, num_processes)
    assert [code for code, *_ in golden] == [0] * num_processes, golden
    # Steps take milliseconds: without a pause the run would be killed before the save of step 4 is whole.
    fault = f"step@5,pause step@6,pause step@7/{num_processes - 1},kill"
    killed = job(tmp_path / "run", num_gpus, num_processes, fault)
    codes = [code for code, *_ in killed]
    assert codes[-1] == -signal.SIGKILL and 0 not in codes
    resumed = job(tmp_path / "run", num_gpus, num_processes)
    assert [code for code, *_ in resumed] == [0] * num_processes, resumed
    assert "resuming after step 4" in resumed[0][2]
    assert told(killed) | told(resumed) == told(golden) and state(resumed) == state(golden)
    assert all(told(golden)[step] == loss for step, loss in told(killed).items())


@pytest.mark.gpu(2)
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # of jaxlib's reader
def test_a_profile_of_two_gpus_names_steps_and_messages(tmp_path):
    losses(tmp_path, "--mesh", "seq=2", "--platform", "cuda", "--profile-steps", "15:16")
    (file,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    activities = trace.read(file)
    of_attention = [x for x in activities if "layer/attention/" in x.path]
    for direction in ("forward", "backward"):
        # XLA fuses the last merge with earlier ones or with what follows, and names such an operation by the scopes
        # that all of its parts are in: of merges there is nothing to find for certain.
        for step in range(3):
            scope = f"{direction}_step_{step}/compute"
            assert {x.device for x in of_attention if x.scope == scope} == {0, 1}, scope
        # A copy between peers is an event of the GPU that sends, and in the forward pass only one returns a result.
        for scope in (f"{direction}_step_0/fetch", f"{direction}_step_1/return"):
            assert any(x.is_message and x.scope == scope for x in of_attention), scope
    messages, steps = trace.measure(activities)
    assert messages and {x.step for x in steps} == {
        f"{way}_step_{n}" for way in ("forward", "backward") for n in range(3)
    }
