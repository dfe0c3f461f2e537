"""Environment of this process: its machine, its settings, the data that it has read."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

from pipeline.config.overrides import without_secret_values
from pipeline.core.errors import without_secrets
from pipeline.core.plugins.loading import loaded_plugins
from pipeline.data.columns import Split
from pipeline.models.lowerings.tune.machine import describe_device
from pipeline.stages.record.code_version import describe_imported_code
from pipeline.stages.record.fingerprint import fingerprint
from pipeline.stages.record.provenance import Provenance
from pipeline.stages.record.settings import describe_numerics

SETTINGS = ("XLA_", "JAX_", "OMP_", "MKL_", "ONEDNN_", "DNNL_", "CUDA_VISIBLE", "NVIDIA_TF32")
"""Prefixes of environment variables that can change numbers or threads."""


def describe_process(
    seed: int, versions: Mapping[str, str], device: jax.Device, splits: Mapping[str, Split]
) -> Provenance:
    """Describe this process. Raises DataError where a sample can't be read."""
    return Provenance(
        begun=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=shlex.join(without_secret_values(sys.orig_argv)),
        folder=str(Path.cwd()),
        seed=seed,
        code=describe_imported_code(),
        versions=versions,
        machine=describe_machine(device),
        settings=describe_settings(),
        data={
            name: {column: asdict(entry) for column, entry in fingerprint(split).items()}
            for name, split in splits.items()
        },
        plugins={plugin.name: plugin.describe() for plugin in loaded_plugins()},
        numerics=describe_numerics(),
    )


def describe_machine(device: jax.Device) -> dict[str, Any]:
    """Describe the processor, the cores and memory of this process, and the device."""
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "libc": _read_libc(),
        "processor": _read_processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": f"{device.platform}:{device.id} {device.device_kind}",
        "instructions": describe_device(device),
    }


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _read_libc() -> str:
    """Return the libc version, which may compute exponentials; `platform` would take 20 ms."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except ValueError:
        return "unknown"


def describe_settings() -> dict[str, str]:
    """Return the environment variables that can change numbers or threads, without passwords."""
    names = [name for name in sorted(os.environ) if name.startswith(SETTINGS)]
    return {name: without_secrets(os.environ[name]) for name in names}
