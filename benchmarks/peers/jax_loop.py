"""JAX as a competent user writes it: a flax network, optax, one jitted step a dispatch.

Timed is, per step: the dispatch of a compiled update (donated state) on a batch that is on the
device as normalised float32. Dispatches are asynchronous; the round ends when the last is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import unflatten_dict

from benchmarks.contestant import Result
from benchmarks.tasks import Task, get_window, load_batches, load_weights, name_layers
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec

Array = jax.Array


class JaxTraining:
    """A training loop over a jitted step."""

    def __init__(self, task: Task) -> None:
        batches = load_batches(task)
        momentum = task.momentum
        self._batches = [
            jax.device_put(batch) for batch in zip(batches.images, batches.labels, strict=True)
        ]
        network = _Stack(task.layers, "bfloat16" if task.precision == "bf16" else "float32")
        shapes = jax.eval_shape(network.init, jax.random.key(0), batches.images[0])
        params = unflatten_dict(load_weights(task), sep="/")
        sgd = optax.sgd(momentum.lr, momentum.momentum, nesterov=momentum.nesterov)
        optimizer = optax.chain(optax.add_decayed_weights(momentum.weight_decay), sgd)
        stats = jax.tree.map_with_path(_make_statistics, shapes.get("batch_stats", {}))
        self._state = jax.device_put((params, stats, optimizer.init(params)))
        self._update = _make_update(network, optimizer)
        self._step = 0
        self.sizes = tuple(sorted(leaf.size for leaf in jax.tree.leaves(params)))

    def run(self, steps: int) -> Result:
        """Train `steps` more steps."""
        losses = []
        for _ in range(steps):
            images, labels = self._batches[self._step % len(self._batches)]
            self._state, loss = self._update(self._state, images, labels)
            losses.append(loss)
            self._step += 1
        jax.block_until_ready(self._state)
        return Result(float(np.mean(jax.device_get(losses))))


def enter(task: Task) -> JaxTraining:
    """Make the training: a jitted step in a Python loop."""
    return JaxTraining(task)


def _make_update(network: nn.Module, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def compute_loss(params: Any, stats: Any, images: Array, labels: Array) -> tuple[Array, Any]:
        variables = {"params": params, "batch_stats": stats}
        logits, changed = network.apply(variables, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        return losses.mean(), changed.get("batch_stats", {})

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, images: Array, labels: Array) -> tuple[Any, Array]:
        params, stats, opt_state = state
        gradient = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, stats), gradients = gradient(params, stats, images, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    return update


def _make_statistics(path: Any, shape: jax.ShapeDtypeStruct) -> Array:
    """Return batch statistics at the start: mean 0, variance 1."""
    value = 1.0 if path[-1].key == "var" else 0.0
    return jnp.full(shape.shape, value, shape.dtype)


class _Stack(nn.Module):
    """Layers one after the other."""

    layers: tuple[LayerSpec, ...]
    dtype: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for name, layer in name_layers(self.layers):
            x = _apply(layer, x, name, self.dtype)
        return x


class _Residual(nn.Module):
    layer: standard.Residual
    dtype: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shortcut = _Stack(self.layer.shortcut, self.dtype, name="shortcut")(x)
        body = x
        for name, layer in name_layers(self.layer.body):
            body = _apply(layer, body, name, self.dtype)
        return body + shortcut


@singledispatch
def _apply(layer: LayerSpec, x: Array, name: str, dtype: str) -> Array:
    raise TypeError(f"{name}: the JAX peer has no layer {layer.name}")


@_apply.register
def _(layer: standard.Conv, x: Array, name: str, dtype: str) -> Array:
    size, stride, padding = get_window(layer)
    conv = nn.Conv(
        _get_features(layer),
        (size, size),
        stride,
        padding.upper(),
        use_bias=False,
        dtype=dtype,
        name=name,
    )
    return conv(x)


@_apply.register
def _(layer: standard.Dense, x: Array, name: str, dtype: str) -> Array:
    return nn.Dense(_get_features(layer), dtype=dtype, name=name)(x)


@_apply.register
def _(layer: standard.BatchNorm, x: Array, name: str, dtype: str) -> Array:
    norm = nn.BatchNorm(
        use_running_average=False,
        momentum=layer.momentum,
        epsilon=layer.epsilon,
        dtype=dtype,
        name=name,
    )
    return norm(x)


@_apply.register
def _(layer: standard.MaxPool, x: Array, name: str, dtype: str) -> Array:
    size, stride, padding = get_window(layer)
    return nn.max_pool(x, (size, size), (stride, stride), padding.upper())


@_apply.register
def _(layer: standard.Residual, x: Array, name: str, dtype: str) -> Array:
    return _Residual(layer, dtype, name=name)(x)


@_apply.register
def _(layer: standard.Relu, x: Array, name: str, dtype: str) -> Array:
    return nn.relu(x)


@_apply.register
def _(layer: standard.Flatten, x: Array, name: str, dtype: str) -> Array:
    return x.reshape(x.shape[0], -1)


@_apply.register
def _(layer: standard.GlobalAvgPool, x: Array, name: str, dtype: str) -> Array:
    return x.mean((1, 2))


def _get_features(layer: standard.Conv | standard.Dense) -> int:
    if isinstance(layer.features, str):
        raise TypeError(f"features {layer.features} isn't a number")
    return layer.features
