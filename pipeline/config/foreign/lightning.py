"""Settings of Lightning: a config that Hydra has composed, or a YAML of LightningCLI.

In Hydra's, `_target_` names a class and the keys beside it are its arguments. In LightningCLI's,
`class_path` names it and `init_args` has them. No class is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipeline.config.files import find_groups
from pipeline.config.foreign.adopt import (
    Adoption,
    KeyRow,
    Rule,
    Settings,
    read_setting,
    read_table,
)
from pipeline.config.foreign.class_settings import (
    SECRET,
    ClassSettings,
    adopt_classes,
    list_leaves,
    map_early_stop,
    map_monitor,
    map_plateau,
    mark_repeated,
)
from pipeline.config.foreign.script import Expression
from pipeline.core.errors import RecipeError

NAME = "lightning"
CLASS_KEYS = ("_target_", "class_path")
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
"""A value that is the value of another key."""
NUMBER = re.compile(r"[0-9]{1,6}")
MAX_REFERENCES = 16
"""Most references that lead from one to another."""
DEFAULT_EPOCHS = 1000
"""Epochs of a Trainer without a length."""
TIMM_MODELS = "timm"
RATES = ("lr", "learning_rate")
NOT_SAVED = "saves nothing, but a run of a recipe saves checkpoints; see checkpoint.every_seconds"
DRAWN = "is no number: Lightning draws a seed, a recipe has its default"
BATCH_SECTIONS = ("data", "datamodule", "model", "dataset", "batch_size")
EVALUATIONS = frozenset(("val", "valid", "validation", "eval", "test", "predict"))
"""Words in the names of settings that aren't for training."""


def is_lightning(tree: Any) -> bool:
    """Return whether a YAML's content has a trainer or a class, as Lightning's configs do."""
    tree = _enter_subcommand(tree)
    sections = [tree, *tree.values()] if isinstance(tree, dict) else []
    mappings = [section for section in sections if isinstance(section, dict)]
    has_class = any(key in section for section in mappings for key in CLASS_KEYS)
    return has_class or (isinstance(tree, dict) and isinstance(tree.get("trainer"), dict))


def is_uncomposed(tree: Any) -> bool:
    """Return whether a YAML's content is Hydra's, with a list of files that it is composed of."""
    return isinstance(tree, dict) and isinstance(tree.get("defaults"), list)


def adopt_lightning(origin: str, tree: Mapping[str, Any]) -> Adoption:
    """Map the settings of a config. Raises RecipeError with the problems of all rules."""
    tree = _enter_subcommand(tree)
    settings: dict[str, Any] = {}
    for name, value in list_leaves(tree):
        if name in settings:
            raise RecipeError([f"{name}: is there twice, by a key with a dot"])
        settings[name] = _resolve(value, tree)
    classes = mark_repeated(NAME, _find_classes(tree, "", settings))
    rules: list[Rule] = [
        _map_length,
        _map_batch,
        _map_clipping,
        _map_validation,
        _map_seed,
        partial(_map_rates, classes),
        partial(_map_networks, classes),
        partial(_map_schedules, classes),
        partial(_map_callbacks, classes),
    ]
    reasons = {
        name: "has a reference that isn't followed" if "${" in str(value) else "is ???: not set"
        for name, value in settings.items()
        if isinstance(value, Expression)
    }
    return adopt_classes(NAME, origin, settings, classes, rules, reasons)


def _enter_subcommand(tree: Any) -> Any:
    """Return the settings of LightningCLI's subcommand `fit`, if a config has them."""
    if isinstance(tree, dict) and list(tree) == ["fit"] and isinstance(tree["fit"], dict):
        return tree["fit"]
    return tree


def _resolve(value: Any, tree: Any) -> Any:
    """Return a value, or the value that it refers to. A text with other references is an
    Expression."""
    for _ in range(MAX_REFERENCES):
        match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None or SECRET.search(match[1]):
            break
        node = tree
        for part in match[1].split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) or node is None:
            break
        value = node
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and ("${" in text or text == "???") for text in texts):
        return Expression(str(value))
    return value


def _find_classes(tree: Any, path: str, settings: Settings) -> Iterator[ClassSettings]:
    """Yield all classes of a config, with those arguments that are constants."""
    prefix = f"{path}." if path else ""
    if isinstance(tree, dict):
        for key in CLASS_KEYS:
            if not isinstance(tree.get(key), str):
                continue
            start = f"{prefix}init_args." if key == "class_path" else prefix
            values = tree.get("init_args", {}) if key == "class_path" else tree
            names = [name for name in values if name != key] if isinstance(values, dict) else []
            arguments = {name: settings.get(f"{start}{name}") for name in names}
            constants = {
                name: value
                for name, value in arguments.items()
                if f"{start}{name}" in settings and not isinstance(value, Expression)
            }
            unknown = frozenset(names).difference(constants)
            yield ClassSettings(f"{prefix}{key}", start, tree[key], constants, unknown)
        for name, value in tree.items():
            part = f"'{name}'" if "." in name else name
            yield from _find_classes(value, f"{prefix}{part}", settings)
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from _find_classes(item, f"{prefix}{number}", settings)


def _map_length(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of `max_epochs` and `max_steps`. With both, the first to be reached ends a
    Trainer's training; a recipe has the epochs, since it isn't known here how many steps they have.
    """
    epochs = read_setting(settings, "trainer.max_epochs", -1)
    steps = read_setting(settings, "trainer.max_steps", -1)
    has_time = settings.get("trainer.max_time") is not None
    if settings.get("trainer.max_epochs") is None and steps < 0 and not has_time:
        epochs = DEFAULT_EPOCHS
    if epochs >= 0:
        yield KeyRow("trainer.max_epochs", {"train.epochs": epochs})
        note = f"training ends with its epochs; if they have more steps, set train.end_step={steps}"
        yield KeyRow("trainer.max_steps", note="is off" if steps < 0 else note)
    else:
        yield KeyRow("trainer.max_epochs", note="has no end")
        if steps >= 0:
            yield KeyRow("trainer.max_steps", {"train.steps": steps})
        else:
            yield KeyRow("trainer.max_steps", note="is off")


def _map_batch(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of the batch size: the samples of all devices and microbatches."""
    names = []
    for name in settings:
        is_size = name.rpartition(".")[2] in ("batch_size", "train_batch_size")
        if not is_size or name.partition(".")[0] not in BATCH_SECTIONS:
            continue
        if settings[name] is None:
            yield KeyRow(name, note="has no value; set train.batch_size=N")
        elif EVALUATIONS.isdisjoint(re.split(r"[._]", name)):
            names.append(name)
        else:
            yield KeyRow(name, note="is for evaluations")
    if not names:
        return
    names.sort(key=lambda name: "train" not in re.split(r"[._]", name))
    count = _count_devices(settings.get("trainer.devices"))
    count *= max(read_setting(settings, "trainer.num_nodes", 1), 1)
    microbatches = read_setting(settings, "trainer.accumulate_grad_batches", 1)
    size = read_setting(settings, names[0], 1)
    notes = [f"times {count} devices, unless the data module divides it"] if count > 1 else []
    notes += [f"times {microbatches} microbatches"] if microbatches != 1 else []
    keys = {"train.batch_size": size * count * microbatches}
    yield KeyRow(names[0], keys, ", ".join(notes))
    for name in names[1:]:
        yield KeyRow(name, note=f"{names[0]} is used")


def _count_devices(devices: Any) -> int:
    """Return the number of devices of a Trainer's `devices`: 3, [0, 1], "2", "0, 1" or "0,"."""
    if isinstance(devices, str) and "," in devices:
        devices = [number for number in devices.split(",") if number.strip()]
    elif isinstance(devices, str) and NUMBER.fullmatch(devices):
        devices = int(devices)
    if isinstance(devices, list):
        return max(len(devices), 1)
    return max(devices, 1) if isinstance(devices, int) else 1


def _map_clipping(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of gradient clipping, which is off by default."""
    if limit := read_setting(settings, "trainer.gradient_clip_val", 0.0):
        kind = settings.get("trainer.gradient_clip_algorithm") or "norm"
        if kind in ("norm", "value"):
            row = KeyRow("trainer.gradient_clip_val", {f"train.clip.{kind}": limit})
            yield row
            if "trainer.gradient_clip_algorithm" in settings:
                yield KeyRow("trainer.gradient_clip_algorithm", row.keys)


def _map_validation(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of when validation runs: after each epoch by default."""
    name = "trainer.val_check_interval"
    interval = settings.get(name)
    has_steps = isinstance(interval, int) and not isinstance(interval, bool)
    if has_steps:
        yield KeyRow("trainer.check_val_every_n_epoch", note=f"{name} is used")
    elif "trainer.check_val_every_n_epoch" not in settings:
        yield KeyRow("trainer.check_val_every_n_epoch", {"eval.every_epochs": 1})
    microbatches = settings.get("trainer.accumulate_grad_batches") or 1
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        return
    if isinstance(interval, float):
        note = "is off" if interval == 1.0 else "is a share of an epoch; set eval.every_steps=N"
        yield KeyRow(name, note=note)
    elif isinstance(microbatches, int) and interval > 0 and interval % max(microbatches, 1) == 0:
        yield KeyRow(name, {"eval.every_steps": interval // max(microbatches, 1)})


def _map_seed(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of the seed; a seed that isn't a number is drawn by each run."""
    for name in ("seed", "seed_everything"):
        seed = settings.get(name)
        if isinstance(seed, bool):
            yield KeyRow(name, note=DRAWN if seed else "is off")
        elif seed is not None:
            yield KeyRow(name, {"seed": seed})


def _map_rates(classes: Sequence[ClassSettings], settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of a model's argument `lr`, if the config has no optimizer."""
    entries = read_table(NAME)["classes"]
    optimizers = [
        item for item in classes if "optimizer" in entries.get(item.key, {}).get("sets", {})
    ]
    if optimizers:
        return
    for name, value in settings.items():
        if name.partition(".")[0] == "model" and name.rpartition(".")[2] in RATES and value:
            note = "by its name; the optimizer is code: choose optimizer="
            yield KeyRow(name, {"train.optimizer.lr": value}, note)
            return


def _map_networks(classes: Sequence[ClassSettings], settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of a network of torchvision or timm that conf/ has too."""
    files = find_groups()["model"]
    for item in classes:
        if item.name.startswith("torchvision.models."):
            option = item.name.rpartition(".")[2]
            setting = item.setting
        elif item.name.startswith("timm.") and item.key == "createmodel":
            name = str(item.arguments.get("model_name", "")).partition(".")[0]
            option = read_table(TIMM_MODELS)["models"].get(name, name)
            setting = f"{item.prefix}model_name"
        else:
            continue
        if option in files:
            yield KeyRow(setting, {"model": option})
            return


def _map_schedules(classes: Sequence[ClassSettings], settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of schedules that need more than their own arguments."""
    lr = _find_rate(classes)
    lengths = (settings.get("trainer.max_epochs"), settings.get("trainer.max_steps"))
    for item in classes:
        if item.key == "cosineannealinglr":
            end = item.arguments.get("eta_min")
            if _is_number(end) and lr:
                keys = {"train.schedule.end_factor": end / lr}
                yield KeyRow(f"{item.prefix}eta_min", keys, "eta_min / lr")
        for argument in ("T_max", "total_iters"):
            if argument in item.arguments and item.arguments[argument] in lengths:
                yield KeyRow(f"{item.prefix}{argument}", note="is the length of training, as here")
        if item.key == "reducelronplateau":
            yield from map_plateau(item, 1, "val_loss")


def _find_rate(classes: Sequence[ClassSettings]) -> Any:
    """Return the optimizer's learning rate. Without an optimizer, the first class's that has one.

    None if it isn't known.
    """
    entries = [read_table(NAME)["classes"].get(item.key, {}) for item in classes]
    rates = {
        place: item.arguments.get("lr", entry.get("defaults", {}).get("lr"))
        for place, (item, entry) in enumerate(zip(classes, entries, strict=True))
        if "lr" not in item.unknown
    }
    optimizers = [n for n, entry in enumerate(entries) if "optimizer" in entry.get("sets", {})]
    if optimizers:
        rates = {optimizers[0]: rates.get(optimizers[0])}
    return next(filter(_is_number, rates.values()), None)


def _map_callbacks(classes: Sequence[ClassSettings], settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of EarlyStopping and ModelCheckpoint."""
    for item in classes:
        if item.key == "earlystopping":
            yield from map_early_stop(item)
        elif item.key == "modelcheckpoint":
            yield from _map_checkpoint(item, settings)


def _map_checkpoint(item: ClassSettings, settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of a ModelCheckpoint. It saves at each validation if it has no period."""
    arguments = item.arguments
    top = arguments.get("save_top_k")
    if _is_number(top) and top == 0 and not arguments.get("save_last"):
        for name in ("", *arguments):
            yield KeyRow(f"{item.prefix}{name}" if name else item.setting, note=NOT_SAVED)
        return
    if arguments.get("monitor"):
        yield from map_monitor(item, "checkpoint.best")
    names = {"every_n_train_steps": "every_steps", "every_n_epochs": "every_epochs"}
    periods = {
        name: (f"checkpoint.{key}", arguments[name])
        for name, key in names.items()
        if arguments.get(name)
    }
    given = [*names, "train_time_interval"]
    if all(name not in item.unknown and arguments.get(name) is None for name in given):
        periods = {"every_n_epochs": ("checkpoint.every_epochs", 1)}
    for name, (key, value) in periods.items():
        yield KeyRow(f"{item.prefix}{name}", {key: value})
    for name in settings:
        if name.startswith(f"{item.prefix}train_time_interval"):
            yield KeyRow(name, note="set checkpoint.every_seconds=N")
    if not arguments.get("monitor"):
        keys = dict([*periods.values()][:1])
        yield KeyRow(item.setting, keys, "" if keys else "has no period in steps or epochs")
    if isinstance(top, int) and top > 0:
        note = "the newest, and the best"
        yield KeyRow(f"{item.prefix}save_top_k", {"checkpoint.keep": top}, note)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
