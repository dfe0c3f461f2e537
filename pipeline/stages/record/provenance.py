"""provenance.json: the origin of a run besides its recipe, and the description of a process.

It has the command, code, versions, machine, settings and data of every process that worked on the
run. A resumed run adds a process.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.overrides import hide_secret_values
from pipeline.core.errors import DataError, get_system_reason, hide_secrets
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.paths import PACKAGE
from pipeline.core.plugins.loading import list_loaded_plugins
from pipeline.data.columns import BlankColumn, Column, Split
from pipeline.data.padding.buckets import PaddedColumn, RaggedArray, UniformColumn
from pipeline.data.text.windows import TokenWindows

if TYPE_CHECKING:
    import jax

PROVENANCE = "provenance.json"
SETTINGS = ("XLA_", "JAX_", "OMP_", "MKL_", "ONEDNN_", "DNNL_", "CUDA_VISIBLE", "NVIDIA_TF32")
"""Prefixes of environment variables that can change numbers or threads."""
NUMERICS = (
    *("threefry_partitionable", "default_prng_impl", "random_seed_offset", "enable_custom_prng"),
    *("high_dynamic_range_gumbel", "default_matmul_precision", "enable_x64", "explicit_x64_dtypes"),
    *("numpy_dtype_promotion", "allow_f16_reductions", "softmax_custom_jvp", "accurate_erf_inv"),
    *("use_hlo_logistic_lowering", "disable_jit", "disable_most_optimizations"),
    *("optimization_level", "exec_time_optimization_effort", "threefry_gpu_kernel_lowering"),
    *("use_direct_linearize", "use_shardy_partitioner", "use_magma"),
)
"""Settings of jax that decide numbers, without `jax_`. A version of jax may lack some of them."""
NOT_CODE = frozenset({"__pycache__", "conf", "examples", "pylock.toml", "recipes"})
"""Names of folders and files in the package that aren't code."""
GIT = ("git", "--no-optional-locks", "status", "--porcelain=v2", "--branch")
GIT_S = 5.0
"""Time limit of git in seconds, since the file system may hang."""
MAX_CHANGES = 50
"""Most changed files that are recorded."""
FIELDS = {"1": 8, "2": 9, "u": 10, "?": 1}
"""Number of fields before the path in a line of `git status`, by the kind of line."""
MAX_HASHED_SAMPLES = 32
"""Most hashed samples of a column that isn't in memory: decoding all would take minutes."""


@dataclass(frozen=True)
class Provenance:
    """The origin of that part of a run that one process has computed."""

    begun: str
    """Start of the process, ISO 8601 with the offset of its time zone."""
    command: str
    folder: str
    """Working directory, in which relative paths of the recipe begin."""
    seed: int
    """The recipe's seed."""
    code: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    settings: Mapping[str, str]
    """Environment variables."""
    data: Mapping[str, Any]
    """Fingerprints of columns by split."""
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """Versions and SHA-256 of the files of plug-ins, by module."""
    numerics: Mapping[str, Any] = field(default_factory=dict)
    """Values of jax's settings that decide numbers."""


def add_provenance(run_dir: Path, process: Provenance) -> None:
    """Append a process to the earlier processes of the run."""
    try:
        earlier = read_provenance(run_dir)
    except DataError:
        # A damaged file doesn't stop the run. It is replaced.
        earlier = []
    processes = [*earlier, asdict(process)]
    write_whole(run_dir / PROVENANCE, format_json({"processes": processes}, indent=2) + "\n")


def read_provenance(run_dir: Path) -> Sequence[Mapping[str, Any]]:
    """Read the processes that worked on a run, oldest first; [] without the file.

    Raises DataError for a damaged file.
    """
    file = run_dir / PROVENANCE
    try:
        tree = read_json(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: can't be read: {get_system_reason(error)}; delete it to continue without it"
        ) from error
    processes = tree.get("processes") if isinstance(tree, dict) else None
    if not isinstance(processes, list) or not all(isinstance(item, dict) for item in processes):
        raise DataError(f"{file}: must hold a list of processes; delete it to continue without it")
    return processes


def describe_process(
    seed: int, versions: Mapping[str, str], device: jax.Device, splits: Mapping[str, Split]
) -> Provenance:
    """Describe this process. Raises DataError if a sample can't be read."""
    return Provenance(
        begun=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=shlex.join(hide_secret_values(sys.orig_argv)),
        folder=str(Path.cwd()),
        seed=seed,
        code=describe_imported_code(),
        versions=versions,
        machine=describe_machine(device),
        settings=describe_settings(),
        data={
            name: {column: asdict(entry) for column, entry in fingerprint_columns(split).items()}
            for name, split in splits.items()
        },
        plugins={plugin.name: plugin.describe() for plugin in list_loaded_plugins()},
        numerics=describe_numerics(),
    )


def describe_machine(device: jax.Device) -> dict[str, Any]:
    """Describe the processor, the cores and memory of this process, and the device."""
    from pipeline.models.lowerings.tune.machine import describe_device

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


def describe_numerics() -> dict[str, Any]:
    """Return the values of jax's settings that decide numbers, as JSON."""
    import jax

    numerics: dict[str, Any] = {}
    for name in NUMERICS:
        value = jax.config.values.get(f"jax_{name}", ...)
        if isinstance(value, Enum):
            numerics[name] = value.name.lower()
        elif isinstance(value, bool | int | float | str | None):
            numerics[name] = value
    return numerics


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _read_libc() -> str:
    """Return the version of libc. Its exponentials may decide numbers."""
    # `platform.libc_ver` takes 20 ms.
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except ValueError:
        return "unknown"


def describe_settings() -> dict[str, str]:
    """Return the environment variables that can change numbers or threads, without passwords."""
    names = [name for name in sorted(os.environ) if name.startswith(SETTINGS)]
    return {name: hide_secrets(os.environ[name]) for name in names}


def describe_code(package: Path = PACKAGE) -> dict[str, Any]:
    """Return a SHA-256 of the package's files, the same in a checkout and a wheel.

    In a checkout the entry `git` has the commit and the files that differ from it.
    """
    digest = hashlib.sha256()
    for folder, subfolders, files in os.walk(package):
        subfolders[:] = sorted(set(subfolders) - NOT_CODE)
        for file in sorted(set(files) - NOT_CODE):
            path = os.path.join(folder, file)
            if not os.path.isfile(path):
                continue  # such as an editor's lock, a link to nowhere
            content = Path(path).read_bytes()
            name = os.path.relpath(path, package)
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape"))
            digest.update(content)
    description: dict[str, Any] = {"sha256": digest.hexdigest()}
    git = _read_git_state(package.parent)
    if git is not None:
        description["git"] = git
    return description


describe_imported_code = cache(describe_code)
"""Imported code doesn't change, so later runs of the process need not read files and start git."""


def _read_git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit and the changed files of a checkout; None if `root` isn't a checkout."""
    # git would also find a user's checkout that an installed package is in.
    if not (root / ".git").exists():
        return None
    try:
        status = subprocess.run(
            GIT, cwd=root, capture_output=True, encoding="utf-8", errors="replace",
            timeout=GIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return {"commit": None, "why": str(error).splitlines()[0]}
    lines = status.stdout.splitlines()
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid "))
    changed = [
        line.split(" ", FIELDS[line[0]])[-1].partition("\t")[0]
        for line in lines
        if line[0] in FIELDS
    ]
    return {"commit": commit, "dirty": bool(changed), "changed": changed[:MAX_CHANGES]}


@dataclass(frozen=True)
class Fingerprint:
    """The shape and type of a column, and the SHA-256 of its values in C order, little-endian.

    If samples have several sizes, the sizes are hashed before the values, without padding. For
    windows of a text, the text is hashed.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    """Digest; empty if no values were hashed."""
    of: str
    """Hashed values: all, `N of M` for evenly spread samples, or none."""


def fingerprint_columns(split: Split) -> Mapping[str, Fingerprint]:
    """Return the fingerprint of every column.

    A column in memory is hashed as a whole, without padding, in about 1 ms a megabyte. Of any other
    column, up to `MAX_HASHED_SAMPLES` samples are hashed. Raises DataError if one can't be read.
    """
    return {name: _fingerprint_column(column) for name, column in split.columns.items()}


def _fingerprint_column(column: Column) -> Fingerprint:
    shape = tuple(column.shape)
    dtype = np.dtype(column.dtype).name
    if isinstance(column, BlankColumn):
        return Fingerprint(shape, dtype, sha256="", of="none")
    arrays = _list_arrays(column)
    of = "all"
    if arrays is None:
        rows = np.unique(np.linspace(0, shape[0] - 1, MAX_HASHED_SAMPLES).astype(np.int64))
        arrays = (column[rows],)
        of = f"{len(rows)} of {shape[0]:,}"
    digest = hashlib.sha256()
    for values in arrays:
        little_endian = values.astype(values.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little_endian).data)
    return Fingerprint(shape, dtype, digest.hexdigest(), of)


def _list_arrays(column: Column) -> Sequence[np.ndarray] | None:
    """Return the arrays of a column in memory, sizes first; None if samples are read on demand."""
    match column:
        case np.ndarray():
            return (column,)
        case RaggedArray(flat=flat, sizes=sizes):
            return sizes, flat
        case PaddedColumn(values=padded):
            return _list_arrays(padded)
        case UniformColumn(column=uniform):
            return _list_arrays(uniform)
        case TokenWindows(tokens=tokens):
            return (tokens,)
    return None
