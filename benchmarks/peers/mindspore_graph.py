"""MindSpore in graph mode: `TrainOneStepCell`, the whole update as one compiled graph.

Timed is, per step: the call of that cell on a batch of tensors in memory. MindSpore's sinking
(`data_sink`, `dataset_sink_mode`) refuses the CPU.
"""

from __future__ import annotations

from functools import singledispatch

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from benchmarks.contestant import Result
from benchmarks.tasks import (
    Task,
    get_window,
    load_batches,
    load_weights,
    name_layers,
    order_rows,
)
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec

Weights = dict[str, np.ndarray]


class MindSporeTraining:
    """A compiled training cell."""

    def __init__(self, task: Task) -> None:
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        mindspore.set_device("CPU")
        if task.precision == "bf16":
            raise NotImplementedError("no bfloat16 in MindSpore's MatMul and Conv2D on the CPU")
        batches = load_batches(task)
        momentum = task.momentum
        images = np.ascontiguousarray(batches.images.transpose(0, 1, 4, 2, 3))
        self._batches = [
            (Tensor(x), Tensor(y)) for x, y in zip(images, batches.labels, strict=True)
        ]
        network = _Stack(task.layers, load_weights(task), channels=images.shape[2])
        # On the CPU its Momentum ignores use_nesterov, but its SGD doesn't.
        optimizer = nn.SGD(
            network.trainable_params(),
            momentum.lr,
            momentum.momentum,
            weight_decay=momentum.weight_decay,
            nesterov=momentum.nesterov,
        )
        loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        self._cell = nn.TrainOneStepCell(nn.WithLossCell(network, loss), optimizer)
        self._cell.set_train()
        self._step = 0
        self.sizes = tuple(sorted(p.size for p in network.trainable_params()))

    def run(self, steps: int) -> Result:
        """Train `steps` more steps."""
        losses = []
        for _ in range(steps):
            losses.append(self._cell(*self._batches[self._step % len(self._batches)]))
            self._step += 1
        return Result(float(np.mean([loss.asnumpy() for loss in losses])))


def enter(task: Task) -> MindSporeTraining:
    """Make the training: a compiled cell of MindSpore."""
    return MindSporeTraining(task)


class _Stack(nn.SequentialCell):
    """Layers one after the other, with their weights; `features` are the channels of the result."""

    def __init__(
        self, stack: tuple[LayerSpec, ...], weights: Weights, channels: int, scope: str = ""
    ) -> None:
        cells = []
        for path, layer in name_layers(stack, scope):
            cell = _build_cell(layer, path, weights, channels)
            channels = getattr(cell, "features", channels)
            cells.append(cell)
        super().__init__(*cells)
        self.features = channels


class _Residual(nn.Cell):
    def __init__(
        self, layer: standard.Residual, path: str, weights: Weights, channels: int
    ) -> None:
        super().__init__()
        self.body = _Stack(layer.body, weights, channels, path)
        stack = _Stack(layer.shortcut, weights, channels, f"{path}/shortcut")
        # An empty SequentialCell can't be compiled.
        self.shortcut = stack if layer.shortcut else nn.Identity()
        self.features = self.body.features

    def construct(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class _GlobalAvgPool(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.mean(x, (2, 3))


@singledispatch
def _build_cell(layer: LayerSpec, path: str, weights: Weights, channels: int) -> nn.Cell:
    raise TypeError(f"{path}: the MindSpore peer has no layer {layer.name}")


@_build_cell.register
def _(layer: standard.Conv, path: str, weights: Weights, channels: int) -> nn.Cell:
    kernel = np.ascontiguousarray(weights[f"{path}/kernel"].transpose(3, 2, 0, 1))
    size, stride, padding = get_window(layer)
    cell = nn.Conv2d(channels, len(kernel), size, stride, padding, weight_init=Tensor(kernel))
    cell.features = len(kernel)
    return cell


@_build_cell.register
def _(layer: standard.Dense, path: str, weights: Weights, channels: int) -> nn.Cell:
    kernel = order_rows(weights[f"{path}/kernel"], channels)
    cell = nn.Dense(
        *kernel.shape,
        weight_init=Tensor(np.ascontiguousarray(kernel.T)),
        bias_init=Tensor(weights[f"{path}/bias"]),
    )
    cell.features = kernel.shape[1]
    return cell


@_build_cell.register
def _(layer: standard.BatchNorm, path: str, weights: Weights, channels: int) -> nn.Cell:
    return nn.BatchNorm2d(
        channels,
        layer.epsilon,
        layer.momentum,
        gamma_init=Tensor(weights[f"{path}/scale"]),
        beta_init=Tensor(weights[f"{path}/bias"]),
    )


@_build_cell.register
def _(layer: standard.MaxPool, path: str, weights: Weights, channels: int) -> nn.Cell:
    return nn.MaxPool2d(*get_window(layer))


@_build_cell.register
def _(layer: standard.Residual, path: str, weights: Weights, channels: int) -> nn.Cell:
    return _Residual(layer, path, weights, channels)


@_build_cell.register
def _(layer: standard.Relu, path: str, weights: Weights, channels: int) -> nn.Cell:
    return nn.ReLU()


@_build_cell.register
def _(layer: standard.Flatten, path: str, weights: Weights, channels: int) -> nn.Cell:
    return nn.Flatten()


@_build_cell.register
def _(layer: standard.GlobalAvgPool, path: str, weights: Weights, channels: int) -> nn.Cell:
    return _GlobalAvgPool()
