"""What a convolution is asked to compute, and the name of a way to compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, get_args

from jax import Array

from pipeline.models.lowerings.window import Window

Role = Literal["forward", "images_gradient", "kernel_gradient"]
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


@dataclass(frozen=True)
class Problem:
    """One of the three computations of a convolution, by the shapes that decide its speed."""

    role: Role
    window: Window
    batch: int
    channels: int
    features: int
    dtype: str

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the two arrays that the role reads, in the order of its functions."""
        w = self.window
        images = (self.batch, *w.sizes, self.channels)
        kernel = (*w.kernel, self.channels // w.groups, self.features)
        cotangent = (self.batch, *w.positions, self.features)
        pairs = {
            "forward": (images, kernel),
            "images_gradient": (kernel, cotangent),
            "kernel_gradient": (images, cotangent),
        }
        return pairs[self.role]

    @property
    def flops(self) -> int:
        """Multiplications and additions; the same in all three roles."""
        w = self.window
        pixels = self.batch * w.positions[0] * w.positions[1]
        return 2 * pixels * w.kernel[0] * w.kernel[1] * self.channels // w.groups * self.features

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved alone."""
        return 1 < self.window.groups == self.channels == self.features

    @property
    def itemsize(self) -> int:
        """Bytes of a value as it is multiplied: what is `WIDENED` has four."""
        return 2 if self.dtype == "bfloat16" else 4

    def __str__(self) -> str:
        w = self.window
        pads = ",".join(f"{before}+{after}" for before, after in w.pads)
        return (
            f"conv2d {self.role} {self.batch}x{w.sizes[0]}x{w.sizes[1]}x{self.channels} "
            f"kernel {w.kernel[0]}x{w.kernel[1]}x{self.features} "
            f"stride {w.strides[0]}x{w.strides[1]} pads {pads} "
            f"dilation {w.dilation[0]}x{w.dilation[1]} groups {w.groups} {self.dtype}"
        )


class Chooser(Protocol):
    """Says how each convolution of a network is computed; hashable, as flax modules are."""

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
class Listing:
    """Takes down the problems of a network while it is traced, in their order."""

    problems: dict[Problem, None] = field(default_factory=dict)

    def choose(self, problem: Problem) -> Lowering:
        """The default; the problem is on the list now."""
        self.problems[problem] = None
        return DEFAULT


def problem_of(role: Role, window: Window, images: Array, kernel: Array) -> Problem:
    """The problem that a role poses for a convolution of these operands."""
    batch, channels, features = images.shape[0], images.shape[3], kernel.shape[3]
    return Problem(role, window, batch, channels, features, str(images.dtype))
