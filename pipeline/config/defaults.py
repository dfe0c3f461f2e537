"""Defaults from conf/ for keys that a recipe lacks, and keys that conf/ may lack.

A recipe lacks keys if it was written before they existed. conf/ may lack fields with a default, and
custom keys.

Hydra refuses to set a key that the composed files lack, unless an override begins with `++`, as in
`++model.padding=symmetric`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Annotated, Any, cast, get_args, get_origin

from omegaconf import OmegaConf
from pydantic import ValidationError

from pipeline.config.files import SECTIONS
from pipeline.config.recipe import Recipe
from pipeline.core.deprecations import (
    FORMER_KEYS,
    KEY,
    list_deprecated,
    rename_references,
    warn_of_deprecation,
)
from pipeline.core.errors import RecipeError
from pipeline.core.files.error_text import split_location
from pipeline.core.files.paths import CONF
from pipeline.core.files.tree_diff import TreePath, find_value, iterate_leaves
from pipeline.core.registry import ComponentOf, Spec, list_components

Tree = dict[str, Any]

_NOTHING = object()


def names_every_component(tree: Mapping[str, Any]) -> bool:
    """Return whether a recipe names every component, as a run's recipe and `--cfg job` do."""
    sections = (find_value(tree, path) for path in SECTIONS.values())
    return "defaults" not in tree and all(
        isinstance(section, Mapping) and "name" in section for section in sections
    )


def fill_missing(tree: Mapping[str, Any]) -> Tree:
    """Return a copy of a recipe that names every component, with defaults for missing keys.

    A key of a component takes its default from the most similar option in conf/. Keys without a
    default stay missing. Keys of earlier versions get their new names.
    """
    filled = _rename_former_keys(deepcopy(dict(tree)))
    # This repeats because validation reports a section's missing keys only if the section exists.
    is_changed = True
    while is_changed:
        was_filled = [_fill_key(filled, path) for path in _find_missing(filled)]
        is_changed = any(was_filled)
    return filled


def _rename_former_keys(tree: Tree) -> Tree:
    """Return a run's recipe with the new names of keys. A former `train.epochs` becomes
    `sink_epochs` or `epochs`, by what it counted.

    Earlier versions called an epoch a pass, and `train.epochs` counted sinks of a positive size.
    """
    train = tree.get("train")
    if isinstance(train, dict) and "passes" in train:
        size = train.get("sink_size")
        counts_sinks = train.get("sink") is True and isinstance(size, int) and size > 0
        former_epochs = train.pop("epochs", None)
        train["sink_epochs"] = former_epochs if counts_sinks else None
        if former_epochs is not None and not counts_sinks:
            train["passes"] = former_epochs
    renamed: Tree = _rename_keys(tree)
    return rename_deprecated(renamed)


def rename_deprecated(tree: Tree, source: str = "", within: tuple[str, ...] = ()) -> Tree:
    """Return a tree with the new spellings of deprecated keys, changed in place.

    `within` is the section of a recipe that the tree is, () for a recipe. Warns of each key if
    `source`, a file that a user has written, has one. Raises RecipeError for both spellings.
    """
    root: Tree = tree
    for key in reversed(within):
        root = {key: root}
    entries = [entry for entry in list_deprecated(KEY) if _is_within(entry.new_name, within)]
    if entries:
        _rename_references(tree)
    for entry in entries:
        *path, last = entry.name.split(".")
        *new_path, new_last = entry.new_name.split(".")
        section = find_value(root, path)
        if not isinstance(section, dict) or last not in section:
            continue
        target = _open_section(root, new_path)
        if target is None or new_last in target:
            place = f"{source}: " if source else ""
            raise RecipeError([f"{place}{entry.name}: is called {entry.new_name} now; give one"])
        target[new_last] = section.pop(last)
        if source:
            warn_of_deprecation(entry, source)
    return tree


def _is_within(key: str, section: tuple[str, ...]) -> bool:
    return tuple(key.split("."))[: len(section)] == section


def _open_section(tree: Tree, path: Sequence[str]) -> Tree | None:
    """Return the section at a path, made if it is missing; None if a value is there instead."""
    section: Any = tree
    for key in path:
        section = section.setdefault(key, {}) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def _rename_references(node: Any) -> None:
    """Rename the deprecated keys to which the texts below a node refer, in place."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node))
    for key, value in items:
        if isinstance(value, str):
            node[key] = rename_references(value)
        elif isinstance(value, dict | list):
            _rename_references(value)


def _rename_keys(node: Any, path: TreePath = ()) -> Any:
    """Return a tree with the new names of keys in `FORMER_KEYS`. Custom keys keep their names."""
    if isinstance(node, list):
        return [_rename_keys(item, (*path, number)) for number, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    renamed = {}
    for key, value in node.items():
        place = (*path, str(key))
        if str(key) in FORMER_KEYS and not _is_in_custom_section(tuple(map(str, path))):
            key = FORMER_KEYS[str(key)]
        renamed[key] = _rename_keys(value, place)
    return renamed


def fill_component(group: str, component: Mapping[str, Any]) -> Tree:
    """Copy a custom component, with the defaults that all shipped options of its name share.

    A key stays missing if the options have different values, such as the shapes of ResNets, or if
    its value is a figure of a chip: a mapping with `value` and `source`. A component that names
    bases in `defaults` is returned unchanged.
    """
    if any(base != "_self_" for base in component.get("defaults", ())):
        return dict(component)
    options = list(find_options(group, str(component.get("name"))).values())
    first_option = options[0] if options else {}
    shared = {
        key: value
        for key, value in first_option.items()
        if all(option.get(key, _NOTHING) == value for option in options)
        and not (isinstance(value, Mapping) and {"value", "source"} <= value.keys())
    }
    return _update(shared, component)


def make_option(group: str, component: type[Spec]) -> Tree:
    """Return an option of a group for a custom component, for which conf/ has no file.

    A required key, such as `reduction` of a loss, gets its value from the group's default option,
    which conf/config.yaml names, if that option has the key.
    """
    names_by_group: Tree = {}
    for entry in _read_config_file("config")["defaults"]:
        if isinstance(entry, dict):
            names_by_group |= entry
    default_option = _read_option(group, names_by_group[group])
    fields = component.model_fields
    required = [key for key, field in fields.items() if field.is_required()]
    values = {key: deepcopy(default_option[key]) for key in required if key in default_option}
    return {"name": fields["name"].default, **values}


def normalise_recipe(tree: Mapping[str, Any]) -> Tree:
    """Return a run's recipe with defaults for newer keys, and with validated values if it is valid.

    Validation converts values and translates words of other frameworks to keys.
    """
    tree = fill_missing(tree)
    try:
        return Recipe.model_validate(tree).model_dump(mode="json")
    except ValidationError:
        return tree


def _update(base: Mapping[str, Any], part: Mapping[str, Any]) -> Tree:
    """Return `base` updated by `part`, and its sections by the sections of `part`.

    A section with another `name` in `part` replaces the section of `base`.
    """
    tree = deepcopy({**base, **part})
    for key, section in part.items():
        base_section = base.get(key)
        if not isinstance(section, Mapping) or not isinstance(base_section, Mapping):
            continue
        if section.get("name", base_section.get("name")) == base_section.get("name"):
            tree[key] = _update(base_section, section)
    return tree


def _find_missing(tree: Tree) -> list[TreePath]:
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        missing = [problem["loc"] for problem in problems if problem["type"] == "missing"]
        return [split_location(location, tree)[0] for location in missing]
    return []


def _fill_key(tree: Tree, path: TreePath) -> bool:
    """Insert the default of a missing key; return False if conf/ has none."""
    parent = find_value(tree, path[:-1])
    default = _find_default(tree, path)
    if not isinstance(parent, dict) or path[-1] in parent or default is _NOTHING:
        return False
    parent[path[-1]] = deepcopy(default)
    return True


def _find_default(tree: Tree, path: TreePath) -> Any:
    """Return a key's default, or `_NOTHING` if conf/ has none.

    The default of a component's key is its value in the most similar option.
    """
    for group, section in SECTIONS.items():
        if path[: len(section)] != section:
            continue
        component = find_value(tree, section)
        if not isinstance(component, Mapping):
            return _NOTHING
        leaves = _list_leaf_texts(component)
        most_similar = max(
            find_options(group, str(component.get("name"))).values(),
            key=lambda option: len(leaves & _list_leaf_texts(option)),
            default={},
        )
        return find_value(most_similar, path[len(section) :], _NOTHING)
    return find_value(read_config_defaults(), path, _NOTHING)


def read_config_defaults() -> Tree:
    """Read the defaults of the keys of every recipe, without the defaults of components."""
    return {**_read_config_file("config"), "train": _read_config_file("train/default")}


def _list_leaf_texts(component: Mapping[str, Any]) -> set[str]:
    """Return a text of each leaf of a component, which has the leaf's path and value."""
    return {str(path_and_value) for path_and_value in iterate_leaves(component)}


@cache
def find_options(group: str, name: str) -> Mapping[str, Tree]:
    """Return the options of a group that configure the component `name`, by file name."""
    # A file that lists bases in `defaults` may take `name` from a base.
    pattern = re.compile(rf"^(name: {re.escape(name)}|defaults: .*)$", re.MULTILINE)
    files = sorted((CONF / group).glob("*.yaml"))
    stems = [file.stem for file in files if pattern.search(file.read_text("utf-8"))]
    options = {stem: _read_option(group, stem) for stem in stems}
    return {stem: option for stem, option in options.items() if option.get("name") == name}


def _read_option(group: str, name: str) -> Tree:
    """Read an option's file, over the options that its `defaults` list."""
    tree = dict(_read_config_file(f"{group}/{name}"))
    bases = [base for base in tree.pop("defaults", []) if base != "_self_"]
    for base in bases:
        tree = {**_read_option(group, base), **tree}
    return tree


@cache
def _read_config_file(name: str) -> Mapping[str, Any]:
    return cast(Tree, OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml")))


def mark_optional_keys(overrides: Iterable[str]) -> list[str]:
    """Return the overrides, with `++` before each override of an optional or custom key."""
    return [f"++{override}" if _sets_optional_key(override) else override for override in overrides]


def _sets_optional_key(override: str) -> bool:
    key, equals, value = override.partition("=")
    if not equals or key in SECTIONS:
        return False
    path = key.split(".")
    if _is_in_custom_section(path):
        return True
    if any(_is_optional(spec, path[-1]) for spec in _find_specs(path[:-1])):
        return True
    # A value in braces may set any key of the section.
    specs = _find_specs(path) if value.startswith("{") else ()
    return any(_is_optional(spec, field) for spec in specs for field in spec.model_fields)


def _is_in_custom_section(path: Sequence[str]) -> bool:
    """Return whether a path is in a section with custom keys, such as `model.arguments`."""
    for position, name in enumerate(path):
        specs = _find_specs(path[:position])
        fields = [spec.model_fields[name] for spec in specs if name in spec.model_fields]
        if any(get_origin(field.annotation) is dict for field in fields):
            return True
    return False


def _find_specs(sections: Sequence[str]) -> list[type[Spec]]:
    """Return the types that the section at a path may have; empty for an unknown section."""
    specs: list[type[Spec]] = [Recipe]
    for section in sections:
        fields = [spec.model_fields[section] for spec in specs if section in spec.model_fields]
        inner = (spec for field in fields for spec in _list_specs(field.annotation, field.metadata))
        specs = list(dict.fromkeys(inner))
    return specs


def _list_specs(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[type[Spec]]:
    """Yield the types of sections that a field's type allows."""
    kind = next((mark.kind for mark in metadata if isinstance(mark, ComponentOf)), None)
    if kind is not None:
        yield from list_components(kind).values()
    elif isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from _list_specs(annotation.__origin__, annotation.__metadata__)
    elif get_origin(annotation) is not tuple:
        # Choices of a union. Lists are tuples, and an override can't set a key of a list's item.
        for choice in get_args(annotation):
            yield from _list_specs(choice)


def _is_optional(spec: type[Spec], field: str) -> bool:
    """Return whether `spec` has the field, with a default. conf/ never lacks the key `name`."""
    info = spec.model_fields.get(field)
    return field != "name" and info is not None and not info.is_required()
