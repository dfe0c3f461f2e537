"""A step in two halves computes what the step does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipeline.core.host.jaxpr import iterate_equations
from pipeline.engine.user_step import begin_step
from tests.slow_cases import mark_slow_except


def make_state(optimizer: optax.GradientTransformation) -> dict[str, Any]:
    params = {"kernel": jnp.full((3, 2), 0.5), "bias": jnp.zeros(2)}
    key = jax.random.key(7)
    return {"params": params, "optimizer": optimizer.init(params), "key": key, "mean": jnp.zeros(3)}


def make_step(optimizer: optax.GradientTransformation) -> Any:
    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean((batch["x"] @ params["kernel"] + params["bias"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
        key, draw = jax.random.split(state["key"])
        after = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": optimizer_state,
            "key": key,
            "mean": 0.9 * state["mean"] + batch["x"].mean(0) + jax.random.uniform(draw, (3,)),
        }
        return after, {"loss": loss, "norm": optax.tree.norm(gradients)}

    return step


def read_numbers(leaf: Any) -> Any:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam, clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
}


@pytest.mark.medium
@pytest.mark.parametrize("jitted", mark_slow_except([True], [False, True]))
@pytest.mark.parametrize("name", mark_slow_except([*OPTIMIZERS][:1], OPTIMIZERS))
def test_split_step_equals_the_step(name: str, jitted: bool) -> None:
    step = make_step(OPTIMIZERS[name])
    step = jax.jit(step) if jitted else step
    state = make_state(OPTIMIZERS[name])
    batch = {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}
    metrics, compute_state = begin_step(step, state, batch)
    expected, expected_metrics = step(state, batch)
    assert metrics.keys() == expected_metrics.keys()
    leaves = jax.tree.leaves((compute_state(state), metrics))
    for leaf, expected_leaf in zip(
        leaves, jax.tree.leaves((expected, expected_metrics)), strict=True
    ):
        np.testing.assert_allclose(read_numbers(leaf), read_numbers(expected_leaf), rtol=1e-6)


def test_update_is_computed_from_the_second_state() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state - 0.5 * batch, {"loss": jnp.sum(batch)}

    _, compute_state = begin_step(step, jnp.ones(2), jnp.ones(2))
    np.testing.assert_array_equal(compute_state(jnp.full(2, 3.0)), [2.5, 2.5])


def test_matmuls_are_outside_the_update_branch() -> None:
    """A branch would compute them without XLA's library."""

    def step(state: Any, batch: Any) -> Any:
        return state + 0.1 * (batch @ state), {"loss": jnp.sum(state)}

    def update(state: Any, batch: Any) -> Any:
        _, compute_state = begin_step(step, state, batch)
        return jax.lax.cond(True, compute_state, lambda same: same, state)

    traced = jax.make_jaxpr(update)(jnp.ones(2), jnp.ones((2, 2)))
    branches = {
        equation.primitive.name: [outer_equation.primitive.name for outer_equation in outer]
        for equation, outer in iterate_equations(traced.jaxpr)
    }
    assert branches["dot_general"] == []
    assert branches["add"] == ["cond"]
