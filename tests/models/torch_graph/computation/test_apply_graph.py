"""Values whose gradient is a function's result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.torch_graph.computation.apply_graph import make_input, replace_gradient
from pipeline.models.torch_graph.graph import TensorSpec


def test_gradient_is_that_of_the_backward_pass() -> None:
    """The derivative of the outputs, of what is saved, and the integers saved have no effect."""

    def compute(x: Any, w: Any) -> Any:
        saved = [w * x, jnp.arange(3)]
        (y,) = replace_gradient(
            [x], [x * w], saved, lambda arrays, gs: [gs[0] * arrays[0] + arrays[1]]
        )
        return (y * jnp.array([1.0, 2.0, 3.0])).sum()

    x, w = jnp.array([1.0, 2.0, 3.0]), jnp.array([5.0, 6.0, 7.0])
    assert compute(x, w) == 5 + 24 + 63
    dx, dw = jax.jit(jax.grad(compute, (0, 1)))(x, w)
    np.testing.assert_array_equal(dx, [5.0, 2 * 12 + 1, 3 * 21 + 2])
    np.testing.assert_array_equal(dw, [0, 0, 0])


def test_float_images_are_not_cut_to_whole_numbers() -> None:
    images = jnp.full((1, 2, 3, 1), 0.7)
    shape = (None, 1, 2, 3)
    for dtype in ("float32", "bfloat16"):
        assert make_input(TensorSpec(shape, dtype), images, "nhwc").plain().max() > 0.6
    with pytest.raises(ValueError, match="the network reads whole numbers, int64"):
        make_input(TensorSpec(shape, "int64"), images, "nhwc")
