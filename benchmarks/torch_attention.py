"""PyTorch's attention, timed: `torchrun --nproc-per-node 2 -m benchmarks.torch_attention`.

On several GPUs its context_parallel with the cuDNN backend, on one its FlashAttention-2. For each "T N K H is_causal
mode" of the command line a line of JSON from process 0: the case and seconds a call, each the slowest GPU's. Started by
benchmarks.peers, whose process must not hold the GPUs meanwhile.
"""
# pyright: reportMissingImports=false

import contextlib
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


def make_call(T: int, N: int, K: int, H: int, is_causal: bool, mode: str) -> Callable[[], object]:
    """Attention of T tokens on this GPU, forward, or forward and backward."""
    q, k, v, dout = (
        torch.randn(1, heads, T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (N, K, K, N)
    )
    # Looked up at each call: context_parallel puts another function in its place.
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=N != K)
    return attend if mode == "forward" else lambda: attend().backward(dout)


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    num_gpus = dist.get_world_size()
    backend = SDPBackend.CUDNN_ATTENTION if num_gpus > 1 else SDPBackend.FLASH_ATTENTION
    mesh = init_device_mesh("cuda", (num_gpus,), mesh_dim_names=("cp",))
    for words in sys.argv[1:]:
        *numbers, mode = words.split()
        T, N, K, H, is_causal = map(int, numbers)
        positions = torch.zeros(T, device="cuda")  # it wants a buffer to cut; q, k and v are cut already
        try:
            call = make_call(T // num_gpus, N, K, H, bool(is_causal), mode)
            cut = context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0])
            with sdpa_kernel(backend), cut if num_gpus > 1 else contextlib.nullcontext():
                found: dict[str, object] = {"seconds": measure(call)}
        except Exception as error:
            found = {"error": " ".join(str(error).split())[:200]}
        if dist.get_rank() == 0:
            print(json.dumps({"case": words} | found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
