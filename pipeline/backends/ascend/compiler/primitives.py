"""Units and work of JAX's primitives on the device; primitives.yaml lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pipeline.core.files.safe_yaml import parse_written_yaml

Kind = Literal[
    "view", "elementwise", "reduce", "conv", "matmul", "window", "move", "gather", "scatter",
    "sort", "random", "cumulative", "loop_view", "collective", "unsupported",
]  # fmt: skip

_TABLE: Any = parse_written_yaml(
    Path(__file__).with_name("primitives.yaml").read_text(encoding="utf-8")
)
_ELEMENTWISE = ("simple", "heavy", "virtual")
_KINDS: dict[str, Kind] = {
    name: "elementwise" if kind in _ELEMENTWISE else kind
    for kind, names in _TABLE["kinds"].items()
    for name in names
}
SIMPLE, HEAVY, VIRTUAL = (frozenset(_TABLE["kinds"][kind]) for kind in _ELEMENTWISE)
OPS: dict[str, str] = _TABLE["ops"]
"""The vendor's names of primitives."""
GENERATORS = ("random_", "threefry", "philox", "rng_")


def kind_of(primitive: str) -> Kind:
    """Return the kind of a primitive on the device."""
    if primitive in _KINDS:
        return _KINDS[primitive]
    return "random" if primitive.startswith(GENERATORS) else "unsupported"


def passes_of(primitive: str) -> tuple[float, float]:
    """Return simple and heavy operations per output element of a primitive."""
    return float(primitive in SIMPLE), float(primitive in HEAVY)
