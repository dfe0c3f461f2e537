"""Which engines this machine can be tested with."""

from __future__ import annotations

from pipeline.models.lowerings.lowering import Engine


def engines_here(dtype: str) -> frozenset[Engine]:
    return frozenset(("xla", "onednn"))
