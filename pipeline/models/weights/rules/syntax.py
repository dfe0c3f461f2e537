"""The language of rules for names of layers, and the frameworks' names of a layer's arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

LayerRules = tuple[tuple[str, str], ...]
"""Patterns for the entire name of a layer in a file, each with its path here. The first match
applies. In a path

    \\1       is the text of the pattern's group, and <\\1-1> that number minus 1,
    {kind}   is conv, dense, batch_norm or layer_norm, known by the arrays of the layer,
    #        counts the layers with otherwise equal paths, in the order of the file or, if it has
             none, of the numbers in their names; layers that fit nowhere are skipped,
    {a,b}    splits an array into several, in equal parts of its first axis,
    ^T       at the end says that the layer's weight is (in, out),
    +        at the start says that its first row is added to every row of the array here.

An empty path skips the layer.
"""

SKIPPED = ""

_SUM = re.compile(r"<(\d+)([+-]\d+)>")
_TRANSPOSED = "^T"
_ADDED = "+"


@dataclass(frozen=True)
class Place:
    """The place of a layer in the network, by a rule."""

    path: str
    transposed: bool = False
    """Whether its weight is (in, out)."""
    added: bool = False
    """Whether its first row is added to every row of another array."""


def place_by(rules: LayerRules, layer: str, kind: str) -> Place | None:
    """Return the place of a layer by the rules; None if none matches.

    Without a kind, rules that need one are skipped.
    """
    for pattern, path in rules:
        match = re.fullmatch(pattern, layer)
        if match is not None and (kind or "{kind}" not in path):
            return _place(match.expand(path).replace("{kind}", kind))
    return None


def _place(text: str) -> Place:
    path = _SUM.sub(lambda terms: str(int(terms[1]) + int(terms[2])), text)
    return Place(
        path.removeprefix(_ADDED).removesuffix(_TRANSPOSED),
        transposed=path.endswith(_TRANSPOSED),
        added=path.startswith(_ADDED),
    )


Framework = Literal["torch", "mindspore"]


@dataclass(frozen=True)
class Convention:
    """A framework's names of a layer's arrays, and of entries that aren't weights."""

    leaves: dict[str, str]
    """Names here by the framework's, for linear layers; a norm's factor is `scale` here, and the
    rows of an embedding are `table`."""
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
