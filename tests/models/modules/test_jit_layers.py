"""Single layers that are compiled in eager mode, while Python in the others runs (M-11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pipeline.models.layers.path_patterns import LayerPath
from pipeline.models.modules.jit_layers import _make_key, compile_layers, record_module_paths

calls: Counter[str] = Counter()
"""How often Python ran through the layers."""


class Own(nn.Module):
    """A layer of the user's own, with Python in it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        calls["own"] += 1
        return nn.Dense(8)(x)


class Block(nn.Module):
    """Two layers, statistics, and a module that its parent holds."""

    shared: nn.Module
    init: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        calls[self.name or ""] += 1
        x = nn.Dense(16, kernel_init=self.init, name="inner")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return self.shared(nn.relu(x))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = Own(name="own")(x)
        scale = float(np.sqrt(2))
        x = Block(nn.Dense(8), nn.initializers.normal(scale), name="block_0")(x, train=train)
        x = Block(nn.Dense(4), partial(nn.initializers.ones), name="block_1")(x, train=train)
        return nn.Dense(3, kernel_init=nn.initializers.normal(scale), name="out")(x)


X = jax.random.normal(jax.random.key(1), (5, 8))


def gradients(patterns: tuple[str, ...], steps: int) -> Any:
    """Gradients and batch statistics of a step that is not compiled, after so many."""
    net = Net()
    variables = net.init(jax.random.key(0), X, train=False)
    calls.clear()

    def loss(params: Any, stats: Any, x: jax.Array) -> Any:
        given = {"params": params, "batch_stats": stats}
        y, changed = net.apply(given, x, train=True, mutable=["batch_stats"])
        return jnp.sum(y**2), changed["batch_stats"]

    stats = variables["batch_stats"]
    for number in range(steps):
        with nn.intercept_methods(compile_layers(patterns)):
            found, stats = jax.grad(loss, has_aux=True)(variables["params"], stats, X + number)
    return found, stats


@pytest.mark.slow
def test_python_runs_at_every_step_except_in_compiled_layers() -> None:
    expected = gradients((), 3)
    assert calls == {"own": 3, "block_0": 3, "block_1": 3}
    found = gradients(("block_*", "out"), 3)
    assert calls == {"own": 3, "block_0": 1, "block_1": 1}
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, expected)


@pytest.mark.slow
def test_layer_recreated_at_every_step_is_compiled_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its initialisers are new functions each time."""
    gradients(("block_*", "out"), 2)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        gradients(("block_*", "out"), 1)
    compiled = [record.getMessage() for record in caplog.records]
    assert [text for text in compiled if "compilation of jit(call)" in text] == []


@pytest.mark.slow
def test_layers_nested_in_a_compiled_layer_match_eager_results() -> None:
    expected = gradients((), 2)
    found = gradients(("*",), 2)
    # Layers that an earlier test has compiled aren't called.
    assert max(calls.values(), default=0) <= 1
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


class Masked(nn.Module):
    """A layer with an array for a field, as attention has the mask of its tokens."""

    mask: jax.Array

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        calls["masked"] += 1
        return x * self.mask


class NetWithMask(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2, name="out")(Masked(x > 0, name="masked")(x))


@pytest.mark.medium
def test_layer_with_array_fields_is_not_compiled() -> None:
    net, paths = NetWithMask(), dict[LayerPath, None]()
    with record_module_paths(paths):
        variables = jax.eval_shape(net.init, jax.random.key(0), X)
    assert list(paths) == [("out",)]
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), variables)
    expected = [net.apply(params, X + number) for number in range(2)]
    calls.clear()
    with nn.intercept_methods(compile_layers(("*",))):
        found = [net.apply(params, X + number) for number in range(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert calls["masked"] == 2


class Chosen(nn.Module):
    """A layer whose result depends on the type of an argument, or on its sign."""

    @nn.compact
    def __call__(self, x: jax.Array, choice: Any) -> jax.Array:
        calls["chosen"] += 1
        number = sum(choice) if isinstance(choice, set) else np.copysign(1, choice)
        return x * number * {bool: 2, int: 3, float: 5, set: 7}[type(choice)]


class NetWithChoice(nn.Module):
    choice: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Chosen(name="chosen")(x, self.choice)


def test_arguments_of_other_types_have_other_programs() -> None:
    """True, 1 and 1.0 are equal for a dict, and 0.0 is -0.0. A set has no hash."""
    calls.clear()
    for _ in range(2):
        with nn.intercept_methods(compile_layers(("*",))):
            found = [
                float(NetWithChoice(choice).apply({}, jnp.ones(())))
                for choice in (1, True, 1.0, 0.0, -0.0, {1, 2})
            ]
        assert found == [3, 2, 5, 5, -5, 21]
    assert calls["chosen"] == 5 + 2


def test_functions_with_other_bound_values_have_other_keys() -> None:
    def pair(a: object, b: object = 0) -> object:
        return a, b

    values = [
        partial(pair, 1),
        partial(pair, True),
        partial(pair, ("b", 1)),
        partial(pair, b=1),
        jax.tree_util.Partial(pair, 1),
    ]
    assert len({_make_key(value, 0) for value in values}) == len(values)
    assert _make_key(partial(pair, b=1.0), 0) == _make_key(partial(pair, b=1.0), 0)
    functions = []
    for number in (1, 2):
        names: dict[str, Any] = {"number": number}
        exec(compile("def draw(): return number", "", "exec"), names)
        functions.append(names["draw"])
    assert _make_key(functions[0], 0) != _make_key(functions[1], 0)


class Outer(nn.Module):
    """A layer that holds another."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        calls["outer"] += 1
        return self.inner(x)


class NetWithHeld(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner = [nn.Dense(2, kernel_init=nn.initializers.normal(0.1)), lambda x: x * 2]
        return Outer(nn.Sequential(inner), name="outer")(x)


class NetWithHeldMask(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Outer(Outer(Masked(x > 0)), name="outer")(x)


def test_functions_and_arrays_of_inner_modules_are_found() -> None:
    """A layer with a new function in a module that it holds is compiled once; one with an array
    there isn't."""
    with nn.intercept_methods(compile_layers(("outer",))):
        variables = NetWithHeld().init(jax.random.key(0), X)
        calls.clear()
        for _ in range(3):
            NetWithHeld().apply(variables, X)
        assert calls["outer"] == 1
        found = [NetWithHeldMask().apply({}, x) for x in (X, -X)]
    np.testing.assert_array_equal(found, [X * (X > 0), -X * (X < 0)])


@dataclass(frozen=True)
class Scale:
    """Arguments of a layer with an array that isn't a field, as a cached property sets it."""

    name: str = "scale"


class Scaled(nn.Module):
    scale: Scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale.__dict__["factor"]


class NetWithScale(nn.Module):
    scale: Scale

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Scaled(self.scale, name="scaled")(x)


def test_arrays_beside_the_fields_of_a_dataclass_are_no_constants() -> None:
    results = []
    with nn.intercept_methods(compile_layers(("scaled",))):
        for factor in (2.0, 5.0):
            scale = Scale()
            object.__setattr__(scale, "factor", np.full(1, factor, np.float32))
            results.append(NetWithScale(scale).apply({}, np.ones(1, np.float32)))
    np.testing.assert_array_equal(results, [[2], [5]])


class Calling(nn.Module):
    def __call__(self, x: jax.Array, function: Any) -> jax.Array:
        return x * 2


class NetWithUnsetCell(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        later: int
        result: jax.Array = Calling(name="calling")(x, lambda: later)
        later = 1
        return result + later


def test_function_of_a_variable_that_is_not_set_yet_may_be_an_argument() -> None:
    with nn.intercept_methods(compile_layers(("calling",))):
        assert NetWithUnsetCell().apply({}, np.ones(1, np.float32)) == 3


class Pair(NamedTuple):
    first: Any
    second: Any


def test_named_tuples_of_new_functions_have_one_key() -> None:
    def bind(values: Any) -> Any:
        return lambda: values

    keys = [_make_key(bind(Pair(bind(1), bind(number))), 0) for number in (2, 2, 3)]
    assert keys[0] == keys[1] != keys[2]
