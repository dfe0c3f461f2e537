"""Settings of a Keras script: its dataset, and the arguments of `compile` and `fit`. The script
isn't run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.foreign.adopt import Adoption, KeyRow, Rule, Settings, read_setting, read_table
from pipeline.config.foreign.class_settings import (
    ClassSettings,
    adopt_classes,
    map_early_stop,
    map_monitor,
    map_plateau,
    mark_repeated,
)
from pipeline.config.foreign.script import Expression, Script, convert_script_errors
from pipeline.core.errors import RecipeError

NAME = "keras"
CALLS = ("compile", "fit")
DATA = ("x", "y", "sample_weight")
"""Parameters of `fit` that scikit-learn's has too."""
NAMED = ("compile.optimizer", "compile.loss")
"""Settings whose value may be the name of a class."""
METRICS = ("compile.metrics", "compile.weighted_metrics")
REDUCTIONS = {"sum": "sum", "sum_over_batch_size": "mean", "mean": "mean"}
CODE = "is code: choose dataset="
NOT_CONSTANT = "isn't a constant, and the script isn't run"
LOADED = "is code: the samples are those of the dataset, after its map ops"
DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")
"""Modules of keras.datasets whose data a dataset of the same name has."""
DEFAULT_BATCH = 32
MAX_SETTINGS = 2000
MAX_RATE = 1e30
"""Bound of rates and weights that are computed with."""


@dataclass
class KerasScript:
    """The settings of a script, the classes that they name, and what isn't constant."""

    script: Script
    settings: dict[str, Any] = field(default_factory=dict)
    classes: list[ClassSettings] = field(default_factory=list)
    not_constant: dict[str, str] = field(default_factory=dict)
    read: list[ast.AST] = field(default_factory=list)
    """The calls that settings were read from."""

    def add_call(self, call: ast.Call, name: str) -> None:
        """Add the arguments of a call of `compile` or `fit`."""
        self.read.append(call)
        for parameter, node in _list_arguments(call, name):
            self._add_value(f"{name}.{parameter}", node)

    def add_dataset(self) -> None:
        """Add the datasets that `keras.datasets.NAME.load_data()` reads, in their order."""
        calls = self.script.find_calls(["load_data"])
        aliases = _list_aliases(self.script)
        for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            first, _, path = ast.unparse(call.func).partition(".")
            parts = f"{aliases.get(first, first)}.{path}".strip(".").split(".")
            is_keras = {"keras", "tf_keras"}.intersection(parts[:-3])
            # With arguments, as in cifar100's label_mode="coarse", it may be other data.
            if not is_keras or parts[-3] != "datasets" or call.args or call.keywords:
                continue
            if parts[-2] in DATASETS:
                self.read.append(call)
                name = "load_data"
                if name in self.settings:
                    name = f"{name} of line {call.lineno}, {call.col_offset}"
                self.settings[name] = parts[-2]

    def _add_value(self, name: str, node: ast.expr) -> Any:
        """Add the setting of a value, and the settings of classes in it; return a constant or None.

        Raises ValueError beyond `MAX_SETTINGS`: classes may have one another as arguments.
        """
        if len(self.settings) >= MAX_SETTINGS:
            raise ValueError(f"has more than {MAX_SETTINGS:,} arguments of compile and fit")
        line = node.lineno
        resolved = self.script.resolve(node)
        items = resolved.elts if isinstance(resolved, ast.List | ast.Tuple) else []
        parts = [_name_class(self.script.resolve(item)).rpartition(".")[2] for item in items]
        if any(parts):
            for number, (item, part) in enumerate(zip(items, parts, strict=True)):
                self._add_value(f"{name}.{part or number}", item)
            return None
        if name in self.settings:
            name = f"{name} of line {line}"
        if name in self.settings:
            name = f"{name}, {node.col_offset}"
        if _name_class(resolved):
            self._add_class(name, resolved)
            return None
        if name in NAMED and isinstance(resolved, ast.Attribute):
            value: Any = resolved.attr
        else:
            value = self.script.read_constant(node)
        if isinstance(value, Expression):
            is_data = name in ("fit.x", "fit.y", "fit.validation_data")
            data = LOADED if "load_data" in self.settings else CODE
            self.not_constant[name] = data if is_data else f"line {line}: {NOT_CONSTANT}"
        self.settings[name] = value
        return value

    def _add_class(self, name: str, call: Any) -> None:
        """Add the setting of a class, and the settings of its arguments."""
        class_name = _name_class(call)
        self.settings[name] = class_name
        self.read.append(call)
        arguments = {}
        unknown = set()
        for parameter, node in _list_arguments(call, _get_key(class_name)):
            value = self._add_value(f"{name}.{parameter}", node)
            if isinstance(value, Expression):
                unknown.add(parameter)
            elif value is not None:
                arguments[parameter] = value
        # A metric isn't the loss of its name.
        if not name.startswith(METRICS):
            prefix = f"{name}."
            item = ClassSettings(name, prefix, class_name, arguments, frozenset(unknown))
            self.classes.append(item)


def uses_keras(script: Script) -> bool:
    """Return whether a script imports Keras, or uses it as a part of TensorFlow."""
    for node in ast.walk(script.tree):
        names = []
        if isinstance(node, ast.Import):
            names = [part for item in node.names for part in item.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(item.name for item in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        if {"keras", "tf_keras"}.intersection(names):
            return True
    return False


def adopt_keras(file: Path, script: Script) -> Adoption:
    """Map the arguments of `compile` and `fit`.

    Raises RecipeError if the script never calls `fit`, and with the problems of all rules.
    """
    with convert_script_errors():
        calls = {name: _find_calls(script, name) for name in CALLS}
    if not calls["fit"]:
        raise RecipeError(
            [f"{file}: never calls fit; must be a script that trains by model.fit(...)"]
        )
    keras = KerasScript(script)
    settings = keras.settings
    with convert_script_errors():
        keras.add_dataset()
        for name in CALLS:
            for call in calls[name]:
                keras.add_call(call, name)
        _add_named_classes(keras)
        for line, text in script.list_other_code(keras.read):
            name = f"line {line}"
            before = f"{settings[name]}; " if name in settings else ""
            settings[name] = Expression(f"{before}{text}")
            keras.not_constant[name] = "is code, and the script isn't run"
    classes = mark_repeated(NAME, keras.classes)
    rules: list[Rule] = [
        _map_dataset,
        _map_length,
        _map_batch,
        _map_validation,
        _map_weights,
        _map_optimizer,
        partial(_map_schedules, classes),
        partial(_map_losses, classes),
        partial(_map_callbacks, classes),
        partial(_map_repeated, settings),
    ]
    return adopt_classes(NAME, f"Keras' {file.name}", settings, classes, rules, keras.not_constant)


def _add_named_classes(keras: KerasScript) -> None:
    """Add the optimizer and the loss that a text names, as in compile("adam", loss="mse")."""
    is_compiled = any(name.startswith("compile.") for name in keras.settings)
    for name in NAMED:
        default = "rmsprop" if is_compiled and name == "compile.optimizer" else None
        value = keras.settings.get(name, default)
        named = {item.setting for item in keras.classes}
        if isinstance(value, str) and name not in named:
            keras.classes.append(ClassSettings(name, f"{name}.", value, {}))


def _find_calls(script: Script, name: str) -> list[ast.Call]:
    """Return the calls of a method of Keras' models, in the order of their lines.

    Methods of imported modules, as in re.compile, and calls with data alone, as scikit-learn's
    fit(x, y), are left out if there are others.
    """
    modules = set()
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules |= {item.asname or item.name.partition(".")[0] for item in node.names}
    methods = {
        method: [pair for pair in _list_methods(script, method) if pair[0] not in modules]
        for method in CALLS
    }
    compiled = {owner for owner, _ in methods["compile"]}
    parameters = set(read_table(NAME)["parameters"][name].split()).difference(DATA)
    certain = [
        call
        for owner, call in methods[name]
        if owner in compiled or parameters.intersection(item.arg for item in call.keywords)
    ]
    calls = certain or [call for _, call in methods[name]]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _list_methods(script: Script, name: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the object's text and the call of each call of a method."""
    for call in script.find_calls([name]):
        if isinstance(call.func, ast.Attribute):
            yield ast.unparse(call.func.value), call


def _list_arguments(call: ast.Call, key: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of each argument of a call or a class."""
    parameters = read_table(NAME)["parameters"].get(key, "").split()
    for number, node in enumerate(call.args):
        yield (parameters[number] if number < len(parameters) else f"argument {number + 1}"), node
    for item in call.keywords:
        yield item.arg or "**", item.value


def _name_class(node: ast.expr) -> str:
    """Return the name of the class that a call makes an object of; "" for another function."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name if name.rpartition(".")[2][:1].isupper() else ""


def _get_key(class_name: str) -> str:
    return class_name.rpartition(".")[2].replace("_", "").lower()


def _list_aliases(script: Script) -> dict[str, str]:
    """Return the full names of imported modules and functions by their names in a script."""
    aliases: dict[str, str] = {}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import):
            aliases |= {item.asname: item.name for item in node.names if item.asname}
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module or ''}."
            aliases |= {item.asname or item.name: prefix + item.name for item in node.names}
    return aliases


def _map_dataset(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of the dataset."""
    if "load_data" in settings:
        yield KeyRow("load_data", {"dataset": settings["load_data"]})


def _map_length(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of epochs. An epoch of `steps_per_epoch` isn't a reading of the data."""
    epochs = read_setting(settings, "fit.epochs", 1)
    steps = settings.get("fit.steps_per_epoch")
    if steps is None:
        yield KeyRow("fit.epochs", {"train.epochs": epochs})
        return
    steps = read_setting(settings, "fit.steps_per_epoch", 1)
    keys = {"train.steps": epochs * steps}
    yield KeyRow("fit.epochs", keys, "epochs of steps_per_epoch steps")
    yield KeyRow("fit.steps_per_epoch", keys)


def _map_batch(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of the batch size: the samples of all microbatches."""
    name = "fit.batch_size"
    microbatches = read_setting(settings, "compile.optimizer.gradient_accumulation_steps", 1)
    size = read_setting(settings, name, DEFAULT_BATCH) * microbatches
    note = f"times {microbatches} microbatches" if microbatches != 1 else ""
    yield KeyRow(name, {"train.batch_size": size}, note)
    if microbatches != 1:
        keys = {"train.accumulate_steps": microbatches}
        yield KeyRow("compile.optimizer.gradient_accumulation_steps", keys)


def _map_validation(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of when validation runs."""
    steps = settings.get("fit.steps_per_epoch")
    period = settings.get("fit.validation_freq")
    if isinstance(period, list):
        yield KeyRow("fit.validation_freq", note="set eval.every_epochs=N")
        period = 1
    period = 1 if period is None else period
    keys = {"eval.every_epochs": period}
    if isinstance(steps, int) and isinstance(period, int):
        keys = {"eval.every_steps": steps * period}
    if not isinstance(settings.get("fit.validation_freq"), list):
        yield KeyRow("fit.validation_freq", keys)


def _map_weights(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of class weights, which must be one for each class."""
    weights = settings.get("fit.class_weight")
    if not isinstance(weights, dict):
        return
    if set(weights) == set(range(len(weights))) and all(map(_is_rate, weights.values())):
        values = [float(weights[number]) for number in range(len(weights))]
        yield KeyRow("fit.class_weight", {"train.loss.class_weights": values})
    else:
        note = "set train.loss.class_weights, a list with one weight for each class"
        yield KeyRow("fit.class_weight", note=note)


def _map_optimizer(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of what all optimizers have: clipping and an average of the weights."""
    prefix = "compile.optimizer."
    for name, key in (("global_clipnorm", "norm"), ("clipvalue", "value")):
        if settings.get(f"{prefix}{name}"):
            yield KeyRow(f"{prefix}{name}", {f"train.clip.{key}": settings[f"{prefix}{name}"]})
    if settings.get(f"{prefix}use_ema") is True:
        decay = read_setting(settings, f"{prefix}ema_momentum", 0.99)
        keys = {"train.ema.decay": decay, "train.ema.warmup": False}
        yield KeyRow(f"{prefix}use_ema", keys)
        yield KeyRow(f"{prefix}ema_momentum", {"train.ema.decay": decay})


def _map_schedules(classes: Sequence[ClassSettings], settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of schedules that need arithmetic."""
    for item in classes:
        arguments = item.arguments
        lr = arguments.get("initial_learning_rate")
        if item.key == "piecewiseconstantdecay":
            yield from _map_pieces(item)
        elif item.key == "polynomialdecay" and _is_rate(lr):
            end = read_setting(arguments, "end_learning_rate", 1e-4)
            keys = {"train.schedule.end_factor": end / lr}
            yield KeyRow(f"{item.prefix}end_learning_rate", keys, "end_learning_rate / lr")
        elif item.key == "cosinedecay" and arguments.get("warmup_target") is not None:
            keys = {"train.optimizer.lr": arguments["warmup_target"]}
            yield KeyRow(f"{item.prefix}warmup_target", keys)
            yield KeyRow(f"{item.prefix}initial_learning_rate", note="warmup begins at lr / W")


def _map_pieces(item: ClassSettings) -> Iterator[KeyRow]:
    """Yield the rows of PiecewiseConstantDecay. Its boundaries are the last steps of a value."""
    boundaries, values = item.arguments.get("boundaries"), item.arguments.get("values")
    if boundaries is None or values is None:
        return
    are_lists = isinstance(boundaries, list) and isinstance(values, list)
    if not (are_lists and len(values) == len(boundaries) + 1 and all(map(_is_rate, values))):
        yield KeyRow(item.setting, note="needs N boundaries and N + 1 rates above 0")
        return
    milestones = [step + 1 if isinstance(step, int) else step for step in boundaries]
    factors = [value / values[0] for value in values[1:]]
    keys = {"train.optimizer.lr": values[0], "train.schedule.factors": factors}
    yield KeyRow(f"{item.prefix}boundaries", {"train.schedule.milestones": milestones})
    yield KeyRow(f"{item.prefix}values", keys)


def _map_losses(classes: Sequence[ClassSettings], settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of label smoothing and of the sum over a batch."""
    for item in classes:
        if item.setting != "compile.loss":
            continue
        smoothing = read_setting(item.arguments, "label_smoothing", 0.0)
        if smoothing and item.key == "categoricalcrossentropy":
            keys = {"train.loss.smoothing": smoothing, "train.loss.smoothing_convention": "uniform"}
            yield KeyRow(f"{item.prefix}label_smoothing", keys)
        if kind := REDUCTIONS.get(str(item.arguments.get("reduction"))):
            yield KeyRow(f"{item.prefix}reduction", {"train.loss.reduction": kind})


def _map_callbacks(classes: Sequence[ClassSettings], settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of EarlyStopping, ReduceLROnPlateau and ModelCheckpoint."""
    for item in classes:
        if item.key == "earlystopping":
            yield from map_early_stop(item, "val_loss")
            if item.arguments.get("restore_best_weights") is True:
                row = next(map_monitor(item, "checkpoint.best", "val_loss"))
                note = row.note or "the best is kept, and the last is evaluated"
                yield KeyRow(f"{item.prefix}restore_best_weights", row.keys, note)
        elif item.key == "reducelronplateau":
            yield from map_plateau(item, 0, "val_loss")
        elif item.key == "modelcheckpoint":
            yield from _map_checkpoint(item)


def _map_checkpoint(item: ClassSettings) -> Iterator[KeyRow]:
    """Yield the rows of a ModelCheckpoint, which saves after each epoch by default."""
    period = item.arguments.get("save_freq", "epoch")
    is_steps = isinstance(period, int) and not isinstance(period, bool)
    keys = {"checkpoint.every_steps": period} if is_steps else {"checkpoint.every_epochs": 1}
    yield KeyRow(f"{item.prefix}save_freq", keys)
    if item.arguments.get("save_best_only") is True:
        rows = list(map_monitor(item, "checkpoint.best", "val_loss"))
        yield from rows
        yield KeyRow(f"{item.prefix}save_best_only", rows[0].keys, rows[0].note)
    else:
        yield KeyRow(item.setting, keys)
        for name in ("monitor", "mode"):
            if name in item.arguments:
                yield KeyRow(f"{item.prefix}{name}", note="save_best_only is off")


def _map_repeated(settings: Mapping[str, Any], constants: Settings) -> Iterator[KeyRow]:
    """Yield the rows of arguments that an earlier call has set."""
    for name in settings:
        stem, _, line = name.partition(" of line ")
        if line:
            yield KeyRow(name, note=f"{stem} is used; a recipe has one")


def _is_rate(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < MAX_RATE
