"""What this machine has to train with: `python -m train.doctor`; exit code 1 if something stands in the way.

Versions, devices, which attention kernel runs on them, XLA flags that this jaxlib takes, the links between GPUs,
memory and disk: a line each, and where something is amiss what to do about it.
"""

import functools
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from distflash_jax import which_implementation, xla_flags
from train.mesh import cuda_advice

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
FREE_DISK = 20 << 30  # bytes below which a checkpoint of a small model may not fit
LINK_BYTES = 256 << 20
SLOW_LINK = 100e9  # bytes/s; NVLink of an H200 has 380e9, PCIe 5 about 50e9
_GIB = 2**30


class Finding(NamedTuple):
    """What was found, and what to do about it; None where nothing has to be."""

    name: str
    found: str
    advice: str | None = None


def versions() -> Iterator[Finding]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "is not installed", "pip install '.[train]' in the checkout")
    yield Finding("versions", f"Python {platform.python_version()}, {', '.join(found)}")


def devices() -> Iterator[Finding]:
    """Devices, and the kernel of the default head dim on them."""
    found = jax.devices()
    kinds = ", ".join(sorted({device.device_kind for device in found}))
    advice = cuda_advice() if found[0].platform == "cpu" else None
    yield Finding("devices", f"{len(found)} x {kinds} ({found[0].platform})", advice)
    choice = which_implementation()
    yield Finding("kernel", f"{choice.name}: {choice.reason}")


def flags() -> Iterator[Finding]:
    for name, value in xla_flags.choose(num_processes=jax.process_count()).items():
        refusal = xla_flags.refusal(name, value)
        advice = "messages of attention may not hide; a jaxlib that takes it" if refusal else None
        yield Finding("XLA flag", f"{name}={value} {f'refused: {refusal}' if refusal else 'accepted'}", advice)


def links() -> Iterator[Finding]:
    """Bytes/s of a message from each GPU to the next, all at a time."""
    gpus = jax.devices()
    if gpus[0].platform != "gpu" or len(gpus) < 2:
        return
    rate = link_rate(jax.make_mesh((len(gpus),), ("seq",), axis_types=(AxisType.Auto,)), LINK_BYTES)
    slow = (
        f"less than {SLOW_LINK / 1e9:.0f} GB/s: NVLink is not used (nvidia-smi topo -m), or longer chunks must hide it"
    )
    yield Finding("link", f"{rate / 1e9:.0f} GB/s from each GPU to the next", slow if rate < SLOW_LINK else None)


def link_rate(mesh: Mesh, num_bytes: int) -> float:
    """Bytes/s that each device of a mesh with the axis seq sends to the next one, the best of three times."""
    count = mesh.size
    chunks = NamedSharding(mesh, P("seq"))
    x = jax.device_put(jnp.zeros((count, num_bytes // 4), jnp.float32), chunks)
    ring = [(i, (i + 1) % count) for i in range(count)]
    shift = functools.partial(lax.ppermute, axis_name="seq", perm=ring)
    send = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=P("seq"), out_specs=P("seq")))
    jax.block_until_ready(send(x))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(send(x))
        seconds.append(time.perf_counter() - start)
    return num_bytes / min(seconds)


def space(folder: Path) -> Iterator[Finding]:
    """Memory of a device and of the host, and the disk of the folder of runs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        yield Finding("device memory", f"{stats['bytes_limit'] / _GIB:.1f} GiB that JAX may take")
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("host memory", f"{host / _GIB:.1f} GiB")
    free = shutil.disk_usage(folder).free
    advice = "few checkpoints fit; --run-dir on another disk" if free < FREE_DISK else None
    yield Finding("disk", f"{free / _GIB:.1f} GiB free in {folder}", advice)


def main() -> int:
    checks: list[Callable[[], Iterator[Finding]]] = [versions, devices, flags, links, lambda: space(Path.cwd())]
    num_amiss = 0
    for check in checks:
        for finding in check():
            num_amiss += finding.advice is not None
            mark = "ok " if finding.advice is None else "!! "
            print(f"{mark} {finding.name:<14} {finding.found}", flush=True)
            if finding.advice is not None:
                print(f"    {'':<14} -> {finding.advice}", flush=True)
    print(f"{num_amiss} of these need attention" if num_amiss else "nothing stands in the way")
    return int(num_amiss > 0)


if __name__ == "__main__":
    xla_flags.apply(xla_flags.choose())  # before JAX starts, so that links are measured as the trainer has them
    sys.exit(main())
