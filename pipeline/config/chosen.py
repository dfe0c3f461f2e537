"""Recipes and parts that overrides choose, found and made known to Hydra before it composes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from hydra.core.config_store import ConfigStore

from pipeline.config.defaults import fill_missing, fill_part, names_every_part
from pipeline.config.files import SECTIONS, find_recipes
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
from pipeline.errors import RecipeError
from pipeline.files.error_text import show
from pipeline.files.package_paths import CONF

DEFAULT_RECIPE = "lenet5_digits"
DEFAULT_PARTS: Mapping[str, str] = {"model": "lenet5", "dataset": "digits"}
"""What a recipe is for, as conf/config.yaml has it where neither recipe nor override says more."""
LENGTHS = ("train.epochs", "train.passes", "train.steps")

_OPTION = re.compile(r"\w[\w.+-]*")


def resolve_recipe(overrides: Sequence[str]) -> list[str]:
    """The overrides with a recipe named, the default one if none was; a file becomes a name, and
    optional keys are added where conf/ lacks them.

    The default recipe's length and name are those of its own dataset and model: where overrides
    choose another, there is no recipe, and the run is called after both.

    Hydra must know a recipe before it composes, so all that can be found are made known to it
    here; so are the files that a part is chosen by, as in `device=./mine.yaml`. Raises RecipeError
    when one that is named can't be read.
    """
    problems = list(unparsable(overrides))
    recipes = [override for override in overrides if key_of(override) == "recipe"]
    if len(recipes) > 1:
        problems.append(f"recipe: given {len(recipes)} times, {show(' '.join(recipes))}; give one")
    if problems:
        raise RecipeError(problems)
    known = [_with_part_known(override) for override in settable(overrides)]
    named, asked, files = _name_recipe(known)
    chosen = {key_of(override) for override in named if override[0] != "~"} & set(SECTIONS)
    if asked is None or not _make_recipes_known(files, asked, chosen):
        return named
    return [*(f"~{group}" for group in {*SECTIONS, "train"} - chosen), *named]


def untrained(overrides: Sequence[str]) -> list[str]:
    """The overrides of a command that trains nothing, with a length where a run would need one."""
    given = {key_of(override) for override in overrides}
    needed = given & set(DEFAULT_PARTS) and not given & {"recipe", *LENGTHS}
    return [*overrides, *(["train.steps=1"] if needed else [])]


def _name_recipe(overrides: list[str]) -> tuple[list[str], str | None, dict[str, Path]]:
    """The overrides with the recipe by name, that name, and the files of all recipes by theirs."""
    files = dict(find_recipes(Path.cwd()))
    asked = value_of(overrides, "recipe")
    if asked is None and set(map(key_of, overrides)) & set(DEFAULT_PARTS):
        return _with_name(overrides), None, {}
    if asked is None:
        return [f"+recipe={DEFAULT_RECIPE}", *overrides], DEFAULT_RECIPE, files
    if asked.endswith(YAML):
        file = Path(asked)
        asked = file.stem
        files[asked] = file
        overrides = [f"+recipe={asked}" if key_of(o) == "recipe" else o for o in overrides]
    return [f"+{o}" if o.startswith("recipe=") else o for o in overrides], asked, files


def _with_name(overrides: list[str]) -> list[str]:
    """The overrides with the name of a run without a recipe: `resnet20_cifar10`."""
    if value_of(overrides, "name") is not None:
        return overrides
    chosen = {group: value_of(overrides, group) or own for group, own in DEFAULT_PARTS.items()}
    # A sweep's own reads what each of its jobs has.
    names = (
        option if _OPTION.fullmatch(option) else f"${{{group}.name}}"
        for group, option in chosen.items()
    )
    return [*overrides, f"name={'_'.join(names)}"]


def _make_recipes_known(files: Mapping[str, Path], asked: str, chosen: Collection[str]) -> bool:
    """Make every recipe an option that Hydra knows; does the one that is asked for name all parts?

    Raises RecipeError where that one can't be read; others are passed over.
    """
    names_all = False
    for name, file in files.items():
        try:
            whole = _make_known(name, file, chosen)
        except RecipeError:
            if name == asked:
                raise
        else:
            names_all |= whole and name == asked
    return names_all


def _with_part_known(override: str) -> str:
    """The override with the files that it names as names that Hydra knows."""
    group, options = key_of(override), override.partition("=")[2].split(",")
    if group not in SECTIONS or not any(option.endswith(YAML) for option in options):
        return override
    return f"{group}={','.join(_make_part_known(group, option) for option in options)}"


def _make_part_known(group: str, option: str) -> str:
    """Make a file an option of a group and return its name; the name of an option stays."""
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
    ConfigStore.instance().store(group=group, name=name, package=package, node=tree)


def _make_own_part_known(recipe: Path, group: str, path: str) -> str:
    """Make a file that a recipe chooses a part by an option of its group and return its name.

    Recipes in several folders may call their files alike, so the name tells their places apart.
    """
    file = find_part_file(recipe, path)
    name = f"{file.stem}-{crc32(os.fsencode(file)):08x}"
    _store_part(group, name, file)
    return name


def _make_known(name: str, file: Path, chosen: Collection[str]) -> bool:
    """Make a file an option of Hydra's group `recipe`; true if it leaves nothing to defaults.

    Such are the recipe.yaml of a run and what `--cfg job` shows; keys that there were not when they
    were written are filled in. A part chosen on the command line comes with its own defaults: what
    the recipe says of the one it would have had goes.
    """
    own_part = partial(_make_own_part_known, file)
    tree = {"name": name, **with_part_files(read_recipe_file(file), own_part)}
    whole = names_every_part(tree)
    if whole:
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
    ConfigStore.instance().store(group="recipe", name=name, package="_global_", node=tree)
    return whole
