"""Averages of the weights: at the ends of periods, which evaluations use, and lookahead.

Averages of periods are SWA and LAWA.

Izmailov et al., Averaging weights leads to wider optima, 2018 (arXiv 1803.05407); Kaddour, Stop
wasting my time: latest weight averaging, 2022 (arXiv 2209.14981).

Lookahead: slow weights that follow the optimizer's fast weights.

Zhang et al., Lookahead optimizer: k steps forward, 1 step back, 2019 (arXiv 1907.08610).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import component
from pipeline.training.features.averages import EvaluatedWeights, WeightCopy
from pipeline.training.step_feature import EVALUATED, FeatureContext, FeatureSpec, StepFeature
from pipeline.training.telemetry import count_updates

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import Gradients, TrainState


class PeriodicAverageSpec(FeatureSpec):
    """Base of the averages whose periods are a number of updates or epochs."""

    applies_network: ClassVar[bool] = True
    steps: PositiveInt | None = None
    """The length of a period in updates."""
    epochs: PositiveFloat | None = None
    """The length of a period in epochs, in place of `steps`; both null: one epoch."""

    @model_validator(mode="after")
    def _require_one_unit(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps = {self.steps} and epochs = {self.epochs}: at least one must be null"
            )
        return self

    def period(self, context: FeatureContext) -> int:
        """Return the length of a period in updates. Raises ValueError if the run has no period."""
        epochs = 1.0 if self.epochs is None else self.epochs
        period = self.steps or max(1, round(epochs * context.steps_per_epoch))
        if period > context.total_steps:
            raise ValueError(
                f"{self.name}: a period has {period} updates; must have at most "
                f"{context.total_steps}, as the run"
            )
        return period


@component("feature")
class SwaSpec(PeriodicAverageSpec):
    """Stochastic weight averaging: evaluations use the mean of the weights after the share `start`
    of the run, and after every period from then on. Before, they use the trained weights. Batches
    that an update collects count as updates."""

    name: Literal["swa"] = "swa"
    start: Annotated[float, Field(ge=0, lt=1)] = 0.75

    def build(self, context: FeatureContext) -> StepFeature:
        start = max(1, round(self.start * context.total_steps))
        period = self.period(context)
        if start + period > context.total_steps:
            raise ValueError(
                f"swa: averages from update {start} on, every {period} updates, and the run has "
                f"{context.total_steps}; set steps to at most {context.total_steps - start}"
            )
        return Swa(start, period)


@component("feature")
class LawaSpec(PeriodicAverageSpec):
    """Latest weight averaging: evaluations use the mean of the weights at the ends of the last
    `count` periods. Before the first end, they use the trained weights. The state has
    `count` + 1 copies of the weights."""

    name: Literal["lawa"] = "lawa"
    count: Annotated[int, Field(ge=2)] = 6

    def build(self, context: FeatureContext) -> StepFeature:
        return Lawa(self.count, self.period(context))


class PeriodicAverage(EvaluatedWeights):
    """A feature whose state changes with the number of updates alone."""

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        from pipeline.training.state import select_averaged

        part = before.features[self.name]
        params = select_averaged(part[EVALUATED], after.params)
        moved = self.add_weights(part, params, count_updates(before) + 1)
        return after.replace_part(self.name, moved)

    @abstractmethod
    def add_weights(self, part: Any, params: Any, updates: Array) -> Any:
        """Return the state after update number `updates`, int32 (), with its weights `params`."""


@dataclass(frozen=True)
class Swa(PeriodicAverage):
    """The mean of the weights after updates `start`, `start` + `period`, ..."""

    name: ClassVar[str] = "swa"
    start: int
    period: int

    def add_weights(self, part: Any, params: Any, updates: Array) -> Any:
        import jax
        import jax.numpy as jnp

        elapsed = updates - self.start
        number = elapsed // self.period + 1
        is_due = (elapsed > 0) & (elapsed % self.period == 0)
        share = jnp.where(is_due, 1 / jnp.maximum(number, 1).astype(jnp.float32), 0)

        def average(a: Array, p: Array) -> Array:
            return jnp.where(elapsed <= 0, p, a + share * (p - a))

        return {EVALUATED: jax.tree.map(average, part[EVALUATED], params)}


@dataclass(frozen=True)
class Lawa(PeriodicAverage):
    """The mean of the weights at the ends of the last `count` periods, which its state has too:
    {"evaluated": ..., "ends": {"0": weights, ...}}. The end of period n, counted
    from 1, is in place (n - 1) % count."""

    name: ClassVar[str] = "lawa"
    count: int
    period: int

    def init(self, trained: Any) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp

        zeros = {str(n): jax.tree.map(jnp.zeros_like, trained) for n in range(self.count)}
        return {**super().init(trained), "ends": zeros}

    def add_weights(self, part: Any, params: Any, updates: Array) -> Any:
        import jax
        import jax.numpy as jnp

        number = updates // self.period
        is_due = updates % self.period == 0
        ends = {
            place: jax.tree.map(
                lambda e, p, place=int(place): jnp.where(
                    is_due & ((number - 1) % self.count == place), p, e
                ),
                end,
                params,
            )
            for place, end in part["ends"].items()
        }
        divisor = jnp.clip(number, 1, self.count).astype(jnp.float32)

        def average(a: Array, p: Array, *ends: Array) -> Array:
            mean = sum(ends[1:], ends[0]) / divisor
            return jnp.where(number == 0, p, jnp.where(is_due, mean, a))

        evaluated = jax.tree.map(average, part[EVALUATED], params, *ends.values())
        return {EVALUATED: evaluated, "ends": ends}


@component("feature")
class LookaheadSpec(FeatureSpec):
    """After every `steps` updates, slow weights move towards the trained parameters by the share
    `rate` of their distance, and training goes on from there."""

    name: Literal["lookahead"] = "lookahead"
    steps: PositiveInt = 5
    rate: Annotated[float, Field(gt=0, le=1)] = 0.5

    def check(self, recipe: Any) -> Iterator[str]:
        if recipe.train.optimizer.averages_iterates:
            name = recipe.train.optimizer.name
            yield f"train.optimizer = {name}: must be another optimizer with lookahead"

    def build(self, context: FeatureContext) -> StepFeature:
        return Lookahead(self.steps, self.rate)


@dataclass(frozen=True)
class Lookahead(WeightCopy):
    """Slow weights, which are its state."""

    name: ClassVar[str] = "lookahead"
    steps: int
    rate: float

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        import jax
        import jax.numpy as jnp

        from pipeline.training.state import merge_params, select_averaged

        slow = before.features[self.name]
        fast = select_averaged(slow, after.params)
        is_due = (count_updates(before) + 1) % self.steps == 0
        slow = jax.tree.map(lambda s, f: jnp.where(is_due, s + self.rate * (f - s), s), slow, fast)
        fast = jax.tree.map(lambda s, f: jnp.where(is_due, s, f), slow, fast)
        after = replace(after, params=merge_params(after.params, fast))
        return after.replace_part(self.name, slow)
