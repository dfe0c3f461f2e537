"""Descriptions of the keys of recipes: type, default and meaning, from the classes' annotations."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.defaults import find_options, read_config_defaults
from pipeline.config.files import SECTIONS
from pipeline.config.recipe import Recipe
from pipeline.core.deprecations import FORMER_KEYS
from pipeline.core.files.name_text import SYNONYMS
from pipeline.core.files.tree_diff import find_value
from pipeline.core.registry import MAX_FLOAT, MAX_INT, Spec, load_all

TYPE_NAMES: Mapping[str, str] = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "null": "null",
    "object": "a section of keys",
}
"""Words for the types of JSON schemas."""
BOUNDS: Mapping[str, str] = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
"""Words for the bounds of JSON schemas."""
KEY_DEPTH = 3
"""Most parts of a key that is searched by its last part, as in train.optimizer.lr."""
MAX_CHOICES = 12
"""Most choices that a type lists."""


@dataclass(frozen=True)
class KeyDescription:
    """A key of a recipe, as one section or component has it."""

    component: str | None
    """The name of the component that has the key; None for a key of every recipe."""
    type_text: str
    default: Any
    meaning: str
    keys: tuple[str, ...] = ()
    """The keys of a section, sorted as they are declared."""


class UnknownKeyError(LookupError):
    """No section or component has a key; `known` are the keys beside it."""

    def __init__(self, path: Sequence[str], known: Sequence[str]) -> None:
        super().__init__(".".join(path))
        self.known = tuple(known)


def describe_key(path: Sequence[str]) -> list[KeyDescription]:
    """Return a description of a key for each section or component that has it, by their names.

    Positions in lists, as in `dataset.train.ops.0.size`, are left out of `path`. Raises
    UnknownKeyError if no section has the key.
    """
    schema = read_schema()
    owners: list[Mapping[str, Any]] = [schema]
    for place, name in enumerate(path[:-1]):
        properties = [owner["properties"][name] for owner in owners if name in owner["properties"]]
        if not properties:
            _refuse_unknown(path[: place + 1], owners)
        owners = [owner for node in properties for owner in _list_sections(node, schema)]
    name = path[-1]
    descriptions = [
        _describe(owner, path, schema) for owner in owners if name in owner["properties"]
    ]
    if not descriptions:
        _refuse_unknown(path, owners)
    return descriptions


def find_key(path: Sequence[str]) -> list[str]:
    """Return the dotted keys that end like `path`, or in a synonym, in its section or else in any.

    Keys of every recipe are preferred to keys that only some components have.
    """
    name = {**SYNONYMS, **FORMER_KEYS}.get(path[-1], path[-1])
    schema = read_schema()
    keys = [key for key in dict.fromkeys(_list_keys(schema, (), schema)) if key[-1] == name]
    keys = [key for key in keys if key[: len(path) - 1] == tuple(path[:-1])] or keys
    defaults = read_config_defaults()
    common = [key for key in keys if find_value(defaults, key, schema) is not schema]
    return [".".join(key) for key in common or keys]


def _list_keys(
    section: Mapping[str, Any], path: tuple[str, ...], schema: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    """Yield the paths of keys in a section, and in the sections up to `KEY_DEPTH` deep in it."""
    for key, node in section["properties"].items():
        yield (*path, key)
        if len(path) + 1 < KEY_DEPTH:
            for inner in _list_sections(node, schema):
                yield from _list_keys(inner, (*path, key), schema)


def _refuse_unknown(path: Sequence[str], owners: Sequence[Mapping[str, Any]]) -> None:
    raise UnknownKeyError(path, list(dict.fromkeys(key for o in owners for key in o["properties"])))


@cache
def read_schema() -> Mapping[str, Any]:
    """Return the JSON schema of recipes, with the docstring of each key as its description."""
    load_all()
    schema = Recipe.model_json_schema()
    classes = {cls.__name__: cls for cls in _list_classes(Spec)}
    for name, node in [("Recipe", schema), *schema["$defs"].items()]:
        if name not in classes or "properties" not in node:
            continue
        for key, text in read_field_docstrings(classes[name]).items():
            if key in node["properties"]:
                node["properties"][key] = {**node["properties"][key], "description": text}
    return schema


def _list_classes(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield base
    for subclass in base.__subclasses__():
        yield from _list_classes(subclass)


def read_field_docstrings(cls: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the fields of a class and its bases, as single lines."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, BaseModel):
            texts |= _read_module_docstrings(inspect.getsourcefile(base) or "").get(
                base.__qualname__, {}
            )
    return {key: " ".join(text.split()) for key, text in texts.items()}


@cache
def _read_module_docstrings(file: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of fields in a module, by class and field; {} without its source."""
    try:
        tree = ast.parse(Path(file).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    docstrings: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(content))
                ):
                    docstrings.setdefault(node.name, {})[name] = content
    return docstrings


def _list_sections(
    node: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the sections that a value may be: of a key, of the items of a list, or of a union."""
    node = _resolve(node, schema)
    if "properties" in node:
        yield node
    for alternative in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _list_sections(alternative, schema)
    if isinstance(node.get("items"), Mapping):
        yield from _list_sections(node["items"], schema)


def _resolve(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    target = schema["$defs"][reference.rpartition("/")[2]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _describe(
    owner: Mapping[str, Any], path: Sequence[str], schema: Mapping[str, Any]
) -> KeyDescription:
    node = owner["properties"][path[-1]]
    component = owner["properties"].get("name", {}).get("const")
    sections = list(_list_sections(node, schema))
    keys = dict.fromkeys(key for section in sections for key in section["properties"])
    return KeyDescription(
        component,
        describe_type(node, schema),
        _find_shown_default(node, path, component),
        node.get("description", ""),
        tuple(keys),
    )


def _find_shown_default(node: Mapping[str, Any], path: Sequence[str], component: str | None) -> Any:
    """Return a key's default; a component has its option's."""
    for group, section in SECTIONS.items():
        if tuple(path[: len(section)]) == section and component is not None:
            options = find_options(group, component)
            values = [option.get(path[-1]) for option in options.values()]
            if len(path) == len(section) + 1 and values and all(v == values[0] for v in values):
                return node.get("default") if values[0] is None else values[0]
            return node.get("default")
    return find_value(read_config_defaults(), tuple(path), node.get("default"))


def describe_type(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the type of a value as words, such as `a whole number above 0, or null`."""
    node = _resolve(node, schema)
    names = [name for name in _list_names(node, schema) if name]
    if names:
        listed = ", ".join(names[:MAX_CHOICES])
        more = f", ... ({len(names)})" if len(names) > MAX_CHOICES else ""
        return f"one of {listed}{more}"
    alternatives = (*node.get("anyOf", ()), *node.get("oneOf", ()))
    if alternatives:
        return ", or ".join(dict.fromkeys(describe_type(item, schema) for item in alternatives))
    if "const" in node:
        return str(node["const"])
    if node.get("type") == "array":
        items = node.get("items")
        return f"a list of {describe_type(items, schema)}" if items else "a list"
    text = TYPE_NAMES.get(str(node.get("type")), "a value")
    bounds = [
        f"{words} {node[bound]:,}"
        for bound, words in BOUNDS.items()
        if bound in node and abs(node[bound]) not in (MAX_INT, MAX_FLOAT, float(MAX_INT))
    ]
    return " ".join([text, *bounds])


def _list_names(node: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return the names that a value may be, of an enumeration or of components."""
    if "enum" in node:
        return list(map(str, node["enum"]))
    alternatives = [_resolve(item, schema) for item in node.get("anyOf", ())]
    if len(alternatives) == 2 and "enum" in alternatives[0] and "anyOf" in alternatives[1]:
        return list(map(str, alternatives[0]["enum"]))
    return []
