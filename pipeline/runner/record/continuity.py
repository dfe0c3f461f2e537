"""Whether a resumed run goes on with what it began with: its data, versions and code.

Held against the newest process in provenance.json that has kept the section in question. The file
may come from a stranger: whatever stands in there is compared and shown, nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import DataError
from pipeline.files.error_text import show, shown
from pipeline.runner.record.provenance import PROVENANCE, Provenance, read_provenance

DIGEST = 12
"""So many digits of a checksum are shown."""
MOST_NAMED, MOST_COLUMNS = 4, 8
"""So many versions, and so many columns, are named in one message."""
ALLOW = "train.resume_changed=allow"
_ABSENT = object()

Warn = Callable[[str], None]


def require_same_origin(
    run_dir: Path, now: Provenance, on_changed: Literal["refuse", "allow"], warn: Warn
) -> None:
    """Hold a process that goes on with a run against those that worked on it before.

    What can't be compared, and other versions and code, are warned of; so are other data where
    they are allowed. Raises DataError where they are not.
    """
    before = _read_or_warn(run_dir, warn)
    if changed := changed_data(before, now):
        told = f"{run_dir}: the data are not those that the run was trained on so far"
        if on_changed == "refuse":
            advice = f"Bring them back, or go on with these: {ALLOW}"
            raise DataError("\n  ".join([f"{told}:", *changed]) + f"\n{advice}")
        warn(f"{told}, and {ALLOW}: {'; '.join(changed)}")
    if software := changed_software(before, now):
        warn(f"{run_dir}: goes on with other software, and may round otherwise: {software}")


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
    """A line for each column of each split that is not what the run was given so far."""
    kept = _newest(before, "data")
    if kept is None:
        return []
    lines = [
        f"{shown(f'{split} {column}')}: was {_of_data(old)}, is {_of_data(new)}"
        for split, column, old, new in _columns(kept, now.data)
        if not _is_same_data(old, new)
    ]
    more = len(lines) - MOST_COLUMNS
    return [*lines[:MOST_COLUMNS], f"{more:,} more"] if more > 0 else lines


def changed_software(before: Sequence[Mapping[str, Any]], now: Provenance) -> str | None:
    """What of versions and code is not as it was, in words; None where nothing is."""
    parts = [*_changed_versions(before, now), *_changed_code(before, now)]
    if not parts:
        return None
    rest = f" and {len(parts) - MOST_NAMED} more" if len(parts) > MOST_NAMED else ""
    return ", ".join(parts[-MOST_NAMED:]) + rest


def _newest(before: Sequence[Mapping[str, Any]], section: str) -> Mapping[str, Any] | None:
    """A section of the newest process that has it."""
    kept = (process.get(section) for process in reversed(before))
    return next((entry for entry in kept if isinstance(entry, Mapping) and entry), None)


def _columns(
    kept: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Split, column, what was kept of it and what is."""
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
    # Where other samples were hashed, shape and type are all that both say.
    names = ("shape", "dtype", *(["sha256"] if old.get("of") == new.get("of") else []))
    return all(_comparable(old.get(name)) == _comparable(new.get(name)) for name in names)


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of_data(entry: Any) -> str:
    """A fingerprint in words."""
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
