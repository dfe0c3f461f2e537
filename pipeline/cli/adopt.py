"""`python -m pipeline adopt FILE`: the settings of another trainer as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.cli.commands.command import CommandResult
from pipeline.config.foreign.adopt import Adoption, KeyRow, adopt, make_recipe_text
from pipeline.config.foreign.keras_script import adopt_keras, uses_keras
from pipeline.config.foreign.lightning import adopt_lightning, is_lightning, is_uncomposed
from pipeline.config.foreign.mindcv import RULES, adopt_timm, is_mindcv, is_timm
from pipeline.config.foreign.npu_run_config import adopt_npu_run_config, sets_npu_run_config
from pipeline.config.foreign.script import parse_script
from pipeline.config.foreign.training_arguments import (
    adopt_training_arguments,
    is_training_arguments,
    read_training_arguments,
)
from pipeline.core.errors import RecipeError, UsageError, get_system_reason, printable
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.value_text import show

UNCOMPOSED = (
    "is a part of a config, with a list of defaults; adopt the whole one: .hydra/config.yaml of a "
    "run, or what `python train.py --cfg job` prints"
)
KNOWN = (
    "must be a YAML file of mindcv (with epoch_size, scheduler, amp_level or image_resize), timm "
    "(sched) or Lightning (trainer), a JSON file of TrainingArguments, or a Python script of Keras "
    "or of NPURunConfig"
)


def main(file: Path, out: Path | None = None) -> CommandResult:
    """Write the file's settings as a recipe, and print each setting with its keys of the recipe.

    `out` None: recipes/STEM.yaml. Raises UsageError if `out` exists or doesn't end in .yaml,
    RecipeError for a file that can't be adopted, and RunError if the recipe can't be written.
    """
    target = out or Path("recipes", f"{file.stem}.yaml")
    if target.suffix != ".yaml":
        raise UsageError([f"--out {target}"], "must end in .yaml")
    if target.exists():
        raise UsageError([f"--out {target}"], "exists already; must be a new file")
    adoption = _adopt_file(file)
    recipe_text = make_recipe_text(adoption, target)
    with convert_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, recipe_text)
    settings = [_describe(row, adoption) for row in adoption.rows]
    for setting in settings:
        keys = ", ".join(f"{key}={show(value)}" for key, value in setting["recipe"].items())
        text = "; ".join(filter(None, (keys, setting["note"])))
        print(f"{setting['state']:<9} {setting['setting']} = {setting['value']}: {text}")
    num_mapped = sum(setting["state"] == "mapped" for setting in settings)
    print(f"{adoption.origin}: {num_mapped} of {len(adoption.settings)} settings mapped")
    print(f"written: {printable(str(target))}; python -m pipeline +recipe={printable(str(target))}")
    return CommandResult({"file": str(target), "origin": adoption.origin, "settings": settings})


def _describe(row: KeyRow, adoption: Adoption) -> dict[str, Any]:
    """Return a row for JSON; `state` is mapped, unmapped, or added if the file lacks it."""
    is_set = row.setting in adoption.settings
    mapped_state = "mapped" if is_set else "added"
    return {
        "setting": printable(row.setting),
        "value": show(adoption.settings[row.setting]) if is_set else "not in the file",
        "state": mapped_state if row.keys else "unmapped",
        "recipe": dict(row.keys),
        "note": printable(row.note),
    }


def _adopt_file(file: Path) -> Adoption:
    """Map the settings of a file to keys. Raises RecipeError if it can't be read or mapped."""
    try:
        if file.suffix == ".py":
            script = parse_script(file)
            if uses_keras(script) and not sets_npu_run_config(script):
                return adopt_keras(file, script)
            if not sets_npu_run_config(script):
                raise RecipeError(
                    [f"{file}: has no Keras and has 0 calls of NPURunConfig; {KNOWN}"]
                )
            return adopt_npu_run_config(file)
        is_json = file.suffix == ".json"
        settings = read_training_arguments(file) if is_json else read_yaml(file)
    except OSError as error:
        raise RecipeError([f"{file}: can't be read: {get_system_reason(error)}"]) from error
    except ValueError as error:
        raise RecipeError([f"{file}: not readable as data: {error}"]) from error
    if is_training_arguments(settings):
        return adopt_training_arguments(f"TrainingArguments of {file.name}", settings)
    if is_lightning(settings):
        return adopt_lightning(f"Lightning's {file.name}", settings)
    if is_uncomposed(settings):
        raise RecipeError([f"{file}: {UNCOMPOSED}"])
    if is_timm(settings):
        return adopt_timm(f"timm's {file.name}", settings)
    if is_mindcv(settings):
        return adopt("mindcv", f"mindcv's {file.name}", settings, RULES)
    raise RecipeError([f"{file}: {KNOWN}"])
