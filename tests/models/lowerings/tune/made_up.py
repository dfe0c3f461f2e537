"""Convolutions to tune for, and stopwatches that tell what a test wants them to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

from pipeline.models.lowerings.problem import (
    ROLES,
    ConvolutionProblem,
    Engine,
    Lowering,
    Problem,
    Role,
    make_window,
)

XLA: frozenset[Engine] = frozenset(("xla",))
BOTH: frozenset[Engine] = frozenset(("xla", "onednn"))

PLAIN = Lowering("convolution")
ONEDNN = Lowering("convolution", "onednn")

Times = Callable[[Problem, Lowering], float]
"""(problem, lowering) -> microseconds."""


def convolution(
    role: Role = "forward",
    channels: int = 16,
    size: int = 8,
    kernel: int = 3,
    stride: int = 1,
    batch: int = 4,
    dtype: str = "float32",
    groups: int = 1,
) -> ConvolutionProblem:
    """One with as many features as channels."""
    window = make_window((size, size), (kernel,) * 2, (stride,) * 2, "SAME", (1, 1), groups)
    return ConvolutionProblem(role, window, batch, channels, channels, dtype)


THREE = tuple(convolution(role) for role in ROLES)
"""The three computations of one convolution."""


def by_engine(xla_us: float, onednn_us: float) -> Times:
    """The plain lowerings of the engines take so long, all others ten times as long."""
    times_us = {"xla": xla_us, "onednn": onednn_us}

    def time(_: Problem, how: Lowering) -> float:
        plain = how == Lowering("convolution", how.engine)
        return times_us[how.engine] * (1 if plain else 10)

    return time


def by_name(times_us: Mapping[str, float], other_us: float = 1000.0) -> Times:
    """Lowerings by their text, whatever the problem."""
    return lambda _, how: times_us.get(str(how), other_us)


class MadeUpStopwatch:
    """Stands in for the tuner's stopwatch; takes down what it was asked to time."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self.asked: list[tuple[Problem, Lowering]] = []

    def __call__(self, problem: Problem, device: jax.Device) -> Callable[[Lowering, float], float]:
        def time(how: Lowering, give_up_us: float) -> float:
            self.asked.append((problem, how))
            return self._times(problem, how)

        return time

    @property
    def problems(self) -> list[Problem]:
        """The problems that something was timed for, in their order."""
        return list(dict.fromkeys(problem for problem, _ in self.asked))


def broken_stopwatch(problem: Problem, device: jax.Device) -> NoReturn:
    """For where nothing may be timed."""
    raise AssertionError(f"{problem} was timed on {device}")


class Watched:
    """A clock that takes down what it was shown for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[Any]:
        self.names.append(name)
        yield
