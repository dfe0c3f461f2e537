"""Numbers that the runs of a population differ in: expressions, arguments, decisions."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.study.population.varied_number import CompiledInError, ProgramArguments, VariedNumber

MEMBERS = ({"b": 0.9, "c": 2.0}, {"b": 0.99, "c": 3.0})


def varied(key: str = "b", members: tuple[dict[str, float], ...] = MEMBERS) -> VariedNumber:
    return VariedNumber.of_key(key, members, ProgramArguments())


NUMBERS = st.floats(0.01, 100)
OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)


@given(
    st.sampled_from(OPERATORS),
    st.sampled_from(OPERATORS),
    NUMBERS,
    st.floats(0.1, 2),
    st.booleans(),
)
def test_an_expression_is_computed_in_doubles_and_rounded_once(
    first: Any, second: Any, value: float, other: float, swapped: bool
) -> None:
    """As the constant is that a Python number gives, whatever is done to it before."""

    def expression(number: Any) -> Any:
        inner = first(other, number) if swapped else first(number, other)
        return abs_free(second, inner, other)

    def abs_free(apply: Any, left: Any, right: float) -> Any:
        return apply(left * left, right)

    number = varied("b", ({"b": value}, {"b": value + 1}))
    combined = expression(number)
    combined.__jax_array__()
    assert number.arguments.values({"b": value}) == [expression(value)]


def test_it_stands_for_a_column_of_the_row_where_it_meets_an_array() -> None:
    number = varied()
    arguments = number.arguments
    x = jnp.arange(3, dtype=jnp.float32)

    def step(row: jax.Array | None) -> jax.Array:
        arguments.row = row
        result: jax.Array = number * x + (1 - number) * x**2 + x / number
        return result

    step(None)
    assert list(arguments.expressions) == ["b", "sub(1, b)"]
    for members in MEMBERS:
        b = members["b"]
        row = jnp.array(arguments.values(members), jnp.float32)
        with jax.disable_jit():
            found, expected = step(row), b * x + (1 - b) * x**2 + x / b
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_a_compiled_function_takes_it_as_an_argument() -> None:
    number = varied()
    number.arguments.row = jnp.array([0.5], jnp.float32)
    number.arguments.expressions["b"] = operator.itemgetter("b")
    assert float(jax.jit(lambda value: 1 - value)(number)) == 0.5


def test_what_all_runs_decide_alike_is_decided_and_held_against_others() -> None:
    number = varied()
    assert number > 0.5
    assert bool(number)
    assert number.arguments.serve({"b": 0.7})
    assert not number.arguments.serve({"b": 0.4})


@pytest.mark.parametrize(
    "use",
    [lambda b: b < 0.95, float, int, lambda b: range(b)],
    ids=["branch", "float", "int", "range"],
)
def test_a_number_that_decides_what_is_compiled_is_named(use: Any) -> None:
    with pytest.raises(CompiledInError, match=r"^b: decides what is compiled") as error:
        use(varied())
    assert error.value.keys == ("b",)
    with pytest.raises(CompiledInError) as error:
        use(varied() * VariedNumber.of_key("c", MEMBERS, ProgramArguments()) / 2)
    assert error.value.keys == ("b", "c")
