"""NVIDIA's driver and JAX's plug-in for CUDA on this machine, examined without opening a GPU."""

from __future__ import annotations

import ctypes
import importlib
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
"""Distributions of JAX's plug-in for CUDA, in the order in which JAX prefers them."""
MODULES = ("jax_cuda13_plugin._versions", "jax_cuda12_plugin._versions")
"""Modules of the plug-ins, with functions that return the versions of CUDA's libraries."""
DRIVER = "libcuda.so.1"
INSTALL = (
    "install the `gpu` extra, pip install 'recipe-pipeline[gpu]', or [gpu13] for CUDA 13, which "
    "needs a driver of 580 or later"
)
PLATFORMS_VARIABLE = "JAX_PLATFORMS"
"""Variable with the platforms that JAX opens."""
MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Variable with the share of a GPU's memory that JAX takes at once."""
NEW_MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION"
"""Its new name, which JAX refuses beside the former one."""
DEFAULT_SHARE = 0.75
"""JAX's share if the variable isn't set."""


def find_plugin() -> str | None:
    """Return JAX's plug-in for CUDA with its version; None if none is installed."""
    for name in PLUGINS:
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return None


def find_driver_problem() -> str | None:
    """Return the reason why NVIDIA's driver can't be used; None if it starts and has a device."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return f"this machine has no NVIDIA driver ({DRIVER} can't be loaded)"
    status = driver.cuInit(0)
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        reason = name.value.decode() if name.value else f"status {status}"
        return f"the NVIDIA driver doesn't start: {reason}"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value else "the NVIDIA driver sees no device"


def explain_missing_gpu(jax_reason: str = "") -> str:
    """Return the reason why JAX has no GPU, or the command that installs its plug-in."""
    installed = find_plugin()
    platforms = os.environ.get(PLATFORMS_VARIABLE, "")
    if installed is None:
        return INSTALL
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"{PLATFORMS_VARIABLE} = {platforms} leaves GPUs out; unset it, or name cuda,cpu"
    problem = find_driver_problem()
    if problem is not None:
        return f"{problem}; {installed} is installed"
    return f"{jax_reason or 'JAX gives no reason'}; {installed} is installed"


def make_memory_share(processes: int) -> dict[str, str]:
    """Return the environment variable for an equal share of a GPU's memory for each process.

    Empty for one process, and if the user has set the variable.
    """
    if processes < 2 or not {MEMORY_SHARE, NEW_MEMORY_SHARE}.isdisjoint(os.environ):
        return {}
    return {MEMORY_SHARE: f"{DEFAULT_SHARE / processes:.3f}"}


def _import_plugin_versions() -> Any:
    """Return the first module of `MODULES` that is installed; None without one."""
    for name in MODULES:
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


def read_cuda_versions() -> dict[str, str]:
    """Return the versions of `driver`, `cuda` and `cudnn` that can be found."""
    versions = {}
    with suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        words = file.readline().split()
        numbers = [word for word in words if word[:1].isdigit() and "." in word]
        if numbers:
            versions["driver"] = numbers[0]
    module = _import_plugin_versions()
    if module is None:
        return versions
    # A call raises RuntimeError if its library can't be loaded.
    with suppress(RuntimeError):
        if cuda := module.cuda_runtime_get_version():
            versions["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    with suppress(RuntimeError):
        if dnn := module.cudnn_get_version():
            versions["cudnn"] = f"{dnn // 10000}.{dnn % 10000 // 100}.{dnn % 100}"
    return versions
