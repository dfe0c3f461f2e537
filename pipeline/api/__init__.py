"""Classes and functions for custom components.

    from pipeline.api import LossSpec, component

A component is a frozen class with a literal `name`, registered by `@component(kind)`. Load its
module by `--plugin my_components.py` on the command line, or import it in Python. Import jax inside
methods, since recipes are checked without jax. `TableClassifier` and `TableRegressor` of
`pipeline.api.table_estimators` train on tables in memory, with scikit-learn's methods.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.recipe import RunFeatureSpec
from pipeline.core.host.launchers import get_group_size, get_rank
from pipeline.core.registry import ComponentOf, FilePath, Seq, Spec, component, make_component
from pipeline.data.columns import ColumnSpec, RawData, Split, Targets
from pipeline.data.dataset_spec import BatchOp, DatasetSpec, MapOp, Op, Selection
from pipeline.data.host_ops import HostOp
from pipeline.data.image_facts import ImageFacts
from pipeline.data.ops.image import ImageOp
from pipeline.engine.callbacks.callback import Callback, RunControl
from pipeline.engine.callbacks.metric_callbacks import CallbackSpec
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import Initializer, InitializerSpec, LayerSpec, ModelSpec
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.component_specs import (
    Backward,
    GradientSpec,
    LossSpec,
    MetricSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from pipeline.training.losses import LabelLoss
from pipeline.training.parallel.all_reduce import all_reduce
from pipeline.training.schedules import DecaySpan, WarmupDecay
from pipeline.training.step_feature import FeatureContext, FeatureSpec, StepFeature

__all__ = [
    "Backward",
    "BatchOp",
    "Callback",
    "CallbackSpec",
    "ColumnSpec",
    "ComponentOf",
    "DatasetSpec",
    "DecaySpan",
    "FeatureContext",
    "FeatureSpec",
    "FilePath",
    "GradientSpec",
    "HostOp",
    "ImageFacts",
    "ImageOp",
    "Initializer",
    "InitializerSpec",
    "LabelLoss",
    "LayerSpec",
    "LayeredModelSpec",
    "LossSpec",
    "MapOp",
    "MetricSpec",
    "ModelSpec",
    "Op",
    "OptimizerSpec",
    "RawData",
    "RunControl",
    "RunFeature",
    "RunFeatureSpec",
    "ScheduleSpec",
    "Selection",
    "Seq",
    "Spec",
    "Split",
    "StepFeature",
    "Targets",
    "WarmupDecay",
    "all_reduce",
    "component",
    "get_group_size",
    "get_rank",
    "layer",
]


def layer(name: str, **fields: Any) -> LayerSpec:
    """Return the description of a layer by its name in recipes and its fields.

    An example is `layer("conv", features=16, kernel=3)`. Raises ValueError for an unknown name, and
    for a field that the layer doesn't have.
    """
    spec: LayerSpec = make_component("layer", name, **fields)
    return spec
