"""Continuity of a resumed run: whether its data, plug-ins, settings and code are as before.

Compared with the newest process in provenance.json that has kept the section in question. The file
may come from a stranger: its content is only compared and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.core.errors import DataError
from pipeline.core.files.error_text import shown
from pipeline.core.files.value_text import first_lines, show
from pipeline.core.plugins.loading import FLAG
from pipeline.stages.record.provenance import PROVENANCE, Provenance, read_provenance
from pipeline.stages.record.settings import compare_settings

DIGEST = 12
"""Digits of a checksum that are shown."""
MAX_VERSIONS, MAX_COLUMNS = 4, 8
"""Most versions, and most columns, that one message names."""
ALLOW = "train.resume_changed=allow"
_ABSENT = object()

Warn = Callable[[str], None]


def require_same_origin(
    run_dir: Path, now: Provenance, on_changed: Literal["refuse", "allow"], warn: Warn
) -> None:
    """Compare a process that resumes a run with those that worked on it before.

    Warns of other versions and code, of settings that decide no numbers, and where nothing can be
    compared. Other data, plug-ins and settings that do decide them are warned of where they are
    allowed; else DataError is raised.
    """
    before = _read_or_warn(run_dir, warn)
    settings = compare_settings(before, now)
    for what, changed in (
        ("the data are not those that the run was trained on", changed_data(before, now)),
        ("the plug-ins are not those that the run was trained with", changed_plugins(before, now)),
        (
            "settings that decide numbers are not those that the run was trained with",
            settings.decisive,
        ),
    ):
        if not changed:
            continue
        problem = f"{run_dir}: {what} so far"
        if on_changed == "refuse":
            advice = f"Bring them back, or go on with these: {ALLOW}"
            raise DataError("\n  ".join([f"{problem}:", *changed]) + f"\n{advice}")
        warn(f"{problem}, and {ALLOW}: {'; '.join(changed)}")
    if software := changed_software(before, now):
        warn(f"{run_dir}: goes on with other software, and may round otherwise: {software}")
    if settings.others:
        warn(f"{run_dir}: goes on with other settings: {'; '.join(settings.others)}")


def _read_or_warn(run_dir: Path, warn: Warn) -> Sequence[Mapping[str, Any]]:
    unknown = "whether data, versions and code are as they were is not known"
    try:
        before = read_provenance(run_dir)
    except DataError as error:
        warn(f"{str(error).partition('; delete')[0]}; {unknown}")
        return []
    if not before:
        warn(f"{run_dir / PROVENANCE}: is not there; {unknown}")
    return before


def changed_data(before: Sequence[Mapping[str, Any]], now: Provenance) -> list[str]:
    """Return a line for each column of each split that differs from the run's data so far."""
    kept = _newest(before, "data")
    if kept is None:
        return []
    lines = [
        f"{shown(f'{split} {column}')}: was {_of_data(old)}, is {_of_data(new)}"
        for split, column, old, new in _columns(kept, now.data)
        if not _is_same_data(old, new)
    ]
    return first_lines(lines, MAX_COLUMNS)


def changed_plugins(before: Sequence[Mapping[str, Any]], now: Provenance) -> list[str]:
    """Return a line for each file of a plug-in that differs, or that is not loaded any more.

    A plug-in that the run did without so far can't have changed it.
    """
    kept = _newest(before, "plugins") or {}
    lines: list[str] = []
    for name, entry in kept.items():
        own = now.plugins.get(name)
        if own is None:
            lines.append(f"{FLAG} {shown(name)}: is missing")
            continue
        for file, old, new in _plugin_versions(entry, own):
            if old != new:
                lines.append(f"{shown(f'{name}: {file}')} {_digest(old)} -> {_digest(new)}")
    return first_lines(lines, MAX_COLUMNS)


def _plugin_versions(old: Any, new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield version and each file of a plug-in as it was kept and as it is now."""
    if not isinstance(old, Mapping):
        yield "what was kept", old, dict(new)
        return
    yield "version", old.get("version"), new["version"]
    files = old.get("sha256")
    files = files if isinstance(files, Mapping) else {}
    for file in dict.fromkeys((*files, *new["sha256"])):
        yield str(file), files.get(file), new["sha256"].get(file)


def _digest(value: Any) -> str:
    return shown(value)[:DIGEST] if isinstance(value, str) else show(value)


def changed_software(before: Sequence[Mapping[str, Any]], now: Provenance) -> str | None:
    """Describe versions and code that differ; None where none does."""
    parts = [*_changed_versions(before, now), *_changed_code(before, now)]
    if not parts:
        return None
    rest = f" and {len(parts) - MAX_VERSIONS} more" if len(parts) > MAX_VERSIONS else ""
    return ", ".join(parts[-MAX_VERSIONS:]) + rest


def _newest(before: Sequence[Mapping[str, Any]], section: str) -> Mapping[str, Any] | None:
    """Return a section of the newest process that has it."""
    kept = (process.get(section) for process in reversed(before))
    return next((entry for entry in kept if isinstance(entry, Mapping) and entry), None)


def _columns(
    kept: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield split, column, the fingerprint that was kept and that of now."""
    for split in dict.fromkeys((*kept, *now)):
        old, new = kept.get(split, {}), now.get(split, {})
        if not isinstance(old, Mapping):
            yield split, "", old, _ABSENT
            continue
        for column in dict.fromkeys((*old, *new)):
            yield split, column, old.get(column, _ABSENT), new.get(column, _ABSENT)


def _is_same_data(old: Any, new: Any) -> bool:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return False
    # Where other samples were hashed, only shape and type can be compared.
    names = ("shape", "dtype", *(["sha256"] if old.get("of") == new.get("of") else []))
    return all(_comparable(old.get(name)) == _comparable(new.get(name)) for name in names)


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of_data(entry: Any) -> str:
    """Describe a fingerprint in words."""
    if entry is _ABSENT:
        return "not there"
    match entry:
        case {"shape": [*sizes] | (*sizes,), "dtype": str(dtype), "sha256": str(digest), "of": of}:
            shape = "x".join(map(str, sizes))
            return shown(f"{dtype} {shape} (SHA-256 {digest[:DIGEST]} of {of})")
    return show(entry)


def _changed_versions(before: Sequence[Mapping[str, Any]], now: Provenance) -> Iterator[str]:
    kept = _newest(before, "versions") or {}
    for name in dict.fromkeys((*kept, *now.versions)) if kept else ():
        old, new = kept.get(name, "none"), now.versions.get(name, "none")
        if old != new:
            yield f"{shown(name)} {_of_software(old)} -> {_of_software(new)}"


def _changed_code(before: Sequence[Mapping[str, Any]], now: Provenance) -> Iterator[str]:
    kept = _newest(before, "code") or {}
    old, new = kept.get("sha256", now.code.get("sha256")), now.code.get("sha256")
    if old != new:
        yield f"code {_of_software(old)[:DIGEST]} -> {_of_software(new)[:DIGEST]}"


def _of_software(value: Any) -> str:
    return shown(value) if isinstance(value, str) else show(value)
