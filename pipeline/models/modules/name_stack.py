"""Module paths from JAX's name stacks."""

from __future__ import annotations

import re

MARKS = re.compile(r"^(?:(?:transpose|jvp|vmap)\()+")
"""Prefixes that JAX's transformations add to a name stack's parts."""
DATA = "step.data"
UPDATE = "step.update"
"""Scopes of a training step outside of the network, which are phases of a profile: DATA makes a
batch, UPDATE follows the gradients."""
NOT_NAMED = frozenset({"", "checkpoint", "rematted_computation", DATA, UPDATE})
"""Parts that aren't a user's names."""


def layer_of(scope: str) -> str:
    """Return the module path of a name stack: `conv_0` for `jvp(Net)/conv_0`, "" outside modules.

    A root with a capital is flax's, the class of the whole network, and is dropped; another is a
    named scope and stays: `jvp(encoder)/attention` is `encoder/attention`.
    """
    names: list[str] = []
    for part in scope.split("/"):
        name = MARKS.sub("", part).rstrip(")")
        if name in NOT_NAMED or name.startswith("jit("):
            continue
        # Inside the backward pass, a recomputed forward pass repeats its marks from the root on.
        repeated = name != part and bool(names) and name == names[0]
        names = [name] if repeated else [*names, name]
    of_flax = len(names) > 1 and names[0][0].isupper()
    return "/".join(names[1:] if of_flax else names)
