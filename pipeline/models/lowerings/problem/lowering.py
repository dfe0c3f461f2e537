"""Formulas and lowerings, which compute problems, and the policies that choose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from jax import Array

if TYPE_CHECKING:
    from pipeline.models.lowerings.problem.problems import Problem

Role = Literal["forward", "input_grad", "weight_grad"]
"""The result, the gradient by the input, the gradient by the weights."""
ROLES: tuple[Role, ...] = get_args(Role)
Engine = Literal["xla", "onednn"]
"""Library of matrix products and convolutions: the one that XLA chooses, or oneDNN."""

FILE_NAMES: Mapping[str, str] = {
    "input_grad": "images_gradient",
    "weight_grad": "kernel_gradient",
    "im2col": "patches",
    "pointwise": "pixels",
    "shifted_sum": "multiply_adds",
    "per_tap_matmul": "positions",
    "grouped_as_dense": "blocks",
    "transposed": "turned",
}
"""Names of roles and formulas in knowledge banks and run directories, if they differ."""
CODE_NAMES = {name: code for code, name in FILE_NAMES.items()}


def to_file_name(name: str) -> str:
    """Return the name of a role or a formula in files."""
    return FILE_NAMES.get(name, name)


@dataclass(frozen=True)
class Lowering:
    """A formula's name, the engine that multiplies, and the images of a chunk (None: all). The
    family `default` isn't a formula. It is a layer's computation for any platform."""

    family: str
    engine: Engine = "xla"
    images: int | None = None

    def __str__(self) -> str:
        """Return `family/engine` or `family/engine/images`, with the names in files."""
        chunk = f"/{self.images}" if self.images else ""
        return f"{to_file_name(self.family)}/{self.engine}{chunk}"

    @staticmethod
    def parse(text: str) -> Lowering:
        """Invert `str`. Raises ValueError for other texts."""
        family, engine, *chunk = text.split("/")
        engines: tuple[Engine, ...] = get_args(Engine)
        if engine not in engines or len(chunk) > 1:
            raise ValueError(f"{text!r} isn't a lowering, such as positions/onednn/8")
        images = int(chunk[0]) if chunk else None
        if images is not None and images < 1:
            raise ValueError(f"{text!r}: must compute at least one image at a time")
        return Lowering(CODE_NAMES.get(family, family), engines[engines.index(engine)], images)


DEFAULT = Lowering("default")

WIDENED: Mapping[str, str] = {"float16": "float32"}
"""Types that no library multiplies on a CPU, and the types in which they are computed. Sums are in
float32 for all types, and only the result is rounded."""


@dataclass(frozen=True)
class Formula:
    """A computation `compute(problem, lowering, *operands)` of the problems for which `fits` is
    true. `chunked` is whether it can compute chunks of images."""

    compute: Callable[..., Array]
    fits: Callable[[Any], bool] = lambda problem: True
    engines: tuple[Engine, ...] = ("xla", "onednn")
    chunked: bool = False


class LoweringPolicy(Protocol):
    """Chooses how the layers of a network are computed. It must be hashable, since it is a field of
    flax modules."""

    def choose(self, problem: Problem) -> Lowering:
        """Return the lowering for a problem."""


@dataclass(frozen=True)
class Lowerings:
    """A policy from a table; problems without an entry have the default."""

    chosen: tuple[tuple[str, Lowering], ...] = ()
    """Problems, as text, and their lowerings."""

    @cached_property
    def _table(self) -> dict[str, Lowering]:
        return dict(self.chosen)

    def choose(self, problem: Problem) -> Lowering:
        return self._table.get(str(problem), DEFAULT)


DEFAULTS = Lowerings()
"""Policy that always chooses the default."""


@dataclass(eq=False)
class RecordingPolicy:
    """Records the problems of a network while it is traced, in their order."""

    problems: dict[Problem, None] = field(default_factory=dict)

    def choose(self, problem: Problem) -> Lowering:
        self.problems[problem] = None
        return DEFAULT
