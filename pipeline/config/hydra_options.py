"""Registration with Hydra of the recipes and components that overrides choose, and access to
Hydra's private modules, some of which differ between Hydra 1.3 and 1.4."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher as BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper as BasicSweeper
from hydra._internal.utils import get_args_parser as get_args_parser
from hydra.core.config_store import ConfigLoadError, ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from pipeline.config.defaults import (
    fill_component,
    fill_missing,
    find_options,
    make_option,
    mark_optional_keys,
    names_every_component,
    rename_deprecated,
)
from pipeline.config.files import SECTIONS, find_recipes, make_recipe_name
from pipeline.config.overrides import find_unparsable, get_key, value_of
from pipeline.config.recipe_file import (
    YAML,
    find_component_file,
    find_user_keys,
    read_component_file,
    read_recipe_file,
    reset_user_keys,
)
from pipeline.config.resolved_settings import LENGTH_UNITS
from pipeline.core.deprecations import rename_overrides
from pipeline.core.errors import RecipeError
from pipeline.core.files.paths import CONF, expand_home
from pipeline.core.files.tree_diff import find_value
from pipeline.core.files.value_text import show
from pipeline.core.registry import list_other_components

_IS_1_3 = hydra.__version__.startswith("1.3.")

HYDRA_DEFAULTS: Mapping[str, str] = {"version_base": "1.3"} if _IS_1_3 else {}
"""Arguments of Hydra's functions for the defaults of version 1.3. Hydra 1.4 needs no argument."""


def store_option(group: str, name: str, package: str, node: Any) -> None:
    """Register an option of a group of the config, replacing an earlier option of that name."""
    options: dict[str, Any] = {} if _IS_1_3 else {"replace": True}
    ConfigStore.instance().store(group=group, name=name, package=package, node=node, **options)


def find_stored_recipe(name: str) -> dict[str, Any]:
    """Return the keys of a registered recipe; empty for an unknown recipe."""
    try:
        node = ConfigStore.instance().load(f"recipe/{name}.yaml").node
    except ConfigLoadError:
        return {}
    return cast(dict[str, Any], OmegaConf.to_container(node))


def apply_overrides(overrides: list[Override], config: DictConfig) -> None:
    """Apply overrides of plain values to a composed config, in place."""
    ConfigLoaderImpl._apply_overrides_to_config(overrides, config)


def set_override_dirname(job: DictConfig, overrides: list[Override]) -> None:
    """Set `override_dirname` of `job`, Hydra's section `hydra.job`, to a text of the overrides."""
    if OmegaConf.is_interpolation(job, "override_dirname"):
        return  # Hydra 1.4 makes the text when the key is read.
    from hydra._internal.config_loader_impl import get_overrides_dirname

    settings = job.config.override_dirname
    job.override_dirname = get_overrides_dirname(
        overrides=overrides,
        kv_sep=settings.kv_sep,
        item_sep=settings.item_sep,
        exclude_keys=settings.exclude_keys,
    )


@contextmanager
def allow_lazy_help() -> Iterator[None]:
    """Let argparse accept Hydra's help of a flag that is an object, and no text until it is shown.

    Since Python 3.14, argparse checks the help when a flag is added, and would reject Hydra 1.3's.
    """
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        yield
        return

    def check_text(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(parser, action)

    parser_class: Any = argparse.ArgumentParser
    parser_class._check_help = check_text
    try:
        yield
    finally:
        parser_class._check_help = check


DEFAULT_RECIPE = "lenet5_digits"
DEFAULT_COMPONENTS: Mapping[str, str] = {"model": "lenet5", "dataset": "digits"}
"""Components of runs without a recipe, by group; the same as in conf/config.yaml."""
LENGTHS = tuple(f"train.{unit}" for unit in LENGTH_UNITS)
"""Keys that set the length of a run."""

WHOLE_KEYS = ("model.inputs",)
"""Keys whose value may be a section or a list, and replaces the recipe's. Hydra would merge
two sections, and refuse a list in place of a section."""

_OPTION = re.compile(r"\w[\w.+-]*")
"""Name of one option of a group."""
_TEXT = re.compile(r"(?i:(?!(null|true|false|inf|nan)\Z)[a-z_][\w.+-]*)", re.ASCII)
"""Name that Hydra reads as a text without quotes."""


def resolve_recipe(overrides: Sequence[str]) -> list[str]:
    """Return the overrides for Hydra, with the default recipe if they name no recipe.

    A recipe file is replaced by a name, and optional keys that conf/ lacks get a `++`. If the
    overrides choose a dataset or a model but no recipe, no recipe is added, since the length and
    the name of the default recipe wouldn't fit. Then the run is named after its model and dataset.

    Registers with Hydra all recipes, and the files of components such as `device=./mine.yaml`.
    Raises RecipeError for a file that can't be read, and for a shipped option with the name of a
    custom component.
    """
    problems = list(find_unparsable(overrides))
    overrides = rename_overrides(overrides)
    recipes = [override for override in overrides if get_key(override) == "recipe"]
    if len(recipes) > 1:
        problems.append(f"recipe: given {len(recipes)} times, {show(' '.join(recipes))}; give one")
    if problems:
        raise RecipeError(problems)
    _register_custom_components(overrides)
    overrides = _replace_whole(mark_optional_keys(overrides))
    overrides = [_register_component_files(override) for override in overrides]
    keys = set(map(get_key, overrides))
    recipe = value_of(overrides, "recipe")
    if recipe is None and keys & set(DEFAULT_COMPONENTS):
        return overrides if "name" in keys else [*overrides, f"name={_name_run(overrides)}"]
    files = dict(find_recipes(Path.cwd()))
    if recipe is None:
        recipe = DEFAULT_RECIPE
        overrides = [f"+recipe={recipe}", *overrides]
    else:
        # A sweep has several options, but a file's name may have a comma too.
        options = [recipe] if os.path.isfile(expand_home(Path(recipe))) else recipe.split(",")
        for position, option in enumerate(options):
            if option.endswith(YAML):
                file = expand_home(Path(option))
                taken = [*options, *files] if len(options) > 1 else ()
                options[position] = _name_option(file, taken)
                files[options[position]] = file
        if (named := ",".join(options)) != recipe:
            recipe = named
            overrides = [
                f"+recipe={named}" if get_key(arg) == "recipe" else arg for arg in overrides
            ]
    # Hydra needs the +, since conf/config.yaml has no default recipe.
    overrides = [f"+{item}" if item.startswith("recipe=") else item for item in overrides]
    groups = {get_key(override) for override in overrides if override[0] != "~"} & set(SECTIONS)
    if not _register_recipes(files, recipe, groups):
        return overrides
    # A complete recipe has all components, so the defaults of conf/config.yaml are deleted.
    deletions = [f"~{group}" for group in {*SECTIONS, "train"} - groups]
    return [*deletions, *overrides]


def _replace_whole(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, with null set before each section or list of `WHOLE_KEYS`."""
    replaced: list[str] = []
    for override in overrides:
        key = get_key(override)
        null = f"++{key}=null"
        is_structured = override.partition("=")[2].startswith(("{", "["))
        if key in WHOLE_KEYS and is_structured and replaced[-1:] != [null]:
            replaced.append(null)
        replaced.append(override)
    return replaced


def add_train_length(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with `train.steps=1` if they have components but no recipe or length.

    A check of such a recipe needs a length.
    """
    keys = {get_key(override) for override in overrides}
    lacks_length = keys & set(DEFAULT_COMPONENTS) and not keys & {"recipe", *LENGTHS}
    return [*overrides, "train.steps=1"] if lacks_length else list(overrides)


def _name_run(overrides: list[str]) -> str:
    """Return the name of a run without a recipe: `resnet20_cifar10`."""
    names = []
    for group, default in DEFAULT_COMPONENTS.items():
        option = value_of(overrides, group) or default
        # A sweep has several options; each of its jobs resolves this reference to its option.
        names.append(option if _OPTION.fullmatch(option) else f"${{{group}.name}}")
    return "_".join(names)


def _register_recipes(files: Mapping[str, Path], requested: str, groups: Collection[str]) -> bool:
    """Register recipes with Hydra; return whether the requested recipe names all components.

    `requested` is a name, or several names separated by commas, which return False. Only requested
    recipes and their bases are read, since reading all takes long; other recipes are registered
    without content, for messages. All are read if a requested recipe doesn't exist. Raises
    RecipeError if a requested recipe can't be read; other unreadable recipes are skipped.
    """
    names = requested.split(",")
    queue = names if files.keys() >= set(names) else list(files)
    is_complete: dict[str, bool] = {}
    for name in queue:
        try:
            is_complete[name], bases = _register_recipe(name, files[name], groups)
        except RecipeError:
            if name in names:
                raise
            continue
        # The loop continues with the bases.
        queue += [base for base in bases if base in files and base not in queue]
    for name in files.keys() - set(queue):
        store_option(group="recipe", name=name, package="_global_", node={})
    return is_complete.get(requested, False)


def _name_option(file: Path, taken: Collection[str]) -> str:
    """Return the stem of a file, or one with a digest of its path if the stem is `taken`, as by
    another option of a sweep or a base, or begins as a number: 12."""
    if _TEXT.fullmatch(file.stem) and file.stem not in taken:
        return file.stem
    stem = re.sub(r"[^\w.+-]", "_", file.stem, flags=re.ASCII)
    return f"file-{stem}-{crc32(os.fsencode(file)):08x}"


def _register_custom_components(overrides: Sequence[str]) -> None:
    """Register components that plug-ins and other distributions add, as options of their groups.

    Raises RecipeError if an override chooses a shipped option with the name of such a component.
    """
    for group, path in SECTIONS.items():
        options = (value_of(overrides, group) or "").split(",")
        for name, component in list_other_components(group).items():
            if not (CONF / group / f"{name}.yaml").is_file():
                node = make_option(group, component)
                store_option(group=group, name=name, package=".".join(path), node=node)
            elif name in options and name not in find_options(group, name):
                rule = f"is a shipped {group} and a custom one; rename the custom one"
                raise RecipeError([f"{group} = {name}: {rule}"])


def _register_component_files(override: str) -> str:
    """Register the component files that an override names; return the override with their stems.

    `device=./mine.yaml` becomes `device=mine`. Raises RecipeError for the stem of a shipped option.
    """
    group = get_key(override)
    options = override.partition("=")[2].split(",")
    if group not in SECTIONS or not any(option.endswith(YAML) for option in options):
        return override
    for position, option in enumerate(options):
        if not option.endswith(YAML):
            continue
        file = expand_home(Path(option))
        if (CONF / group / f"{file.stem}.yaml").is_file():
            problem = f"{file.stem} is a shipped {group}; rename the file"
            raise RecipeError([f"{group} = {option}: {problem}"])
        options[position] = _name_option(file, options)
        _store_component(group, options[position], file)
    return f"{group}={','.join(options)}"


def _store_component(group: str, name: str, file: Path) -> None:
    """Register the file of a component as an option of its group."""
    read = rename_deprecated(read_component_file(file, group), str(file), SECTIONS[group])
    # Former spellings aren't among the keys that a file may not have.
    if problems := [f"{file}: {problem}" for problem in find_user_keys(read, SECTIONS[group])]:
        raise RecipeError(problems)
    tree = fill_component(group, read)
    store_option(group=group, name=name, package=".".join(SECTIONS[group]), node=tree)


def _register_recipe(name: str, file: Path, groups: Collection[str]) -> tuple[bool, Sequence[str]]:
    """Register a file as an option of Hydra's group `recipe`.

    Returns whether the recipe names all components, and the names of its bases. The recipe.yaml of
    a run and the output of `--cfg job` name all; newer keys, which they lack, get defaults. For
    each of `groups` the command line chooses a component, so the recipe's section is removed.
    """
    tree = {"name": make_recipe_name(file, name), **read_recipe_file(file)}
    defaults = tree["defaults"] if isinstance(tree.get("defaults"), list) else []
    _register_chosen_files(file, defaults)
    bases = [item.removesuffix(".yaml") for item in defaults if isinstance(item, str)]
    is_complete = names_every_component(tree)
    if is_complete:
        tree = fill_missing(reset_user_keys(rename_deprecated(tree)))
    else:
        tree = rename_deprecated(tree, str(file))
    if problems := [f"{file}: {problem}" for problem in find_user_keys(tree)]:
        raise RecipeError(problems)
    for group in groups:
        *path, last = SECTIONS[group]
        section = find_value(tree, path)
        if isinstance(section, dict):
            section.pop(last, None)
    store_option(group="recipe", name=name, package="_global_", node=tree)
    return is_complete, bases


def _register_chosen_files(recipe: Path, defaults: Sequence[Any]) -> None:
    """Register the component files in a recipe's defaults, which get the names of options instead.

    A file is in an item such as `override /model: ./net.yaml`.
    """
    for item in defaults:
        choices = item.items() if isinstance(item, dict) else ()
        for key, option in choices:
            if str(option).endswith(YAML):
                file = find_component_file(recipe, option)
                # Recipes in several folders may use one file name.
                item[key] = f"{file.stem}-{crc32(os.fsencode(file)):08x}"
                _store_component(key.rpartition("/")[2], item[key], file)
