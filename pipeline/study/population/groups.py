"""Groups of recipes that one compiled program can train, and the keys that separate groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.registry import list_components
from pipeline.models.imported.model_specs import ImportedModelSpec
from pipeline.models.networks.onnx_network import OnnxNetwork
from pipeline.models.networks.torch_module import TorchModule

ABSENT = "(absent)"
HOST_KEYS = (
    *("name", "debug", "checkpoint", "monitor", "dump"),
    *("eval.every_steps", "eval.every_passes"),
    *("train.resume", "train.resume_changed", "train.callbacks", "train.dispatch_seconds"),
)
"""Keys and sections on which no compiled program depends."""
ARGUMENT_KEYS = ("train.optimizer.lr", "train.schedule", "seed")
"""Keys whose values are arguments of every training program: its learning rates and the seed."""
INIT_KEYS = ("model.init",)
"""Keys on which only the small program of the initialization depends."""
FOLD = "dataset.folds.index"
"""Key of the evaluated fold. It is an argument of the program if folds need the same constants."""
NUMBERS = ("train.optimizer", "train.loss", "train.clip", "train.ema.decay")
"""Sections whose numbers become arguments of the program if they differ between runs."""
CAN_VARY = (
    "seed, train.optimizer.lr, train.schedule, factors and schedules of train.lr_rules, model.init,"
    " dataset.folds.index, numbers of train.optimizer, train.loss, train.clip and train.ema.decay"
)

ProgramKey = tuple[tuple[str, str], ...]
"""Keys that are compiled, with their values as JSON; equal for recipes that share a program."""


def make_program_key(recipe: Recipe, compiled_in: Iterable[str] = ()) -> ProgramKey:
    """Return the key of a recipe's program; numbers with the keys `compiled_in` are part of it."""
    numbers = collect_numbers(recipe, compiled_in)
    imported = isinstance(recipe.model, ImportedModelSpec | TorchModule | OnnxNetwork)
    entries = []
    for key, value in flatten_tree(recipe.model_dump(mode="json")):
        if key in numbers:
            # The program may leave out a computation if its number is 0, such as weight decay.
            is_left_out = numbers[key] == 0 and key != FOLD
            entries.append((key, "0" if is_left_out else "a number"))
        elif not _can_vary(key) or (imported and _is_below(key, ("seed", *INIT_KEYS))):
            entries.append((key, json.dumps(value)))
    return tuple(sorted(entries))


def collect_numbers(recipe: Recipe, compiled_in: Iterable[str] = ()) -> dict[str, float]:
    """Return the numbers of a recipe that may be arguments of its program, by key."""
    excluded = set(compiled_in)
    return {
        key: float(value)
        for key, value in flatten_tree(recipe.model_dump(mode="python"))
        if key not in excluded and (key == FOLD or (isinstance(value, float) and _is_number(key)))
    }


def group_recipes(
    recipes: Mapping[str, Recipe], compiled_in: Iterable[str] = ()
) -> dict[ProgramKey, list[str]]:
    """Return the names of recipes by the program that they share."""
    groups: dict[ProgramKey, list[str]] = {}
    for name, recipe in recipes.items():
        groups.setdefault(make_program_key(recipe, compiled_in), []).append(name)
    return groups


def find_differing_keys(programs: Iterable[ProgramKey]) -> list[str]:
    """Return the keys in which programs differ."""
    values = list(map(dict, programs))
    keys = dict.fromkeys(key for program in values for key in program)
    return [key for key in keys if len({program.get(key, ABSENT) for program in values}) > 1]


def require_population(recipes: Mapping[str, Recipe], groups: Mapping[ProgramKey, Any]) -> None:
    """Raise RecipeError if no two of several recipes share a program, or if one can't be a member.

    The error names the keys that differ.
    """
    require_members(recipes.values())
    if len(recipes) > 1 and len(groups) == len(recipes):
        keys = ", ".join(find_differing_keys(groups))
        raise RecipeError(
            f"hydra.sweeper.vectorize: no two of {len(recipes)} jobs can share a program: they "
            f"differ in {keys}; must differ only in {CAN_VARY}"
        )


def require_members(recipes: Iterable[Recipe]) -> None:
    """Raise RecipeError if a run of a recipe can't be a member of a population."""
    if problems := list_member_problems(recipes):
        raise RecipeError(list(dict.fromkeys(problems)))


def list_member_problems(recipes: Iterable[Recipe]) -> list[str]:
    """Return the reasons why runs of the recipes can't be members of a population."""
    recipes = list(recipes)
    specs: Mapping[str, Any] = list_components("device")
    devices = tuple(name for name, device in specs.items() if device.runs_populations)
    problems = [
        f"{key} = {value}: must be {' or '.join(allowed)} with hydra.sweeper.vectorize"
        for recipe in recipes
        for key, value, allowed in (
            ("device", recipe.device.name, devices),
            ("parallel.mode", recipe.parallel.mode, ("none",)),
            ("launch", recipe.launch.name, ("none", "auto")),
            ("train.mode", recipe.train.mode, ("graph",)),
            ("profile.mode", recipe.profile.mode, ("off",)),
            ("train.remat", recipe.train.remat, ("none", "blocks")),
        )
        if value not in allowed
    ]
    problems += [
        f"train.{deadline}: must be a length in steps with hydra.sweeper.vectorize"
        for deadline in (recipe.train.deadline for recipe in recipes)
        if deadline is not None
    ]
    return problems


def flatten_tree(tree: Any, key: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a recipe's tree by dotted key; an empty section or list is a leaf."""
    if isinstance(tree, Mapping) and tree:
        items: Sequence[tuple[Any, Any]] = list(tree.items())
    elif isinstance(tree, list | tuple) and tree:
        items = list(enumerate(tree))
    else:
        return [(key, tree)]
    return [
        leaf
        for name, value in items
        for leaf in flatten_tree(value, f"{key}.{name}" if key else str(name))
    ]


def _can_vary(key: str) -> bool:
    """Return whether runs that share a program may differ in a key that isn't a number's."""
    if key.startswith("train.lr_rules."):
        return not key.endswith(".pattern")
    if _is_below(key, ("checkpoint.restore",)):
        return False
    return _is_below(key, (*HOST_KEYS, *ARGUMENT_KEYS, *INIT_KEYS))


def _is_number(key: str) -> bool:
    # Numbers in lists are compiled, since they are rarely swept.
    is_in_list = any(part.isdigit() for part in key.split("."))
    return _is_below(key, NUMBERS) and key != "train.optimizer.lr" and not is_in_list


def _is_below(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
