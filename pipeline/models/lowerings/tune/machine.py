"""The machine: the part of it that a bank's entries depend on, and the engines that work on it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.ownership import make_private
from pipeline.models.lowerings.problem.lowering import WIDENED, Engine

PROBE_TIMEOUT_S = 120
_LEVELS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Flags of a processor that its speed in products depends on, the fastest first."""

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""Variable that names the best instruction set which oneDNN may use. It is read at the first call
of a process."""


def describe_device(device: jax.Device) -> str:
    """The scope of timings: instruction set and number of cores, or the accelerator's kind."""
    return scopes_from(device)[0]


def scopes_from(device: jax.Device) -> tuple[str, ...]:
    """The scope of timings on the device, then those of the instruction sets that it has besides,
    with which it can compute in the same way."""
    if device.platform != "cpu":
        return (f"{device.platform} {device.device_kind}",)
    flags = _cpu_flags()
    levels = [level for level in _LEVELS if level in flags] or [platform.machine()]
    return tuple(f"cpu {level} x{len(os.sched_getaffinity(0))}" for level in levels)


def find_engines(device: jax.Device, dtype: str, folder: Path) -> frozenset[Engine]:
    """XLA, and oneDNN where it passes its probe; the outcome is kept in `folder`."""
    plain: frozenset[Engine] = frozenset(("xla",))
    if device.platform != "cpu" or not _may_have_onednn():
        return plain
    able = _passes_probe(WIDENED.get(dtype, dtype), folder)
    return plain | {"onednn"} if able else plain


def _may_have_onednn() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _passes_probe(dtype: str, folder: Path) -> bool:
    """Whether oneDNN computes correctly; probed once for every jaxlib and processor.

    In a process of its own, because a call that oneDNN refuses ends the process.
    """
    limit = os.environ.get(ONEDNN_LIMIT)
    key = f"jaxlib {jaxlib.__version__}, {describe_device(jax.devices('cpu')[0])}, {dtype}"
    key += f", at most {limit}" if limit else ""
    known = _read(folder)
    if key not in known:
        code = f"from pipeline.models.lowerings.formulas.onednn import probe; probe({dtype!r})"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                timeout=PROBE_TIMEOUT_S,
            )
            known[key] = done.returncode == 0
        except subprocess.TimeoutExpired:
            known[key] = False
        _write(folder, known)
    return known[key]


def _read(folder: Path) -> dict[str, bool]:
    """Results of earlier probes; none where the file can't be read, which costs another probe."""
    try:
        known = read_json(folder / "engines.json")
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(folder: Path, known: dict[str, bool]) -> None:
    try:
        make_private(folder)
        write_whole(folder / "engines.json", json.dumps(known, indent=1) + "\n")
    except OSError:
        # Where the result can't be kept, the next run probes again.
        pass


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())
