"""Operators of custom backward passes, which `apply_graph` computes.

Their functions here have the parameters, against which arguments are checked.
"""

from __future__ import annotations

from typing import Any

from pipeline.models.torch_graph.backward_passes import COTANGENT, CUSTOM_GRADIENT
from pipeline.models.torch_graph.operator_table import OPERATORS, AtenOperator


def _take_cotangent(output: Any) -> Any:
    raise ValueError("is computed in a backward pass only")


def _take_gradient(inputs: Any, outputs: Any, cotangents: Any, gradients: Any) -> Any:
    raise ValueError("is computed with its backward pass only")


OPERATORS[COTANGENT] = AtenOperator(_take_cotangent)
OPERATORS[CUSTOM_GRADIENT] = AtenOperator(_take_gradient)
