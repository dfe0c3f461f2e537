"""What a training step is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import optax
from flax import linen as nn
from jax import Array

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Ops
from pipeline.data.padding.buckets import Bucket
from pipeline.models.layers.model_spec import InitRule
from pipeline.training.bad_steps import STOP, BadStepPolicy
from pipeline.training.loss_scales import LossScaling
from pipeline.training.part_specs import AverageSpec, RateRule

SampleLoss = Callable[..., Array]
"""(logits, labels, where) -> loss of each sample, the last where labels are left out."""


@dataclass(frozen=True)
class StepConfig:
    """What the functions of a step are made of; `image` is one image as the ops leave it."""

    network: nn.Module
    image: ColumnSpec
    classes: int
    train_ops: Ops
    eval_ops: Ops
    loss: SampleLoss
    reduction: Literal["mean", "sum"]
    optimizer: optax.GradientTransformation
    loss_scale: LossScaling
    ignore_index: int | None = None
    """The label of what has none, which neither losses nor metrics count; the loss is given `where`
    then."""
    hardest_share: float = 1.0
    """What share of the samples of a batch is reduced, those of the largest losses (M-13)."""
    observe_layers: bool = False
    """Whether the optimizer is given what layers saw: its `update` then takes `observed`."""
    buckets: tuple[Bucket, ...] = ()
    """What images are padded to (D-18), the smallest first; none where all have one size."""
    padding_mask: bool = False
    """Whether images get a channel that tells what is padding."""
    init_rules: tuple[InitRule, ...] = ()
    frozen: tuple[str, ...] = ()
    """Patterns over parameters that stay as they are."""
    rate_rules: tuple[RateRule, ...] = ()
    accumulate: int = 1
    """In how many pieces, one after the other, the gradients of a batch are computed."""
    average: AverageSpec | None = None
    on_nan: BadStepPolicy = STOP
