"""Starts JAX on the devices that the mesh needs: GPUs, or virtual CPU devices where there is no GPU."""

from pathlib import Path

import jax
from jax.sharding import AxisType, Mesh

from train.config import InputError, MeshShape, Platform


def make_mesh(shape: MeshShape, platform: Platform) -> Mesh:
    """Returns a mesh with the axes data, seq and tensor; must be the first use of JAX, whose platform it decides.

    Raises:
      InputError: the platform is not there, or has fewer devices than the mesh.
    """
    if platform != "auto":
        jax.config.update("jax_platforms", platform)
    jax.config.update("jax_num_cpu_devices", shape.num_devices)
    try:
        devices = jax.devices()
    # JAX fails an assertion where the plugin of an asked platform is not installed.
    except (RuntimeError, AssertionError):
        raise InputError(f"--platform {platform}: cpu or auto, as JAX finds no {platform} device") from None
    if platform == "auto" and devices[0].platform == "cpu" and _has_nvidia_gpu():
        raise InputError(
            "--platform auto: a JAX with CUDA on this machine with an NVIDIA GPU "
            "(pip install 'distflash_jax[cuda12]' or [cuda13]), or --platform cpu"
        )
    if len(devices) < shape.num_devices:
        raise InputError(
            f"--mesh {shape}: as many devices as there are, found {len(devices)} x {devices[0].device_kind}; "
            f"--mesh seq={len(devices)} would fit"
        )
    return jax.make_mesh(
        (shape.data, shape.seq, shape.tensor),
        ("data", "seq", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[: shape.num_devices],
    )


def describe(mesh: Mesh) -> str:
    """One line on the devices, for the start of a run."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return f"{mesh.size} virtual CPU device(s), as many as the mesh needs (no GPU in use)"
    return f"{mesh.size} x {device.device_kind}"


def _has_nvidia_gpu() -> bool:
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))
