"""Names of ways to compute what a layer is asked for, and who picks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, get_args

Role = Literal["forward", "images_gradient", "kernel_gradient"]
"""The result, the gradient of what is read, the gradient of the weights. What a dense layer reads
counts as images of one pixel."""
ROLES: tuple[Role, ...] = get_args(Role)
Engine = Literal["xla", "onednn"]
"""Whose matrix products and convolutions: what XLA picks itself, or oneDNN's."""


@dataclass(frozen=True)
class Lowering:
    """A family of formulas, who multiplies, and how many images are taken at a time (None: all).

    `default` is the one that suits any platform and needs no choice.
    """

    family: str
    engine: Engine = "xla"
    images: int | None = None

    def __str__(self) -> str:
        chunk = f"/{self.images}" if self.images else ""
        return f"{self.family}/{self.engine}{chunk}"

    @staticmethod
    def parse(text: str) -> Lowering:
        """From `family/engine` or `family/engine/images`. Raises ValueError for anything else."""
        family, engine, *rest = text.split("/")
        engines: tuple[Engine, ...] = get_args(Engine)
        if engine not in engines or len(rest) > 1:
            raise ValueError(f"{text!r} is no lowering, such as positions/onednn/8")
        images = int(rest[0]) if rest else None
        if images is not None and images < 1:
            raise ValueError(f"{text!r}: must take at least one image at a time")
        return Lowering(family, engines[engines.index(engine)], images)


DEFAULT = Lowering("default")

WIDENED: Mapping[str, str] = {"float16": "float32"}
"""Types that no library multiplies on a CPU, and what stands in for each: the sums are float32 in
any case, only the result is rounded."""


class Problem(Protocol):
    """A computation that can be lowered in several ways: hashable, and told whole by its text."""

    @property
    def kind(self) -> str:
        """What the text begins with."""

    @property
    def role(self) -> Role:
        """What is asked for: the result, or a gradient."""

    @property
    def dtype(self) -> str:
        """Of the operands and of the result."""

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the arrays that the role reads, in the order of its functions."""

    @property
    def batch(self) -> int:
        """What may be taken a few at a time."""

    @property
    def sample_bytes(self) -> int:
        """Of what is read of each of them, as it is computed."""


class LoweringPolicy(Protocol):
    """Says how the layers of a network are computed; hashable, as flax modules are."""

    def choose(self, problem: Problem) -> Lowering:
        """The lowering for a problem."""


@dataclass(frozen=True)
class Lowerings:
    """What was chosen; a problem that is not among it gets the default."""

    chosen: tuple[tuple[str, Lowering], ...] = ()
    """Problems, as text, and what computes them."""

    @cached_property
    def _table(self) -> dict[str, Lowering]:
        return dict(self.chosen)

    def choose(self, problem: Problem) -> Lowering:
        """The lowering for a problem."""
        return self._table.get(str(problem), DEFAULT)


DEFAULTS = Lowerings()
"""Nothing chosen."""


@dataclass(eq=False)
class RecordingPolicy:
    """Takes down the problems of a network while it is traced, in their order."""

    problems: dict[Problem, None] = field(default_factory=dict)

    def choose(self, problem: Problem) -> Lowering:
        """The default; the problem is on the list now."""
        self.problems[problem] = None
        return DEFAULT
