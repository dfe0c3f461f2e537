"""Sections of which only the name was changed: `train.loss.name=mse` keeps cross entropy's keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from pipeline.config.files import SECTIONS
from pipeline.core.files.error_text import Location, dotted, shown
from pipeline.core.files.package_paths import CONF
from pipeline.core.registry import Spec, parts


def unfit_parts(tree: Mapping[str, Any], typed: Collection[str] = ()) -> Mapping[Location, str]:
    """Problems by location of sections whose keys belong to another part than they name.

    Each problem advises how to choose the named part with its own keys. An extra key that no other
    part has is a misspelling, and not reported here; so are keys `typed` on the command line.
    """
    found: dict[Location, str] = {}
    for group, where in SECTIONS.items():
        section: Any = tree
        for key in where:
            section = section.get(key) if isinstance(section, Mapping) else None
        problem = _problem(group, where, section, typed)
        if problem is not None:
            found[where] = problem
    return found


def _problem(group: str, where: Location, section: Any, typed: Collection[str]) -> str | None:
    alone = isinstance(section, str)
    named = {"name": section} if alone else section
    known = parts(group)
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        return None
    name = named["name"]
    if name not in known or not _options(group, name):
        return None
    lacking = [key for key in _required(known[name]) if key not in named]
    foreign = [key for key in named if key not in known[name].model_fields]
    others = [other for other, cls in known.items() if other != name and _fits(named, cls)]
    inherited = any(f"{dotted(where)}.{key}" not in typed for key in foreign)
    if not lacking and not (others and inherited):
        return None
    key = dotted(where) if alone else f"{dotted(where)}.name"
    needed = [_with_unit(known[name], key) for key in lacking]
    reasons = [f"lacks {_listed(needed)}"] if lacking else []
    reasons += [f"has {_listed(foreign)}, which {name} does not take"] if foreign else []
    given = "" if foreign or alone else "give that, or "
    given = given if lacking else "leave that out, or "
    return f"{key} = {name}: the section {' and '.join(reasons)}; {given}{_advice(group, name)}"


def _required(cls: type[Spec]) -> list[str]:
    return [key for key, field in cls.model_fields.items() if field.is_required()]


def _with_unit(cls: type[Spec], key: str) -> str:
    """Return a key, with the unit of a figure."""
    extra = cls.model_fields[key].json_schema_extra
    return f"{key} ({extra['unit']})" if isinstance(extra, dict) and "unit" in extra else key


def _fits(section: Mapping[str, Any], cls: type[Spec]) -> bool:
    """Return whether the section has all required keys of a part, and no unknown ones."""
    return set(section) <= set(cls.model_fields) and set(_required(cls)) <= set(section)


def _advice(group: str, name: str) -> str:
    options = _options(group, name)
    if len(options) > 1 and name not in options:
        several = f"{', '.join(options[:-1])} or {options[-1]}"
        return f"choose one whole: {group}={several}"
    name = name if name in options else options[0]
    return (
        f"choose it whole: {group}={name} (in a recipe file, `override /{group}: {name}` in its "
        "defaults)"
    )


def _listed(keys: list[str]) -> str:
    return shown(", ".join(keys))


@cache
def _options(group: str, name: str) -> list[str]:
    """The options of a group whose files have this name for the part."""
    called = re.compile(rf"^name: {re.escape(name)}$", re.MULTILINE)
    files = sorted((CONF / group).glob("*.yaml"))
    return [file.stem for file in files if called.search(file.read_text("utf-8"))]
