"""Constants of traced functions: which differ, and the function that takes them as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from pipeline.study.population.traced_constants import read_bits, read_constants, with_arguments

X = np.arange(4, dtype=np.float32)
Function = Callable[[Array], Any]


def expression(number: float) -> Function:
    return lambda x: x * number + (1 - number) * x


def called(number: float) -> Function:
    return jax.jit(expression(number))


def in_a_loop(number: float) -> Function:
    return lambda x: lax.fori_loop(0, 3, lambda _, y: y * number + x, x)


def in_a_scan(number: float) -> Function:
    return lambda x: lax.scan(lambda y, _: (y * number, y.sum()), x, None, length=3)


def in_a_branch(number: float) -> Function:
    return lambda x: lax.cond(x[1] > 0, expression(number), lambda x: x, x)


def by_platform(number: float) -> Function:
    return lambda x: lax.platform_dependent(x, cpu=expression(number), default=jnp.sin)


def in_an_array(number: float) -> Function:
    return lambda x: x + np.array([number, 1, 2, 3], np.float32)


def in_half_precision(number: float) -> Function:
    return lambda x: x.astype(jnp.bfloat16) * number


def with_a_key(number: float) -> Function:
    key = jax.random.key(3)
    return lambda x: x * number + jax.random.uniform(key, x.shape)


USES = (with_a_key, expression, called, in_a_loop, in_a_scan, in_a_branch, by_platform, in_an_array)


def differing(first: Function, second: Function) -> list[int]:
    one, other = read_constants(jax.make_jaxpr(first)(X)), read_constants(jax.make_jaxpr(second)(X))
    assert one.structure == other.structure
    pairs = zip(one.values, other.values, strict=True)
    return [n for n, (a, b) in enumerate(pairs) if read_bits(a) != read_bits(b)]


@pytest.mark.parametrize("make", [*USES, in_half_precision])
def test_arguments_have_the_bits_of_constants(
    make: Callable[[float], Function],
) -> None:
    """The same bits as of the function that has the other number."""
    first, second = make(0.9), make(0.3)
    places = differing(first, second)
    assert places
    constants = read_constants(jax.make_jaxpr(second)(X)).values
    values = [constants[place] for place in places]
    shared = jax.jit(with_arguments(first, [[place] for place in places]))
    computed, expected = shared(X, *values), jax.jit(second)(X)
    assert jax.tree.structure(computed) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(computed), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_constant_expression_is_rounded_once() -> None:
    """So it is no expression of the rounded number."""
    traced = read_constants(jax.make_jaxpr(expression(0.9))(X))
    assert [value.dtype for value in traced.values] == [np.float32, np.float32]
    assert traced.values == [np.float32(0.9), np.float32(1 - 0.9)]
    assert np.float32(1 - 0.9) != np.float32(1) - np.float32(0.9)


def test_one_argument_replaces_several_constants() -> None:
    def make(number: float) -> Function:
        return lambda x: (x * number, x + number)

    places = differing(make(0.9), make(0.3))
    assert len(places) == 2
    product, total = with_arguments(make(0.9), [places])(X, np.float32(0.3))
    np.testing.assert_array_equal(np.asarray(product), X * np.float32(0.3))
    np.testing.assert_array_equal(np.asarray(total), X + np.float32(0.3))


def test_constants_are_equal_in_every_trace() -> None:
    for make in USES:
        assert differing(make(0.9), make(0.9)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda number: lambda x: x if number < 0.5 else x + 1,
        lambda number: lambda x: jnp.pad(x, int(10 * number)),
        lambda number: lambda x: jnp.sum(x, axis=int(number > 0.5) - 1, keepdims=number > 0.5),
        lambda number: jax.checkpoint(lambda x: x * number),
        lambda number: lambda x: x ** int(10 * number),
    ],
    ids=["branch", "shape", "parameter", "checkpoint", "power"],
)
def test_numbers_that_decide_equations_change_the_structure(
    make: Callable[[float], Function],
) -> None:
    one, other = (read_constants(jax.make_jaxpr(make(number))(X)) for number in (0.9, 0.3))
    assert one.structure != other.structure
