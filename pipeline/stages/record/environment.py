"""Environment of this process: its machine, its settings, the data that it has read."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jax

from pipeline.config.overrides import without_secret_values
from pipeline.core.errors import without_secrets
from pipeline.core.files.package_paths import PACKAGE
from pipeline.core.plugins.loading import loaded_plugins
from pipeline.data.columns import Split
from pipeline.models.lowerings.tune.machine import describe_device
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


NOT_CODE = frozenset({"__pycache__", "conf", "examples", "pylock.toml", "recipes"})
"""Folders and files of the package that decide nothing once a recipe is composed."""
GIT = ("git", "--no-optional-locks", "status", "--porcelain=v2", "--branch")
GIT_S = 5.0
"""Longest time for git, whose file system may hang."""
CHANGES_KEPT = 50
FIELDS = {"1": 8, "2": 9, "u": 10, "?": 1}
"""Fields before the path in a line of `git status`, by the kind of line."""


@cache
def describe_imported_code() -> dict[str, Any]:
    """Return what `describe_code` says of this package when it is first asked in a process.

    What a process has imported stays as it is, so the runs after the first one read no file again
    and start no git.
    """
    return describe_code()


def describe_code(package: Path = PACKAGE) -> dict[str, Any]:
    """Return a SHA-256 of the package's files, the same in a checkout and a wheel.

    In a checkout `git` has the commit, whether files differ from it, and which; elsewhere the key
    is absent.
    """
    digest = hashlib.sha256()
    for folder, inner, files in os.walk(package):
        inner[:] = sorted(set(inner) - NOT_CODE)
        for file in sorted(set(files) - NOT_CODE):
            path = os.path.join(folder, file)
            if not os.path.isfile(path):
                continue  # such as an editor's lock, a link to nowhere
            with open(path, "rb") as opened:
                content = opened.read()
            name = os.path.relpath(path, package)
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    git = _read_git_state(package.parent)
    return {"sha256": digest.hexdigest()} | ({"git": git} if git else {})


def _read_git_state(root: Path) -> dict[str, Any] | None:
    # Git itself would also find the checkout of a user who has the package inside of it.
    if not (root / ".git").exists():
        return None
    try:
        status = subprocess.run(
            GIT, cwd=root, capture_output=True, text=True, timeout=GIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {"commit": None, "why": str(error).splitlines()[0]}
    lines = status.stdout.splitlines()
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid "))
    changed = [
        line.split(" ", FIELDS[line[0]])[-1].partition("\t")[0]
        for line in lines
        if line[0] in FIELDS
    ]
    return {"commit": commit, "dirty": bool(changed), "changed": changed[:CHANGES_KEPT]}
