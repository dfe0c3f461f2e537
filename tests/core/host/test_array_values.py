"""M-11: custom code reads values outside of jit, and is refused in a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.errors import RecipeError
from pipeline.core.host.array_values import (
    allow_reads,
    convert_value_reads,
    explain_value_read,
    find_shapes,
    is_value_read,
    locate_custom_code,
)

READS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: float(x.mean()),
    "complex": lambda x: complex(x.mean()).real,
    "numpy": lambda x: np.asarray(x).mean(),
    "list": lambda x: sum(x.tolist()) / len(x),
    "format": lambda x: float(f"{x.mean():.6f}"),
    "item": lambda x: x.mean().item(),
    "comparison": lambda x: 2.0 if x.mean() > 1 else 0.0,
}
"""Reads of the mean of an array."""


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_differentiated_array_has_its_value(read: Callable[[Any], Any]) -> None:
    """No derivative follows a value that was read: mean x is a factor of x here."""
    seen = []

    def loss(x: Any) -> Any:
        seen.append(read(3 * x))
        return (seen[0] * x).sum()

    with allow_reads(is_eager=True):
        gradients = jax.grad(loss)(jnp.array([0.5, 1.0, 0.5]))
    assert seen == [pytest.approx(2.0)]
    np.testing.assert_allclose(gradients, [2.0, 2.0, 2.0])


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_traced_array_has_no_value(read: Callable[[Any], Any]) -> None:
    with allow_reads(is_eager=True), pytest.raises((RecipeError, TypeError)) as caught:
        jax.jit(read)(jnp.ones(3))
    assert is_value_read(caught.value)


def test_shapes_of_a_reading_function_are_found_by_running_it() -> None:
    """An argument that is a shape becomes zeros, any other keeps its values."""

    def choose(x: Any, scale: Any) -> Any:
        return jnp.ones((2, 3), jnp.int32) if float(x.sum()) + float(scale) == 4 else x

    arguments = jax.ShapeDtypeStruct((5,), np.float32), np.float32(4)
    with allow_reads(is_eager=True):
        assert find_shapes(choose, *arguments) == jax.ShapeDtypeStruct((2, 3), np.int32)
        shapes = find_shapes(choose, x=arguments[0], scale=np.float32(1))
        assert (shapes.shape, shapes.dtype) == ((5,), np.float32)
    with allow_reads(is_eager=False), pytest.raises(TypeError) as caught:
        find_shapes(choose, *arguments)
    assert is_value_read(caught.value)


def test_wrapped_read_is_found() -> None:
    """An error that is raised in `except` needn't name its cause."""

    def read(x: Any) -> Any:
        try:
            return jnp.full(2, float(x))
        except TypeError:
            raise RuntimeError("no number")  # noqa: B904

    with allow_reads(is_eager=True):
        assert find_shapes(read, jnp.ones(())).shape == (2,)
    with pytest.raises(RecipeError, match="reads the value"), convert_value_reads():
        jax.jit(read)(1.0)


def test_other_errors_of_a_function_stay() -> None:
    def fail(x: Any) -> Any:
        raise ValueError("no shapes")

    with allow_reads(is_eager=True), pytest.raises(ValueError, match="no shapes"):
        find_shapes(fail, jnp.ones(3))


def test_read_is_explained_by_its_line() -> None:
    def read(x: Any) -> Any:
        return x if float(x) > 0 else -x

    with pytest.raises(RecipeError) as caught, convert_value_reads():
        jax.jit(read)(1.0)
    (problem,) = caught.value.problems
    assert problem.startswith("test_array_values.py, line ")
    assert "`return x if float(x) > 0 else -x` reads the value of an array" in problem
    assert problem.endswith("or train on cpu or gpu with train.mode=eager")


def test_read_in_a_boolean_index_is_explained() -> None:
    with pytest.raises(IndexError) as caught:
        jax.jit(lambda x: x[x > 0])(jnp.ones(3))
    assert "reads the value of an array" in explain_value_read(caught.value)


def test_wrapped_read_is_recognised() -> None:
    with pytest.raises(TypeError) as caught:
        jax.jit(float)(1.0)
    wrapper = ValueError("in a layer")
    wrapper.__cause__ = caught.value
    assert is_value_read(wrapper)
    assert not is_value_read(ValueError("in a layer"))
    with pytest.raises(KeyError), convert_value_reads():
        {}["a"]


@pytest.mark.parametrize("folder", ["lib", "src"])
def test_custom_code_may_be_in_any_folder(folder: str, tmp_path: Path) -> None:
    file = tmp_path / folder / "net.py"
    file.parent.mkdir()
    file.write_text("def fail():\n    raise ValueError('here')\n")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    with pytest.raises(ValueError, match="here") as caught:
        space["fail"]()
    assert locate_custom_code(caught.value) == "net.py, line 2"


def test_error_of_the_package_has_no_custom_line() -> None:
    assert locate_custom_code(ValueError("never raised")) == ""
