"""Gradient clipping: hand-worked numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.training.optimizers.first_order import ClipSpec

GRADIENTS = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([-4.0])}  # global norm 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "value", "a", "b"),
    [
        (None, None, [3, 0], [-4]),
        (1.0, None, [0.6, 0], [-0.8]),
        (10.0, None, [3, 0], [-4]),
        (None, 3.5, [3, 0], [-3.5]),
    ],
)
def test_gradients_are_clipped(norm, value, a, b):
    clip = ClipSpec(norm=norm, value=value).build()
    clipped, _ = clip.update(GRADIENTS, clip.init(GRADIENTS))
    np.testing.assert_allclose(clipped["a"], a, rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], b, rtol=1e-6)


def test_norm_and_value_together_are_refused():
    with pytest.raises(ValidationError, match=r"norm = 1\.0 and value = 2\.0"):
        ClipSpec(norm=1.0, value=2.0)


@pytest.mark.parametrize("field", ["norm", "value"])
def test_clipping_to_zero_is_refused(field):
    with pytest.raises(ValidationError, match=field):
        ClipSpec.model_validate({"norm": None, "value": None} | {field: 0.0})
