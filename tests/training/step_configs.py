"""Configurations of steps for tests, changed by short names of their parts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.inputs import NetworkInput, NetworkInputs
from pipeline.training.features.accumulation import Accumulation
from pipeline.training.features.averages import MovingAverage
from pipeline.training.features.curvature import LayerCurvature
from pipeline.training.features.freezing import Freezing
from pipeline.training.features.gradient_rules import GradientRule
from pipeline.training.features.hardest_samples import HardestSamples
from pipeline.training.features.ledger import Ledger
from pipeline.training.features.loss_scales import ScaledLoss
from pipeline.training.features.non_finite_steps import NonFiniteSteps
from pipeline.training.features.parameter_rates import LayerRates, RateGroups
from pipeline.training.privacy.private_gradients import PrivateGradients
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import StepFeature

FEATURES: dict[str, Callable[[Any], StepFeature]] = {
    "loss_scale": ScaledLoss,
    "on_nan": NonFiniteSteps,
    "hardest_share": HardestSamples,
    "privacy": PrivateGradients,
    "curvature": lambda rule: LayerCurvature(rule, is_mean=True),
    "gradients": GradientRule,
    "accumulate": Accumulation,
    "rate_groups": RateGroups,
    "layer_rates": LayerRates,
    "average": MovingAverage,
    "ledger_samples": Ledger,
}
"""Features by short name, in the order in which a recipe's step calls them."""
OBJECTIVE = ("loss", "reduction", "ignore_index")
FREEZING = ("frozen", "phases", "fixes_statistics")


def read_image(shape: tuple[int, ...], layout: Literal["hwc", "chw"] = "hwc") -> NetworkInputs:
    """The inputs of a network that reads one column `image`, float32."""
    spec = ColumnSpec(shape, "float32", layout=layout)
    return NetworkInputs((NetworkInput("image", "image", spec),))


def change_config(config: StepConfig, **changed: Any) -> StepConfig:
    """The configuration with other parts: fields of `StepConfig` and its objective, `classes`, and
    features by the names of `FEATURES`, `frozen`, `phases` and `fixes_statistics`. None leaves a
    feature out."""
    features = {feature.name: feature for feature in config.features}
    freezing = {name: changed.pop(name) for name in FREEZING if name in changed}
    if freezing:
        features[Freezing.name] = replace(config.find(Freezing) or Freezing(), **freezing)
    for name, make in FEATURES.items():
        if name in changed:
            value = changed.pop(name)
            made = make(value)
            features.pop(made.name, None)
            if value is not None:
                features[made.name] = made
    objective = {name: changed.pop(name) for name in OBJECTIVE if name in changed}
    if "reduction" in objective and "curvature" in features:
        is_mean = objective["reduction"] == "mean"
        features["curvature"] = replace(features["curvature"], is_mean=is_mean)
    if "classes" in changed:
        changed["targets"] = Targets(tuple(map(str, range(changed.pop("classes")))))
    changed.setdefault("features", tuple(sort_features(features.values())))
    return replace(config, objective=replace(config.objective, **objective), **changed)


def sort_features(features: Any) -> list[StepFeature]:
    """Features in the order of a recipe's step."""
    order = [
        "freezing", "loss_scale", "non_finite_steps", "adversarial", "hardest_samples", "privacy",
        "curvature", "gradients", "accumulation", "rate_groups", "layer_rates", "average", "ledger",
    ]  # fmt: skip
    return sorted(features, key=lambda feature: order.index(feature.name))
