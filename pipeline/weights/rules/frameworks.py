"""How frameworks call the arrays of a layer, and what wrappers put before all names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Framework = Literal["torch", "mindspore"]


@dataclass(frozen=True)
class Convention:
    """How a framework calls the arrays of a layer, by kind of layer, and what is no weight."""

    leaves: dict[str, str]
    """Ours by theirs, for layers that are linear maps; norms call their factor `scale`, and
    embeddings their rows `table`."""
    not_weights: re.Pattern[str]
    """Whole names of counters, rates and the state of optimizers, which are left out."""


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
"""What wrappers of a whole network put before every name."""
