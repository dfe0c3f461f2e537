"""The first cause among all values that a bad one depends on.

Equation by equation a program gives what it gives compiled, and says where it stops being so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax import Array, lax

from pipeline.backends.graph.replay import (
    Cause,
    Interpreter,
    Origin,
    Range,
    ReplayValue,
    find_cause,
    find_largest_magnitude,
    find_non_finite,
    find_range,
    is_float,
)

SPOILT = np.array([[1.0, np.nan, 3.0], [np.inf, -np.inf, -2.0]], np.float32)


def test_range_covers_finite_values_and_counts_non_finite_values() -> None:
    found = find_range(SPOILT)
    assert found == Range("float32", (2, 3), -2.0, 3.0, pytest.approx(2 / 3), 1, 2)
    assert str(found) == "float32 2x3 with 1 NaN and 2 Inf, else -2 to 3, mean 0.6667"


def test_array_without_finite_values_has_no_range() -> None:
    assert str(find_range(np.array([np.nan, np.inf]))) == "float64 2 with 1 NaN and 1 Inf"


def test_scalar_range_is_its_value() -> None:
    assert str(find_range(jnp.bfloat16(2.5))) == "bfloat16 scalar, 2.5"


@pytest.mark.filterwarnings("error")
def test_complex_values_count_by_their_magnitude() -> None:
    values = np.array([3 + 4j, complex(1, np.inf)], np.complex64)
    assert find_largest_magnitude(values) == np.inf
    assert find_largest_magnitude(values[:1]) == 5
    assert str(find_range(values)) == "complex64 2 with 1 Inf, else 5 to 5, mean 5"
    assert np.isnan(find_largest_magnitude(np.complex64(complex(1, np.nan))))


@pytest.mark.slow
@settings(deadline=None)
@given(
    arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        arrays.array_shapes(max_dims=3, max_side=4),
        elements={"allow_nan": True, "allow_infinity": True},
    )
)
def test_largest_magnitude_is_finite_if_all_values_are(array: np.ndarray) -> None:
    assert np.isfinite(find_largest_magnitude(array)) == np.isfinite(array).all()
    assert np.isnan(find_largest_magnitude(array)) == np.isnan(array).any()
    if np.isfinite(array).all():
        assert find_largest_magnitude(array) == np.abs(array).max()


def test_keys_and_integers_are_not_floats() -> None:
    import jax

    assert not is_float(jax.random.key(0))
    assert not is_float(np.zeros(3, np.int32))
    assert is_float(jnp.zeros(3, jnp.bfloat16))


def test_non_finite_rows_are_detected_along_the_batch_axis() -> None:
    images = np.zeros((4, 2, 2, 3), np.float32)
    images[2, 1, 0, 1] = np.nan
    assert find_non_finite(images, 4) == (2,)
    assert find_non_finite(images.reshape(16, 3), 4) == (2,)
    assert find_non_finite(images.transpose(1, 2, 3, 0), 4, last=True) == (2,)
    assert find_non_finite(images.transpose(3, 1, 2, 0).reshape(3, -1), 4, last=True) == (2,)


def test_array_without_batch_axis_has_no_rows() -> None:
    assert find_non_finite(SPOILT, 5) is None
    assert find_non_finite(np.float32(np.nan), 4) is None


def origin(number: int, *causes: Origin, nan: bool = False, intended: bool = False) -> Origin:
    return Origin(number, "add", "", nan, causes, intended=intended)


def test_earliest_origin_without_causes_is_the_cause() -> None:
    late = origin(5, nan=True)
    early = origin(2)
    outcome = origin(9, origin(7, late, nan=True), origin(8, early), nan=True)
    assert find_cause(outcome) == Cause(early)


def test_input_is_attributed_to_its_first_reader() -> None:
    column = origin(-1, nan=True)
    reader = origin(4, column, nan=True)
    outcome = origin(9, origin(6, column, nan=True), reader, nan=True)
    cause = find_cause(outcome)
    assert (cause.origin, cause.reader, cause.number) == (column, reader, 4)


def test_intended_infinity_is_a_cause_only_without_another() -> None:
    mask = origin(1, intended=True)
    makes_nan = origin(3, mask, nan=True)
    assert find_cause(origin(5, mask)) == Cause(mask)
    assert find_cause(origin(5, makes_nan, nan=True)) == Cause(makes_nan)
    overflow = origin(4)
    assert find_cause(origin(5, makes_nan, overflow, nan=True)) == Cause(overflow)


def test_value_without_causes_is_its_cause() -> None:
    outcome = origin(3, nan=True)
    assert find_cause(outcome) == Cause(outcome)
    assert outcome.makes_nan


def interpreted(function: Callable[..., Any], *args: Any) -> tuple[list[ReplayValue], Interpreter]:
    closed, interpreter = jax.make_jaxpr(function)(*args), Interpreter()
    inputs = [ReplayValue(leaf) for leaf in jax.tree.leaves(args)]
    return interpreter.evaluate(closed, inputs), interpreter


def cause_of(function: Callable[..., Any], *args: Any) -> Cause:
    (value, *_), _ = interpreted(function, *args)
    assert value.origin is not None
    return find_cause(value.origin)


def in_layer(name: str, function: Callable[..., Any], *args: Any) -> Any:
    with jax.named_scope(name):
        return function(*args)


X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def scanned(x: Array) -> tuple[Array, Array]:
    return lax.scan(lambda carry, row: (carry + row.sum(), carry * row), 1.0, x)


def scanned_back(x: Array) -> tuple[Array, Array]:
    return lax.scan(lambda carry, row: (carry * 0.5 + row[0], row + carry), 1.0, x, reverse=True)


def looped(x: Array) -> Array:
    return lax.while_loop(lambda y: jnp.abs(y).sum() < 1e4, lambda y: 1.7 * y + x, x)


def branched(x: Array) -> Array:
    return lax.switch(jnp.argmax(x[0]), [jnp.sin, jnp.cos, jnp.tanh, lambda y: y @ y.T @ y], x)


def called(x: Array) -> Array:
    inner = jax.jit(lambda y: jax.nn.relu(y) + jax.nn.silu(y))
    return jax.checkpoint(lambda y: inner(jnp.sin(y)))(x)


def drawn(x: Array) -> Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.array([1, 2], jnp.uint32)), 3)
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)


def by_platform(x: Array) -> Array:
    return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


PROGRAMS = [scanned, scanned_back, looped, branched, called, drawn, by_platform]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_control_flow_matches_compiled_results(
    program: Callable[..., Any],
) -> None:
    values, _ = interpreted(program, X)
    expected = jax.tree.leaves(jax.jit(program)(X))
    for value, leaf in zip(values, expected, strict=True):
        np.testing.assert_allclose(value.array, leaf, rtol=1e-6, atol=1e-6)
        assert value.origin is None


@pytest.mark.slow
def test_control_flow_gradients_match_compiled_gradients() -> None:
    def gradient(x: Array) -> Array:
        return jax.grad(lambda y: scanned(called(y))[1].sum() + branched(y).sum())(x)

    (value,), _ = interpreted(gradient, X)
    np.testing.assert_allclose(value.array, jax.jit(gradient)(X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_first_non_finite_operation_is_the_cause() -> None:
    def function(x: Array) -> Array:
        y = in_layer("first", lambda v: v * 2, x)
        y = in_layer("second", lambda v: jnp.log(v - v), y)
        return in_layer("third", lambda v: (v @ v.T).sum(), y)

    found = cause_of(function, X).origin
    assert (found.primitive, found.scope) == ("log", "second")
    assert [operand.range.max for operand in found.operands] == [0.0]


@pytest.mark.slow
def test_first_of_several_causes_is_reported() -> None:
    def function(x: Array) -> Array:
        early = in_layer("early", lambda v: v / 0.0, x + 1)
        return in_layer("late", jnp.sqrt, x).sum() + early.sum()

    assert cause_of(function, X).origin.scope == "early"


@pytest.mark.medium
def test_masked_non_finite_values_are_not_a_cause() -> None:
    def function(x: Array) -> Array:
        masked = jnp.where(x > 0, in_layer("masked", jnp.log, x), 0.0)
        return in_layer("guilty", lambda v: v * 3e38 * 10, masked + 1).sum()

    assert cause_of(function, X).origin.scope == "guilty"


@pytest.mark.slow
def test_infinities_of_padding_and_masks_are_not_a_cause() -> None:
    """The infinities of a maximum and a softmax come before it, and are no cause."""

    def function(x: Array) -> Array:
        padded = in_layer("pool", lambda v: jnp.pad(v, 1, constant_values=-jnp.inf), x)
        masked = in_layer("mask", lambda v: jnp.where(jnp.tri(3, 4), v, -jnp.inf), x)
        non_finite = in_layer("guilty", lambda v: v * 3e38 * 10, x)
        return padded.sum() + masked.sum() + non_finite.sum()

    assert cause_of(function, X).origin.scope == "guilty"


def test_infinite_complex_padding_has_an_origin() -> None:
    def function(x: Array) -> Array:
        return jnp.pad(x, 1, constant_values=complex(-np.inf, 0))

    (value,), _ = interpreted(function, X.astype(np.complex64))
    assert value.origin is not None


@pytest.mark.slow
def test_softmax_of_a_fully_masked_row_is_the_cause() -> None:
    def function(x: Array) -> Array:
        masked = in_layer("mask", lambda v: jnp.where(jnp.arange(3)[:, None] > 0, v, -jnp.inf), x)
        return in_layer("softmax", jax.nn.softmax, masked).sum()

    found = cause_of(function, X).origin
    assert (found.primitive, found.scope) == ("sub", "softmax")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_constant_is_attributed_to_its_layer(value: float) -> None:
    def function(x: Array) -> Array:
        non_finite = in_layer("maker", lambda v: jnp.full_like(v, value), x)
        return in_layer("reader", lambda v: (v @ non_finite.T).sum(), x)

    assert cause_of(function, X).origin.scope == "maker"


def test_bitcast_of_a_non_finite_value_leads_to_its_cause() -> None:
    def function(x: Array) -> Array:
        non_finite = in_layer("guilty", lambda v: v / 0.0, x)
        bits = lax.bitcast_convert_type(non_finite, jnp.uint32).T
        return lax.bitcast_convert_type(bits, jnp.float32).sum()

    assert cause_of(function, X).origin.scope == "guilty"


@pytest.mark.medium
def test_cause_inside_a_loop_has_its_iteration() -> None:
    x = X.copy()
    x[1] = 0.0

    def function(x: Array) -> Array:
        return lax.scan(lambda total, row: (total + jnp.log(row[0] ** 2), None), 0.0, x)[0]

    found = cause_of(function, x).origin
    assert (found.primitive, found.iteration) == ("log", 1)


def test_cause_inside_a_while_loop_has_its_iteration() -> None:
    """The third iteration computes 1 / 0. A division by zero after a loop is in no iteration."""

    def divide(y: Array) -> Array:
        return 1 / (1 / y - 1)

    inside = cause_of(lambda x: lax.while_loop(jnp.isfinite, divide, x), np.float32(1 / 3))
    assert inside.origin.iteration == 2
    after = cause_of(
        lambda x: 1 / lax.while_loop(lambda y: y > 0, lambda y: y - 1, x), np.float32(3)
    )
    assert after.origin.iteration == 0


def test_cause_inside_checkpoint_is_its_operation() -> None:
    def function(x: Array) -> Array:
        return jax.checkpoint(lambda y: jnp.log(y - y).sum())(x)

    assert cause_of(function, X).origin.primitive == "log"


def test_most_extreme_value_is_recorded() -> None:
    _, interpreter = interpreted(
        lambda x: in_layer("near", lambda v: v * 1.5e38, x).sum() * 1e-3, X
    )
    assert (interpreter.extreme.source, interpreter.extreme.dtype) == ("mul in near", "float32")
    assert 0.8 < interpreter.extreme.share < 1


def test_non_finite_input_is_ordered_by_its_first_use() -> None:
    non_finite = Origin(-1, "", "", has_nan=True)
    closed = jax.make_jaxpr(lambda x, y: (jnp.exp(x * 1e30) + 1) * y)(1.0, 1.0)
    inputs = [ReplayValue(np.float32(1)), ReplayValue(np.float32(np.nan), origin=non_finite)]
    (value,) = Interpreter().evaluate(closed, inputs)
    assert value.origin is not None
    assert find_cause(value.origin).origin.primitive == "exp"
