"""Eight virtual CPU devices, strict dtype promotion; `--platform cuda` runs the same tests on GPUs."""

import os

import jax
import pytest

from distflash_jax import xla_flags

# On CPUs the tests compile far more than they compute. Without optimizations, half of the time that is left would go
# into what these flags leave out: code of fusions by way of MLIR, and modules cut into parts for threads to compile.
LITTLE_COMPILATION = {
    "xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
    "xla_cpu_parallel_codegen_split_count": "1",
}
# On GPUs autotuning would mostly choose algorithms of the float32 oracle.
NO_AUTOTUNING = {"xla_gpu_autotune_level": "0"}


def pytest_addoption(parser):
    parser.addoption("--platform", default="cpu", choices=("cpu", "cuda"), help="where the tests run")


def pytest_configure(config):
    platform = config.getoption("--platform")
    jax.config.update("jax_platforms", platform)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    xla_flags.apply(LITTLE_COMPILATION if platform == "cpu" else NO_AUTOTUNING)
    if platform == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of children


def pytest_collection_modifyitems(config, items):
    """Skip tests that need more devices than there are: gpu(n) on CPUs, eight workers on two GPUs."""
    platform, count = config.getoption("--platform"), jax.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and (platform == "cpu" or marker.args[0] > count):
            item.add_marker(
                pytest.mark.skip(reason=f"needs {marker.args[0]} GPU(s), found {count} {platform} device(s)")
            )
        workers = getattr(item, "callspec", None) and item.callspec.params.get("num_workers", 1)
        if workers and workers > count:
            item.add_marker(pytest.mark.skip(reason=f"needs {workers} devices, found {count} {platform} device(s)"))
