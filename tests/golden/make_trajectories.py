"""Losses of trainings in MindSpore on the CPU, written to trajectories/*.json.

    python -m tests.golden.make_trajectories DATA [NAME ...]

with mindspore 2.10.0 and this project, DATA being the folder that has mnist. MindSpore maps
the images with its own ops and trains with its own cells, in graph mode; first weights, batches and
learning rates are those of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import vision

from pipeline.config.recipe import Recipe
from tests.training.trajectory_cases import CASES, FOLDER, Given, given, recipe_of

Weights = Mapping[str, np.ndarray]
Image = np.ndarray


class LeNet5(nn.Cell):
    """As the documents write it (M-02), its convolutions without biases."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.conv1 = convolution(weights["conv_0/kernel"])
        self.conv2 = convolution(weights["conv_1/kernel"])
        self.relu, self.pool, self.flatten = nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten()
        # Rows of the first dense kernel by channel, height and width, as flattened from NCHW.
        rows = (
            weights["dense_0/kernel"].reshape(5, 5, 16, -1).transpose(2, 0, 1, 3).reshape(400, -1)
        )
        self.fc1 = dense(rows.reshape(400, -1), weights["dense_0/bias"])
        self.fc2 = dense(weights["dense_1/kernel"], weights["dense_1/bias"])
        self.fc3 = dense(weights["dense_2/kernel"], weights["dense_2/bias"])

    def construct(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.flatten(self.pool(self.relu(self.conv2(x))))
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


class Mlp(nn.Cell):
    """784-512-512-10 (M-04)."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.flatten, self.relu = nn.Flatten(), nn.ReLU()
        self.fc1, self.fc2, self.fc3 = (
            dense(weights[f"dense_{i}/kernel"], weights[f"dense_{i}/bias"]) for i in range(3)
        )

    def construct(self, x: Tensor) -> Tensor:
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(self.flatten(x))))))


NETWORKS: Mapping[str, Callable[[Weights], nn.Cell]] = {"lenet5": LeNet5, "mlp": Mlp}


def convolution(kernel: np.ndarray) -> nn.Conv2d:
    """Without padding or bias, from a kernel (height, width, in, out)."""
    turned = np.ascontiguousarray(kernel.transpose(3, 2, 0, 1))
    features, channels, size, _ = turned.shape
    return nn.Conv2d(channels, features, size, pad_mode="valid", weight_init=Tensor(turned))


def dense(kernel: np.ndarray, bias: np.ndarray) -> nn.Dense:
    """From a kernel (in, out)."""
    turned = np.ascontiguousarray(kernel.T)
    return nn.Dense(*kernel.shape, weight_init=Tensor(turned), bias_init=Tensor(bias))


def map_ops(recipe: Recipe) -> list[Callable[[Image], Image]]:
    """The recipe's map ops, and HWC2CHW, by MindSpore."""
    ops: list[Callable[[Image], Image]] = []
    for op in recipe.dataset.train.ops:
        match op.name:
            case "resize":
                ops.append(vision.Resize(op.size, vision.Inter.LINEAR))
            case "rescale":
                ops.append(vision.Rescale(op.factor, op.shift))
            case "normalize":
                ops.append(vision.Normalize(list(op.mean), list(op.std)))
            case name:
                raise TypeError(f"no counterpart of the map op {name} here")
    return [*ops, vision.HWC2CHW()]


def map_image(recipe: Recipe, image: Image) -> Image:
    """An image (H, W, C) after all ops: float32 (C, H', W')."""
    for op in map_ops(recipe):
        image = op(image)
        image = image[..., np.newaxis] if image.ndim == 2 else image
    return image


def train(recipe: Recipe, start: Given) -> list[float]:
    """The loss of every step."""
    choice = recipe.train.optimizer
    # Its Momentum takes no notice of use_nesterov on the CPU.
    assert not choice.weight_decay
    network = NETWORKS[recipe.model.name](start.weights)
    rates = start.learning_rates.astype(float).tolist()
    if choice.name == "momentum":
        assert not choice.nesterov
        optimizer = nn.Momentum(network.trainable_params(), rates, choice.momentum)
    else:
        assert choice.name == "sgd"
        optimizer = nn.SGD(network.trainable_params(), rates)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    cell = nn.TrainOneStepCell(nn.WithLossCell(network, loss), optimizer)
    cell.set_train()
    losses = []
    for images, labels in zip(start.images, start.labels, strict=True):
        batch = np.stack([map_image(recipe, image) for image in images])
        losses.append(float(cell(Tensor(batch), Tensor(labels)).asnumpy()))
    return losses


def main() -> None:
    """Write the files of the cases named, or of all."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[2:] or CASES:
        recipe = recipe_of(name, Path(sys.argv[1]))
        losses = train(recipe, given(recipe))
        text = json.dumps({"mindspore": mindspore.__version__, "losses": losses}, indent=0)
        (FOLDER / f"{name}.json").write_text(text + "\n")
        print(name, losses[0], losses[-1])


if __name__ == "__main__":
    main()
