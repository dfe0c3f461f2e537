"""Problems of sections whose keys don't fit their component, since only `name` was changed.

For example, `train.loss.name=mse` leaves the keys of cross entropy, which `mse` doesn't have.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from pipeline.config.files import SECTIONS
from pipeline.core.files.name_text import show_name
from pipeline.core.files.paths import CONF
from pipeline.core.files.tree_diff import TreePath, find_value, format_key
from pipeline.core.registry import Spec, list_components


def find_unfit_components(
    tree: Mapping[str, Any], override_keys: Collection[str]
) -> Mapping[TreePath, str]:
    """Return the problems of sections whose keys belong to another component, by path.

    Each problem ends with advice: choose the component together with its keys. A section is
    reported if it lacks a required key of its component. A section that only has foreign keys too
    is reported if it fits another component, since a key is misspelt otherwise, and if one of the
    foreign keys isn't in `override_keys`, the keys of the command line.
    """
    problems = {
        path: _find_problem(group, path, find_value(tree, path), override_keys)
        for group, path in SECTIONS.items()
    }
    return {path: problem for path, problem in problems.items() if problem is not None}


def _find_problem(
    group: str, path: TreePath, section: Any, override_keys: Collection[str]
) -> str | None:
    """Return the problem of the section at `path`; None if its keys fit."""
    is_name = isinstance(section, str)
    section = {"name": section} if is_name else section
    specs = list_components(group)
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        return None
    name = section["name"]
    options = _list_options(group, name)
    if name not in specs or not options:
        return None
    spec = specs[name]
    missing_keys = [key for key in _list_required_keys(spec) if key not in section]
    foreign_keys = [key for key in section if key not in spec.model_fields]
    fits_another = any(
        set(_list_required_keys(other)) <= section.keys() <= other.model_fields.keys()
        for other_name, other in specs.items()
        if other_name != name
    )
    is_inherited = any(f"{format_key(path)}.{key}" not in override_keys for key in foreign_keys)
    if not missing_keys and not (fits_another and is_inherited):
        return None
    key = format_key(path) if is_name else f"{format_key(path)}.name"
    names = (_add_unit(spec, missing) for missing in missing_keys)
    reasons = [f"lacks {show_name(', '.join(names))}"] if missing_keys else []
    if foreign_keys:
        reasons.append(f"has {show_name(', '.join(foreign_keys))}, which {name} lacks")
    correction = "" if foreign_keys or is_name else "give that, or "
    if not missing_keys:
        correction = "leave that out, or "
    problem = f"{key} = {name}: the section {' and '.join(reasons)}; {correction}"
    if len(options) > 1 and name not in options:
        several = f"{', '.join(options[:-1])} or {options[-1]}"
        return f"{problem}choose one whole: {group}={several}"
    option = name if name in options else options[0]
    in_file = f"(in a recipe file, `override /{group}: {option}` in its defaults)"
    return f"{problem}choose it whole: {group}={option} {in_file}"


def _list_required_keys(spec: type[Spec]) -> list[str]:
    return [key for key, field in spec.model_fields.items() if field.is_required()]


def _add_unit(spec: type[Spec], key: str) -> str:
    """Return a key, followed by its unit if it has one."""
    extra = spec.model_fields[key].json_schema_extra
    return f"{key} ({extra['unit']})" if isinstance(extra, dict) and "unit" in extra else key


@cache
def _list_options(group: str, name: str) -> list[str]:
    """Return the options of a group whose files in conf/ have this `name`."""
    pattern = re.compile(rf"^name: {re.escape(name)}$", re.MULTILINE)
    files = sorted((CONF / group).glob("*.yaml"))
    return [file.stem for file in files if pattern.search(file.read_text("utf-8"))]
