"""Calls of modules are observed in their order, and compute what they compute unobserved."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

from pipeline.models.modules.jit_layers import observe_modules

X = np.ones((2, 3), np.float32)


class Net(nn.Module):
    """A module with a module inside, which is called by keyword, and another method."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.double(nn.Dense(4, name="inner")(inputs=x))

    def double(self, x: jax.Array) -> jax.Array:
        return 2 * x


@pytest.mark.medium
def test_module_calls_and_results_are_observed_in_nesting_order() -> None:
    events: list[tuple[Any, ...]] = []

    def add_call(module: nn.Module, args: tuple[Any, ...]) -> None:
        events.append(("call", module.path, len(args)))

    def add_result(module: nn.Module, result: jax.Array) -> None:
        events.append(("result", module.path, result.shape))

    net = Net()
    variables = net.init(jax.random.key(0), X)
    with observe_modules(on_call=add_call, on_result=add_result):
        observed = net.apply(variables, X)
    assert events == [
        ("call", (), 1),
        ("call", ("inner",), 0),
        ("result", ("inner",), (2, 4)),
        ("result", (), (2, 4)),
    ]
    np.testing.assert_array_equal(observed, net.apply(variables, X))
    assert len(events) == 4
