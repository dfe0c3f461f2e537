"""Recipe files, and files of one component. They may come from a stranger, so they are checked.

A file may name shipped or installed files as bases, and refer to keys of the recipe. Some keys are
only for the command line: those that decide where a run writes, and Hydra's section, which can name
code to run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from pipeline.config.files import SECTIONS
from pipeline.config.references import find_refused_references, iterate_texts
from pipeline.core.errors import RecipeError
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_yaml
from pipeline.core.files.tree_diff import format_key
from pipeline.core.files.value_text import show

Tree = dict[str, Any]

USER_KEYS: Mapping[tuple[str, ...], Any] = {
    ("cache", "root"): None,
    ("device", "tune_bank"): None,
    ("train", "resume"): None,
    ("train", "resume_changed"): "refuse",
    ("dataset", "follow_links"): False,
    ("profile", "output"): None,
    ("dump", "path"): None,
    ("checkpoint", "directory"): None,
    ("checkpoint", "mirror"): None,
}
"""Keys that only the user may set, with harmless values. These keys decide where a run writes, or
allow data to be outside of a folder or to change."""
RESUME_ANY = "auto"
"""Value of `train.resume` that a file may set, since it doesn't name a directory."""
YAML = (".yaml", ".yml")

_OPTION = re.compile(r"\w[\w.+-]{0,99}")
"""Name of a recipe, or of an option of a group."""
_COMPONENT_FILE = re.compile(r"(?:\./)?(?:\w[\w.+-]{0,99}/){0,9}\w[\w.+-]{0,99}\.ya?ml")
"""Path of a component's file, in the recipe's folder or below it."""
_PACKAGE = re.compile(
    r"(?:[ \t]*(?:#(?![ \t]*@package\b)[^\n]*)?\n)*[ \t]*#[ \t]*@package[ \t:]+(\S+)"
)
"""Hydra's directive `# @package PATH` among the first comments of a file."""
_CHOICE = re.compile(r"(?:override )?/(\w+)")
"""Key of an item of `defaults` that chooses the option of a group."""


def read_recipe_file(file: Path) -> Tree:
    """Read a recipe file. Raises RecipeError if it can't be read, or has forbidden content."""
    tree = _read(file, "recipe", "_global_")
    return _require_data(file, tree, list(_check_recipe_defaults(tree)))


def read_component_file(file: Path, group: str) -> Tree:
    """Read the file of a component of a recipe. Raises RecipeError as for a recipe."""
    tree = _read(file, group, ".".join(SECTIONS[group]))
    problems = [
        f"defaults: {show(item)}: must be _self_ or the name of a {group}"
        for item in _list_defaults(tree)
        if not isinstance(item, str) or not _OPTION.fullmatch(item)
    ]
    return _require_data(file, tree, [*problems, *find_user_keys(tree, SECTIONS[group])])


def find_component_file(recipe: Path, path: str) -> Path:
    """Return the file of a component, whose path is relative to the folder of the recipe file.

    Raises RecipeError if the path, or a link, leads out of that folder. Otherwise the contents of
    any file could be shown in errors about a stranger's recipe, or stored in a run directory.
    """
    folder = recipe.parent.resolve()
    file = (folder / path).resolve()
    if not file.is_relative_to(folder):
        raise RecipeError([f"{recipe}: defaults: {path}: leads out of the folder of the recipe"])
    return file


def reset_user_keys(tree: Tree) -> Tree:
    """Return the recipe with harmless values of the keys that only the user may set."""
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for (section, key), harmless in USER_KEYS.items():
        if isinstance(copy.get(section), dict) and key in copy[section]:
            copy[section][key] = harmless
    return copy


def find_user_keys(tree: Tree, within: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a problem for every key of a file that only the user may set.

    `within` is the section of a recipe that the file contains; () for a whole recipe.
    """
    for path, harmless in USER_KEYS.items():
        if path[: len(within)] != within:
            continue
        value: Any = tree
        for key in path[len(within) :]:
            if isinstance(value, dict):
                value = value.get(key)
            elif "${" not in str(value):
                value = None
            # Else the section is a reference, which could lead to the key: a problem.
        is_resume_any = path == ("train", "resume") and value == RESUME_ANY
        if value is not None and value != harmless and not is_resume_any:
            yield (
                f"{format_key(path)} = {show(value)}: must not be in a file, which may be a "
                f"stranger's; set it on the command line: {format_key(path)}={show(value)}"
            )


def _read(file: Path, key: str, package: str) -> Tree:
    """Read a YAML file of keys and values; errors name the `key` whose value is the file. Raises
    RecipeError if it can't be read, or if its directive names another `package`."""
    try:
        text = read_text(file, MAX_BYTES)
        tree = parse_yaml(text)
    except FileNotFoundError:
        raise RecipeError([f"{key} = {file}: there is no such file"]) from None
    except OSError as error:
        raise RecipeError([f"{file}: can't be read: {error.strerror}"]) from error
    except ValueError as error:
        raise RecipeError([f"{file}: not readable as YAML: {error}"]) from error
    if tree is not None and not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else "a single value"
        raise RecipeError([f"{file}: must hold keys and values, not {kind}"])
    header = _PACKAGE.match(text)
    if header is not None and header[1] != package:
        raise RecipeError(
            [f"{file}: # @package {header[1]}: its keys would go elsewhere; must be {package}"]
        )
    return tree or {}


def _require_data(file: Path, tree: Tree, problems: list[str]) -> Tree:
    """Return the tree of a file. Raises RecipeError if there are `problems`.

    They are joined by the problems of Hydra's section, missing values and refused references.
    """
    if "hydra" in tree:
        problems.append("hydra: must not be in a file; set it on the command line")
    problems += [
        f"{format_key(path)} = ???: the value is missing; give one, or leave the key out"
        for path, text in iterate_texts(tree)
        if text == MISSING
    ]
    problems += find_refused_references({key: tree[key] for key in tree if key != "defaults"})
    if problems:
        raise RecipeError([f"{file}: {problem}" for problem in problems])
    return tree


def _list_defaults(tree: Tree) -> list[Any]:
    defaults = tree.get("defaults", [])
    return defaults if isinstance(defaults, list) else [defaults]


def _check_recipe_defaults(tree: Tree) -> Iterator[str]:
    """Yield a problem for every item that isn't a recipe's name, a component's choice or _self_."""
    for item in _list_defaults(tree):
        if isinstance(item, str) and _OPTION.fullmatch(item):
            continue
        if isinstance(item, dict) and len(item) == 1:
            ((key, option),) = item.items()
            choice = _CHOICE.fullmatch(key)
            text = option if isinstance(option, str) else ""
            pattern = _COMPONENT_FILE if text.endswith(YAML) else _OPTION
            is_option = option is None or pattern.fullmatch(text)
            if choice is not None and choice[1] in SECTIONS and is_option:
                continue
        yield (
            f"defaults: {show(item)}: must be _self_, the name of a recipe, or "
            f"`override /GROUP: NAME` with GROUP one of {', '.join(SECTIONS)}, and NAME an option "
            "or a file beside the recipe or below it, as in ./mine.yaml"
        )
