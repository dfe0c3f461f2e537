"""Initialisation piece by piece against one program for all, which it must equal bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array
from jax.nn import initializers

from pipeline.backends import initialisation
from pipeline.backends.find_draws import Draw, Fill, find_draws
from pipeline.backends.initialisation import (
    UNOPTIMIZED,
    compile_initialisation,
    draw_bits,
    fold_key_words,
    initialise_state,
)
from pipeline.training.parallel.state_sharing import DevicePlacement
from tests.compiling import optimized

SEED = np.array([7, 11], np.uint32)
FAN_IN = partial(initializers.variance_scaling, mode="fan_in")


def _compile(function: Any, args: Any, options: Any) -> Any:
    return jax.jit(function).lower(*args).compile(compiler_options=options)


def _state(seed: Array) -> Any:
    """Arrays of every initialiser, of several shapes, and others."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), 0)

    def own(number: int) -> Array:
        return jax.random.fold_in(key, number)

    drawn = {
        "truncated": initializers.truncated_normal(0.02)(own(1), (300, 40), jnp.float32),
        "normal": initializers.normal(0.5)(own(2), (3, 3, 5, 7), jnp.float32),
        "shifted": initializers.normal(0.5)(own(2), (100,), jnp.float32) + 0.3,
        "uniform": jax.random.uniform(own(3), (2000,), jnp.float32, -0.07, 0.07),
        "he": FAN_IN(2.0, distribution="uniform")(own(4), (40, 1030), jnp.float32),
        "xavier": FAN_IN(1.0, distribution="normal")(own(5), (40, 30), jnp.float32),
        "one": initializers.normal(0.5)(own(9), (), jnp.float32),
    }
    return {
        **drawn,
        "copy": jnp.copy(drawn["normal"]),
        "zeros": jnp.zeros((4, 5)),
        "ones": jnp.ones(7),
        "minus": jnp.full(3, -0.0),
        "step": jnp.zeros((), jnp.int32),
        "orthogonal": initializers.orthogonal()(own(6), (8, 8), jnp.float32),
        "split": jax.random.normal(jax.random.split(own(7))[1], (5,)),
        "half": jax.random.normal(own(8), (5,), jnp.bfloat16),
    }


@pytest.fixture(scope="module")
def whole() -> Any:
    """The state as one program draws it."""
    return _compile(_state, (SEED,), UNOPTIMIZED)(SEED)


@pytest.mark.medium
def test_state_of_a_run_can_be_initialised_alone(whole: Any) -> None:
    """An optimised program of the whole initialisation has other last bits."""
    placement = DevicePlacement((jax.devices()[0],))
    with optimized():
        state: Any = initialise_state(_state, SEED, placement)
        fused = jax.jit(_state)(SEED)
    assert {name: np.asarray(array).tobytes() for name, array in state.items()} == {
        name: np.asarray(array).tobytes() for name, array in whole.items()
    }
    assert any(np.any(np.asarray(fused[name]) != np.asarray(whole[name])) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("worth", [0, 2**40])
def test_initialisation_in_pieces_is_bit_equal_to_one_program(
    worth: int, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without tables."""
    monkeypatch.setattr(initialisation, "TABLE_WORTH_VALUES", worth)
    monkeypatch.setattr(initialisation, "PORTION_VALUES", 10_000)
    placement = DevicePlacement((jax.devices()[0],))
    rest: list[int] = []

    def on_devices(function: Any) -> Any:
        compiled = _compile(function, (SEED,), UNOPTIMIZED)
        rest.append(len(compiled(SEED)))
        return compiled

    pieces = compile_initialisation(_state, SEED, placement, _compile, on_devices)(SEED)
    assert rest == [3]
    for name, array in whole.items():
        assert pieces[name].dtype == array.dtype, name
        assert pieces[name].shape == array.shape, name
        assert np.asarray(pieces[name]).tobytes() == np.asarray(array).tobytes(), name


def test_arrays_of_a_distribution_share_a_formula() -> None:
    found = dict(
        zip(
            sorted(jax.eval_shape(_state, SEED)),
            find_draws(jax.make_jaxpr(_state)(SEED)),
            strict=True,
        )
    )
    draws = {name: one for name, one in found.items() if isinstance(one, Draw)}
    assert set(draws) == {
        "copy",
        "he",
        "normal",
        "one",
        "shifted",
        "truncated",
        "uniform",
        "xavier",
    }
    assert draws["normal"].formula == draws["xavier"].formula != draws["truncated"].formula
    assert draws["copy"] == draws["normal"]
    assert (draws["normal"].folds, draws["he"].size) == ((0, 2), 40 * 1030)
    assert {name for name, one in found.items() if isinstance(one, Fill)} == {
        *("zeros", "ones", "minus", "step")
    }


@pytest.mark.medium
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=4))
def test_keys_and_bits_match_jax(seed: int, folds: list[int]) -> None:
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    for number in folds:
        key = jax.random.fold_in(key, np.uint32(number))
    own = fold_key_words(words, folds)
    assert own.tolist() == np.asarray(jax.random.key_data(key)).tolist()
    rows = draw_bits(np.stack([own, own]), np.array([0, 1024], np.uint32))
    assert np.asarray(rows).ravel().tolist() == jax.random.bits(key, (2048,)).tolist()
