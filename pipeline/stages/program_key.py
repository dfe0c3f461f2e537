"""The key of a run's programs: a digest of everything that they are made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel

from pipeline.config.recipe import Recipe
from pipeline.core.files.strict_json import json_text
from pipeline.stages.build import Built

NOT_COMPILED = frozenset({"name", "cache", "checkpoint", "monitor", "launch", "debug", "stages"})
"""Sections of a recipe that no program depends on."""
OF_MACHINE = ("libc", "processor", "cores", "device", "instructions")


def program_key(process: Mapping[str, Any], recipe: Recipe, built: Built) -> str | None:
    """Return the key of the programs of a run that a process of its own does.

    `process` is its provenance: code, versions, machine, settings and data. Returns None where not
    all that the programs are made from is known by it: code of the user's own, a file that the
    network or training is read from, or data of which only samples were hashed.
    """
    splits = process["data"].values()
    columns = [column for split in splits for column in split.values()]
    if process["plugins"] or any(column.get("of") != "all" for column in columns):
        return None
    if not all(type(one).__module__.startswith("pipeline.") for one in _sections(recipe)):
        return None
    if any(_names_file(one) for one in _sections((recipe.model, recipe.train))):
        return None
    network = built.parts.network
    machine = {name: process["machine"][name] for name in OF_MACHINE}
    parts = {
        **{name: process[name] for name in ("versions", "settings", "data")},
        "code": process["code"]["sha256"],
        "machine": machine,
        "recipe": recipe.model_dump(mode="json", exclude=set(NOT_COMPILED)),
        "lowerings": [repr(getattr(network, name, None)) for name in ("layout", "policy")],
        "single steps": built.single_steps,
        "jax": sorted((name, repr(value)) for name, value in jax.config.values.items()),
    }
    return hashlib.sha256(json_text(parts).encode()).hexdigest()


def _names_file(section: BaseModel) -> bool:
    return any(isinstance(value, Path) for value in section.__dict__.values())


def _sections(value: Any) -> Iterator[BaseModel]:
    """Yield the sections of a recipe, and those inside of them."""
    if isinstance(value, BaseModel):
        yield value
        value = list(value.__dict__.values())
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _sections(item)
