"""Recipes from the settings of other trainers.

Each setting is mapped to keys of a recipe, or listed with the reason why it isn't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from pipeline.config.compose import load_recipe
from pipeline.config.files import SECTIONS, make_recipe_name
from pipeline.core.errors import RecipeError, printable
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.value_text import show

Settings = Mapping[str, Any]

NO_COUNTERPART = "has no counterpart in a recipe"
"""The reason of an unmapped setting that no table has."""
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that turn a setting off, so that a recipe doesn't need it."""


@dataclass(frozen=True)
class KeyRow:
    """A trainer's setting and the recipe's keys for it."""

    setting: str
    keys: Settings = field(default_factory=dict)
    """Values by key of the recipe: a group, such as `model`, or a dotted path. A path of a map op
    has the op's name in place of its position, and so has one of a callback:
    `dataset.train.ops.normalize.mean`."""
    note: str = ""
    """An explanation of the keys; without keys, the reason for that."""


Rule = Callable[[Settings], Iterable[KeyRow]]


@dataclass(frozen=True)
class Adoption:
    """The settings of a foreign file, and rows for them and for defaults that the file omits."""

    origin: str
    settings: Settings
    rows: tuple[KeyRow, ...]


@cache
def read_table(trainer: str) -> Mapping[str, Any]:
    """Return a trainer's table: a key for each setting, and reasons for unmapped settings."""
    table: Mapping[str, Any] = read_yaml(Path(__file__).parent / "tables" / f"{trainer}.yaml")
    return table


def adopt(trainer: str, origin: str, settings: Settings, rules: Iterable[Rule]) -> Adoption:
    """Map all settings by rules and by the trainer's table.

    Raises RecipeError with the problems of all rules.
    """
    table = read_table(trainer)
    reasons = {name: text for text, names in table["reasons"].items() for name in names.split()}
    rows: dict[str, KeyRow] = {}
    problems: list[str] = []
    settings_and_defaults = {**table.get("defaults", {}), **settings}
    all_rules: list[Rule] = [*rules, partial(_map_choices, table.get("choices", {}))]
    for rule in all_rules:
        try:
            rows |= {row.setting: row for row in rule(settings_and_defaults)}
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    for name, value in settings.items():
        key = table.get("keys", {}).get(name)
        if name not in rows and key and value not in (None, ""):
            rows[name] = KeyRow(name, {key: value})
        elif name not in rows:
            reason = _find_reason(name, reasons)
            rows[name] = KeyRow(name, note="is off" if value in _OFF else reason)
    return Adoption(origin, settings, add_length(rows.values()))


def add_length(rows: Iterable[KeyRow]) -> tuple[KeyRow, ...]:
    """Return the rows, with one for the length of training if they have none."""
    rows = tuple(rows)
    keys = {key for row in rows for key in row.keys}
    if keys.isdisjoint(("train.epochs", "train.steps")):
        rows = (*rows, KeyRow("length of training", {"train.epochs": 1}, "is missing"))
    return rows


def _find_reason(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason of a setting, of the end of its name, or of a section around it."""
    parts = name.split(".")
    sections = [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
    for candidate in (name, parts[-1], *sections):
        if candidate in reasons:
            return reasons[candidate]
    return NO_COUNTERPART


def _map_choices(choices: Mapping[str, Any], settings: Settings) -> Iterator[KeyRow]:
    """Yield a row for each setting whose value is in `choices`, by setting and value.

    Also yields rows of further settings that apply with this value only.
    """
    for name, choices_by_value in choices.items():
        value = settings.get(name)
        choice = choices_by_value.get(value if isinstance(value, str) else show(value))
        if choice is None:
            continue
        yield KeyRow(name, choice["sets"])
        for further_name, key in choice.get("uses", {}).items():
            if settings.get(further_name) is not None:
                yield KeyRow(further_name, {key: settings[further_name]})


def make_recipe_text(adoption: Adoption, target: Path) -> str:
    """Return the recipe as YAML, with a comment for each unmapped setting.

    Raises RecipeError if it isn't a valid recipe.
    """
    head = [
        "# @package _global_",
        f"# Adopted from {printable(adoption.origin)}",
        f"# python -m pipeline +recipe={printable(str(target))}",
    ]
    for row in adoption.rows:
        if not row.keys and row.note != "is off":
            value = show(adoption.settings[row.setting])
            head.append(f"# Unmapped: {printable(row.setting)} = {value}: {printable(row.note)}")
    values = {key: value for row in adoption.rows for key, value in row.keys.items()}
    defaults = [{f"override /{group}": values[group]} for group in SECTIONS if group in values]
    tree: dict[str, Any] = {"defaults": defaults, "name": make_recipe_name(target, "adopted")}
    for key, value in values.items():
        if key not in SECTIONS:
            _set_value(tree, key.split("."), deepcopy(value))
    body = yaml.safe_dump(tree, default_flow_style=None, sort_keys=False, width=100)
    text = "\n".join([*head, body])
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "adopted.yaml"
        draft.write_text(text, encoding="utf-8")
        try:
            load_recipe(str(draft))
        except RecipeError as error:
            problems = [problem.removeprefix(f"{draft}: ") for problem in error.problems]
            raise RecipeError(problems) from error
    return text


def _set_value(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value at a path. An op or a callback is found by its name, or added at the end of its
    list."""
    key, *inner = path
    if not inner:
        tree[key] = value
    elif key in ("ops", "callbacks"):
        name, *op_path = inner
        ops = tree.setdefault(key, [])
        if all(op["name"] != name for op in ops):
            ops.append({"name": name})
        op = next(op for op in ops if op["name"] == name)
        _set_value(op, op_path, value)
    else:
        _set_value(tree.setdefault(key, {}), inner, value)


def read_setting(settings: Settings, name: str, default: Any) -> Any:
    """Return a setting, or `default` if it is missing or null. Raises RecipeError if it isn't a
    number, a text or a list, as `default` is, or isn't finite."""
    value = settings.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    has_type = is_number if isinstance(default, int | float) else isinstance(value, type(default))
    if not has_type:
        expected = {"str": "text", "list": "a list"}.get(type(default).__name__, "a number")
        raise RecipeError([f"{name} = {show(value)}: must be {expected}"])
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError([f"{name} = {value}: must be finite"])
    return value
