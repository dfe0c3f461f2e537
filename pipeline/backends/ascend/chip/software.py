"""Software stacks that launch a step, by framework and version: `mindspore_graph@1.8`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.core.files.name_text import find_nearest
from pipeline.core.files.safe_yaml import parse_written_yaml

EAGER = ("mindspore_eager", "pytorch_eager")
"""Stacks that launch op by op: MindSpore's PyNative mode and torch_npu's eager mode."""
ONE_POOL_SINCE = "1.5"
"""MindSpore's first version whose parameters and feature maps share one pool: 30 of 32 GB, with
parameters from its end and feature maps from its start (notes on the code of r1.5)."""
_VERSION = re.compile(r"(\d{1,4}\.\d{1,4})(\.\d{1,4})?")


@dataclass(frozen=True)
class Stack:
    """A software stack. `missing_fusions` are the fusions that its version lacks.

    `version` is None if none was named.
    """

    name: str
    missing_fusions: frozenset[str] = frozenset()
    version: str | None = None

    @property
    def is_eager(self) -> bool:
        """Whether the host launches every op."""
        return self.name in EAGER

    @property
    def has_one_pool(self) -> bool:
        """Whether parameters and feature maps share one pool of memory.

        Eager frameworks allocate all from one, and MindSpore since `ONE_POOL_SINCE`. A MindSpore
        whose version isn't named has the pools of CANN's documents.
        """
        if self.name == "mindspore_graph":
            return self.version is not None and _rank(self.version) >= _rank(ONE_POOL_SINCE)
        return True


@cache
def load_stacks() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the fusions that each version of each stack lacks, by stack and version."""
    file = Path(__file__).with_name("software.yaml")
    stacks: Any = parse_written_yaml(file.read_text(encoding="utf-8"))
    return stacks  # type: ignore[no-any-return]


@cache
def find_stack(software: str) -> Stack:
    """Return a stack by its name, or by its name and version, such as `pytorch_eager@1.8`.

    Without a version it is the newest. A version may have a third number, which changes nothing.
    Raises ValueError, with the problem and the nearest name or version, for an unknown one.
    """
    stacks = load_stacks()
    name, at, version = software.partition("@")
    if name not in stacks:
        guess = find_nearest(name, stacks)
        question = f"; did you mean {guess}?" if guess else ""
        names = ", ".join(stacks)
        raise ValueError(
            f"must be None (MindSpore) or one of {names}, or one with @VERSION{question}"
        )
    known = stacks[name]
    if not at:
        return Stack(name, frozenset(known[list(known)[-1]]))
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"must be {name}@VERSION, such as {name}@{list(known)[-1]}")
    if match[1] not in known:
        closest = min(known, key=lambda other: abs(_rank(other) - _rank(match[1])))
        raise ValueError(
            f"this version isn't known; the nearest is {name}@{closest}, of {', '.join(known)}"
        )
    return Stack(name, frozenset(known[match[1]]), match[1])


def _rank(version: str) -> int:
    major, minor = version.split(".")
    return 100 * int(major) + int(minor)
