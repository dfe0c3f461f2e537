"""Programs without the calls and branches around their equations compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Literal, Var

from pipeline.inspect.forecast.step_parts import FlatProgram, bytes_of, flatten, values_of

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def flat(function: Callable[..., Any], *args: Any, platform: str = "cpu") -> FlatProgram:
    return flatten(jax.make_jaxpr(function)(*args), platform)


def names(program: FlatProgram) -> list[str]:
    return [equation.primitive.name for equation in program.equations]


def evaluate(program: FlatProgram, *args: Any) -> list[Any]:
    """Compute a flat program whose inputs are read in the order of the arguments."""
    made = {v for equation in program.equations for v in equation.outvars}
    read = dict.fromkeys(
        a for e in program.equations for a in e.invars if isinstance(a, Var) and a not in made
    )
    inputs = [v for v in read if v not in program.constants]
    known: dict[Var, Any] = dict(zip(inputs, args, strict=True)) | dict(program.constants)
    for equation in program.equations:
        operands = [a.val if isinstance(a, Literal) else known[a] for a in equation.invars]
        results = equation.primitive.bind(*operands, **equation.params)
        results = results if equation.primitive.multiple_results else [results]
        known |= dict(zip(equation.outvars, results, strict=True))
    return [a.val if isinstance(a, Literal) else known[a] for a in program.results]


def test_constant_factor_of_a_bfloat16_product_is_widened() -> None:
    def scale(x: Array) -> Array:
        return lax.dot_general(jnp.bfloat16(0.5), x, (((), ()), ((), ())))

    x = X.astype(jnp.bfloat16)
    np.testing.assert_array_equal(evaluate(flat(scale, x), x)[0], scale(x))


def test_token_has_no_dtype_to_widen() -> None:
    assert "create_token" in names(flat(lambda x: (lax.create_token(x), x + 1), X))


@pytest.mark.medium
def test_calls_are_inlined() -> None:
    @jax.jit
    def inner(x: Array) -> Array:
        return jax.checkpoint(jnp.sin)(x) + 1

    def loss(x: Array) -> Array:
        return (jax.nn.relu(inner(x)) * inner(2 * x)).sum()

    program = flat(jax.grad(loss), X)
    assert not {"jit", "pjit", "checkpoint", "remat2", "custom_jvp_call"} & set(names(program))
    np.testing.assert_allclose(evaluate(program, X)[0], jax.grad(loss)(X), rtol=1e-6)


def test_constant_values_remain_constants() -> None:
    table = jnp.arange(4.0)
    program = flat(lambda x: x * table, X)
    (value,) = program.constants.values()
    assert value is table
    np.testing.assert_allclose(evaluate(program, X)[0], X * table)


def test_most_expensive_branch_is_taken() -> None:
    def choose(x: Array, which: Array) -> Array:
        return lax.cond(which, lambda x: jnp.exp(jnp.sin(x)), lambda x: x, x)

    assert {"exp", "sin"} <= set(names(flat(choose, X, True)))


def test_platform_branch_is_selected() -> None:
    def choose(x: Array) -> Array:
        return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    assert "sin" in names(flat(choose, X))
    assert "cos" not in names(flat(choose, X))
    assert "cos" in names(flat(choose, X, platform="cuda"))


def test_call_without_inlining_is_a_separate_function() -> None:
    def step(x: Array) -> Array:
        with set_xla_metadata(inlineable="false"):
            apart = jax.jit(jnp.sin)(x)
        return jnp.cos(apart) + 1

    program = flat(step, X)
    functions = dict(zip(names(program), program.functions, strict=True))
    assert functions["sin"] == 1
    assert functions["cos"] == functions["add"] == 0


@pytest.mark.medium
def test_bfloat16_product_on_a_cpu_is_a_float32_product_between_conversions() -> None:
    x = X.astype(jnp.bfloat16)

    def gram(x: Array) -> Array:
        return jnp.sin(x) @ x.T

    program = flat(gram, x)
    assert names(program) == [
        *("sin", "transpose", "convert_element_type", "convert_element_type"),
        *("dot_general", "convert_element_type"),
    ]
    (product,) = (e for e in program.equations if e.primitive.name == "dot_general")
    assert {v.aval.dtype for v in (*product.invars, *product.outvars)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(evaluate(program, x)[0], gram(x))
    assert names(flat(gram, x, platform="cuda")) == ["sin", "transpose", "dot_general"]


def test_products_of_one_bfloat16_array_share_its_conversion() -> None:
    x, w = X.astype(jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16)
    program = flat(lambda x, w: (x @ w) @ w, x, w)
    assert names(program).count("convert_element_type") == 2 + 1 + 2
    assert names(flat(lambda x, w: (x @ w) @ w, X, w)).count("dot_general") == 2


def test_sizes_count_values_and_bytes() -> None:
    array, key = (Var(jax.typeof(value)) for value in (X, jax.random.key(0)))
    assert (values_of(array), bytes_of(array)) == (12, 48)
    assert (values_of(array, key), bytes_of(key)) == (13, 8)
