"""Parts of a step: each operation that is needed is in one of them, equal ones are one part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from pipeline.inspect.forecast.step_parts import StepPart, flatten, parts_of

X, W = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)


def split_program(function: Callable[..., Any], *args: Any) -> Counter[StepPart]:
    return parts_of(jax.make_jaxpr(function)(*args), "cpu")


def operations(parts: Counter[StepPart]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part, count in parts.items():
        for equation in part.equations:
            total[equation.primitive.name] += count
    return total


def layers(x: Array, w: Array, depth: int) -> Array:
    for _ in range(depth):
        x = jnp.tanh(x @ w) + 1
    return x


def test_equal_layers_are_one_part() -> None:
    parts = split_program(lambda x, w: layers(x, w, 4), X, W)
    assert Counter({part.kind: count for part, count in parts.items()})["product"] == 4
    assert sorted(parts.values()) == [4, 4]


@given(depth=st.integers(1, 5))
def test_needed_operations_are_each_in_one_part(depth: int) -> None:
    function = jax.grad(lambda w, x: layers(x, w, depth).sum())
    traced = jax.make_jaxpr(function)(W, X)
    needed = _needed(traced)
    assert operations(parts_of(traced, "cpu")) == needed
    assert needed["dot_general"] == depth + 2 * (depth - 1) + 1


def _needed(traced: Any) -> Counter[str]:
    """Count the operations that results depend on, from the last one back."""
    flat = flatten(traced, "cpu")
    wanted, counted = set(map(id, flat.results)), Counter[str]()
    for equation in reversed(flat.equations):
        if wanted & set(map(id, equation.outvars)):
            wanted |= set(map(id, equation.invars))
            counted[equation.primitive.name] += 1
    return counted


def test_unused_operations_are_in_no_part() -> None:
    def step(x: Array) -> Array:
        jnp.exp(x)
        return jnp.sin(x)

    assert operations(split_program(step, X)) == Counter(sin=1)


def test_operations_join_the_part_of_their_consumer() -> None:
    def step(x: Array, w: Array) -> Array:
        mask = x > 0
        return jnp.where(mask, (x @ w) @ w, x)

    (part,) = (part for part in split_program(step, X, W) if part.kind == "rest")
    names = {equation.primitive.name for equation in part.equations}
    assert names == {"gt", "select_n"}


def test_loop_counts_as_its_body_times_its_iterations() -> None:
    def step(x: Array, w: Array) -> Array:
        return lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=7)[0]

    assert operations(split_program(step, X, W)) == Counter(dot_general=7, sin=7)


def test_scalars_do_not_connect_parts() -> None:
    def update(x: Array, w: Array, rate: Array) -> tuple[Array, Array]:
        rate = rate * 2
        return x - rate * x, w - rate * w

    parts = split_program(update, X, np.ones((4, 4), np.float32), np.float32(1))
    assert sorted(len(part.equations) for part in parts) == [1, 2, 2]


@pytest.mark.medium
def test_part_computes_the_same_as_the_program() -> None:
    function = jax.grad(lambda w, x: jnp.log(jnp.cosh(x * w)).sum())
    w, x = np.full((1, 8), 0.7, np.float32), np.full((4, 8), 0.3, np.float32)
    (part,) = split_program(function, w, x)
    inputs = [w if v.aval.shape == w.shape else x for v in part.program.jaxpr.invars]
    (found,) = jaxpr_as_fun(part.program)(*inputs)
    np.testing.assert_allclose(found, function(w, x), rtol=1e-6)


def test_conversions_of_a_bfloat16_product_are_in_the_parts_around_it() -> None:
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    parts = split_program(lambda x, w: jnp.tanh(x) @ w + 1, x, w)
    names = {part.kind: set[str]() for part in parts}
    for part in parts:
        names[part.kind] |= {equation.primitive.name for equation in part.equations}
    assert names == {"product": {"dot_general"}, "rest": {"tanh", "convert_element_type", "add"}}
