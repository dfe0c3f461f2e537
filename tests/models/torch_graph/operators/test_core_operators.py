"""Operators of PyTorch by JAX: values and gradients are torch's for drawn arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.torch_graph.operator_table import to_tensor
from pipeline.models.torch_graph.operators.known_operators import OPERATORS
from tests.models.torch_graph.operators.all_cases import CASES, NOT_COMPARED, draw_case
from tests.models.torch_graph.operators.core_table import (
    PAGE,
    REFUSED,
    list_core_operators,
    write_page,
)
from tests.models.torch_graph.operators.golden_results import SEED, hide_values, read_results
from tests.models.torch_graph.operators.operator_results import (
    CONTEXT,
    assert_same,
    compute_by_jax,
    compute_by_torch,
)

SEEDS = range(4)


def table_rows() -> dict[str, str]:
    """Return the state of each operator of the page: computed or refused."""
    lines = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {line[1].strip(" `"): line[2].strip() for line in lines}


def test_page_lists_what_is_computed() -> None:
    rows = table_rows()
    states = {n: "computed" if f"aten.{n}" in OPERATORS else "refused" for n in rows}
    assert rows == states
    assert PAGE.read_text() == write_page(set(rows))
    assert {name for name, state in rows.items() if state == "refused"} == set(REFUSED)


def test_core_operators_are_computed() -> None:
    rows = table_rows()
    assert list(rows.values()).count("computed") >= 0.95 * len(rows)


def test_every_operator_is_compared() -> None:
    names = {name for name in OPERATORS if not name.startswith("sym.")}
    assert names - set(NOT_COMPARED) == {f"aten.{name}" for name in CASES}
    assert set(NOT_COMPARED) <= names
    assert set(read_results()) == set(CASES)


def test_experts_of_transformers_are_grouped_products() -> None:
    names = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
    theirs, ours = (OPERATORS[name].function for name in names)
    assert theirs is ours


def compute(op: str, *args: Any) -> list[np.ndarray]:
    """Return the results of an operator of ATen, whose last arguments may be left out."""
    tensors = [to_tensor(x) if isinstance(x, np.ndarray) else x for x in args]
    results = OPERATORS[f"aten.{op}.default"](CONTEXT, *tensors)
    several = results if isinstance(results, tuple) else (results,)
    return [np.asarray(x.plain()) for x in several]


X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("op", "args", "shapes"),
    [
        ("linalg_qr", ("r",), [(0,), (2, 3, 3)]),
        ("linalg_svd", (), [(2, 5, 5), (2, 3), (2, 3, 3)]),
        ("_linalg_svd", (), [(2, 5, 3), (2, 3), (2, 3, 3)]),
        ("_linalg_svd", (False, False), [(0,), (2, 3), (0,)]),
    ],
)
def test_decompositions_have_the_shapes_of_torch(
    op: str, args: tuple[Any, ...], shapes: list[tuple[int, ...]]
) -> None:
    assert [result.shape for result in compute(op, X, *args)] == shapes


def test_decomposition_without_q_has_the_r_of_both() -> None:
    np.testing.assert_allclose(compute("linalg_qr", X, "r")[1], compute("linalg_qr", X)[1])


def test_cross_products_are_along_the_first_axis_of_size_3() -> None:
    x = X[:, :3]
    expected = np.cross(x, x[::-1], axis=1)
    np.testing.assert_allclose(compute("cross", x, x[::-1])[0], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="an axis must have size 3"):
        compute("cross", X[..., :2], X[..., :2])


@pytest.mark.slow
def test_page_lists_the_core_operators_of_torch() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    assert set(table_rows()) == list_core_operators()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_operator_matches_golden_values(name: str) -> None:
    """The golden values are torch's, of tests/golden/make_torch_operators.py."""
    case = draw_case(name, SEED)
    ours = hide_values(compute_by_jax(name, case, SEED), case)
    assert_same(ours, read_results()[name], case)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_operator_matches_torch(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for seed in SEEDS:
        case = draw_case(name, seed)
        assert_same(compute_by_jax(name, case, seed), compute_by_torch(name, case), case)


def compute_one(op: str, *args: Any, **kwargs: Any) -> np.ndarray:
    """The result of an operator for arrays and numbers."""
    operands = (to_tensor(arg) if isinstance(arg, np.ndarray) else arg for arg in args)
    return np.asarray(OPERATORS[f"aten.{op}"](CONTEXT, *operands, **kwargs).plain())


def test_whole_numbers_beyond_a_float_are_divided_exactly() -> None:
    big = np.array([2**24 + 1, -(2**24) - 1, 7, -7], np.int32)
    floors = compute_one("div.Scalar_mode", big, 2, rounding_mode="floor")
    np.testing.assert_array_equal(floors, [2**23, -(2**23) - 1, 3, -4])
    truncated = compute_one("div.Scalar_mode", big, 1, rounding_mode="trunc")
    np.testing.assert_array_equal(truncated, big)
    numbers = np.array([6.0, -7.0], np.float32)
    np.testing.assert_array_equal(
        compute_one("div.Scalar_mode", numbers, 4, rounding_mode="trunc"), [1, -1]
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
def test_sums_of_small_integers_do_not_wrap(dtype: str) -> None:
    ones = np.ones(300, dtype)
    assert compute_one("sum.default", ones) - 301 == -1
    assert compute_one("cumsum.default", ones, 0)[-1] == 300
    assert compute_one("prod.default", np.full(3, 100).astype("int8")) == 10**6


def test_gradient_leaves_the_row_of_padding() -> None:
    indices = np.array([[0, 2, 2]], np.int32)

    def total(weight: Any, *settings: int) -> Any:
        operands = to_tensor(weight), to_tensor(indices)
        return OPERATORS["aten.embedding.default"](CONTEXT, *operands, *settings).array.sum()

    weight = np.ones((3, 1), np.float32)
    np.testing.assert_array_equal(jax.grad(total)(weight).ravel(), [1, 0, 2])
    np.testing.assert_array_equal(jax.grad(total)(weight, 2).ravel(), [1, 0, 0])
    np.testing.assert_array_equal(jax.grad(total)(weight, 0).ravel(), [0, 0, 2])


def test_transposed_arrays_have_all_axes_reversed() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(compute_one("numpy_T.default", x), x.T)
    np.testing.assert_array_equal(compute_one("mT.default", x), x.transpose(0, 2, 1))


def first_result(name: str, array: Any, *args: Any) -> Any:
    """The first result of an operator, as a numpy array."""
    result = OPERATORS[f"aten.{name}"](CONTEXT, to_tensor(jnp.asarray(array)), *args)
    return np.asarray((result[0] if isinstance(result, tuple) else result).plain(), np.float32)


NAN = float("nan")


def test_median_of_nan_is_nan() -> None:
    rows = np.array([[1, NAN, 3, NAN], [4, 2, 1, 0], [NAN] * 4], np.float32)
    values, places = OPERATORS["aten.median.dim"](CONTEXT, to_tensor(jnp.asarray(rows)), 1)
    np.testing.assert_array_equal(values.plain(), [NAN, 1, NAN])
    np.testing.assert_array_equal(places.plain(), [1, 2, 0])
    np.testing.assert_array_equal(first_result("median.dim", rows, 0), [NAN, NAN, NAN, NAN])
    assert np.isnan(first_result("median.default", rows))
    assert first_result("median.default", rows[1]) == 1
    assert first_result("median.default", np.array([3, 1, 2], np.int32)) == 2


def test_sign_of_nan_is_zero() -> None:
    for name in ("sign.default", "sgn.default"):
        np.testing.assert_array_equal(first_result(name, [NAN, -2.0, 0.0, 3.0]), [0, -1, 0, 1])
        np.testing.assert_array_equal(first_result(name, np.array([-2, 0, 3])), [-1, 0, 1])
        np.testing.assert_array_equal(first_result(name, [True, False]), [1, 0])


def test_gradient_of_an_absolute_nan_is_zero() -> None:
    def total(x: Any) -> Any:
        return OPERATORS["aten.abs.default"](CONTEXT, to_tensor(x)).plain().sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.array([NAN, -2.0, 0.0])), [0, -1, 0])


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_sigmoid_and_rsqrt_of_whole_numbers_are_floats(dtype: str) -> None:
    numbers = np.array([1, 1, 4]).astype(dtype)
    x = numbers.astype(np.float32)
    np.testing.assert_allclose(first_result("sigmoid.default", numbers), 1 / (1 + np.exp(-x)), 1e-6)
    np.testing.assert_allclose(first_result("rsqrt.default", numbers), 1 / np.sqrt(x), 1e-6)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_averages_of_16_bits_do_not_overflow(axes: int) -> None:
    volumes = np.full((1, 2, *[4] * axes), 30000, np.float16)
    for args in ((4,), (3, 1, 1, False, False), (2, 2, 0, False, True, 2**axes)):
        assert (first_result(f"avg_pool{axes}d.default", volumes, *args) == 30000).all()
    assert (first_result(f"adaptive_avg_pool{axes}d.default", volumes, [3] * axes) == 30000).all()


def test_infinite_pixel_is_in_the_averages_of_its_windows_alone() -> None:
    rows = np.arange(10, dtype=np.float32).reshape(1, 2, 5)
    rows[0, 0, 0] = np.inf
    average = first_result("adaptive_avg_pool1d.default", rows, [3])
    np.testing.assert_allclose(average, [[[np.inf, 2, 3.5], [5.5, 7, 8.5]]])
