"""Functions in float64: their results, and how often they are compiled."""

from __future__ import annotations

import jax
import numpy as np

from pipeline.inspect.dumps.layer_programs import compile_in_float64


def test_function_in_float64_is_compiled_once_for_each_shape() -> None:
    traced = []

    def third(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        traced.append(tree["x"].shape)
        return {"y": tree["x"] / 3}

    compute = compile_in_float64(third)
    for values in ([1.0, 2.0], [4.0, 5.0], [7.0]):
        y = compute({"x": np.array(values, np.float32)})["y"]
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, np.array(values) / 3, rtol=1e-15)
    assert traced == [(2,), (1,)]
