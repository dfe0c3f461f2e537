"""Settings of the training scripts of mindcv and of timm.

timm's, in its `args.yaml`, are translated to mindcv's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.config.files import find_groups
from pipeline.config.foreign.adopt import (
    Adoption,
    KeyRow,
    Settings,
    adopt,
    read_setting,
    read_table,
)
from pipeline.core.errors import RecipeError
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.value_text import show

IMAGENET = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]}
"""Mean and standard deviation of pixels from 0 to 255, which are defaults of mindcv."""
CIFAR = {"normalize.mean": [0.4914, 0.4822, 0.4465], "normalize.std": [0.2023, 0.1994, 0.2010]}
MNIST = {"normalize.mean": [0.1307], "normalize.std": [0.3081]}
SMALL_IMAGES = {"cifar10": CIFAR, "cifar100": CIFAR, "mnist": MNIST}
"""Mean and standard deviation of pixels from 0 to 1, which are constants of mindcv."""
MAX_EDGE = 2**15
"""Largest height and width of images."""
OPS = "dataset.train.ops"
CIFAR_OPS = {
    f"{OPS}.random_crop.size": [32, 32],
    f"{OPS}.random_crop.padding": [4, 4, 4, 4],
    f"{OPS}.random_horizontal_flip.prob": 0.5,
}
INTERPOLATIONS = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}
WITHOUT_NORMS = ("alexnet", "squeezenet", "vgg")
"""Beginnings of the names of networks without norms, unless a name has `_bn`."""
DEVICES = {"cpu": "cpu", "cuda": "gpu", "npu": "ascend910"}
SCALER_START = 65536.0
"""First loss scale of PyTorch's gradient scaler."""


def map_model(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of the network, its dropout, and its parameters without weight decay. Raises
    RecipeError for a network that conf/ lacks."""
    name = read_setting(settings, "model", "")
    files = find_groups()["model"]
    option = read_table("mindcv")["models"].get(name, name)
    if option not in files:
        hint = "`convert model` writes a network of PyTorch as a recipe"
        raise RecipeError(
            [f"model = {show(name)}: {explain_unknown_name('network', name, files)}; {hint}"]
        )
    yield KeyRow("model", {"model": option})
    rate = read_setting(settings, "drop_rate", 0.0)
    if rate and "dropout" in read_yaml(files[option]):
        yield KeyRow("drop_rate", {"model.dropout": rate})
    has_norms = "_bn" in name or not name.startswith(WITHOUT_NORMS)
    patterns = ["*/bias", "*/scale"] if has_norms else ["*/bias"]
    rules = [{"pattern": pattern, "weight_decay": 0.0} for pattern in patterns]
    for setting, value in (("weight_decay_filter", "norm_and_bias"), ("filter_bias_and_bn", True)):
        if settings.get(setting) == value:
            yield KeyRow(setting, {"train.optimizer.decay_rules": rules})


def map_training(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of the batch size, warmup, last learning rate and label smoothing.

    Raises RecipeError for an optimizer that isn't in the trainer's table.
    """
    optimizers = read_table("mindcv")["choices"]["opt"]
    optimizer = read_setting(settings, "opt", "adam")
    if optimizer not in optimizers:
        choices = ", ".join(sorted(optimizers))
        raise RecipeError([f"opt = {show(optimizer)}: must be one of {choices}"])
    microbatches = read_setting(settings, "gradient_accumulation_steps", 1)
    batch_size = read_setting(settings, "batch_size", 64) * microbatches
    yield KeyRow("batch_size", {"train.batch_size": batch_size})
    if warmup := read_setting(settings, "warmup_epochs", 0.0):
        note = "W steps; each adds lr / W"
        yield KeyRow("warmup_epochs", {"train.schedule.warmup_epochs": warmup}, note)
    lr = read_setting(settings, "lr", 0.0)
    if "cosine" in str(settings.get("scheduler")) and lr > 0:
        end = read_setting(settings, "min_lr", 1e-6) / lr
        yield KeyRow("min_lr", {"train.schedule.end_factor": end}, "min_lr / lr, at the last step")
    if smoothing := read_setting(settings, "label_smoothing", 0.0):
        keys = {"train.loss.smoothing": smoothing, "train.loss.smoothing_convention": "uniform"}
        yield KeyRow("label_smoothing", keys)


def map_data(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of the dataset and its map ops. Raises RecipeError for another dataset."""
    name = read_setting(settings, "dataset", "imagenet") or "imagenet"
    if name != "imagenet" and name not in SMALL_IMAGES:
        choices = ", ".join(["imagenet", *SMALL_IMAGES])
        raise RecipeError([f"dataset = {show(name)}: must be one of {choices}"])
    edge = read_setting(settings, "image_resize", 224)
    if not 1 <= edge <= MAX_EDGE:
        raise RecipeError([f"image_resize = {show(edge)}: must be from 1 to {MAX_EDGE:,}"])
    size = [edge] * 2
    if name == "imagenet" or settings.get("has_crops"):
        yield from _map_crops(settings, name, size)
    else:
        ops = {"resize.size": size, "rescale.factor": 1 / 255, "rescale.shift": 0.0}
        yield KeyRow("dataset", {"dataset": name, **(CIFAR_OPS if name != "mnist" else {})})
        yield KeyRow("image_resize", _map_to_splits({**ops, **SMALL_IMAGES[name]}))
    yield from _map_mixing(settings)


def _map_mixing(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of MixUp or CutMix. A file with both has MixUp, and a row that says so."""
    classes = read_setting(settings, "num_classes", 1000)
    used = ""
    for setting, op in (("mixup", "mix_up"), ("cutmix", "cut_mix")):
        alpha = read_setting(settings, setting, 0.0)
        if alpha and used:
            note = f"{used} is used: a recipe has one of both, for all batches"
            yield KeyRow(setting, note=f"{note}; {OPS} may have cut_mix in place of mix_up")
        elif alpha:
            used = setting
            yield KeyRow(setting, {f"{OPS}.one_hot.classes": classes, f"{OPS}.{op}.alpha": alpha})


def _map_crops(settings: Settings, name: str, size: list[int]) -> Iterator[KeyRow]:
    """Yield the rows of a dataset with random crops of `size`, and its flips, colours and norms."""
    share = read_setting(settings, "crop_pct", 0.875)
    if not 0.01 <= share <= 1:
        raise RecipeError([f"crop_pct = {share}: must be from 0.01 to 1"])
    crop = f"{OPS}.random_resized_crop"
    resized = [math.floor(edge / share) for edge in size]
    resize = "dataset.image_size" if name == "imagenet" else "dataset.eval.ops.resize.size"
    note = "all images are resized, whatever their shape"
    yield KeyRow("dataset", {"dataset": "image_folder" if name == "imagenet" else name})
    yield KeyRow("image_resize", {f"{crop}.size": size})
    yield KeyRow("crop_pct", {resize: resized, "dataset.eval.ops.center_crop.size": size}, note)
    if name == "imagenet" and not settings.get("data_dir"):
        yield KeyRow("data_dir", {"dataset.root": "."}, "set dataset.root=DIR")
    for setting in ("scale", "ratio"):
        if settings.get(setting):
            yield KeyRow(setting, {f"{crop}.{setting}": settings[setting]})
    if interpolation := INTERPOLATIONS.get(str(settings.get("interpolation"))):
        yield KeyRow("interpolation", {f"{crop}.interpolation": interpolation})
    if prob := read_setting(settings, "hflip", 0.5):
        yield KeyRow("hflip", {f"{OPS}.random_horizontal_flip.prob": prob})
    if prob := read_setting(settings, "vflip", 0.0):
        yield KeyRow("vflip", {f"{OPS}.random_vertical_flip.prob": prob})
    policy = settings.get("auto_augment")
    if policy in ("autoaug", "original"):
        yield KeyRow("auto_augment", {f"{OPS}.auto_augment.policy": "imagenet"})
    elif not policy and (strength := read_setting(settings, "color_jitter", 0.0)):
        factors = [max(1 - strength, 0), 1 + strength]
        colors = ("brightness", "contrast", "saturation")
        keys = {f"{OPS}.random_color_adjust.{color}": factors for color in colors}
        yield KeyRow("color_jitter", keys)
    for setting, default in IMAGENET.items():
        pixels = settings.get(setting) or default
        yield KeyRow(setting, _map_to_splits({f"normalize.{setting}": pixels}))


def _map_to_splits(fields: Settings) -> dict[str, Any]:
    """Return fields of map ops, such as `normalize.mean`, as keys of both splits."""
    return {
        f"dataset.{split}.ops.{name}": value
        for split in ("train", "eval")
        for name, value in fields.items()
    }


RULES = (map_model, map_training, map_data)


def is_mindcv(tree: Any) -> bool:
    """Return whether a YAML's content has settings of mindcv."""
    marks = ("epoch_size", "scheduler", "amp_level", "image_resize")
    return isinstance(tree, dict) and not tree.keys().isdisjoint(marks)


def is_timm(tree: Any) -> bool:
    """Return whether a YAML's content is timm's args.yaml."""
    return isinstance(tree, dict) and "sched" in tree


def adopt_timm(origin: str, settings: Settings) -> Adoption:
    """Map timm's settings. Raises RecipeError with the problems of all rules."""
    return adopt("timm", origin, settings, [_map_translated, _map_untranslated])


def _map_translated(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of settings that mindcv has too, under timm's names."""
    names = read_table("timm")["names"]
    timm_names = {
        names[name]: name for name in settings if settings[name] is not None and name in names
    }
    for row in adopt("mindcv", "", _translate(settings), RULES).rows:
        name = timm_names.get(row.setting, row.setting)
        if row.keys or name in settings:
            yield replace(row, setting=name)


def _translate(settings: Settings) -> dict[str, Any]:
    """Return the settings with mindcv's names and values."""
    table = read_table("timm")
    result: dict[str, Any] = {"has_crops": True, "filter_bias_and_bn": True}
    for name, mindcv_name in table["names"].items():
        value = settings.get(name)
        if isinstance(value, str):
            value = table["values"].get(name, {}).get(value, value)
        if value is not None:
            result[mindcv_name] = value
    # Tags such as .a1_in1k name pretrained weights.
    model = read_setting(settings, "model", "").partition(".")[0]
    result["model"] = table["models"].get(model, model)
    optimizer = read_setting(settings, "opt", "sgd").lower()
    # timm's `sgd` has Nesterov's momentum, unlike its `momentum`.
    result |= {"opt": optimizer, "use_nesterov": optimizer == "sgd"}
    epochs = read_setting(settings, "epochs", 300) + read_setting(settings, "cooldown_epochs", 0)
    warmup = read_setting(settings, "warmup_epochs", 0)
    result["epoch_size"] = epochs + (warmup if settings.get("warmup_prefix") else 0)
    if settings.get("lr") is None:
        batch_size = read_setting(settings, "batch_size", 128)
        batch_size *= read_setting(settings, "grad_accum_steps", 1)
        base_size = read_setting(settings, "lr_base_size", 256)
        if base_size <= 0 or batch_size <= 0:
            raise RecipeError([f"lr_base_size = {base_size}: must be above 0, as the batch size"])
        ratio = batch_size / base_size
        # By the rule of timm's training script.
        is_adaptive = "ada" in optimizer or "lamb" in optimizer
        scale = read_setting(settings, "lr_base_scale", "") or ("sqrt" if is_adaptive else "linear")
        rate = read_setting(settings, "lr_base", 0.1)
        result["lr"] = rate * (ratio**0.5 if scale == "sqrt" else ratio)
    if settings.get("clip_grad") is None:
        result.pop("clip_grad", None)
    # Both depend on `amp` and `amp_dtype` together.
    for name in ("amp_level", "loss_scale_type"):
        result.pop(name, None)
    is_bfloat16 = settings.get("amp_dtype") == "bfloat16"
    if settings.get("amp"):
        result["amp_level"] = "bf16" if is_bfloat16 else "O1"
    if settings.get("amp") and not is_bfloat16:
        result |= {"loss_scale_type": "dynamic", "loss_scale": SCALER_START}
    for name in ("mean", "std"):
        values = enumerate(read_setting(settings, name, []))
        channels = {f"{name}.{number}": value for number, value in values}
        if channels:
            result[name] = [255 * read_setting(channels, key, 0.0) for key in channels]
    return result


def _map_untranslated(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of settings that mindcv doesn't have: betas, epsilon and device."""
    choices = read_table("mindcv")["choices"]["opt"]
    choice = choices.get(read_setting(settings, "opt", "sgd").lower(), choices["sgd"])
    fields = read_yaml(find_groups()["optimizer"][choice["sets"]["optimizer"]])
    betas = read_setting(settings, "opt_betas", [])
    if len(betas) == 2 and "b1" in fields:
        yield KeyRow("opt_betas", {"train.optimizer.b1": betas[0], "train.optimizer.b2": betas[1]})
    if settings.get("opt_eps") is not None and "eps" in fields:
        yield KeyRow("opt_eps", {"train.optimizer.eps": settings["opt_eps"]})
    device, _, index = read_setting(settings, "device", "cpu").partition(":")
    if device in DEVICES:
        note = f"device {index} is the environment's choice" if index else ""
        yield KeyRow("device", {"device": DEVICES[device]}, note)
