"""JAX's CUDA plugin on a machine without a GPU: it compiles for GPUs that are not there.

It needs a C compiler, for a stand-in of the driver, and the plugin's library, of jax[cuda12] or jax[cuda13]. Nothing of
this is public API of JAX, so it may change.
"""

import ctypes
import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

# What the plugin asks the driver which GPU there is: this one says sm90. And what compiled programs would call.
DRIVER = """
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
void mosaic_gpu_init_tma_desc(void) {}
void mosaic_gpu_launch_kernel(void) {}
"""
# XLA's GpuTargetConfigProto, of what NVIDIA's data sheet and deviceQuery say of this GPU.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  clock_rate_ghz: 1.98
}
"""


def find() -> Path:
    """The library of the CUDA plugin that is installed, or that the Makefile has unpacked.

    Raises:
        ValueError: neither is there.
    """
    installed = importlib.util.find_spec("jax_plugins")
    folders = list(installed.submodule_search_locations or ()) if installed else []
    for folder in (*folders, Path(__file__).parent.parent / "build/cuda/jax_plugins"):
        for library in sorted(Path(folder).glob("xla_cuda1*/xla_cuda_plugin.so"), reverse=True):
            return library
    raise ValueError("no CUDA plugin of JAX is installed, and --plugin names none")


def make_driver(folder: Path) -> Path:
    """The stand-in for the driver's library, where the loader finds it with LD_LIBRARY_PATH=folder."""
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def devices(count: int, plugin: Path, driver: Path) -> Sequence[object]:
    """So many H200s of one host, to make a mesh of: what is lowered for it can be compiled, but not run."""
    ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin))
    xla_client.initialize_pjrt_plugin("cuda")
    topology = xla_client.make_c_api_device_topology(api, "", topology=f"1x1x{count}", target_config=H200)
    return topology._make_compile_only_devices()
