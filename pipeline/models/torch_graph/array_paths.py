"""Paths and orders of axes of a PyTorch network's arrays here.

They are those that `pipeline.stages.export` gives the entries of PyTorch's weight files, so that a file
of the same module restores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeline.models.torch_graph.graph import Order

_PACKED = re.compile(r"in_proj_(weight|bias)$")
"""torch.nn.MultiheadAttention has no layer of its own for its packed projection."""
_LEAVES = {"running_mean": "mean", "running_var": "var"}
KERNEL_ORDERS: dict[str, Order] = {"aten.conv2d": "hwio", "aten.linear": "io"}
"""Order of the kernel, the second argument, by operator."""


def order_of(uses: Iterable[tuple[str, int]], axes: int) -> Order:
    """Return the order to keep an array in, given its uses: (operator, place of the argument).

    A kernel that is used in one way alone lies as that needs it.
    """
    orders = {
        KERNEL_ORDERS.get(op.rpartition(".")[0], "torch") if place == 1 else "torch"
        for op, place in uses
    }
    found = orders.pop() if len(orders) == 1 else "torch"
    return found if axes == {"hwio": 4, "io": 2}.get(found) else "torch"


def path_of(name: str, order: Order, uses: Iterable[tuple[str, int]], axes: int) -> str:
    """Return the path of an array, such as `layer1/0/conv1/kernel` for `layer1.0.conv1.weight`."""
    module, _, leaf = _PACKED.sub(r"in_proj.\1", name).rpartition(".")
    ops = {op.split(".")[1] for op, _ in uses if "." in op}
    if leaf == "weight" and order != "torch":
        leaf = "kernel"
    elif leaf == "weight" and axes == 1:
        leaf = "scale"
    elif leaf == "weight" and ops == {"embedding"}:
        leaf = "table"
    leaf = _LEAVES.get(leaf, leaf)
    return "/".join([*filter(None, module.split(".")), leaf])
