"""Resolution of the recipes and parts that overrides choose, and their registration with Hydra."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from pipeline.config.defaults import fill_missing, fill_part, names_every_part, option_of
from pipeline.config.files import SECTIONS, find_recipes
from pipeline.config.hydra_versions import store_option
from pipeline.config.optional_keys import settable
from pipeline.config.overrides import key_of, unparsable, value_of
from pipeline.config.recipe_file import (
    YAML,
    drop_foreign_keys,
    find_part_file,
    read_part_file,
    read_recipe_file,
    user_keys,
    with_part_files,
)
from pipeline.core.errors import RecipeError
from pipeline.core.files.error_text import show
from pipeline.core.files.package_paths import CONF
from pipeline.core.registry import parts

DEFAULT_RECIPE = "lenet5_digits"
DEFAULT_PARTS: Mapping[str, str] = {"model": "lenet5", "dataset": "digits"}
"""Parts of conf/config.yaml that are used where neither a recipe nor an override chooses one."""
LENGTHS = ("train.epochs", "train.passes", "train.steps")

_OPTION = re.compile(r"\w[\w.+-]*")


def resolve_recipe(overrides: Sequence[str]) -> list[str]:
    """Complete overrides for Hydra: name a recipe, the default one if none is given.

    A recipe file becomes a name, and optional keys are added where conf/ lacks them. The default
    recipe's length and name belong to its own dataset and model: where overrides choose another,
    there is no recipe, and the run is named after both.

    Hydra must know a recipe before it composes, so recipes are registered here; so are the files
    that choose parts, as in `device=./mine.yaml`. Raises RecipeError where a named one
    can't be read.
    """
    problems = list(unparsable(overrides))
    recipes = [override for override in overrides if key_of(override) == "recipe"]
    if len(recipes) > 1:
        problems.append(f"recipe: given {len(recipes)} times, {show(' '.join(recipes))}; give one")
    if problems:
        raise RecipeError(problems)
    _register_own_parts()
    known = [_register_part_files(override) for override in settable(overrides)]
    named, recipe, files = _name_recipe(known)
    chosen = {key_of(override) for override in named if override[0] != "~"} & set(SECTIONS)
    if recipe is None or not _register_recipes(files, recipe, chosen):
        return named
    return [*(f"~{group}" for group in {*SECTIONS, "train"} - chosen), *named]


def untrained(overrides: Sequence[str]) -> list[str]:
    """Overrides of a command that does not train, with a length added where a run needs one."""
    given = {key_of(override) for override in overrides}
    needed = given & set(DEFAULT_PARTS) and not given & {"recipe", *LENGTHS}
    return [*overrides, *(["train.steps=1"] if needed else [])]


def _name_recipe(overrides: list[str]) -> tuple[list[str], str | None, dict[str, Path]]:
    """The overrides with the recipe by name, its name, and the files of all recipes by name."""
    files = dict(find_recipes(Path.cwd()))
    recipe = value_of(overrides, "recipe")
    if recipe is None and set(map(key_of, overrides)) & set(DEFAULT_PARTS):
        return _with_name(overrides), None, {}
    if recipe is None:
        return [f"+recipe={DEFAULT_RECIPE}", *overrides], DEFAULT_RECIPE, files
    if recipe.endswith(YAML):
        file = Path(recipe)
        recipe = file.stem
        files[recipe] = file
        overrides = [f"+recipe={recipe}" if key_of(o) == "recipe" else o for o in overrides]
    return [f"+{o}" if o.startswith("recipe=") else o for o in overrides], recipe, files


def _with_name(overrides: list[str]) -> list[str]:
    """The overrides with the name of a run without a recipe: `resnet20_cifar10`."""
    if value_of(overrides, "name") is not None:
        return overrides
    chosen = {group: value_of(overrides, group) or own for group, own in DEFAULT_PARTS.items()}
    # In a sweep, the interpolation takes the name of each job's own part.
    names = (
        option if _OPTION.fullmatch(option) else f"${{{group}.name}}"
        for group, option in chosen.items()
    )
    return [*overrides, f"name={'_'.join(names)}"]


def _register_recipes(files: Mapping[str, Path], requested: str, chosen: Collection[str]) -> bool:
    """Register recipes with Hydra; return whether the requested one names all parts.

    Those that are requested, and those that they start from, are read; the others, which take
    longer to read than a recipe takes to compose, are registered by name, as messages list them.
    Where a requested one does not exist, all are read. Raises RecipeError where the requested one
    can't be read; others are skipped.
    """
    named = requested.split(",")
    needed = named if files.keys() >= set(named) else list(files)
    names_all = False
    for name in needed:
        try:
            complete, bases = _register_recipe(name, files[name], chosen)
        except RecipeError:
            if name == requested:
                raise
        else:
            names_all |= complete and name == requested
            needed += [base for base in bases if base in files and base not in needed]
    for name in files.keys() - set(needed):
        store_option(group="recipe", name=name, package="_global_", node={})
    return names_all


def _register_own_parts() -> None:
    """Register the parts of plug-ins and other distributions as options of their groups.

    Not those that conf/ has files for.
    """
    for group, where in SECTIONS.items():
        for name, part in parts(group).items():
            if part.__module__.startswith("pipeline.") or (CONF / group / f"{name}.yaml").is_file():
                continue
            node, package = option_of(group, part), ".".join(where)
            store_option(group=group, name=name, package=package, node=node)


def _register_part_files(override: str) -> str:
    """The override with its files registered with Hydra and replaced by their names."""
    group, options = key_of(override), override.partition("=")[2].split(",")
    if group not in SECTIONS or not any(option.endswith(YAML) for option in options):
        return override
    return f"{group}={','.join(_register_part(group, option) for option in options)}"


def _register_part(group: str, option: str) -> str:
    """Register a file as an option of a group and return its name; other names are unchanged."""
    if not option.endswith(YAML):
        return option
    file = Path(option).expanduser()
    if (CONF / group / f"{file.stem}.yaml").is_file():
        problem = f"{group} = {option}: {file.stem} is a shipped {group}; call the file otherwise"
        raise RecipeError([problem])
    _store_part(group, file.stem, file)
    return file.stem


def _store_part(group: str, name: str, file: Path) -> None:
    tree, package = fill_part(group, read_part_file(file, group)), ".".join(SECTIONS[group])
    store_option(group=group, name=name, package=package, node=tree)


def _register_part_of_recipe(recipe: Path, group: str, path: str) -> str:
    """Register a part's file that a recipe file names as an option of its group; return its name.

    Recipes in several folders may use equal file names, so the option's name includes a checksum
    of the path.
    """
    file = find_part_file(recipe, path)
    name = f"{file.stem}-{crc32(os.fsencode(file)):08x}"
    _store_part(group, name, file)
    return name


def _register_recipe(name: str, file: Path, chosen: Collection[str]) -> tuple[bool, Sequence[str]]:
    """Register a file as an option of Hydra's group `recipe`.

    Returns whether it is complete, and the names of the recipes that it starts from.

    Complete are the recipe.yaml of a run and the output of `--cfg job`; newer keys that they lack
    are filled in. A part chosen on the command line comes with its own defaults and replaces the
    recipe's section.
    """
    own_part = partial(_register_part_of_recipe, file)
    tree = {"name": name, **with_part_files(read_recipe_file(file), own_part)}
    started_from = tree["defaults"] if isinstance(tree.get("defaults"), list) else []
    bases = [item.removesuffix(".yaml") for item in started_from if isinstance(item, str)]
    complete = names_every_part(tree)
    if complete:
        tree = fill_missing(drop_foreign_keys(tree))
    if problems := [f"{file}: {problem}" for problem in user_keys(tree)]:
        raise RecipeError(problems)
    for group in chosen:
        *path, last = SECTIONS[group]
        section: Any = tree
        for key in path:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(last, None)
    store_option(group="recipe", name=name, package="_global_", node=tree)
    return complete, bases
