"""Module paths from JAX's name stacks."""

from __future__ import annotations

import re
from functools import lru_cache

MARKS = re.compile(r"^(?:(?:transpose|jvp|vmap)\()+")
"""Prefixes that JAX's transformations add to a name stack's parts."""
DATA = "step.data"
UPDATE = "step.update"
"""Scopes of a training step outside of the network, which are phases of a profile. DATA: the map
ops of a batch; UPDATE: the update, after the gradients."""
NOT_NAMED = frozenset({"", "checkpoint", "rematted_computation", DATA, UPDATE})
"""Parts of name stacks that aren't modules or scopes of the user."""


@lru_cache(maxsize=4096)
def find_layer(scope: str) -> str:
    """Return the module path of a name stack: `conv_0` for `jvp(Net)/conv_0`, "" outside modules. A
    root with a capital letter, flax's class of the whole network, is dropped. Another root is a
    named scope and stays: `jvp(encoder)/attention` is `encoder/attention`."""
    names: list[str] = []
    for part in scope.split("/"):
        name = MARKS.sub("", part).rstrip(")")
        if name in NOT_NAMED or name.startswith("jit("):
            continue
        # A forward pass recomputed in the backward pass begins with the root again.
        is_repeated_root = name != part and bool(names) and name == names[0]
        names = [name] if is_repeated_root else [*names, name]
    is_flax_root = len(names) > 1 and names[0][0].isupper()
    return "/".join(names[1:] if is_flax_root else names)
