"""Starts JAX on the devices that the mesh needs: GPUs, or virtual CPU devices where there is no GPU."""

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from train import distributed
from train.config import Platform
from train.flags import InputError, MeshShape


def make_mesh(shape: MeshShape, platform: Platform) -> Mesh:
    """Returns a mesh with the axes data, seq and tensor; must be the first use of JAX, whose platform it decides.

    Raises:
      InputError: the platform is not there, or has fewer devices than the mesh.
    """
    # JAX takes three quarters of a GPU unless told otherwise; some has to stay for NCCL's buffers and the CUDA context.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the old name, which JAX refuses beside the other one
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
    if platform != "auto":
        jax.config.update("jax_platforms", platform)
    count = distributed.num_processes()
    jax.config.update("jax_num_cpu_devices", -(-shape.num_devices // count))
    try:
        devices = by_host(jax.devices())
    # JAX fails an assertion where the plugin of an asked platform is not installed.
    except (RuntimeError, AssertionError):
        advice = cuda_advice()
        raise InputError(
            f"--platform {platform}: cpu or auto, as JAX finds no {platform} device{f'; {advice}' if advice else ''}"
        ) from None
    if platform == "auto" and devices[0].platform == "cpu" and (advice := cuda_advice()):
        raise InputError(
            f"--platform auto: with the NVIDIA GPU of this machine, which JAX lacks; {advice}, or --platform cpu"
        )
    if count > 1 and len(devices) != shape.num_devices:
        has = f"{len(devices)} x {devices[0].device_kind}"
        raise InputError(f"--mesh {shape}: all devices of the {count} processes, which have {has}")
    if len(devices) < shape.num_devices:
        raise InputError(
            f"--mesh {shape}: as many devices as there are, found {len(devices)} x {devices[0].device_kind}; "
            f"--mesh seq={len(devices)} would fit"
        )
    # Not jax.make_mesh, which would order the devices of several hosts itself.
    grid = np.array(devices[: shape.num_devices]).reshape(shape.data, shape.seq, shape.tensor)
    return Mesh(grid, ("data", "seq", "tensor"), axis_types=(AxisType.Auto,) * 3)


def keep_compiled(folder: Path | None, platform: str) -> None:
    """Has JAX keep what it compiles, and find it again, in a folder that nobody else can write: it is code.

    Args:
      folder: None takes that of JAX_COMPILATION_CACHE_DIR, else, on GPUs, one in the home of the user. What is compiled
        for a CPU may not run on another one, with the same home.

    Raises:
      InputError: somebody else can write there, or the folder that is asked for cannot be made.
    """
    flag, asked = "--compile-cache", folder or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None and asked:
        flag = "JAX_COMPILATION_CACHE_DIR"
    if not asked and platform == "cpu":
        return
    path = Path(
        asked or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distflash_jax" / "compiled"
    )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = path.stat()
    except OSError as error:
        if asked:
            raise InputError(f"{flag} {path}: a folder that can be made ({error.strerror})") from None
        return
    if stat.st_uid not in (os.getuid(), 0) or stat.st_mode & 0o002:
        raise InputError(f"{flag} {path}: a folder of yours that not everybody can write, as what is in it is run")
    jax.config.update("jax_compilation_cache_dir", str(path))


def by_host(devices: Sequence[Any]) -> list[Any]:
    """Devices that a fast link joins, such as the GPUs of a host (JAX: a slice), beside each other.

    The mesh lays tensor, then seq, then data along this order, so that seq and tensor cross as few hosts as they can.
    """
    return sorted(devices, key=lambda device: (getattr(device, "slice_index", 0), device.process_index, device.id))


def describe(mesh: Mesh) -> str:
    """One line on the devices, for the start of a run."""
    device = mesh.devices.flat[0]
    count = distributed.num_processes()
    processes = f" of {count} processes" if count > 1 else ""
    if device.platform == "cpu":
        return f"{mesh.size} virtual CPU device(s){processes}, as many as the mesh needs (no GPU in use)"
    return f"{mesh.size} x {device.device_kind}{processes}"


def usable_memory(mesh: Mesh) -> int | None:
    """Bytes that JAX may allocate on a device; None where it does not say, as on CPUs."""
    stats = mesh.local_devices[0].memory_stats()
    return stats and stats.get("bytes_limit")


def peak_memory(mesh: Mesh) -> int | None:
    """Most bytes that were allocated at a time on a device so far; None where JAX does not say, as on CPUs."""
    stats = mesh.local_devices[0].memory_stats()
    return stats and stats.get("peak_bytes_in_use")


def cuda_advice() -> str | None:
    """What to do where JAX does not find the NVIDIA GPU of this machine; None where Linux shows none."""
    if not has_nvidia_gpu():
        return None
    if any("cuda" in plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")):
        return "JAX's CUDA plugin finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return "make cuda13, or pip install 'distflash_jax[cuda13]' (with an older driver cuda12)"


def has_nvidia_gpu() -> bool:
    """Whether Linux shows one, whatever JAX finds."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or any(Path("/dev").glob("nvidia[0-9]*"))
