"""Settings of Hugging Face's Trainer: the JSON that `TrainingArguments.to_json_string` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config.foreign.adopt import Adoption, KeyRow, Settings, read_setting
from pipeline.config.foreign.class_settings import (
    PLATEAU,
    adopt_classes,
    list_leaves,
    translate_metric,
)
from pipeline.core.files.bounded_read import parse_json, read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, MAX_NUMBER_LENGTH
from pipeline.core.files.value_text import show
from pipeline.training.metric_names import METRICS

NAME = "TrainingArguments"
CERTAIN = frozenset(("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"))
"""Settings that no other trainer has."""
UNITS = {"steps": "every_steps", "epoch": "every_epochs"}
"""Keys of a period by the strategy of evaluations and checkpoints."""
WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")
PLATEAU_PATIENCE = 11
"""Evaluations until PyTorch's ReduceLROnPlateau reduces the rate, by default."""


def read_training_arguments(file: Path) -> Any:
    """Parse a JSON file. Raises OSError, and ValueError if it isn't JSON or has a key twice."""
    text = read_text(file, MAX_BYTES)
    parse_json(text)
    return json.loads(text, object_pairs_hook=_require_single_keys, parse_int=_parse_int)


def _parse_int(text: str) -> int:
    """Return a number. Raises ValueError for one that is too long to compute with."""
    if len(text) > MAX_NUMBER_LENGTH:
        raise ValueError(f"has a number of {len(text):,} digits")
    return int(text)


def _require_single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError if a key is there twice."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in tree if keys.count(key) > 1)
        raise ValueError(f"has the key {twice} twice")
    return tree


def is_training_arguments(tree: Any) -> bool:
    """Return whether a file's content has settings that only TrainingArguments have."""
    return isinstance(tree, dict) and not CERTAIN.isdisjoint(tree)


def adopt_training_arguments(origin: str, tree: Mapping[str, Any]) -> Adoption:
    """Map all settings. Raises RecipeError with the problems of all rules."""
    settings = dict(list_leaves(tree))
    rules = (
        _map_length,
        _map_batch,
        _map_optimizer,
        _map_warmup,
        _map_schedule,
        _map_events,
        _map_further,
    )
    return adopt_classes(NAME, origin, settings, (), rules, {})


def _map_length(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of `max_steps`, which replaces `num_train_epochs`."""
    steps = read_setting(settings, "max_steps", -1)
    epochs = read_setting(settings, "num_train_epochs", 3.0)
    if steps > 0:
        yield KeyRow("max_steps", {"train.steps": steps})
        yield KeyRow("num_train_epochs", note="max_steps is used")
        return
    yield KeyRow("max_steps", note="is off")
    whole = math.ceil(epochs)
    note = "" if whole == epochs else "whole epochs are counted; set train.steps for a part of one"
    yield KeyRow("num_train_epochs", {"train.epochs": whole}, note)


def _map_batch(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of the batch size: the samples of all devices and microbatches."""
    name = "per_device_train_batch_size"
    devices = max(read_setting(settings, "_n_gpu", 1), 1)
    microbatches = read_setting(settings, "gradient_accumulation_steps", 1)
    size = read_setting(settings, name, 8) * devices * microbatches
    notes = [f"times {devices} devices"] if devices > 1 else []
    notes += [f"times {microbatches} microbatches"] if microbatches != 1 else []
    yield KeyRow(name, {"train.batch_size": size}, ", ".join(notes))
    if "dataloader_drop_last" not in settings:
        yield KeyRow("dataloader_drop_last", {"dataset.train.drop_remainder": False})


def _map_optimizer(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of the learning rate, decay and clipping. Biases and norms have no decay."""
    lr = read_setting(settings, "learning_rate", 5e-5)
    yield KeyRow("learning_rate", {"train.optimizer.lr": lr})
    if decay := read_setting(settings, "weight_decay", 0.0):
        rules = [{"pattern": pattern, "weight_decay": 0.0} for pattern in ("*/bias", "*/scale")]
        keys = {"train.optimizer.weight_decay": decay, "train.optimizer.decay_rules": rules}
        yield KeyRow("weight_decay", keys, "biases and norms have none")
    elif settings.get("optim", "adamw_torch") not in ("sgd", "adagrad", "rmsprop"):
        yield KeyRow("weight_decay", {"train.optimizer.weight_decay": 0.0})
    if limit := read_setting(settings, "max_grad_norm", 1.0):
        yield KeyRow("max_grad_norm", {"train.clip.norm": limit})


def _map_warmup(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of warmup, in steps or as a share of the length."""
    kind = read_setting(settings, "lr_scheduler_type", "linear")
    steps = read_setting(settings, "warmup_steps", 0.0)
    ratio = read_setting(settings, "warmup_ratio", 0.0)
    if kind in WITHOUT_WARMUP:
        if steps or ratio:
            yield KeyRow("warmup_steps", note=f"{kind} has no warmup")
            yield KeyRow("warmup_ratio", note=f"{kind} has no warmup")
    elif steps >= 1:
        keys = {"train.schedule.warmup_steps": int(steps)}
        yield KeyRow("warmup_steps", keys, "W steps; each adds lr / W")
        yield KeyRow("warmup_ratio", note="warmup_steps is used" if ratio else "is off")
    elif share := steps or ratio:
        name = "warmup_steps" if steps else "warmup_ratio"
        yield KeyRow(name, _scale_warmup(settings, share), "a share of the length")


def _map_schedule(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of schedules with numbers of their own."""
    lr = read_setting(settings, "learning_rate", 5e-5)
    kind = read_setting(settings, "lr_scheduler_type", "linear")
    prefix = "lr_scheduler_kwargs."
    end = "train.schedule.end_factor"
    if kind == "polynomial" and lr > 0:
        keys: dict[str, Any] = {
            "schedule": "polynomial",
            end: read_setting(settings, f"{prefix}lr_end", 1e-7) / lr,
            "train.schedule.power": read_setting(settings, f"{prefix}power", 1.0),
        }
        for setting in ("lr_scheduler_type", f"{prefix}lr_end", f"{prefix}power"):
            yield KeyRow(setting, keys)
    elif kind == "cosine_with_min_lr" and lr > 0:
        if settings.get(f"{prefix}min_lr") is not None:
            factor = read_setting(settings, f"{prefix}min_lr", 0.0) / lr
            yield KeyRow(f"{prefix}min_lr", {end: factor}, "min_lr / lr")
        if settings.get(f"{prefix}min_lr_rate") is not None:
            yield KeyRow(f"{prefix}min_lr_rate", {end: settings[f"{prefix}min_lr_rate"]})
    elif kind == "cosine_with_restarts" and settings.get(f"{prefix}num_cycles", 1) == 1:
        yield KeyRow("lr_scheduler_type", {"schedule": "cosine"}, "without a restart")
    elif kind == "reduce_lr_on_plateau":
        keys = {f"{PLATEAU}.metric": "loss", f"{PLATEAU}.patience": PLATEAU_PATIENCE}
        yield KeyRow("lr_scheduler_type", keys)


def _scale_warmup(settings: Settings, ratio: float) -> dict[str, Any]:
    """Return keys of a warmup that is a share of the length."""
    steps = read_setting(settings, "max_steps", -1)
    if steps > 0:
        return {"train.schedule.warmup_steps": math.ceil(steps * ratio)}
    epochs = math.ceil(read_setting(settings, "num_train_epochs", 3.0))
    return {"train.schedule.warmup_epochs": epochs * ratio}


def _map_events(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of evaluations, checkpoints and logs, and of the best checkpoint."""
    logging = read_setting(settings, "logging_steps", 500.0)
    if logging >= 1:
        yield KeyRow("logging_steps", {"monitor.loss_every": int(logging)})
    old_name = "evaluation_strategy"
    name = old_name if old_name in settings else "eval_strategy"
    yield from _map_period(settings, name, "eval", logging)
    yield from _map_period(settings, "save_strategy", "checkpoint", 500.0)
    if settings.get("load_best_model_at_end") is not True:
        return
    named = settings.get("metric_for_best_model") or "loss"
    metric = translate_metric(named, is_evaluated=True)
    larger = settings.get("greater_is_better")
    is_larger = metric is not None and METRICS[metric] == "max"
    names = ["load_best_model_at_end", "metric_for_best_model", "greater_is_better"]
    if metric is None or (isinstance(larger, bool) and larger != is_larger):
        for setting in names:
            yield KeyRow(setting, note=f"evaluations have no such metric as {show(named)}")
        return
    for setting in names:
        note = "the best is kept, and the last is evaluated" if setting == names[0] else ""
        yield KeyRow(setting, {"checkpoint.best": metric}, note)


def _map_period(
    settings: Settings, name: str, section: str, default_steps: float
) -> Iterator[KeyRow]:
    """Yield the rows of a strategy and its steps, as of evaluations."""
    strategy = settings.get(name, "steps" if section == "checkpoint" else "no")
    stem = "eval" if section == "eval" else "save"
    steps = read_setting(settings, f"{stem}_steps", default_steps)
    if strategy == "epoch":
        yield KeyRow(name, {f"{section}.every_epochs": 1})
    elif strategy == "steps" and steps >= 1:
        keys = {f"{section}.every_steps": int(steps)}
        yield KeyRow(name, keys)
        yield KeyRow(f"{stem}_steps", keys)
    elif strategy == "steps":
        note = f"is a share of the length; set {section}.every_steps=N"
        yield KeyRow(name, note=note)
        yield KeyRow(f"{stem}_steps", note=note)
    elif strategy == "best":
        yield KeyRow(name, note="checkpoint.best keeps the best")
    else:
        yield KeyRow(name, note="is off")


def _map_further(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of label smoothing and of trackers."""
    if smoothing := read_setting(settings, "label_smoothing_factor", 0.0):
        keys = {"train.loss.smoothing": smoothing, "train.loss.smoothing_convention": "uniform"}
        yield KeyRow("label_smoothing_factor", keys)
    trackers = settings.get("report_to")
    names = trackers if isinstance(trackers, list) else [trackers]
    if "tensorboard" in names or "all" in names:
        others = [name for name in names if name not in ("tensorboard", "none")]
        note = f"not {', '.join(map(str, others))}: see train.callbacks" if others else ""
        yield KeyRow("report_to", {"monitor.tensorboard": True}, note)
