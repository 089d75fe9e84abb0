"""Attention of others, for comparison: which there are, and how each one is called for a case."""

import functools
import importlib
import json
import logging
import subprocess
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Case
from benchmarks.harness import Quantiles, count_gpus, quantiles

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def cudnn(case: Case, nn: ModuleType) -> Attention:
    if case.documents:
        raise NotImplementedError("jax.nn.dot_product_attention has packed documents as a dense mask only")
    window = None if case.window is None else (case.window - 1, 0)
    return functools.partial(
        nn.dot_product_attention, implementation="cudnn", is_causal=case.is_causal, local_window_size=window
    )


def tokamax(case: Case, package: ModuleType) -> Attention:
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns, at length, of each shape that it was not tuned for
    window = None if case.window is None else (case.window - 1, 0)
    if not case.documents:
        return functools.partial(
            package.dot_product_attention, implementation="mosaic", is_causal=case.is_causal, local_window_size=window
        )
    # The public function has no argument for the first key that a query sees; the kernel behind it has.
    api = importlib.import_module("tokamax._src.ops.attention.api")
    starts = np.repeat(np.cumsum((0, *case.documents[:-1])), case.documents).astype(np.int32)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = api.base.Mask(k_start=jnp.asarray(starts)[None, None], is_causal=case.is_causal)
        return api.IMPLEMENTATIONS["mosaic_gpu"](q, k, v, mask=mask)

    return attention


def tokamax_triton(case: Case, package: ModuleType) -> Attention:
    if case.documents or case.window is not None:
        raise NotImplementedError("not asked of tokamax's Triton kernel here")
    return functools.partial(package.dot_product_attention, implementation="triton", is_causal=case.is_causal)


def in_tree_triton(case: Case, module: ModuleType) -> Attention:
    if case.documents or case.window is not None or case.N != case.K:
        raise NotImplementedError("not asked of JAX's Triton kernel here")
    return functools.partial(module.mha, segment_ids=None, sm_scale=case.H**-0.5, causal=case.is_causal)


def in_tree(case: Case, module: ModuleType) -> Attention:
    if case.documents or case.window is not None:
        raise NotImplementedError("attention_mgpu has no packed documents and no window")
    is_wide = case.H == 256  # of which less fits into shared memory
    config = module.TuningConfig(
        block_q=64, block_kv=64 if is_wide else 128, max_concurrent_steps=2, causal=case.is_causal,
        compute_wgs_bwd=1 if is_wide else 2, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64,
    )  # fmt: skip
    return lambda q, k, v: module.attention(q, k, v, config)


class Peer(NamedTuple):
    """An attention by others: call(case, module) is the function of (q, k, v) that computes the case.

    module: where it is imported from. dtype: of the inputs. has_scale: whether it scales the scores; a peer that does
    not is given scaled queries.
    """

    module: str
    call: Callable[[Case, Any], Attention]
    dtype: Any = jnp.bfloat16
    has_scale: bool = True

    def attention(self, case: Case, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return self.call(case, importlib.import_module(self.module))(q, k, v)


PEERS = {
    "cudnn": Peer("jax.nn", cudnn),
    "tokamax": Peer("tokamax", tokamax),
    # Its shared memory is float16 whatever the inputs are.
    "in_tree": Peer("jax.experimental.pallas.ops.gpu.attention_mgpu", in_tree, jnp.float16, has_scale=False),
    "tokamax_triton": Peer("tokamax", tokamax_triton),
    "in_tree_triton": Peer("jax.experimental.pallas.ops.gpu.attention", in_tree_triton),
}
TORCH = "torch"  # FlashAttention-2 on one GPU; measured in a process of its own
LABELS = {"hopper": "ours", "cudnn": "cuDNN", "tokamax": "tokamax", "in_tree": "in-tree"}
TRITON_LABELS = {
    "triton": "ours", TORCH: "FlashAttention-2", "tokamax_triton": "tokamax's Triton", "in_tree_triton": "JAX's Triton"
}  # fmt: skip


def time_torch(cases: Sequence[Case], modes: Sequence[str]) -> dict[tuple[str, str], Quantiles]:
    """Seconds of PyTorch's attention by (case, mode), on all GPUs; {} and a line where it cannot run.

    A mode other than "forward" is forward and backward.
    """
    calls = {
        f"{case.T} {case.N} {case.K} {case.H} {int(case.is_causal)} {mode}": (case.name, mode)
        for case in cases
        for mode in modes
    }
    command = ["torchrun", "--nproc-per-node", str(count_gpus()), "-m", "benchmarks.torch_attention", *calls]
    try:
        child = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{TORCH}: left out, {one_line(error)} {(getattr(error, 'stderr', None) or '')[-300:]}", flush=True)
        return {}
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        if "error" in line:
            print(f"{TORCH}: {line['case']} left out, {line['error']}", flush=True)
    return {calls[line["case"]]: quantiles(line["seconds"]) for line in lines if "seconds" in line}


def available(names: Iterable[str]) -> dict[str, Peer]:
    """The peers that can be imported; one line is printed for each that cannot."""
    peers = {}
    for name in names:
        try:
            importlib.import_module(PEERS[name].module)
            peers[name] = PEERS[name]
        except Exception as error:
            print(f"{name}: left out, {one_line(error)}", flush=True)
    return peers


def one_line(error: Exception) -> str:
    """The kind of an error and what it says, cut to a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
