"""Initialisers of weights. Most have the meaning and defaults of MindSpore's; He's and Xavier's
have the formulas of their papers."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from pipeline.core.registry import component
from pipeline.models.layers.model_spec import InitializerSpec

Init = Callable[..., Any]
"""(key, shape, dtype) -> array."""
Distribution = Literal["normal", "uniform"]


@component("initializer")
class TruncatedNormal(InitializerSpec):
    """Normal of deviation `sigma`, truncated at two sigma; the deviation of the result is 0.88
    sigma."""

    name: Literal["truncated_normal"] = "truncated_normal"
    sigma: PositiveFloat = 0.01

    def build(self) -> Init:
        return _import_initializers().truncated_normal(self.sigma)


@component("initializer")
class Normal(InitializerSpec):
    """Normal of deviation `sigma` around `mean`."""

    name: Literal["normal"] = "normal"
    sigma: PositiveFloat = 0.01
    mean: float = 0.0

    def build(self) -> Init:
        centred = _import_initializers().normal(self.sigma)
        return lambda key, shape, dtype: centred(key, shape, dtype) + self.mean


@component("initializer")
class Uniform(InitializerSpec):
    """Uniform in [-scale, scale)."""

    name: Literal["uniform"] = "uniform"
    scale: PositiveFloat = 0.07

    def build(self) -> Init:
        from jax import random

        return lambda key, shape, dtype: random.uniform(key, shape, dtype, -self.scale, self.scale)


class _He(InitializerSpec):
    """Base of distributions of variance gain^2 / fan, with gain^2 = 2 / (1 + negative_slope^2) (He
    et al. 2015, eq. 14). `fan` is the number of inputs or, with fan_out, of outputs of a result."""

    distribution: ClassVar[Distribution]
    mode: Literal["fan_in", "fan_out"] = "fan_in"
    negative_slope: NonNegativeFloat

    def build(self) -> Init:
        squared_gain = 2 / (1 + self.negative_slope**2)
        return _make_variance_scaling(self.name, squared_gain, self.mode, self.distribution)


@component("initializer")
class HeNormal(_He):
    """Normal of deviation gain / sqrt(fan), not truncated; slope 0 is for ReLU."""

    distribution: ClassVar[Distribution] = "normal"
    name: Literal["he_normal"] = "he_normal"
    negative_slope: NonNegativeFloat = 0.0


@component("initializer")
class HeUniform(_He):
    """Uniform within gain * sqrt(3 / fan): 1 / sqrt(fan) with the default slope of sqrt(5)."""

    distribution: ClassVar[Distribution] = "uniform"
    name: Literal["he_uniform"] = "he_uniform"
    negative_slope: NonNegativeFloat = sqrt(5)


@component("initializer")
class XavierNormal(InitializerSpec):
    """Normal of deviation gain * sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""

    name: Literal["xavier_normal"] = "xavier_normal"
    gain: PositiveFloat = 1.0

    def build(self) -> Init:
        return _make_variance_scaling(self.name, self.gain**2, "fan_avg", "normal")


@component("initializer")
class XavierUniform(InitializerSpec):
    """Uniform within gain * sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""

    name: Literal["xavier_uniform"] = "xavier_uniform"
    gain: PositiveFloat = 1.0

    def build(self) -> Init:
        return _make_variance_scaling(self.name, self.gain**2, "fan_avg", "uniform")


@component("initializer")
class Constant(InitializerSpec):
    """The same number for all values."""

    name: Literal["constant"] = "constant"
    value: float

    def build(self) -> Init:
        return _import_initializers().constant(self.value)


@component("initializer")
class Zeros(InitializerSpec):
    """Zero for all values."""

    name: Literal["zeros"] = "zeros"

    def build(self) -> Init:
        return _import_initializers().zeros


@component("initializer")
class Ones(InitializerSpec):
    """One for all values."""

    name: Literal["ones"] = "ones"

    def build(self) -> Init:
        return _import_initializers().ones


def _import_initializers() -> Any:
    from jax.nn import initializers

    return initializers


def _make_variance_scaling(
    name: str,
    scale: float,
    mode: Literal["fan_in", "fan_out", "fan_avg"],
    distribution: Distribution,
) -> Init:
    draw_scaled = _import_initializers().variance_scaling(scale, mode, distribution)

    def draw(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if len(shape) < 2:
            raise ValueError(
                f"initializer {name} scales by inputs and outputs of a kernel, and shape {shape} "
                f"has {len(shape)} of two axes; must be constant, normal, ones, truncated_normal, "
                "uniform or zeros"
            )
        return draw_scaled(key, shape, dtype)

    return draw
