"""Read chips from YAML files: one of conf/device by name, or any file, checked before its use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from pipeline.backends.ascend.chip.hardware import FIGURES, UNREAD, Chip, unit_of
from pipeline.core.errors import MAX_PROBLEMS, PipelineError, listed
from pipeline.core.files.error_text import describe, nearest, no_such, shown
from pipeline.core.files.package_paths import CONF
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.value_text import show
from pipeline.core.registry import parts

DEVICES = CONF / "device"
OWN_KEYS = frozenset(Chip.model_fields)
_NAME = re.compile(r"\w[\w.+-]{0,99}")


class ChipError(PipelineError):
    """A chip that can't be used. Carries every problem of its file, each opening with its key."""

    exit_status = 2

    def __init__(self, source: str | Path, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
        else:
            head = f"{source} has {len(self.problems)} problems:"
            super().__init__("\n".join([head, *(f"  {line}" for line in listed(self.problems))]))


def load_chip(name_or_path: str | Path) -> Any:
    """Return the `Chip` of a shipped device file, by name, or of any YAML file.

    A file may start from another with `defaults: [ascend910, _self_]`, as in Hydra: names are
    looked up beside the file, then among the shipped ones, and the later overrides the earlier,
    figure by figure. Keys of a run (devices, mode, ...) are left aside.

    Raises:
        ChipError: there is no such chip or file, or its file has problems: all of them at once.
    """
    file = _find(name_or_path)
    # Keys of a device file that say how a run uses the chip.
    run_keys = frozenset(parts("device")["ascend"].model_fields) - OWN_KEYS
    tree = {key: value for key, value in _read(file).items() if key not in run_keys | UNREAD}
    try:
        return Chip.model_validate(tree)
    except ValidationError as error:
        unknown = [key for key in tree if key not in OWN_KEYS]
        problems = [_unknown_key(key, tree[key]) for key in unknown[:MAX_PROBLEMS]]
        problems += [f"{shown(key)}: there is no such key" for key in unknown[MAX_PROBLEMS:]]
        missing = [name for name in FIGURES if name not in tree]
        problems += [
            f"{name}: missing; a formula needs it, in {unit_of(name)}, with its source"
            for name in missing
        ]
        reported = ("no such key", *(f"{name}: missing" for name in missing))
        problems += [
            problem
            for problem in describe(error, tree)
            if not any(text in problem for text in reported)
        ]
        raise ChipError(file, problems) from error


def _unknown_key(key: str, value: Any) -> str:
    """Return the message for an unknown key, with a near key or one that differs by its unit."""
    stem = key.rpartition("_")[0] or key
    alike = [name for name in sorted(OWN_KEYS) if name.startswith((f"{key}_", f"{stem}_"))]
    guess = nearest(key, alike) or nearest(key, OWN_KEYS)
    question = f"; did you mean {guess}? Keys carry their unit" if guess else ""
    return f"{shown(key)} = {show(value)}: there is no such key{question}"


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        file = Path(text).expanduser()
        if file.is_file():
            return file
        raise ChipError(f"hardware = {text}", ["there is no such file"])
    chips = [chip.stem for chip in sorted(DEVICES.glob("*.yaml")) if "chip" in _read(chip)]
    if text in chips:
        return DEVICES / f"{text}.yaml"
    hint = no_such("chip", text, chips)
    raise ChipError(f"hardware = {text}", [f"{hint}; or name a YAML file"])


def _read(file: Path, origins: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file merged over those that it starts from, as plain data."""
    if file in origins:
        chain = " -> ".join(origin.name for origin in (*origins, file))
        raise ChipError(file, [f"defaults: go in a circle, {chain}"])
    values = _parse(file)
    names = values.pop("defaults", [])
    if not isinstance(names, list):
        raise ChipError(file, [f"defaults = {show(names)}: must be a list"])
    tree: dict[str, Any] = {}
    for name in names if "_self_" in names else [*names, "_self_"]:
        layer = values if name == "_self_" else _read(_origin(name, file), (*origins, file))
        tree = _merge(tree, layer)
    return tree


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections key by key and replace all else, as Hydra does."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _parse(file: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(file) or {}
    except (OSError, ValueError) as error:
        raise ChipError(file, [f"not readable as YAML: {error}"]) from error
    if not isinstance(tree, dict):
        raise ChipError(file, ["must hold keys and values, not a list"])
    return cast(dict[str, Any], tree)


def _origin(name: Any, file: Path) -> Path:
    """Return the file of a name in `defaults`."""
    for folder in (file.parent, DEVICES):
        candidate = folder / f"{name}.yaml"
        named = isinstance(name, str) and _NAME.fullmatch(name)
        if named and candidate.is_file() and candidate.resolve() != file.resolve():
            return candidate
    names = (other.stem for other in DEVICES.glob("*.yaml"))
    raise ChipError(file, [f"defaults: {show(name)}: {no_such('device file', str(name), names)}"])
