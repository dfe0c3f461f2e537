"""Continuity of a resumed run: whether this version may resume it, and whether its data, plug-ins,
settings and code have changed.

Each section is compared with the same section of the newest process in provenance.json that has it.
The file may come from a stranger, so its content is only compared and shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from pipeline.core.errors import DataError, RecipeError, limit_lines
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import show
from pipeline.core.plugins.loading import FLAG
from pipeline.stages.record.provenance import PROVENANCE, Provenance, read_provenance
from pipeline.stages.record.summary import find_version

PACKAGE_NAME = "recipe-pipeline"
PROGRAM = "python -m pipeline"
COMMIT_DIGITS = 12
"""Number of digits of a commit that are shown."""


def require_readable_version(run_dir: Path) -> None:
    """Raise RecipeError if a run was written by a version whose runs this one can't resume."""
    if problem := explain_other_version(run_dir):
        raise RecipeError([problem])


def explain_other_version(run_dir: Path, current: str | None = None) -> str | None:
    """Return why this version can't resume a run: the version that wrote it, those that can resume
    it, and what this one can still do. None if it can, or if the version isn't recorded.

    `current` is this version; None for the installed one.
    """
    process = _find_writer(run_dir)
    text = str(process.get("versions", {}).get(PACKAGE_NAME, ""))
    current = current or find_version(PACKAGE_NAME)
    if text in ("", current):
        return None
    try:
        this = Version(current)
    except InvalidVersion:  # the package isn't installed
        return None
    readers = _explain_readers(text, this, process)
    if readers is None:
        return None
    origin = f"{run_dir}: was written by {PACKAGE_NAME} {show_name(text)}, {readers}"
    command = f"convert weights {shlex.quote(str(run_dir))} weights.safetensors"
    return f"{origin}; this is {current}, which can still export its weights: {PROGRAM} {command}"


def _explain_readers(text: str, this: Version, process: Mapping[str, Any]) -> str | None:
    """Return what kind of version `text` is, and which can resume its runs; None if `this` can."""
    try:
        writer = Version(text)
    except ValueError:  # also a number of too many digits
        writer = None
    if writer is None or writer.is_devrelease or writer.local is not None:
        commit = _find_commit(process)
        state = f"that state, commit {commit}," if commit else "that state"
        return f"an unreleased state, and only {state} can resume it"
    series = f"from {writer} to below {writer.major + 1}.0 can resume it"
    if writer.major != this.major:
        return f"another major version, and versions {series}"
    is_unstable = writer.is_prerelease or this.is_prerelease
    if writer > this and (writer.minor > this.minor or is_unstable):
        return f"a newer version, and versions {series}"
    return None


def _find_writer(run_dir: Path) -> Mapping[str, Any]:
    """Return the newest process of a run that recorded versions; {} if none did."""
    try:
        processes = read_provenance(run_dir)
    except DataError:  # the resumed run warns of the file
        return {}
    recorded = [process for process in processes if isinstance(process.get("versions"), dict)]
    return recorded[-1] if recorded else {}


def _find_commit(process: Mapping[str, Any]) -> str:
    """Return the commit of the code that a process ran, shortened; "" if it isn't recorded."""
    match process:
        case {"code": {"git": {"commit": str(commit)}}}:
            return show_name(commit[:COMMIT_DIGITS])
    return ""


DIGEST_LENGTH = 12
"""Number of digits of a checksum that are shown."""
MAX_VERSIONS = 4
MAX_COLUMNS = 8
MAX_SETTINGS = 8
"""Most versions, columns and settings that a message names."""
ALLOW = "train.resume_changed=allow"
XLA_FLAGS = "XLA_FLAGS"
DECISIVE_VARIABLES = ("--", XLA_FLAGS, "ONEDNN_", "DNNL_", "NVIDIA_TF32")
"""Prefixes of variables, and of XLA's flags (--), that decide how libraries compute."""
HARMLESS_VARIABLES = ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "ONEDNN_JIT_DUMP", "DNNL_JIT_DUMP")
HARMLESS_FLAGS = (
    "--xla_dump_",
    "--xla_hlo_profile",
    "--xla_force_host_platform_device_count",
    "--xla_cpu_collective_timeout_seconds",
    "--xla_cpu_collective_call_",
    "--xla_gpu_enable_command_buffer",
    "--xla_gpu_graph_min_graph_size",
    "--xla_gpu_cuda_data_dir",
    "--xla_gpu_force_compilation_parallelism",
)
"""Prefixes of XLA's flags that don't change numbers. This package sets some of them."""
REFUSED = ("the data", "the plug-ins", "settings that decide numbers")
"""Parts of provenance whose change refuses a resume, or is a warning if the user allows it."""
WARNED = ("versions and code", "other settings")
"""Parts of provenance whose change is a warning."""
FORK = "fork"
"""Key of a process in provenance.json with which a fork of another run begins."""
_ABSENT = object()

Processes = Sequence[Mapping[str, Any]]
"""The processes in provenance.json, oldest first."""
Warn = Callable[[str], None]


def require_same_origin(
    run_dir: Path, current: Provenance, on_changed: Literal["refuse", "allow"], warn: Warn
) -> None:
    """Compare a process that resumes a run with the earlier processes of the run.

    Warns of other versions and code, of settings that don't change numbers, and if nothing can be
    compared. Raises DataError for changes in data, plug-ins and settings that change numbers, or
    warns of them if `on_changed` is allow.
    """
    unknown = "whether data, versions and code are the same as before is unknown"
    processes: Processes = []
    try:
        processes = read_provenance(run_dir)
        if not processes:
            warn(f"{run_dir / PROVENANCE}: is missing; {unknown}")
    except DataError as error:
        # The advice to delete the file is left out.
        warn(f"{str(error).partition('; delete')[0]}; {unknown}")
    decisive, harmless = compare_settings(processes, current)
    changes = (
        find_changed_data(processes, current.data),
        find_changed_plugins(processes, current),
        decisive,
    )
    for changed, lines in zip(REFUSED, changes, strict=True):
        if not lines:
            continue
        problem = f"{run_dir}: {changed} have changed since the run was trained"
        if on_changed == "refuse":
            advice = f"Restore them, or continue with these: {ALLOW}"
            raise DataError("\n  ".join([f"{problem}:", *lines]) + f"\n{advice}")
        warn(f"{problem}, and {ALLOW}: {'; '.join(lines)}")
    if software := describe_changed_software(processes, current):
        warn(f"{run_dir}: continues with other software, which may round differently: {software}")
    if harmless:
        warn(f"{run_dir}: continues with other settings: {'; '.join(harmless)}")


def is_fork(run_dir: Path) -> bool:
    """Return whether a run began with the steps of another run."""
    try:
        return any(FORK in process for process in read_provenance(run_dir))
    except DataError:
        return False


def _find_newest(processes: Processes, section: str) -> Mapping[str, Any]:
    """Return a section of the newest process that has it; {} if none has it."""
    sections = (process.get(section) for process in reversed(processes))
    return next((entry for entry in sections if isinstance(entry, Mapping) and entry), {})


def require_same_data(run_dir: Path, current: Provenance) -> None:
    """Raise RecipeError if the data of a run with a ledger have changed."""
    if changes := find_changed_data(read_provenance(run_dir), current.data):
        raise RecipeError(
            f"train.ledger = true: the ledger is of other data than these, so {ALLOW} can't "
            f"continue {run_dir}: {'; '.join(changes)}"
        )


def find_changed_data(processes: Processes, current: Mapping[str, Any]) -> list[str]:
    """Return a line for each column whose fingerprint differs; `current` has those by split."""
    recorded = _find_newest(processes, "data")
    if not recorded:
        return []
    lines = [
        f"{show_name(f'{split} {column}')}: was {_format_fingerprint(old)}, "
        f"is {_format_fingerprint(new)}"
        for split, column, old, new in _pair_columns(recorded, current)
        if not _is_same_data(old, new)
    ]
    return limit_lines(lines, MAX_COLUMNS)


def _pair_columns(
    recorded: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (split, column, recorded fingerprint, current fingerprint)."""
    for split in dict.fromkeys((*recorded, *current)):
        old = recorded.get(split, {})
        new = current.get(split, {})
        if not isinstance(old, Mapping):
            yield split, "", old, _ABSENT
            continue
        for column in dict.fromkeys((*old, *new)):
            yield split, column, old.get(column, _ABSENT), new.get(column, _ABSENT)


def _is_same_data(old: Any, new: Any) -> bool:
    """Return whether two fingerprints of a column agree; `old` is from JSON."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return False

    def to_json(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    names = ["shape", "dtype"]
    # Checksums of different samples can't be compared.
    if old.get("of") == new.get("of"):
        names.append("sha256")
    return all(to_json(old.get(name)) == to_json(new.get(name)) for name in names)


def _format_fingerprint(entry: Any) -> str:
    if entry is _ABSENT:
        return "missing"
    match entry:
        case {"shape": [*sizes], "dtype": str(dtype), "sha256": str(digest), "of": of}:
            shape = "x".join(map(str, sizes))
            return show_name(f"{dtype} {shape} (SHA-256 {digest[:DIGEST_LENGTH]} of {of})")
    return show(entry)


def find_changed_plugins(processes: Processes, current: Provenance) -> list[str]:
    """Return a line for each file of a plug-in that differs, and for each missing plug-in.

    New plug-ins aren't listed: the run hasn't depended on them.
    """
    lines: list[str] = []
    for name, old in _find_newest(processes, "plugins").items():
        new = current.plugins.get(name)
        if new is None:
            lines.append(f"{FLAG} {show_name(name)}: is missing")
            continue
        for file, old_value, new_value in _pair_plugin_entries(old, new):
            if old_value != new_value:
                change = f"{_format_digest(old_value)} -> {_format_digest(new_value)}"
                lines.append(f"{show_name(f'{name}: {file}')} {change}")
    return limit_lines(lines, MAX_COLUMNS)


def _pair_plugin_entries(old: Any, new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, recorded, current) for the version and each file of a plug-in."""
    if not isinstance(old, Mapping):
        yield "record", old, dict(new)
        return
    yield "version", old.get("version"), new["version"]
    files = old.get("sha256")
    files = files if isinstance(files, Mapping) else {}
    for file in dict.fromkeys((*files, *new["sha256"])):
        yield str(file), files.get(file), new["sha256"].get(file)


def _format_digest(value: Any) -> str:
    return show_name(value)[:DIGEST_LENGTH] if isinstance(value, str) else show(value)


def describe_changed_software(processes: Processes, current: Provenance) -> str | None:
    """Return the versions and code that differ, at most `MAX_VERSIONS`, as text; None if equal."""
    recorded = _find_newest(processes, "versions")
    changes = []
    names = dict.fromkeys((*recorded, *current.versions)) if recorded else ()
    for name in names:
        old = recorded.get(name, "none")
        new = current.versions.get(name, "none")
        if old != new:
            changes.append(f"{show_name(name)} {_format_value(old)} -> {_format_value(new)}")
    digest = current.code.get("sha256")
    old_digest = _find_newest(processes, "code").get("sha256", digest)
    if old_digest != digest:
        changes.append(f"code {_format_digest(old_digest)} -> {_format_digest(digest)}")
    if not changes:
        return None
    omitted = f" and {len(changes) - MAX_VERSIONS} more" if len(changes) > MAX_VERSIONS else ""
    return ", ".join(changes[-MAX_VERSIONS:]) + omitted


def _format_value(value: Any) -> str:
    return show_name(value) if isinstance(value, str) else show(value)


def compare_settings(processes: Processes, current: Provenance) -> tuple[list[str], list[str]]:
    """Return lines about changed settings that change numbers, and about other changed settings.

    These are settings of jax, flags of XLA and environment variables. They are compared with those
    of the newest process that has recorded `numerics`.
    """
    recorded = [process for process in processes if isinstance(process.get("numerics"), Mapping)]
    if not recorded or not recorded[-1]["numerics"]:
        return [], []
    numerics = recorded[-1]["numerics"]
    variables = recorded[-1].get("settings")
    decisive: list[str] = []
    harmless: list[str] = []
    # Names that only one process has come from another version of jax.
    for name in current.numerics:
        if name in numerics and numerics[name] != current.numerics[name]:
            change = _format_change(f"jax_{name}", numerics[name], current.numerics[name])
            decisive.append(change)
    old = _split_flags(variables if isinstance(variables, Mapping) else {})
    new = _split_flags(current.settings)
    for name in dict.fromkeys((*old, *new)):
        # Settings of jax are compared above.
        is_numeric = name.lower().removeprefix("jax_") in current.numerics
        if not is_numeric and old.get(name) != new.get(name):
            is_harmless = name.startswith(HARMLESS_VARIABLES)
            is_decisive = name.startswith(DECISIVE_VARIABLES) and not is_harmless
            change = _format_change(name, old.get(name), new.get(name))
            changes = decisive if is_decisive else harmless
            changes.append(change)
    return limit_lines(decisive, MAX_SETTINGS), limit_lines(harmless, MAX_SETTINGS)


def list_decisive_settings(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment variables and flags of XLA that decide how libraries compute."""
    return {
        name: value
        for name, value in _split_flags(variables).items()
        if name.startswith(DECISIVE_VARIABLES) and not name.startswith(HARMLESS_VARIABLES)
    }


def _split_flags(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of variables, and of XLA's flags that may change numbers, by name."""
    settings = {str(name): value for name, value in variables.items() if name != XLA_FLAGS}
    text = variables.get(XLA_FLAGS)
    try:
        words = shlex.split(text) if isinstance(text, str) else []
    except ValueError:
        words = [str(text)]
    for word in words:
        name, _, value = word.partition("=")
        if not name.startswith("--"):
            settings[XLA_FLAGS] = word  # a file of flags
        elif not name.startswith(HARMLESS_FLAGS):
            settings[name] = value or "true"
    return settings


def _format_change(name: str, old: Any, new: Any) -> str:
    old_text = show_name("not set" if old is None else str(old))
    new_text = show_name("not set" if new is None else str(new))
    return f"{show_name(name)}: was {old_text}, is {new_text}"
