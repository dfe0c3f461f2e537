"""Keys of a recipe that conf/ may lack: fields with a default, and custom keys.

Hydra refuses to set a key that the composed files lack, unless an override begins with `++`, as in
`++model.padding=symmetric`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pipeline.config.files import SECTIONS
from pipeline.config.recipe import Recipe
from pipeline.core.registry import ComponentOf, Spec, list_components


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
