"""Error messages for recipes: dotted key, value, what is allowed, and the nearest known name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.core.errors import MAX_PROBLEMS, DataError, limit_problems
from pipeline.core.files.name_text import SYNONYMS, explain_unknown_name, find_nearest, show_name
from pipeline.core.files.tree_diff import TreePath, find_value, format_key
from pipeline.core.files.value_text import show
from pipeline.core.plugins.loading import suggest_missing_flag
from pipeline.core.registry import MAX_FLOAT, MAX_INT, find_components, find_kind

_LARGEST = {MAX_INT: f"{MAX_INT:,}", MAX_FLOAT: f"{MAX_FLOAT:.4g}, the largest of float32"}
"""Texts of the bounds that the registry adds to numbers."""
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "path_type": "a path",
}


Model = TypeVar("Model", bound=BaseModel)


def validate_file(kind: type[Model], tree: Mapping[str, Any], file: Path) -> Model:
    """Return the content of a file, `tree`, as a `kind`. Raises DataError with its problems."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = limit_problems(describe_problems(error, tree))
        raise DataError(f"{file}: {'; '.join(problems)}") from error


def describe_problems(
    error: ValidationError, tree: Mapping[str, Any], unfit: Mapping[TreePath, str] | None = None
) -> list[str]:
    """Return a line for each problem that pydantic found in `tree`.

    `unfit` has a line for each section whose keys belong to another component. These lines replace
    the problems of missing and unknown keys in the section. The first MAX_PROBLEMS lines show the
    value and a similar key. Further lines, of which a file can cause thousands, have only the key
    and the kind of problem.
    """
    unfit = unfit or {}
    problems = []
    for details in error.errors(include_url=False):
        path, tags = split_location(details["loc"], tree)
        if details["type"] not in ("missing", "extra_forbidden") or path[:-1] not in unfit:
            problems.append((details, path, tags))
    unknown = {path for details, path, _ in problems if details["type"] == "extra_forbidden"}
    lines = list(unfit.values())
    for details, path, tags in problems[:MAX_PROBLEMS]:
        guess = _guess_key(path, tree, tags, unknown) if path in unknown else None
        lines.append(_describe_problem(details, path, guess))
    for details, path, _ in problems[MAX_PROBLEMS:]:
        kind = details["type"]
        key_problem = {"extra_forbidden": "there is no such key", "missing": "missing"}.get(kind)
        lines.append(f"{show_name(format_key(path))}: {key_problem or _describe_rule(details)}")
    return lines


def _describe_problem(details: ErrorDetails, path: TreePath, guess: TreePath | None) -> str:
    """Return a line with the key, the value and the broken rule; `guess` is for an unknown key."""
    key = show_name(format_key(path))
    value = details["input"]
    context = details.get("ctx", {})
    match details["type"]:
        case "missing":
            return f"{key}: missing; it needs a value"
        case "value_error":
            return f"{key}: {context['error']}" if key else str(context["error"])
        case "union_tag_invalid":
            names = [name.strip("' ") for name in context["expected_tags"].split(",")]
            tag = str(context["tag"])
            problem = explain_unknown_name(find_kind(names) or "component", tag, names)
            return f"{key}.name = {show(tag)}: {problem}; {suggest_missing_flag()}"
        case "extra_forbidden":
            # Imported here, since few recipes have unknown keys.
            from pipeline.core.deprecations import FORMER_KEYS, rename_key

            question = f"; did you mean {show_name(format_key(guess))}?" if guess else ""
            rule = f"there is no such key{question}"
            if (former := FORMER_KEYS.get(str(path[-1]))) is not None:
                rule = f"is called {show_name(format_key((*path[:-1], former)))} now"
            new_key, entry = rename_key(format_key(path))
            if entry is not None:
                rule = f"is called {show_name(new_key)} now"
        case "union_tag_not_found":
            rule = "must be a section with a `name`"
        case "component_without_name":
            names = context["fitting"]
            items = [f"{name}: {show(item)}" for name, item in value.items()]
            section = ", ".join([f"name: {names[0]}", *items]) if names else ""
            example = f", as in {key}={{{section}}}" if names else ""
            rule = f"must be a section with a `name`{example}"
        case "literal_error":
            rule = f"must be {context['expected']}"
        case "string_pattern_mismatch":
            rule = f"must match {context['pattern']}"
        case "string_too_short":
            rule = "must not be empty"
        case "string_too_long":
            rule = f"must have at most {context['max_length']} characters"
        case "too_short":
            rule = f"must have at least {context['min_length']}"
        case "less_than_equal" if context["le"] in _LARGEST:
            rule = f"must be at most {_LARGEST[context['le']]}"
        case "greater_than_equal" if -context["ge"] in _LARGEST:
            rule = f"must be at least -{_LARGEST[-context['ge']]}"
        case "float_type" if _is_too_large(value):
            rule = f"must be at most {_LARGEST[MAX_FLOAT]}"
        case "expected" if _is_too_large(value):
            rule = f"{details['msg']}, and at most {_LARGEST[MAX_INT]}"
        case _:
            rule = _describe_rule(details)
    return f"{key} = {show(value)}: {rule}"


def _is_too_large(value: Any) -> bool:
    """Return whether a value is, or a list contains, a number beyond the range of int32."""
    if isinstance(value, list | tuple):
        return any(_is_too_large(item) for item in value)
    return isinstance(value, int | float) and abs(value) > MAX_INT


def _describe_rule(details: ErrorDetails) -> str:
    if details["type"] == "tuple_type" and isinstance(details["input"], str | int | float):
        return f"must be a list, as [{show(details['input'])}]"
    if details["type"] in _EXPECTED:
        return f"must be {_EXPECTED[details['type']]}"
    return details["msg"].replace("Input should", "must").replace("must be a valid", "must be a")


def split_location(location: TreePath, tree: Mapping[str, Any]) -> tuple[TreePath, tuple[str, ...]]:
    """Split pydantic's location into the path in the recipe and the names of components.

    Pydantic's location has a component's name between the key of the component and its keys.
    """
    path: list[int | str] = []
    tags: list[str] = []
    node: Any = tree
    is_component = False
    for step in location:
        if is_component and step == (node if isinstance(node, str) else node.get("name")):
            tags.append(str(step))
            is_component = False
            continue
        path.append(step)
        node = find_value(node, (step,))
        is_component = isinstance(node, str) or (isinstance(node, Mapping) and "name" in node)
    return tuple(path), tuple(tags)


def _guess_key(
    path: TreePath, tree: Mapping[str, Any], tags: Sequence[str], unknown: AbstractSet[TreePath]
) -> TreePath | None:
    """Return the path of a valid key, in the same section or another, that the user may have meant
    by an unknown key; None without one. `tags` are the components on the path to the key."""
    name = str(path[-1])
    section = find_value(tree, path[:-1])
    keys = section if isinstance(section, Mapping) else {}
    siblings = {str(key) for key in keys if (*path[:-1], key) not in unknown}
    for cls in find_components(tags[-1]) if tags else ():
        siblings.update(cls.model_fields)
    elsewhere = _find_key(SYNONYMS.get(name, name), tree, unknown)
    if name in SYNONYMS and SYNONYMS[name] not in siblings and elsewhere:
        return elsewhere
    sibling = find_nearest(name, siblings)
    return (*path[:-1], sibling) if sibling else elsewhere


def _find_key(
    name: str, tree: Mapping[str, Any], unknown: AbstractSet[TreePath]
) -> TreePath | None:
    """Return the path of the known key of this name that is nearest to the root of the recipe."""
    sections: list[tuple[TreePath, Any]] = [((), tree)]
    for path, section in sections:
        if not isinstance(section, Mapping) or path in unknown:
            continue
        if name in section and (*path, name) not in unknown:
            return (*path, name)
        sections += [((*path, key), value) for key, value in section.items()]
    return None
