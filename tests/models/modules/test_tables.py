"""The layers for rows of a table against TabM and RealMLP of other packages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.tables import MemberDense, MemberHead, TableColumns
from pipeline.models.modules.tables import average_members, list_one_hot_rows
from tests.conftest import ROOT
from tests.models.build import network

GOLDEN = np.load(ROOT / "tests" / "golden" / "table_network.npz")
PLAIN = {"frequencies": 0, "scale_factor": 0.0}


def apply(
    layers: tuple[LayerSpec, ...], params: Any, rows: np.ndarray, train: bool = False
) -> np.ndarray:
    module = network(*layers)
    return np.asarray(module.apply({"params": params}, jnp.asarray(rows, jnp.float32), train=train))


def make_tabm() -> tuple[tuple[LayerSpec, ...], dict[str, Any], np.ndarray]:
    """Layers, parameters and rows of the stored TabM."""
    first = {key: GOLDEN[f"tabm/backbone.blocks.0.0.{key}"] for key in ("weight", "r", "s", "bias")}
    second = {key: GOLDEN[f"tabm/backbone.blocks.1.0.{key}"] for key in first}
    columns = TableColumns(numbers=3, categories=(4,), **PLAIN)
    dense = MemberDense(features=8, members=5, columns=columns.sizes)
    layers = (columns, dense, MemberDense(features=8, members=5), MemberHead(features=2))

    def convert(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        kernel = block["weight"].T * block["weight"].shape[1] ** 0.5
        return {"kernel": kernel, "before": block["r"], "after": block["s"], "bias": block["bias"]}

    head = GOLDEN["tabm/output.weight"] * 8**0.5, GOLDEN["tabm/output.bias"]
    params = {
        "member_dense_0": convert(first),
        "member_dense_1": convert(second),
        "member_head_0": {"kernel": head[0], "bias": head[1]},
    }
    rows = np.concatenate([GOLDEN["tabm_numbers"], GOLDEN["tabm_codes"] + 1], axis=1)
    return layers, params, rows


def test_members_golden_outputs_are_those_of_tabm() -> None:
    layers, params, rows = make_tabm()
    outputs = apply(layers, params, rows, train=True)
    np.testing.assert_allclose(outputs, GOLDEN["tabm_outputs"], rtol=2e-5, atol=2e-5)
    shares = np.exp(apply(layers, params, rows))
    expected = np.asarray(jax.nn.softmax(GOLDEN["tabm_outputs"])).mean(axis=1)
    np.testing.assert_allclose(shares, expected, rtol=1e-4, atol=1e-7)


def test_number_golden_features_are_those_of_realmlp() -> None:
    layer = TableColumns(numbers=2, frequencies=4, scale_factor=0.0, slow_factor=0.5)
    stored = {
        "frequency": GOLDEN["pbld_weight_1"][:, 0],
        "phase": GOLDEN["pbld_bias_1"][:, 0],
        "wave_kernel": GOLDEN["pbld_weight_2"],
        "wave_bias": GOLDEN["pbld_bias_2"][:, 0],
    }
    # A parameter that learns at half the rate is stored doubled.
    params = {"table_columns_0": {name: array / 0.5 for name, array in stored.items()}}
    features = apply((layer,), params, GOLDEN["pbld_numbers"])
    expected = GOLDEN["pbld_features"]
    by_column = [*range(3), 6, *range(3, 6), 7]
    np.testing.assert_allclose(features, expected[:, by_column], rtol=1e-4, atol=1e-5)


def test_number_has_the_shares_of_bins_below_it() -> None:
    """A number of the normal distribution's quantile q has bins that sum to 4 q."""
    layer = TableColumns(numbers=2, bins=4, **PLAIN)
    deviation = 1 / (2 * norm.ppf(0.75))
    rows = np.array([[norm.ppf(0.5) * deviation, norm.ppf(0.25) * deviation], [-3.0, 3.0]])
    features = apply((layer,), {}, rows)
    expected = [[0, 1, 1, 0, 0], [rows[0, 1], 1, 0, 0, 0], [-3, 0, 0, 0, 0], [3, 1, 1, 1, 1]]
    np.testing.assert_allclose(features.reshape(4, 5), expected, atol=1e-6)
    half = apply((layer,), {}, np.array([[0.25, 1.75]]))[0]
    np.testing.assert_allclose(half, [0.25, 1, 1, 0.5, 0, 1.75, 1, 1, 1, 0.5], atol=1e-6)
    assert layer.sizes == (5, 5)


def test_categories_are_signs_zeros_and_ones_or_vectors() -> None:
    layer = TableColumns(numbers=0, categories=(2, 3, 4), one_hot_up_to=3, category_size=2, **PLAIN)
    vectors = np.arange(10.0).reshape(5, 2)
    params = {"table_columns_0": {"category_2": vectors}}
    rows = np.array([[0, 0, 0], [1, 1, 1], [2, 3, 4]])
    expected = [[0, 0, 0, 0, 0, 1], [-1, 1, 0, 0, 2, 3], [1, 0, 0, 1, 8, 9]]
    np.testing.assert_array_equal(apply((layer,), params, rows), expected)
    assert layer.sizes == (1, 3, 2)


@pytest.mark.parametrize("one_hot_up_to", [0, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4])
def test_rows_of_categories_have_the_counted_features(size: int, one_hot_up_to: int) -> None:
    settings = {"one_hot_up_to": one_hot_up_to, "category_size": 5, **PLAIN}
    layer = TableColumns(numbers=0, categories=(size,), **settings)  # type: ignore[arg-type]
    variables = network(layer).init(jax.random.key(0), jnp.ones((1, 1)), train=False)
    assert layer.is_one_hot(size) != bool(variables)
    outputs = network(layer).apply(variables, jnp.ones((1, 1)), train=False)
    assert outputs.shape == (1, layer.count_features(size))
    assert not layer.is_one_hot(size) or list_one_hot_rows(size).shape == (
        max(3, size + 1),
        layer.count_features(size),
    )


def test_positive_numbers_are_the_mean_times_an_exponential() -> None:
    layers = (
        MemberDense(features=2, members=3),
        MemberHead(features=1, average="numbers", ratios=(2.0,)),
    )
    module = network(*layers)
    x = jnp.ones((1, 4))
    variables = module.init(jax.random.key(0), x, train=False)
    np.testing.assert_array_equal(module.apply(variables, x, train=False), 0)  # the mean
    head = {**variables["params"]["member_head_0"], "bias": jnp.full((3, 1), np.log(3.0))}
    params = {**variables["params"], "member_head_0": head}
    outputs = module.apply({"params": params}, x, train=False)
    np.testing.assert_allclose(outputs, 2.0 * (3 - 1), rtol=1e-6)


def test_members_begin_with_equal_biases_and_other_factors_of_columns() -> None:
    module = network(MemberDense(features=3, members=4, columns=(2, 1)))
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)), train=True)
    params = variables["params"]["member_dense_0"]
    before, bias = np.asarray(params["before"]), np.asarray(params["bias"])
    assert (bias == bias[:1]).all()
    np.testing.assert_array_equal(before[:, 0], before[:, 1])
    assert len(np.unique(before)) == 8


def test_average_of_labels_is_the_logit_of_the_mean() -> None:
    outputs = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    shares = 1 / (1 + np.exp(-outputs.astype(np.float64)))
    mean = shares.mean(axis=1)
    found = average_members(jnp.asarray(outputs), "labels")
    np.testing.assert_allclose(found, np.log(mean / (1 - mean)), rtol=1e-4, atol=1e-5)


def test_wrong_shapes_are_refused() -> None:
    columns, dense = TableColumns(numbers=2), MemberDense(features=2, members=3)
    for layers, shape, text in (
        ((columns,), (1, 3), r"shape \(1, 3\) reaches the layer; must be \(batch, 2\)"),
        ((dense,), (1, 2, 4), r"must be \(batch, inputs\) or \(batch, 3, inputs\)"),
        (
            (dense.model_copy(update={"columns": (2, 2)}),),
            (1, 5),
            "member_dense_0: columns have 4 features; must have the 5 that reach the layer",
        ),
        ((MemberHead(features=1),), (1, 2), "put member_dense before it"),
    ):
        with pytest.raises(ValueError, match=text):
            network(*layers).init(jax.random.key(0), jnp.ones(shape), train=False)
