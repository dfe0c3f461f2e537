"""Settings of timm's training script, in its `args.yaml`, by translation to mindcv's settings."""

from __future__ import annotations

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
from pipeline.config.foreign.mindcv import RULES
from pipeline.core.errors import RecipeError
from pipeline.core.files.safe_yaml import read_yaml

DEVICES = {"cpu": "cpu", "cuda": "gpu", "npu": "ascend910"}
SCALER_START = 65536.0
"""First loss scale of PyTorch's gradient scaler."""


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
