"""Properties of the machine that a bank's entries depend on, and the engines that work on it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.trusted_files import make_private
from pipeline.core.host.platforms import get_platform
from pipeline.models.lowerings.formulas.onednn import is_library_installed
from pipeline.models.lowerings.problem import WIDENED, Engine

PROBE_TIMEOUT_S = 120
_LEVELS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Flags of a processor that decide the speed of products, the fastest first."""

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""Variable with the best instruction set that oneDNN may use, read at a process's first call."""


def describe_device(device: jax.Device) -> str:
    """Return the scope of timings: instruction set and number of cores, or the kind of GPU."""
    return list_scopes(device)[0]


def list_scopes(device: jax.Device) -> tuple[str, ...]:
    """List the scope of timings on the device, then the scopes of its slower instruction sets."""
    if not get_platform(device.platform).is_host:
        return (f"{device.platform} {device.device_kind}",)
    flags = _read_cpu_flags()
    levels = [level for level in _LEVELS if level in flags] or [platform.machine()]
    return tuple(f"cpu {level} x{len(os.sched_getaffinity(0))}" for level in levels)


def find_engines(device: jax.Device, dtype: str, folder: Path) -> frozenset[Engine]:
    """Find the engines: XLA, and oneDNN if it passes its probe, whose result is in `folder`."""
    dtype = WIDENED.get(dtype, dtype)
    if may_have_onednn(device.platform) and _passes_probe(dtype, folder):
        if is_library_installed():
            # Imported here, since few installations have it.
            from pipeline.models.lowerings.tune.onednn_library import open_library

            limit = os.environ.get(ONEDNN_LIMIT)
            # Some formulas of bfloat16 have products of float32.
            for kind in dict.fromkeys((dtype, "float32")):
                open_library(folder / "onednn", kind, f"{describe_device(device)}, at most {limit}")
        return frozenset(("xla", "onednn"))
    return frozenset(("xla",))


def may_have_onednn(device_platform: str) -> bool:
    """Return whether jaxlib has oneDNN for a platform of JAX: for a processor that is x86-64."""
    is_host = get_platform(device_platform).is_host
    return is_host and sys.platform == "linux" and platform.machine() == "x86_64"


def _passes_probe(dtype: str, folder: Path) -> bool:
    """Return whether oneDNN computes correctly, probed once for every jaxlib and processor. The
    probe is a child process, since a call that oneDNN refuses ends its process."""
    limit = os.environ.get(ONEDNN_LIMIT)
    key = f"jaxlib {jaxlib.__version__}, {describe_device(jax.devices('cpu')[0])}, {dtype}"
    key += f", at most {limit}" if limit else ""
    file = folder / "engines.json"
    results: Any = None
    with suppress(OSError, ValueError):
        results = read_json(file)
    if not isinstance(results, dict):
        results = {}
    if key in results:
        return bool(results[key])
    code = f"from pipeline.models.lowerings.formulas.onednn import probe; probe({dtype!r})"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
        )
        results[key] = probe.returncode == 0
    except subprocess.TimeoutExpired:
        results[key] = False
    # Without the file the next run probes again.
    with suppress(OSError):
        make_private(folder)
        write_whole(file, json.dumps(results, indent=1) + "\n")
    return bool(results[key])


def _read_cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())
