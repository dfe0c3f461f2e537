"""Names of a layer's arrays by framework, and prefixes that wrappers add to all names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Framework = Literal["torch", "mindspore"]


@dataclass(frozen=True)
class Convention:
    """A framework's names for the arrays of a layer, and for entries that are no weights."""

    leaves: dict[str, str]
    """Our names by theirs, for linear layers; a norm's factor is `scale` here, and the rows of an
    embedding are `table`."""
    not_weights: re.Pattern[str]
    """Full names of counters, rates and the state of optimizers, which are skipped."""


TORCH = Convention(
    {"weight": "kernel", "bias": "bias", "running_mean": "mean", "running_var": "var"},
    re.compile(r"(.*\.)?num_batches_tracked"),
)
MINDSPORE = Convention(
    {
        "weight": "kernel",
        "bias": "bias",
        "gamma": "scale",
        "beta": "bias",
        "moving_mean": "mean",
        "moving_variance": "var",
    },
    re.compile(
        r"(moments|moment1|moment2|accum|accumulation|stat|mean_square|mean_gradient)\..*"
        r"|learning_rate|momentum|global_step|epoch_num|step_num|current_iterator_step"
        r"|last_overflow_iterator_step|scale_sense|loss_scale|beta1_power|beta2_power"
    ),
)
CONVENTIONS: dict[Framework, Convention] = {"torch": TORCH, "mindspore": MINDSPORE}

WRAPPERS = ("module.", "_orig_mod.", "network.", "_backbone.", "backbone.")
"""Prefixes that wrappers of a network add to every name."""
