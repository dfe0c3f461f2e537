"""Defaults of conf/ for keys that a complete recipe lacks because they were added later.

The recipe's validation says which keys are missing, so nothing else is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache, reduce
from typing import Any, cast

from omegaconf import OmegaConf
from pydantic import ValidationError

from pipeline.config.files import SECTIONS
from pipeline.config.recipe import Recipe
from pipeline.core.files.error_text import locate
from pipeline.core.files.package_paths import CONF
from pipeline.core.files.tree_diff import leaves
from pipeline.core.registry import Spec

Tree = dict[str, Any]

_NOTHING = object()


def names_every_part(tree: Mapping[str, Any]) -> bool:
    """Return whether a recipe names every part, as that of a run and that of `--cfg job` do."""
    parts = (_at(tree, where) for where in SECTIONS.values())
    named = all(isinstance(part, Mapping) and "name" in part for part in parts)
    return named and "defaults" not in tree


def fill_missing(tree: Mapping[str, Any]) -> Tree:
    """A copy of a recipe that names every part, with defaults for missing keys.

    A key of a part takes its default from the most similar option in conf/. Keys without a default
    stay missing.
    """
    filled = deepcopy(dict(tree))
    # Repeat: a section's missing keys are reported only once the section exists.
    while sum(_fill(filled, where) for where in _missing(filled)):
        pass
    return filled


def fill_part(group: str, part: Mapping[str, Any]) -> Tree:
    """A copy of a user's part, with the defaults that all shipped parts of its name share.

    Where these differ, as the shapes of ResNets do, a missing key stays missing, and so does a
    figure with its source: those of one chip are not another's. A part that starts from another by
    `defaults` is returned unchanged.
    """
    if any(base != "_self_" for base in part.get("defaults", ())):
        return dict(part)
    options = _options(group, str(part.get("name")))
    agreed: Mapping[str, Any] = reduce(_common, options, options[0]) if options else {}
    return _upon({key: value for key, value in agreed.items() if not _is_figure(value)}, part)


def _is_figure(value: Any) -> bool:
    """Return whether a value is a number with its source."""
    return isinstance(value, Mapping) and {"value", "source"} <= value.keys()


def option_of(group: str, part: type[Spec]) -> Tree:
    """An option of a group for a part that conf/ has no file for, one of the user's own.

    A key without a default gets that of the group's first choice in conf/config.yaml, where that
    has such a key, as every loss has `reduction`.
    """
    chosen = _option(group, _first_choices()[group])
    needed = [key for key, field in part.model_fields.items() if field.is_required()]
    return {
        "name": part.model_fields["name"].default,
        **{key: deepcopy(chosen[key]) for key in needed if key in chosen},
    }


def normalised(tree: Mapping[str, Any]) -> Tree:
    """The recipe of a run with all its keys; unchanged where it is no longer valid."""
    filled = fill_missing(tree)
    try:
        return Recipe.model_validate(filled).model_dump(mode="json")
    except ValidationError:
        return filled


def _common(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries that two trees have in common."""
    return {key: value for key, value in one.items() if other.get(key, _NOTHING) == value}


def _upon(base: Mapping[str, Any], own: Mapping[str, Any]) -> Tree:
    """`base` updated by `own`, recursively; a section with another name is replaced entirely."""
    tree = deepcopy({**base, **own})
    for key, section in own.items():
        below = base.get(key)
        if not isinstance(section, Mapping) or not isinstance(below, Mapping):
            continue
        if section.get("name", below.get("name")) == below.get("name"):
            tree[key] = _upon(below, section)
    return tree


def _missing(tree: Tree) -> list[tuple[int | str, ...]]:
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return [
            locate(details["loc"], tree)[0] for details in found if details["type"] == "missing"
        ]
    return []


def _fill(tree: Tree, where: Sequence[int | str]) -> bool:
    """Insert the default of a missing key; return whether there was one."""
    parent, default = _at(tree, where[:-1]), _default(tree, tuple(where))
    if not isinstance(parent, dict) or where[-1] in parent or default is _NOTHING:
        return False
    parent[where[-1]] = deepcopy(default)
    return True


def _default(tree: Tree, where: tuple[int | str, ...]) -> Any:
    for group, section in SECTIONS.items():
        if where[: len(section)] == section:
            part = _at(tree, section)
            if not isinstance(part, Mapping):
                return _NOTHING
            return _at(_most_similar(group, part), where[len(section) :])
    return _at(_without_parts(), where)


def _most_similar(group: str, part: Mapping[str, Any]) -> Tree:
    """The group's option with the part's name that shares most of its values."""
    own = set(map(str, leaves(part)))

    def alike(option: Tree) -> int:
        return len(own & set(map(str, leaves(option))))

    return max(_options(group, str(part.get("name"))), key=alike, default={})


@cache
def _options(group: str, name: str) -> list[Tree]:
    called = re.compile(rf"^(name: {re.escape(name)}|defaults: .*)$", re.MULTILINE)
    files = sorted((CONF / group).glob("*.yaml"))
    found = [_option(group, file.stem) for file in files if called.search(file.read_text("utf-8"))]
    return [option for option in found if option.get("name") == name]


def _option(group: str, name: str) -> Tree:
    """A file of conf/, merged with those that it starts from."""
    tree = _read(f"{group}/{name}")
    bases = [base for base in tree.pop("defaults", []) if base != "_self_"]
    for base in bases:
        tree = {**_option(group, base), **tree}
    return tree


@cache
def _first_choices() -> Mapping[str, str]:
    """The option that conf/config.yaml chooses of each group."""
    choices = (entry for entry in _read("config")["defaults"] if isinstance(entry, dict))
    return {group: option for entry in choices for group, option in entry.items()}


@cache
def _without_parts() -> Tree:
    """The defaults of a recipe's keys outside of its parts."""
    return {**_read("config"), "train": _read("train/default")}


def _read(file: str) -> Tree:
    return cast(Tree, OmegaConf.to_container(OmegaConf.load(CONF / f"{file}.yaml")))


def _at(tree: Any, where: Sequence[int | str]) -> Any:
    """The value at a path of a tree; `_NOTHING` where the path does not exist."""
    for key in where:
        inside = isinstance(tree, Mapping) and key in tree
        indexed = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if not inside and not indexed:
            return _NOTHING
        tree = tree[key]
    return tree
