"""PyTorch's context_parallel with its cuDNN backend, timed: `torchrun --nproc-per-node 2 -m benchmarks.torch_cp`.

For each "T N K H mode" of the command line a line of JSON from process 0: the case and seconds a call, each the slowest
GPU's. Started by benchmarks.attention, whose process must not hold the GPUs meanwhile.
"""
# pyright: reportMissingImports=false

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

REPEATS = 7


def measure(call: Callable[[], object]) -> list[float]:
    call()
    call()
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - start, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return seconds


def make_call(T: int, N: int, K: int, H: int, mode: str) -> Callable[[], object]:
    """Attention of T tokens on this GPU, forward, or forward and backward."""
    q, k, v, dout = (
        torch.randn(1, heads, T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (N, K, K, N)
    )
    # Looked up at each call: context_parallel puts another function in its place.
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=N != K)
    return attend if mode == "forward" else lambda: attend().backward(dout)


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    for words in sys.argv[1:]:
        *numbers, mode = words.split()
        T, N, K, H = map(int, numbers)
        positions = torch.zeros(T, device="cuda")  # it wants a buffer to cut; q, k and v are cut already
        try:
            call = make_call(T // dist.get_world_size(), N, K, H, mode)
            with (
                sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
                context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]),
            ):
                found: dict[str, object] = {"seconds": measure(call)}
        except Exception as error:
            found = {"error": " ".join(str(error).split())[:200]}
        if dist.get_rank() == 0:
            print(json.dumps({"case": words} | found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
