"""The language of rules for names of layers, and the frameworks' names of layers' arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

LayerRules = tuple[tuple[str, str], ...]
"""Patterns for the entire name of a layer in a file, each with the layer's path in the network. The
first match applies. In a path

    \\1       is the text of the pattern's group, and <\\1-1> that number minus 1,
    {kind}   is conv, dense, batch_norm or layer_norm, by the arrays of the layer,
    #        is the number of the layer among those with otherwise equal paths, in the order of the
             file or, if the file has no order, of the numbers in their names,
    {a,b}    splits an array into several, in equal parts of its first axis,
    ^T       at the end means that the layer's weight is (in, out),
    +        at the start means that its first row is added to every row of the network's array.

An empty path skips the layer.
"""

SKIPPED = ""

_OFFSET = re.compile(r"<(\d+)([+-]\d+)>")
_TRANSPOSED = "^T"
_ADDED = "+"


@dataclass(frozen=True)
class Place:
    """The place of a file's layer in the network."""

    path: str
    transposed: bool = False
    """Whether the layer's weight is (in, out)."""
    added: bool = False
    """Whether the first row of its weight is added to every row of the array at `path`."""


def place_layer(rules: LayerRules, layer: str, kind: str) -> Place | None:
    """Return the place of a layer by the first rule that matches, or None if none does.

    If `kind` is empty, rules with `{kind}` are skipped.
    """
    for pattern, path in rules:
        match = re.fullmatch(pattern, layer)
        if match is not None and (kind or "{kind}" not in path):
            path = match.expand(path).replace("{kind}", kind)
            path = _OFFSET.sub(lambda terms: str(int(terms[1]) + int(terms[2])), path)
            return Place(
                path.removeprefix(_ADDED).removesuffix(_TRANSPOSED),
                transposed=path.endswith(_TRANSPOSED),
                added=path.startswith(_ADDED),
            )
    return None


Framework = Literal["torch", "mindspore", "tensorflow"]


@dataclass(frozen=True)
class Convention:
    """A framework's names of a layer's arrays, and of entries that aren't weights."""

    leaves: dict[str, str]
    """This package's names of a linear layer's arrays, by the framework's names. A norm's factor is
    `scale`, and the rows of an embedding are `table`."""
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
TENSORFLOW = Convention(
    {
        **dict.fromkeys(("kernel", "weights", "depthwise_kernel", "embeddings"), "kernel"),
        **dict.fromkeys(("bias", "biases", "beta"), "bias"),
        "gamma": "scale",
        "moving_mean": "mean",
        "moving_variance": "var",
    },
    re.compile(
        r"(.*\.)?(optimizer|keras_api)\..*|(.*\.)?(save_counter|iterations?|learning_rate)"
        r"|_all_variables\..*|global_step|beta[12]_power"
        r"|.*\.(Momentum|(Adam|RMSProp)(_1)?|ExponentialMovingAverage)"
    ),
)
CONVENTIONS: dict[Framework, Convention] = {
    "torch": TORCH,
    "mindspore": MINDSPORE,
    "tensorflow": TENSORFLOW,
}
KERNELS = frozenset(
    leaf
    for convention in CONVENTIONS.values()
    for leaf, name in convention.leaves.items()
    if name == "kernel"
)
"""The frameworks' names of kernels."""

WRAPPERS = ("module.", "_orig_mod.", "network.", "_backbone.", "backbone.")
"""Prefixes that wrappers of a network add to every name."""
