"""Keras on its JAX backend: `model.fit` on arrays, `steps_per_execution` as long as a sink.

Timed is one `fit` over the batches of a round, without shuffling, metrics or progress bar, as for a
user who trains on numpy arrays. The losses are Keras's mean.
"""

from __future__ import annotations

import os
from functools import singledispatch
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

from benchmarks.contestant import Result
from benchmarks.tasks import Task, get_window, load_batches, load_weights, name_layers
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec


class KerasTraining:
    """A compiled Keras model."""

    def __init__(self, task: Task) -> None:
        if task.precision == "bf16":
            keras.mixed_precision.set_global_policy("mixed_bfloat16")
        batches = load_batches(task)
        self._batch_size = task.batch_size
        self._images = batches.images.reshape(-1, *batches.images.shape[2:])
        self._labels = batches.labels.reshape(-1)
        self._model = _build_model(task, self._images.shape[1:])
        self._model.compile(
            _Momentum(task),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=task.sink_size,
        )
        self._step = 0
        self.sizes = tuple(sorted(int(np.prod(v.shape)) for v in self._model.trainable_variables))

    def run(self, steps: int) -> Result:
        """Train `steps` more steps; after the end of an epoch, another `fit` continues."""
        total = 0.0
        remaining = steps
        while remaining:
            first = self._step % (len(self._labels) // self._batch_size)
            count = min(remaining, len(self._labels) // self._batch_size - first)
            rows = slice(first * self._batch_size, (first + count) * self._batch_size)
            history = self._model.fit(
                self._images[rows],
                self._labels[rows],
                batch_size=self._batch_size,
                shuffle=False,
                verbose=0,
            )
            total += count * history.history["loss"][-1]
            self._step += count
            remaining -= count
        return Result(total / steps)


class _Momentum(keras.optimizers.SGD):
    """SGD that adds weight decay to the gradient, as in all other contestants.

    Keras's SGD subtracts it from the weights, which is another training.
    """

    def __init__(self, task: Task) -> None:
        momentum = task.momentum
        super().__init__(momentum.lr, momentum.momentum, momentum.nesterov)
        self._decay = momentum.weight_decay

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable."""
        if self._decay:
            gradient = gradient + self._decay * variable
        super().update_step(gradient, variable, learning_rate)


def enter(task: Task) -> KerasTraining:
    """Make the training: `model.fit` of Keras."""
    return KerasTraining(task)


def _build_model(task: Task, shape: tuple[int, ...]) -> keras.Model:
    images = keras.Input(shape)
    layers: dict[str, keras.layers.Layer] = {}
    x = _apply_stack(task.layers, images, "", layers)
    model = keras.Model(images, keras.layers.Activation("linear", dtype="float32")(x))
    weights = load_weights(task)
    for path, layer in layers.items():
        values = [weights[f"{path}/{name}"] for name in _get_names(layer)]
        layer.set_weights([*values, *layer.get_weights()[len(values) :]])
    return model


def _get_names(layer: keras.layers.Layer) -> tuple[str, ...]:
    """Return our names of a layer's weights in Keras's order; moving statistics come after them."""
    if isinstance(layer, keras.layers.Conv2D):
        return ("kernel",)
    return ("kernel", "bias") if isinstance(layer, keras.layers.Dense) else ("scale", "bias")


def _apply_stack(stack: tuple[LayerSpec, ...], x: Any, scope: str, layers: dict[str, Any]) -> Any:
    for path, layer in name_layers(stack, scope):
        x = _apply(layer, x, path, layers)
    return x


@singledispatch
def _apply(layer: LayerSpec, x: Any, path: str, layers: dict[str, Any]) -> Any:
    raise TypeError(f"{path}: the Keras peer has no layer {layer.name}")


@_apply.register
def _(layer: standard.Conv, x: Any, path: str, layers: dict[str, Any]) -> Any:
    size, stride, padding = get_window(layer)
    layers[path] = keras.layers.Conv2D(layer.features, size, stride, padding, use_bias=False)
    return layers[path](x)


@_apply.register
def _(layer: standard.Dense, x: Any, path: str, layers: dict[str, Any]) -> Any:
    layers[path] = keras.layers.Dense(layer.features)
    return layers[path](x)


@_apply.register
def _(layer: standard.BatchNorm, x: Any, path: str, layers: dict[str, Any]) -> Any:
    layers[path] = keras.layers.BatchNormalization(momentum=layer.momentum, epsilon=layer.epsilon)
    return layers[path](x)


@_apply.register
def _(layer: standard.MaxPool, x: Any, path: str, layers: dict[str, Any]) -> Any:
    return keras.layers.MaxPooling2D(*get_window(layer))(x)


@_apply.register
def _(layer: standard.Residual, x: Any, path: str, layers: dict[str, Any]) -> Any:
    body = _apply_stack(layer.body, x, path, layers)
    return keras.layers.Add()([body, _apply_stack(layer.shortcut, x, f"{path}/shortcut", layers)])


@_apply.register
def _(layer: standard.Relu, x: Any, path: str, layers: dict[str, Any]) -> Any:
    return keras.layers.ReLU()(x)


@_apply.register
def _(layer: standard.Flatten, x: Any, path: str, layers: dict[str, Any]) -> Any:
    return keras.layers.Flatten()(x)


@_apply.register
def _(layer: standard.GlobalAvgPool, x: Any, path: str, layers: dict[str, Any]) -> Any:
    return keras.layers.GlobalAveragePooling2D()(x)
