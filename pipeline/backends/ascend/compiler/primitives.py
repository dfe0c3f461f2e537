"""Kinds and work of JAX's primitives on the device, and the vendor's names of kernels.

primitives.yaml lists the primitives by kind, patterns.yaml the conditions for each kernel's name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.backends.ascend.chip.hardware import Core
from pipeline.backends.ascend.chip.tasks import CostClass, Phase
from pipeline.core.files.safe_yaml import parse_written_yaml
from pipeline.core.registry import Seq, Spec

Kind = Literal[
    "view", "elementwise", "reduce", "conv", "matmul", "window", "move", "gather", "scatter",
    "resize", "sort", "random", "cumulative", "loop_view", "collective", "unsupported",
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
"""Element-wise primitives by their work, as explained in primitives.yaml."""
OPS: dict[str, str] = _TABLE["ops"]
"""The vendor's op types by primitive."""
GENERATORS = ("random_", "threefry", "philox", "rng_")
"""Beginnings of the names of primitives that draw random numbers."""
PATTERNS = Path(__file__).with_name("patterns.yaml")


def classify_primitive(primitive: str) -> Kind:
    """Return the kind of a primitive on the device."""
    if primitive in _KINDS:
        return _KINDS[primitive]
    return "random" if primitive.startswith(GENERATORS) else "unsupported"


class KernelPattern(Spec):
    """Conditions for a kernel to have the op type `type` and the cost class `class`.

    The conditions are explained in patterns.yaml.
    """

    type: str
    cost_class: Annotated[CostClass, Field(alias="class")]
    form: Literal["elementwise", "rows", "reduce"] | None = None
    phase: Literal["forward", "backward", "optimizer"] | None = None
    all: Seq[str] = ()
    any: Seq[str] = ()
    none: Seq[str] = ()
    only: Seq[str] = ()
    calls: Seq[str] = ()
    after: CostClass | None = None
    channels: bool = False
    maps: bool = False
    updates: bool = False
    results: int = 1
    masked_by: Literal["random"] | None = None


class FusionPattern(Spec):
    """Cost classes of two kernels that fuse: one writes a value, the other reads it.

    The keys are explained in patterns.yaml.
    """

    name: str
    producer: Seq[CostClass]
    consumer: Seq[CostClass]
    phase: Literal["forward", "backward"] | None = None
    max_operations: int | None = None
    keep: bool = False
    cores: Seq[Core] = ("joined", "split")
    alone: bool = False
    batched: bool | None = None


class Patterns(Spec):
    """Patterns of kernels and of fusions, in the order in which they are tried."""

    kernels: Seq[KernelPattern]
    fusions: Seq[FusionPattern]

    def select(self, core: Core, without: Collection[str]) -> Patterns:
        """Return the patterns with the fusions that a core can do, except the names `without`."""
        fusions = tuple(
            fusion for fusion in self.fusions if core in fusion.cores and fusion.name not in without
        )
        return self.model_copy(update={"fusions": fusions})


@cache
def load_patterns() -> Patterns:
    """Return the package's patterns."""
    return Patterns.model_validate(parse_written_yaml(PATTERNS.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Features:
    """Properties of a kernel for `KernelPattern`. `primitives` has an entry for each node."""

    form: str
    phase: Phase
    primitives: tuple[str, ...]
    calls: frozenset[str]
    after: frozenset[str]
    channels: bool
    maps: bool
    updates: bool
    results: int
    random_mask: bool


def match_pattern(features: Features, patterns: Patterns) -> tuple[str, CostClass]:
    """Return a kernel's op type and cost class. If no pattern fits, the type names up to 4 ops."""
    for pattern in patterns.kernels:
        if _matches(pattern, features):
            return pattern.type, pattern.cost_class
    ops = [OPS.get(name, name) for name in features.primitives if name != "broadcast_in_dim"]
    name = ops[0] if len(ops) == 1 else "FusionOp_" + "_".join(dict.fromkeys(ops[:4]))
    classes: dict[str, CostClass] = {"rows": "rows", "reduce": "reduce"}
    return name, classes.get(features.form, "elementwise")


def _matches(pattern: KernelPattern, features: Features) -> bool:
    primitives = set(features.primitives)
    return (
        pattern.form in (None, features.form)
        and pattern.phase in (None, features.phase)
        and primitives.issuperset(pattern.all)
        and (not pattern.any or not primitives.isdisjoint(pattern.any))
        and primitives.isdisjoint(pattern.none)
        and (not pattern.only or primitives.issubset(pattern.only))
        and (not pattern.calls or not features.calls.isdisjoint(pattern.calls))
        and (pattern.after is None or pattern.after in features.after)
        and (features.channels or not pattern.channels)
        and (features.maps or not pattern.maps)
        and (features.updates or not pattern.updates)
        and features.results >= pattern.results
        and (pattern.masked_by is None or features.random_mask)
    )
