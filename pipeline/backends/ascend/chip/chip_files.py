"""Read and check chips from YAML files: a file of conf/device by name, or any file by path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from pipeline.backends.ascend.chip.hardware import FIGURES, UNREAD, Chip, find_unit
from pipeline.backends.ascend.chip.options import EmulationOptions
from pipeline.core.errors import MAX_PROBLEMS, PipelineError, limit_problems
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.name_text import explain_unknown_name, find_nearest, show_name
from pipeline.core.files.paths import CONF, expand_home
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.value_text import show

DEVICES = CONF / "device"
CHIP_KEYS = frozenset(Chip.model_fields)
NO_FIGURES = UNREAD | frozenset(("name", *EmulationOptions.model_fields))
"""Keys of a device file that aren't a chip's."""
_NAME = re.compile(r"\w[\w.+-]{0,99}")


class ChipError(PipelineError):
    """A chip file with problems. Each of `problems` starts with its key."""

    exit_status = 2

    def __init__(self, source: str | Path, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
        else:
            head = f"{source} has {len(self.problems)} problems:"
            lines = [f"  {line}" for line in limit_problems(self.problems)]
            super().__init__("\n".join([head, *lines]))


def load_chip(name_or_path: str | Path) -> Any:
    """Return the `Chip` of a shipped device file, by name, or of any YAML file.

    A file may start from others with `defaults: [ascend910, _self_]`, as in Hydra. Names are
    looked up beside the file, then among the shipped files. Later figures override earlier ones.
    Keys of a run (devices, mode, ...) are ignored.

    Raises ChipError for an unknown chip or file, and with all problems of a file at once.
    """
    file = _find_file(name_or_path)
    tree = {key: value for key, value in _read_merged(file).items() if key not in NO_FIGURES}
    try:
        return Chip.model_validate(tree)
    except ValidationError as error:
        unknown = [key for key in tree if key not in CHIP_KEYS]
        problems = [_describe_unknown_key(key, tree[key]) for key in unknown[:MAX_PROBLEMS]]
        problems += [f"{show_name(key)}: there is no such key" for key in unknown[MAX_PROBLEMS:]]
        missing = [name for name in FIGURES if name not in tree]
        problems += [
            f"{name}: missing; a formula needs it, in {find_unit(name)}, with its source"
            for name in missing
        ]
        reported = {*map(show_name, unknown), *missing}
        problems += [
            problem
            for problem in describe_problems(error, tree)
            if problem.partition(": ")[0].partition(" = ")[0] not in reported
        ]
        raise ChipError(file, problems) from error


def _describe_unknown_key(key: str, value: Any) -> str:
    """Return the message for an unknown key, with the key of another unit or a similar key."""
    stem = key.rpartition("_")[0] or key
    other_units = [name for name in sorted(CHIP_KEYS) if name.startswith((f"{key}_", f"{stem}_"))]
    guess = find_nearest(key, other_units) or find_nearest(key, CHIP_KEYS)
    question = f"; did you mean {guess}? Keys carry their unit" if guess else ""
    return f"{show_name(key)} = {show(value)}: there is no such key{question}"


def _find_file(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        file = expand_home(Path(text))
        if file.is_file():
            return file
        raise ChipError(f"hardware = {text}", ["there is no such file"])
    file = DEVICES / f"{text}.yaml"
    if file.is_file() and "chip" in _read_merged(file):
        return file
    chips = [chip.stem for chip in sorted(DEVICES.glob("*.yaml")) if "chip" in _read_merged(chip)]
    hint = explain_unknown_name("chip", text, chips)
    raise ChipError(f"hardware = {text}", [f"{hint}; or name a YAML file"])


def _read_merged(file: Path, origins: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file merged over the files in its `defaults`, as plain data.

    `origins` are the files whose `defaults` led to this file.
    """
    if file in origins:
        chain = " -> ".join(origin.name for origin in (*origins, file))
        raise ChipError(file, [f"defaults: must not lead back to their file, as {chain}"])
    values = _parse_file(file)
    names = values.pop("defaults", [])
    if not isinstance(names, list):
        raise ChipError(file, [f"defaults = {show(names)}: must be a list"])
    tree: dict[str, Any] = {}
    for name in names if "_self_" in names else [*names, "_self_"]:
        layer = values
        if name != "_self_":
            layer = _read_merged(_find_default(name, file), (*origins, file))
        tree = _merge_sections(tree, layer)
    return tree


def _merge_sections(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections key by key and replace other values, as Hydra does."""
    merged = dict(base)
    for key, value in override.items():
        are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge_sections(merged[key], value) if are_sections else value
    return merged


def _parse_file(file: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(file) or {}
    except (OSError, ValueError) as error:
        raise ChipError(file, [f"not readable as YAML: {error}"]) from error
    if not isinstance(tree, dict):
        raise ChipError(file, ["must hold keys and values, not a list"])
    return cast(dict[str, Any], tree)


def _find_default(name: Any, file: Path) -> Path:
    """Return the file of a name in `defaults`."""
    for folder in (file.parent, DEVICES):
        candidate = folder / f"{name}.yaml"
        is_name = isinstance(name, str) and _NAME.fullmatch(name)
        # A file may start from the shipped file of the same name.
        if is_name and candidate.is_file() and candidate.resolve() != file.resolve():
            return candidate
    names = (shipped.stem for shipped in DEVICES.glob("*.yaml"))
    raise ChipError(
        file, [f"defaults: {show(name)}: {explain_unknown_name('device file', str(name), names)}"]
    )
