"""Groups of recipes that one compiled program can train, and the keys that separate groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.registry import list_components
from pipeline.models.imported.model_specs import ImportedModelSpec
from pipeline.models.networks.foreign_networks import OnnxNetwork, TorchModule

ABSENT = "(absent)"
# fmt: off
HOST_KEYS = (
    "name", "debug", "checkpoint", "monitor", "dump", "receipt", "eval.every_steps",
    "eval.every_epochs", "eval.every_seconds", "train.resume", "train.resume_changed",
    "train.callbacks", "train.dispatch_seconds",
)
# fmt: on
"""Keys and sections on which no compiled program depends."""
ARGUMENT_KEYS = ("train.optimizer.lr", "train.schedule", "seed")
"""Keys whose values are arguments of every training program: its learning rates and the seed."""
INIT_KEYS = ("model.init",)
"""Keys on which only the small program of the initialization depends."""
FOLD = "dataset.folds.index"
"""Key of the evaluated fold. It is an argument of the program if the folds' constants are equal."""
NUMBERS = ("train.optimizer", "train.loss", "train.clip", "train.ema.decay")
"""Sections whose numbers become arguments of the program if they differ between runs."""
CAN_VARY = (
    "seed, train.optimizer.lr, train.schedule, factors and schedules of train.lr_rules, model.init,"
    " dataset.folds.index, numbers of train.optimizer, train.loss, train.clip and train.ema.decay,"
    " and keys that no program depends on, such as name, monitor and checkpoint"
)

ProgramKey = tuple[tuple[str, str], ...]
"""Keys that are compiled, with their values as JSON; equal for recipes that share a program."""


def make_program_key(recipe: Recipe, compiled_in: Iterable[str] = ()) -> ProgramKey:
    """Return the key of a recipe's program, with the values of the numbers `compiled_in`."""
    numbers = collect_numbers(recipe, compiled_in)
    is_imported = isinstance(recipe.model, ImportedModelSpec | TorchModule | OnnxNetwork)
    entries = []
    for key, value in flatten_tree(recipe.model_dump(mode="json")):
        if key in numbers:
            # If a number is 0, the program may leave out a computation, such as weight decay.
            is_left_out = numbers[key] == 0 and key != FOLD
            entries.append((key, "0" if is_left_out else "a number"))
        # An imported network may draw its parameters while it is built, as constants of a program.
        elif not _can_vary(key) or (is_imported and _is_below(key, ("seed", *INIT_KEYS))):
            entries.append((key, json.dumps(value)))
    return tuple(sorted(entries))


def collect_numbers(recipe: Recipe, compiled_in: Iterable[str] = ()) -> dict[str, float]:
    """Return the numbers of a recipe that may be arguments of its program, by key.

    Numbers with a key in `compiled_in` are left out.
    """
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
    trees = [dict(program) for program in programs]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return [key for key in keys if len({tree.get(key, ABSENT) for tree in trees}) > 1]


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
    specs: Mapping[str, Any] = list_components("device")
    devices = tuple(name for name, device in specs.items() if device.runs_populations)
    problems = []
    for recipe in recipes:
        rules = (
            ("device", recipe.device.name, devices),
            ("parallel.mode", recipe.parallel.mode, ("none",)),
            ("launch", recipe.launch.name, ("none", "auto")),
            ("train.mode", recipe.train.mode, ("graph",)),
            ("profile.mode", recipe.profile.mode, ("off",)),
            ("train.remat", recipe.train.remat, ("none", "blocks")),
        )
        problems += [
            f"{key} = {value}: must be {' or '.join(allowed)} with hydra.sweeper.vectorize"
            for key, value, allowed in rules
            if value not in allowed
        ]
        if recipe.train.deadline is not None:
            rule = "must be a length in steps with hydra.sweeper.vectorize"
            problems.append(f"train.{recipe.train.deadline}: {rule}")
    return problems


def flatten_tree(tree: Any, key: str = "") -> list[tuple[str, Any]]:
    """Return the dotted keys and the leaves of a tree; an empty section or list is a leaf."""
    if isinstance(tree, Mapping) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple) and tree:
        items = enumerate(tree)
    else:
        return [(key, tree)]
    leaves = []
    for name, value in items:
        leaves += flatten_tree(value, f"{key}.{name}" if key else str(name))
    return leaves


def _can_vary(key: str) -> bool:
    """Return whether runs that share a program may differ in this key, which isn't a number's."""
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
