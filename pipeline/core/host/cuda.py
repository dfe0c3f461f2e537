"""NVIDIA's software on this machine: the driver, JAX's plug-in for CUDA, and what is wrong with
them. Nothing here opens a GPU or takes its memory."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
"""Distributions of JAX's plug-in for CUDA, in the order in which JAX prefers them."""
MODULES = ("jax_cuda13_plugin._versions", "jax_cuda12_plugin._versions")
DRIVER = "libcuda.so.1"
INSTALL = (
    "install the `gpu` extra, pip install '.[gpu]', or '.[gpu13]' for CUDA 13, which needs a "
    "driver of 580 or later"
)
PLATFORMS, MEMORY_SHARE = "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Variables that name the platforms for JAX to open, and the share of a GPU's memory to take."""
DEFAULT_SHARE = 0.75
"""The share that JAX takes of a GPU's memory at once, where nobody says otherwise."""


def plugin() -> str | None:
    """Return JAX's plug-in for CUDA with its version; None where none is installed."""
    for name in PLUGINS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def driver_problem() -> str | None:
    """Return why NVIDIA's driver can't be used; None where it starts and has a device."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return f"this machine has no NVIDIA driver ({DRIVER} can't be loaded)"
    status = driver.cuInit(0)
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        said = name.value.decode() if name.value else f"status {status}"
        return f"the NVIDIA driver doesn't start: {said}"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value else "the NVIDIA driver sees no device"


def why_no_gpu(said: str = "") -> str:
    """Return why JAX has no GPU, and what would help; `said` is what JAX gave as its reason."""
    installed, platforms = plugin(), os.environ.get(PLATFORMS, "")
    if installed is None:
        return INSTALL
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"{PLATFORMS} = {platforms} leaves GPUs out; unset it, or name cuda,cpu"
    problem = driver_problem()
    if problem is not None:
        return f"{problem}; {installed} is installed"
    return f"{said or 'JAX gives no reason'}; {installed} is installed"


def share_memory(processes: int) -> dict[str, str]:
    """Return the variable by which each of several processes takes its share of a GPU's memory;
    nothing where the user has set it."""
    if processes < 2 or MEMORY_SHARE in os.environ:
        return {}
    return {MEMORY_SHARE: f"{DEFAULT_SHARE / processes:.3f}"}


def cuda_versions() -> dict[str, str]:
    """Return the versions of driver, CUDA and cuDNN, those that can be found."""
    found = {"driver": _driver_version(), **_library_versions()}
    return {name: text for name, text in found.items() if text}


def _driver_version() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            line = file.readline()
    except OSError:
        return ""
    numbers = [word for word in line.split() if word[:1].isdigit() and "." in word]
    return numbers[0] if numbers else ""


def _library_versions() -> dict[str, str]:
    module = _versions_module()
    if module is None:
        return {}
    cuda = _told(module.cuda_runtime_get_version)
    dnn = _told(module.cudnn_get_version)
    return {
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "cudnn": f"{dnn // 10000}.{dnn % 10000 // 100}.{dnn % 100}" if dnn else "",
    }


def _versions_module() -> ModuleType | None:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _told(ask: Callable[[], int]) -> int:
    """Return the number of a version; 0 where the library is not there."""
    try:
        return ask()
    except RuntimeError:
        return 0
