"""Keys of a recipe that need not be in conf/: those with a default in their type, and a user's own.

Hydra sets only existing keys, unless an override has a `++`: `++model.padding=symmetric`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pipeline.config.files import SECTIONS
from pipeline.config.recipe import Recipe
from pipeline.core.registry import PartOf, Spec, parts

_NAME = "name"


def settable(overrides: Iterable[str]) -> list[str]:
    """The overrides, with `++` before those that set an optional key, or one of the user's own."""
    return [f"++{override}" if _sets_optional(override) else override for override in overrides]


def _sets_optional(override: str) -> bool:
    key, equals, value = override.partition("=")
    if not equals or key in SECTIONS:
        return False
    *sections, last = key.split(".")
    if _is_open((*sections, last)):
        return True
    if any(_is_optional(spec, last) for spec in _specs_at(sections)):
        return True
    inside = _specs_at([*sections, last]) if value.startswith("{") else ()
    return any(_is_optional(spec, field) for spec in inside for field in spec.model_fields)


def _is_open(path: Sequence[str]) -> bool:
    """Whether the path leads into a section with keys of the user's own, as `model.arguments`."""
    return any(
        get_origin(spec.model_fields[name].annotation) is dict
        for position, name in enumerate(path)
        for spec in _specs_at(path[:position])
        if name in spec.model_fields
    )


def _specs_at(sections: Sequence[str]) -> list[type[Spec]]:
    """The types that the section at a path may have; empty where there is no such section."""
    specs: list[type[Spec]] = [Recipe]
    for section in sections:
        fields = [spec.model_fields[section] for spec in specs if section in spec.model_fields]
        found = (spec for field in fields for spec in _specs(field.annotation, field.metadata))
        specs = list(dict.fromkeys(found))
    return specs


def _specs(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[type[Spec]]:
    """The types of sections that a field's type allows."""
    kind = next((mark.kind for mark in metadata if isinstance(mark, PartOf)), None)
    if kind is not None:
        yield from parts(kind).values()
    elif isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from _specs(annotation.__origin__, annotation.__metadata__)
    elif get_origin(annotation) is not tuple:
        for choice in get_args(annotation):
            yield from _specs(choice)


def _is_optional(spec: type[Spec], field: str) -> bool:
    found = spec.model_fields.get(field)
    return field != _NAME and found is not None and not found.is_required()
