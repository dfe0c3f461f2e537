"""Classes that a file of settings names, such as an optimizer with its arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.config.files import SECTIONS
from pipeline.config.foreign.adopt import (
    NO_COUNTERPART,
    Adoption,
    KeyRow,
    Rule,
    Settings,
    add_length,
    adopt,
    read_table,
)
from pipeline.config.foreign.script import Expression
from pipeline.core.files.value_text import show
from pipeline.training.metric_names import METRICS

EVALUATED = re.compile(r"(?:val|valid|validation|eval|test)[/_.-](?P<metric>.+)")
"""Names of metrics of evaluations, as in val_loss and val/acc."""
ACCURACIES = ("acc", "categorical_accuracy", "sparse_categorical_accuracy", "binary_accuracy")
STAND_INS = {"model": "lenet5", "dataset": "digits"}
"""Network and dataset of a recipe, if the file has none of conf/."""
SECRET = re.compile(r"(?:token|password|secret|api_?key)$", re.IGNORECASE)
"""Ends of the names of settings whose values aren't shown."""
HIDDEN = "(hidden)"
PLATEAU = "train.callbacks.reduce_on_plateau"


@dataclass(frozen=True)
class ClassSettings:
    """A class, and the constants among its arguments."""

    setting: str
    """The setting whose value is the class."""
    prefix: str
    """The beginning of the names of the arguments' settings."""
    name: str
    """The name of the class with its module, if the file has it."""
    arguments: Settings
    unknown: frozenset[str] = frozenset()
    """The arguments that aren't constants."""
    used: str = ""
    """The setting of an earlier class that is used in place of this one."""

    @property
    def short_name(self) -> str:
        """The name of the class without its module."""
        return self.name.rpartition(".")[2]

    @property
    def key(self) -> str:
        """The name of the class's entry in tables: in lower case, without _. "" if another class is
        used."""
        return "" if self.used else self.short_name.replace("_", "").lower()


def list_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each leaf. A list is a leaf, unless it has mappings."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            part = f"'{key}'" if "." in key else key
            yield from list_leaves(value, f"{name}.{part}" if name else part)
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for number, item in enumerate(tree):
            yield from list_leaves(item, f"{name}.{number}")
    else:
        yield name, tree


def mark_repeated(trainer: str, classes: Iterable[ClassSettings]) -> list[ClassSettings]:
    """Return the classes; of two that set the same keys of a recipe, the second isn't used."""
    entries = read_table(trainer).get("classes", {})
    first: dict[str, str] = {}
    marked = []
    for item in classes:
        entry = entries.get(item.key, {})
        roles = [key for key in entry.get("sets", {}) if key in SECTIONS]
        roles += [item.key] if entry.get("once") else []
        used = next((first[role] for role in roles if role in first), "")
        first |= {role: item.setting for role in roles if not used}
        marked.append(replace(item, used=used))
    return marked


def adopt_classes(
    trainer: str,
    origin: str,
    settings: Settings,
    classes: Sequence[ClassSettings],
    rules: Iterable[Rule],
    not_constant: Mapping[str, str],
) -> Adoption:
    """Map settings and classes by rules and the trainer's table.

    `not_constant` has the reason of each setting whose value is an `Expression`, which rules don't
    see. Raises RecipeError with the problems of all rules.
    """
    constants = {
        name: value for name, value in settings.items() if not isinstance(value, Expression)
    }
    entries = read_table(trainer).get("classes", {})
    first: Rule = partial(_map_classes, classes, entries, frozenset(settings))
    reasons = {item.setting: "is code, which isn't run" for item in classes}
    reasons |= {
        f"{item.prefix}{argument}": f"is an argument of {show(item.short_name)}"
        for item in classes
        for argument in item.arguments
    }
    rows = [
        replace(row, note=reasons.get(row.setting, row.note)) if row.note == NO_COUNTERPART else row
        for row in adopt(trainer, origin, constants, [first, *rules]).rows
        if (row.keys or row.setting in settings) and row.setting not in not_constant
    ]
    rows += [KeyRow(name, note=note) for name, note in not_constant.items()]
    rows = list(add_length(rows))
    places = {name: place for place, name in enumerate(settings)}
    rows.sort(key=lambda row: places.get(row.setting, len(places)))
    rows = list(_drop_repeated_keys(rows))
    keys = {key for row in rows for key in row.keys}
    stand_ins = read_table(trainer).get("stand_ins", STAND_INS)
    for section, choice in stand_ins.items():
        if section not in keys:
            hint = "; `convert model` writes a network of PyTorch" if section == "model" else ""
            rows.append(KeyRow(section, {section: choice}, f"stands in: choose {section}={hint}"))
    public = {
        name: HIDDEN if isinstance(value, str) and value and SECRET.search(name) else value
        for name, value in settings.items()
    }
    return Adoption(origin, public, tuple(rows))


def _drop_repeated_keys(rows: Iterable[KeyRow]) -> Iterator[KeyRow]:
    """Yield the rows without keys that an earlier row has with another value."""
    first: dict[str, tuple[str, Any]] = {}
    for row in rows:
        dropped = [key for key in row.keys if key in first and first[key][1] != row.keys[key]]
        first |= {key: (row.setting, row.keys[key]) for key in row.keys if key not in first}
        if dropped:
            keys = {key: value for key, value in row.keys.items() if key not in dropped}
            note = "; ".join(f"{first[key][0]} sets {key}" for key in dropped)
            yield KeyRow(row.setting, keys, note)
        else:
            yield row


def _map_classes(
    classes: Iterable[ClassSettings],
    entries: Mapping[str, Any],
    names: Collection[str],
    settings: Settings,
) -> Iterator[KeyRow]:
    """Yield the rows of classes, and of those arguments that their entries use."""
    for item in classes:
        if item.used:
            yield KeyRow(item.setting, note=f"{item.used} is used; a recipe has one")
        elif "reason" in entries.get(item.key, {}):
            yield KeyRow(item.setting, note=entries[item.key]["reason"])
        elif item.key in entries:
            yield from _map_class(item, entries, names)


def _map_class(
    item: ClassSettings, entries: Mapping[str, Any], names: Collection[str]
) -> Iterator[KeyRow]:
    """Yield the rows of a class by its entry, or by the variant that an argument chooses.

    `names` are the settings of the file, which have no defaults.
    """
    entry = entries[item.key]
    for argument, variant in entry.get("variants", {}).items():
        if item.arguments.get(argument):
            entry = entries[variant]
            yield KeyRow(f"{item.prefix}{argument}", entry["sets"])
    missing = [name for name in entry.get("needs", "").split() if name not in item.arguments]
    uses = entry.get("uses", {})
    if missing:
        yield KeyRow(item.setting, note=f"needs constants: {', '.join(missing)}")
        # The rate of a schedule that isn't mapped is the optimizer's.
        uses = {name: key for name, key in uses.items() if key == "train.optimizer.lr"}
    elif entry["sets"]:
        yield KeyRow(item.setting, entry["sets"], entry.get("note", ""))
    defaults = entry.get("defaults", {})
    values = {name: defaults[name] for name in defaults if f"{item.prefix}{name}" not in names}
    values |= {name: value for name, value in item.arguments.items() if value is not None}
    for argument, keys in uses.items():
        value = values.get(argument)
        if isinstance(keys, str) and value not in (None, ""):
            yield KeyRow(f"{item.prefix}{argument}", {keys: value})
        elif isinstance(value, list) and len(value) == len(keys):
            yield KeyRow(f"{item.prefix}{argument}", dict(zip(keys, value, strict=True)))


def translate_metric(name: Any, is_evaluated: bool = False) -> str | None:
    """Return the metric of evaluations with another trainer's name, such as val_acc, or None.

    `is_evaluated`: names without a prefix are metrics of evaluations too.
    """
    text = str(name).lower()
    match = EVALUATED.fullmatch(text)
    metric = match["metric"] if match else text if is_evaluated else ""
    metric = "accuracy" if metric in ACCURACIES else metric
    return metric if metric in METRICS else None


def map_monitor(item: ClassSettings, key: str, default: str = "") -> Iterator[KeyRow]:
    """Yield the rows of a class's `monitor` and `mode`, with the metric as the value of `key`.

    They have no keys if evaluations have no such metric, or if it is better in the other direction.
    """
    monitored = item.arguments.get("monitor") or default
    metric = None if "monitor" in item.unknown else translate_metric(monitored)
    mode = item.arguments.get("mode")
    names = [name for name in ("monitor", "mode") if name in item.arguments]
    if metric is None:
        note = f"evaluations have no such metric; set {key}="
    elif mode in ("min", "max") and mode != METRICS[metric]:
        note, metric = f"{metric} is better if it is {METRICS[metric]}; set {key}=", None
    else:
        note = ""
    keys = {} if metric is None else {key: metric}
    for setting in (item.setting, *(f"{item.prefix}{name}" for name in names)):
        yield KeyRow(setting, keys, note)


def map_plateau(item: ClassSettings, extra_patience: int, default: str) -> Iterator[KeyRow]:
    """Yield the rows of a ReduceLROnPlateau, which waits for `patience` + `extra_patience`
    evaluations."""
    rows = list(map_monitor(item, f"{PLATEAU}.metric", default))
    yield from rows
    if not rows[0].keys:
        yield from _skip_arguments(item)
        return
    patience = item.arguments.get("patience", 10)
    if isinstance(patience, int):
        waits = max(patience + extra_patience, 1)
        note = "the rate is multiplied after this number of evaluations without an improvement"
        yield KeyRow(f"{item.prefix}patience", {f"{PLATEAU}.patience": waits}, note)


def map_early_stop(item: ClassSettings, default: str = "") -> Iterator[KeyRow]:
    """Yield the rows of an EarlyStopping."""
    rows = list(map_monitor(item, "monitor.early_stop.metric", default))
    yield from rows
    if not rows[0].keys:
        yield from _skip_arguments(item)
    elif item.arguments.get("patience") == 0:
        yield KeyRow(f"{item.prefix}patience", {"monitor.early_stop.patience": 1}, "0 is as 1")


def _skip_arguments(item: ClassSettings) -> Iterator[KeyRow]:
    """Yield rows without keys for the arguments, and their defaults, of a class whose metric isn't
    mapped."""
    defaults = ("patience", "min_delta")
    for argument in {**item.arguments, **dict.fromkeys(defaults)}:
        if argument not in ("monitor", "mode"):
            yield KeyRow(f"{item.prefix}{argument}", note="its metric isn't mapped")
