"""Steps as users write them: which leaves are trained, what can't be traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array, lax

from pipeline.backends.ascend.pricing.traced_step import trace_step
from pipeline.core.errors import RunError
from tests.backends.ascend.steps import ROWS, WIDTH, macs, of

PRODUCTS = 2 * ROWS * WIDTH * WIDTH


def descend(weight: Array, batch: Array) -> tuple[Array, Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weight)
    return weight - 0.1 * gradient, loss


class Pair(NamedTuple):
    weight: Any
    count: Any


@flax.struct.dataclass
class Frozen:
    weight: Any
    settings: Any = flax.struct.field(pytree_node=False)


def of_pair(state: Any, batch: Any) -> Any:
    weight, metrics = descend(state.weight, batch)
    return Pair(weight, state.count + 1), {"loss": metrics}


def of_frozen(state: Any, batch: Any) -> Any:
    weight, loss = descend(state.weight, batch)
    return state.replace(weight=weight), loss


def of_dict(state: Any, batch: Any) -> Any:
    weight, loss = descend(state["w"], batch["x"])
    return {"w": weight}, loss


def with_argument(ignored: int, state: Any, batch: Any) -> Any:
    return descend(state, batch)


class Unhashable(dict[str, Any]):
    def __call__(self, state: Any, batch: Any) -> Any:
        return descend(state, batch)


W, X = of(WIDTH, WIDTH), of(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("step", "state", "batch"),
    [
        (descend, W, X),
        (jax.jit(descend), W, X),
        (jax.jit(descend, donate_argnums=0), W, X),
        (functools.partial(with_argument, 3), W, X),
        (Unhashable(), W, X),
        (descend, np.zeros((WIDTH, WIDTH), np.float32), np.zeros((ROWS, WIDTH), np.float32)),
        (of_pair, Pair(W, 0), X),
        (of_frozen, Frozen(W, {"not": "hashable"}), X),
        (of_dict, {"w": W}, {"x": X}),
    ],
    ids=["plain", "jit", "donated", "partial", "unhashable", "numpy", "tuple", "dataclass", "dict"],
)
def test_step_of_any_kind_is_traced(step: Callable[..., Any], state: Any, batch: Any) -> None:
    traced = trace_step(step, state, batch, None)
    graph = traced.tasks("O2")
    assert macs(graph) == PRODUCTS
    assert len(graph.parameters) == len(graph.gradients) == 1
    assert traced.batch_bytes == 4 * ROWS * WIDTH
    assert traced.batch_size == ROWS


def test_running_statistics_and_loss_scales_are_not_trained() -> None:
    def step(state: Any, batch: Array) -> Any:
        def loss(weight: Array) -> tuple[Array, Array]:
            mean = jnp.mean(batch, 0)
            out = (batch - 0.9 * state["mean"] - 0.1 * mean) @ weight
            return state["scale"] * jnp.mean(out**2), mean

        (value, mean), gradient = jax.value_and_grad(loss, has_aux=True)(state["w"])
        finite = jnp.isfinite(gradient).all()
        return {
            "w": jnp.where(finite, state["w"] - gradient / state["scale"], state["w"]),
            "mean": 0.9 * state["mean"] + 0.1 * mean,
            "scale": jnp.where(finite, state["scale"] * 2, state["scale"] / 2),
        }, value

    traced = trace_step(step, {"w": W, "mean": of(WIDTH), "scale": of()}, X, None)
    assert list(traced.signature.parameters.values()) == ["w"]
    assert sorted(traced.signature.state.values()) == ["mean", "scale"]


def test_averages_of_parameters_are_not_trained() -> None:
    def step(state: Any, batch: Array) -> Any:
        weight, loss = descend(state[0], batch)
        return (weight, 0.99 * state[1] + 0.01 * weight), loss

    traced = trace_step(step, (W, W), X, None)
    assert list(traced.signature.parameters.values()) == ["0"]
    assert len(traced.tasks("O2").gradients) == 1


def test_inference_step_has_no_parameters() -> None:
    traced = trace_step(lambda state, batch: (state, batch @ state), W, X, None)
    graph = traced.tasks("O2")
    assert (graph.parameters, graph.gradients) == ((), ())
    assert {task.phase for task in graph.tasks} == {"data", "forward"}


@pytest.mark.parametrize(
    "key", [jax.eval_shape(lambda: jax.random.key(0)), of(2, dtype=jnp.uint32)]
)
def test_random_keys_of_both_styles_are_accepted_in_state(key: Any) -> None:
    def step(state: Any, batch: Array) -> Any:
        key, mine = jax.random.split(state["key"])
        noise = jax.random.normal(mine, batch.shape)
        weight, loss = descend(state["w"], batch + noise)
        return {"w": weight, "key": key}, loss

    traced = trace_step(step, {"w": W, "key": key}, X, None)
    assert list(traced.signature.parameters.values()) == ["w"]
    assert macs(traced.tasks("O2")) == PRODUCTS


def test_empty_arrays_and_empty_batch_are_traced() -> None:
    state = {"empty": of(0, 4), "scalar": of()}
    traced = trace_step(lambda s, b: (jax.tree.map(lambda x: x + 1, s), None), state, {}, None)
    graph = traced.tasks("O2")
    assert (traced.batch_bytes, traced.batch_size) == (0, 1)
    assert all(task.phase != "data" for task in graph.tasks)


@pytest.mark.medium
def test_flax_network_with_batch_norm_and_optax_is_traced() -> None:
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = nn.Conv(16, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            return nn.Dense(10)(nn.avg_pool(x, (8, 8)).reshape(x.shape[0], -1))

    network, optimizer = Network(), optax.adam(1e-3)
    images = of(4, 16, 16, 3)
    variables = jax.eval_shape(network.init, jax.random.key(0), images)
    moments = jax.eval_shape(optimizer.init, variables["params"])

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            given = {"params": params, "batch_stats": state["stats"]}
            logits, new = network.apply(given, batch[0], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return losses.mean(), new["batch_stats"]

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "moments": moments}, value

    state = {"params": variables["params"], "stats": variables["batch_stats"], "moments": moments}
    traced = trace_step(step, state, (images, of(4, dtype=jnp.int32)), None)
    graph = traced.tasks("O2")
    assert len(graph.parameters) == len(graph.gradients) == 5
    assert macs(graph) == 2 * 4 * 256 * 27 * 16 + 3 * 4 * 16 * 10
    assert sum(graph.primitives.values()) == traced.graph.equations


def test_explicit_all_reduces_are_collectives() -> None:
    def inner(weight: Array, batch: Array) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weight)
        return weight - lax.pmean(gradient, "devices"), loss

    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    step = jax.shard_map(
        inner, mesh=mesh, in_specs=(spec(), spec("devices")), out_specs=(spec(), spec()),
        check_vma=False,
    )  # fmt: skip
    graph = trace_step(step, W, X, None).tasks("O2")
    assert [task.engine for task in graph.tasks].count("hccl") == 1
    assert macs(graph) == PRODUCTS


def test_step_must_return_a_pair() -> None:
    with pytest.raises(RunError, match=r"must return \(state, result\)"):
        trace_step(lambda state, batch: state, W, X, None)


def test_state_leaves_must_be_arrays() -> None:
    with pytest.raises(RunError, match=r"'adam'.*must be arrays"):
        trace_step(descend, {"w": W, "name": "adam"}, X, None)


def test_parameters_must_select_leaves() -> None:
    with pytest.raises(RunError, match="picks no leaf"):
        trace_step(descend, W, X, lambda state: [])
