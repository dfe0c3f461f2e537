"""Components of this project, one of each kind; `--plugin components.py` lets recipes name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from pipeline.api import (
    Callback,
    CallbackSpec,
    DatasetSpec,
    DecaySpan,
    FeatureContext,
    FeatureSpec,
    GradientSpec,
    ImageFacts,
    ImageOp,
    LabelLoss,
    LayeredModelSpec,
    LayerSpec,
    MetricSpec,
    OptimizerSpec,
    RawData,
    RunFeature,
    RunFeatureSpec,
    Split,
    StepFeature,
    Targets,
    WarmupDecay,
    component,
    layer,
)


@component("dataset")
class Waves(DatasetSpec):
    """Images 16x16 of waves in four directions, under noise."""

    name: Literal["waves"] = "waves"
    noise: float = 1.0

    def facts(self) -> ImageFacts:
        """Sizes that are known without reading anything."""
        return ImageFacts((16, 16, 1), classes=4, train_size=2048, eval_size=512)

    def read(self, cache: Path) -> RawData:
        """Images uint8 (n, 16, 16, 1) and labels int32 (n,)."""
        targets = Targets(("up", "right", "across", "down"))
        return RawData(self._draw(2048, 0), self._draw(512, 1), targets)

    def _draw(self, count: int, seed: int) -> Split:
        draw = np.random.default_rng(seed)
        labels = draw.integers(4, size=count).astype(np.int32)
        rows, columns = np.mgrid[:16, :16]
        angles = (labels * np.pi / 4)[:, None, None]
        phase = draw.uniform(0, 2 * np.pi, (count, 1, 1))
        waves = np.sin(columns * np.cos(angles) + rows * np.sin(angles) + phase)
        noisy = 128 + 40 * (waves + self.noise * draw.normal(size=waves.shape))
        return Split({"image": noisy.clip(0, 255).astype(np.uint8)[..., None], "label": labels})


@component("op")
class Darken(ImageOp):
    """Take away up to `most` of the brightness, drawn for each image."""

    name: Literal["darken"] = "darken"
    most: float = 0.3

    @property
    def draws(self) -> int:
        """One random number for each sample."""
        return 1

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        """Images (batch, height, width, channels), with xp numpy or jax.numpy."""
        return values * (1 - self.most * uniforms.reshape(-1, 1, 1, 1))


@component("layer")
class Centre(LayerSpec):
    """Subtract the mean of each image."""

    name: Literal["centre"] = "centre"

    def compute(self, x: Any, context: Any) -> Any:
        """Images (batch, height, width, channels); a flax module may be called here too."""
        return x - x.mean(axis=(1, 2, 3), keepdims=True)


@component("model")
class SmallNetwork(LayeredModelSpec):
    """Two convolutions of a width, and one dense layer."""

    name: Literal["small"] = "small"
    width: int = 16

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        """The layers, as a recipe would list them."""
        conv = layer("conv", features=self.width, kernel=3, stride=2)
        ends = layer("global_avg_pool"), layer("dense", features=classes)
        return Centre(), conv, layer("relu"), conv, layer("relu"), *ends


@component("loss")
class LogCosh(LabelLoss):
    """The logarithm of the hyperbolic cosine of the distance to the one-hot label."""

    name: Literal["log_cosh"] = "log_cosh"
    scale: float = 2.0

    def build_each(self) -> Any:
        """A function (logits, targets), both (..., classes) -> loss (...)."""
        import optax

        return lambda logits, targets: optax.log_cosh(self.scale * (logits - targets)).mean(-1)


@component("metric")
class WithinOne(MetricSpec):
    """The share of samples whose class is next to the predicted one, or it."""

    name: Literal["within_one"] = "within_one"

    def zero(self, classes: int) -> Any:
        """Hits and samples."""
        return np.zeros(2, np.int32)

    def sums(self, logits: Any, labels: Any, mask: Any) -> Any:
        """The same, of a batch; `mask` marks the samples that count."""
        import jax.numpy as jnp

        near = abs(logits.argmax(-1) - labels) <= 1
        return jnp.array([(near & mask).sum(), mask.sum()])

    def value(self, sums: Any) -> float:
        """Their ratio."""
        return float(sums[0] / sums[1])


@component("gradients")
class Noisy(GradientSpec):
    """Gradients with noise, as a share of their own size."""

    name: Literal["noisy"] = "noisy"
    share: float = 0.01

    def build(self) -> Any:
        """A function (backward, parameters, key) -> what `backward` returns."""
        import jax
        import optax

        def noisy(backward: Any, parameters: Any, key: Any) -> Any:
            gradients, result = backward(parameters)
            noise = optax.tree.random_like(key, gradients)
            mixed = jax.tree.map(lambda g, n: g + self.share * abs(g) * n, gradients, noise)
            return mixed, result

        return noisy


@component("optimizer")
class SignDescent(OptimizerSpec):
    """A step of the same length for every parameter: the sign of its gradient."""

    name: Literal["sign"] = "sign"

    def build(self) -> Any:
        """An optax transformation, from gradients to a direction; the pipeline applies -lr."""
        import optax

        return optax.scale_by_sign()


@component("schedule")
class Halving(WarmupDecay):
    """Half the learning rate after every `steps` updates."""

    name: Literal["halving"] = "halving"
    steps: int = 200

    def decay(self, span: DecaySpan) -> np.ndarray:
        """The factor on the learning rate of each update."""
        return 0.5 ** (span.elapsed_updates // self.steps)


class _Best(Callback):
    def __init__(self) -> None:
        self._best = 0.0

    def on_eval(self, run: Any, step: int, evaluation: Any) -> None:
        accuracy = evaluation.scalars()["accuracy"]
        run.log("best_accuracy", max(accuracy, self._best))
        if accuracy > self._best:
            self._best = accuracy
            run.save_at(step)

    def state(self) -> Any:
        return self._best

    def restore(self, state: Any) -> None:
        self._best = float(state)


@component("callback")
class SaveBest(CallbackSpec):
    """Save whenever the accuracy is the best so far."""

    name: Literal["save_best"] = "save_best"

    def build(self) -> Callback:
        """A new callback for every run."""
        return _Best()


@component("feature")
class DoubledLossSpec(FeatureSpec):
    """Records twice the loss of each step."""

    name: Literal["doubled_loss"] = "doubled_loss"

    def build(self, context: FeatureContext) -> StepFeature:
        """The feature of a run, of which `context` has the length and the shapes."""
        return DoubledLoss()


@dataclass(frozen=True)
class DoubledLoss(StepFeature):
    """A column of every step."""

    name: ClassVar[str] = "doubled_loss"
    columns: tuple[str, ...] = ("doubled_loss",)

    def make_columns(self, state: Any, gradients: Any, outcome: Any) -> tuple[Any, ...]:
        """The values of `columns`, float32 scalars."""
        return (2 * gradients.loss,)


class _WeightNorm(RunFeature):
    def measure(self, run: Any, state: Any) -> dict[str, float]:
        """The norm of all weights, a metric beside those of every evaluation."""
        import optax

        return {"weight_norm": float(optax.tree.norm(state.params))}


@component("run_feature")
class WeightNorm(RunFeatureSpec):
    """Measure the norm of all weights at every evaluation."""

    name: Literal["weight_norm"] = "weight_norm"

    def open(self, recipe: Any) -> RunFeature:
        """A new feature for every run."""
        return _WeightNorm(recipe)
