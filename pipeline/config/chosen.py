"""Recipes and parts that overrides choose, found and made known to Hydra before it composes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from pipeline.config.defaults import fill_missing, names_every_part
from pipeline.config.files import SECTIONS, find_recipes
from pipeline.config.optional_keys import settable
from pipeline.config.overrides import key_of, unparsable, value_of
from pipeline.config.recipe_file import (
    kept_to_its_own,
    read_part_file,
    read_recipe_file,
    user_keys,
)
from pipeline.errors import RecipeError
from pipeline.shipped import CONF

DEFAULT_RECIPE = "lenet5_digits"
YAML = (".yaml", ".yml")


def with_recipe(overrides: Sequence[str]) -> list[str]:
    """The overrides with a recipe named, the default one if none was; a file becomes a name, and
    optional keys are added where conf/ lacks them.

    Hydra must know a recipe before it composes, so all that can be found are made known to it
    here; so are the files that a part is chosen by, as in `device=./mine.yaml`. Raises RecipeError
    when one that is named can't be read.
    """
    if problems := list(unparsable(overrides)):
        raise RecipeError(problems)
    known = [_with_part_known(override) for override in settable(overrides)]
    named, asked, files = _name_recipe(known)
    chosen = {key_of(override) for override in named if override[0] != "~"} & set(SECTIONS)
    if not _make_recipes_known(files, asked, chosen):
        return named
    return [*(f"~{group}" for group in {*SECTIONS, "train"} - chosen), *named]


def _name_recipe(overrides: list[str]) -> tuple[list[str], str, dict[str, Path]]:
    """The overrides with the recipe by name, that name, and the files of all recipes by theirs."""
    files = dict(find_recipes(Path.cwd()))
    asked = value_of(overrides, "recipe")
    if asked is None:
        return [f"+recipe={DEFAULT_RECIPE}", *overrides], DEFAULT_RECIPE, files
    if asked.endswith(YAML):
        file = Path(asked)
        asked = file.stem
        files[asked] = file
        overrides = [f"+recipe={asked}" if key_of(o) == "recipe" else o for o in overrides]
    return [f"+{o}" if o.startswith("recipe=") else o for o in overrides], asked, files


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
    tree, package = read_part_file(file, group), ".".join(SECTIONS[group])
    ConfigStore.instance().store(group=group, name=file.stem, package=package, node=tree)
    return file.stem


def _make_known(name: str, file: Path, chosen: Collection[str]) -> bool:
    """Make a file an option of Hydra's group `recipe`; true if it leaves nothing to defaults.

    Such are the recipe.yaml of a run and what `--cfg job` shows; keys that there were not when they
    were written are filled in. A part chosen on the command line comes with its own defaults: what
    the recipe says of the one it would have had goes.
    """
    tree = {"name": name, **read_recipe_file(file)}
    whole = names_every_part(tree)
    if whole:
        tree = fill_missing(kept_to_its_own(tree))
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
