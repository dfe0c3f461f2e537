from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.models.build import conf_model, initialise, parameters

SMALL = {
    "vocabulary": 300,
    "embedding": 3,
    "hidden": [4],
    "table_init": {"name": "normal", "sigma": 1.0},
}
NUMBERS = np.array([[299, 0, 1], [257, 258, 0]], np.int32)
VALUES = np.array([[1, 0.5, 0], [2, 1, -1]], np.float32)
SAMPLES = {"field_index": NUMBERS, "field_value": VALUES}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logit_is_the_sum_of_wide_and_deep_parts(dtype: str) -> None:
    module = conf_model("wide_deep", **SMALL).build(2, dtype)
    variables = initialise(module, SAMPLES)
    p = parameters(variables)
    logits = module.apply(variables, SAMPLES, train=True)
    wide = (p["wide"][NUMBERS][..., 0] * VALUES).sum(1) + p["wide_bias"]
    rows = (p["deep"][NUMBERS] * VALUES[..., None]).reshape(2, 9)
    hidden = np.maximum(rows, 0) @ p["dense_0/kernel"] + p["dense_0/bias"]
    deep = np.maximum(hidden, 0) @ p["dense_1/kernel"] + p["dense_1/bias"]
    assert logits.dtype == np.float32
    tolerance = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(logits[:, 1], wide + deep[:, 0], atol=tolerance)
    np.testing.assert_array_equal(logits[:, 0], 0)


@pytest.mark.slow
def test_softmax_of_the_logits_is_the_logistic_function() -> None:
    module = conf_model("wide_deep", **SMALL).build(2, "float32")
    logits = module.apply(initialise(module, SAMPLES), SAMPLES, train=False)
    np.testing.assert_allclose(
        jax.nn.softmax(logits)[:, 1], 1 / (1 + np.exp(-logits[:, 1])), rtol=1e-5
    )


@pytest.mark.slow
def test_number_outside_the_vocabulary_is_nan() -> None:
    module = conf_model("wide_deep", **{**SMALL, "vocabulary": 299}).build(2, "float32")
    logits = np.asarray(module.apply(initialise(module, SAMPLES), SAMPLES, train=False))
    np.testing.assert_array_equal(np.isnan(logits[:, 1]), [True, False])


def test_unsupported_classes_and_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="separates 2 classes, and the dataset has 10"):
        initialise(conf_model("wide_deep").build(10, "float32"), SAMPLES)
    with pytest.raises(ValueError, match=r"have the shapes \(2, 3\) and \(2, 2\); both must be"):
        initialise(
            conf_model("wide_deep").build(2, "float32"),
            {**SAMPLES, "field_value": VALUES[:, :2]},
        )


FRESH = """
import jax, jax.numpy as jnp
from pipeline.models.networks.table_network import WideDeep
normal = {"name": "normal"}
init = {"conv": normal, "dense": normal, "bias": normal}
spec = WideDeep(vocabulary=9, embedding=2, hidden=(3,), table_init=normal, init=init)
module = spec.build(2, "float32")
samples = {"field_index": jnp.zeros((4, 5), jnp.int32), "field_value": jnp.zeros((4, 5))}
trace = jax.eval_shape(
    lambda key: module.init_with_output(key, samples, train=False), jax.random.key(0)
)
print(trace[0].shape)
"""


@pytest.mark.slow
def test_wide_deep_works_as_the_only_import() -> None:
    result = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert result.stdout.strip() == "(4, 2)", result.stderr
