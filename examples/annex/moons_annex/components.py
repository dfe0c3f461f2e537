"""The dataset `moons` and the feature `smallest_loss`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from pipeline.api import (
    DatasetSpec,
    FeatureContext,
    FeatureSpec,
    RawData,
    Split,
    StepFeature,
    Targets,
    component,
)


@component("dataset")
class Moons(DatasetSpec):
    """Points in the plane, on one of two half circles."""

    name: Literal["moons"] = "moons"
    noise: float = 0.1

    def read(self, cache: Path) -> RawData:
        """Rows `features` float32 (n, 2), and labels int32 (n,)."""
        train, test = self._draw(512, seed=0), self._draw(256, seed=1)
        return RawData(train, test, Targets(("upper", "lower")), inputs=("features",))

    def _draw(self, count: int, seed: int) -> Split:
        draw = np.random.default_rng(seed)
        labels = draw.integers(2, size=count).astype(np.int32)
        angles = draw.uniform(0, np.pi, count)
        signs = 1 - 2 * labels
        points = np.stack([np.cos(angles) * signs + labels, np.sin(angles) * signs + labels / 2], 1)
        noisy = points + self.noise * draw.normal(size=points.shape)
        return Split({"features": noisy.astype(np.float32), "label": labels})


@component("feature")
class SmallestLossSpec(FeatureSpec):
    """Records the smallest loss so far with each step."""

    name: Literal["smallest_loss"] = "smallest_loss"

    def build(self, context: FeatureContext) -> StepFeature:
        """Return the feature of a run."""
        return SmallestLoss()


@dataclass(frozen=True)
class SmallestLoss(StepFeature):
    """A column of every step, and its state."""

    name: ClassVar[str] = "smallest_loss"
    columns: tuple[str, ...] = ("smallest_loss",)

    def init(self, trained: Any) -> Any:
        """Return the state at step 0: no loss yet."""
        import jax.numpy as jnp

        return jnp.float32(jnp.inf)

    def make_columns(self, state: Any, gradients: Any, outcome: Any) -> tuple[Any, ...]:
        """Return the values of `columns`, float32 scalars."""
        return (self._find_smallest(state, gradients),)

    def change_update(self, before: Any, after: Any, gradients: Any, count: Any) -> Any:
        """Return the state after an update."""
        smallest = self._find_smallest(before, gradients)
        return replace(after, features={**after.features, self.name: smallest})

    def _find_smallest(self, state: Any, gradients: Any) -> Any:
        import jax.numpy as jnp

        return jnp.minimum(state.features[self.name], gradients.loss)
