"""Eight virtual CPU devices, strict dtype promotion; `--platform cuda` runs the same tests on GPUs."""

import os

import jax
import pytest


def pytest_addoption(parser):
    parser.addoption("--platform", default="cpu", choices=("cpu", "cuda"), help="where the tests run")


def pytest_configure(config):
    jax.config.update("jax_platforms", config.getoption("--platform"))
    jax.config.update("jax_num_cpu_devices", 8)
    # On CPUs the tests compile far more than they compute; this halves the time of a compilation.
    jax.config.update("jax_disable_most_optimizations", config.getoption("--platform") == "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if config.getoption("--platform") == "cuda":  # on GPUs they would mostly choose algorithms of the float32 oracle
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"


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
