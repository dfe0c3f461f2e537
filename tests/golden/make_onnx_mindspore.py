"""Writes onnx/mindspore.onnx and .npz: a small network as MindSpore exports it.

    python tests/golden/make_onnx_mindspore.py        with mindspore 2.10.0 and onnx

The arrays are those of make_onnx.py. MindSpore exports for one batch size.
"""

from __future__ import annotations

from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn

FOLDER = Path(__file__).parent / "onnx"
CLASSES, BATCH, STEPS, RATE = 3, 4, 5, 0.05


class Convolutions(nn.Cell):
    """Convolutions with each kind of padding, batch norm, pooling and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, pad_mode="same", has_bias=True)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, pad_mode="pad", padding=1)
        self.flatten = nn.Flatten()
        self.fc = nn.Dense(8 * 3 * 3, CLASSES)

    def construct(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(self.relu(self.bn(self.conv1(x))))
        return self.fc(self.flatten(self.relu(self.conv2(x))))


def main() -> None:
    """Write the network, and what it computes."""
    mindspore.set_seed(3)
    network = Convolutions().set_train(False)
    random = np.random.default_rng(3)
    images = random.normal(size=(BATCH, 3, 12, 12)).astype(np.float32)
    labels = (np.arange(BATCH) % CLASSES).astype(np.int32)
    logits = network(Tensor(images)).asnumpy()
    mindspore.onnx.export(network, Tensor(images), file_name=str(FOLDER / "mindspore"))
    (FOLDER / "mindspore.onnx").chmod(0o644)
    network.set_train(True)
    loss = nn.CrossEntropyLoss()
    optimizer = nn.SGD(network.trainable_params(), RATE)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return loss(network(x), y)

    step = mindspore.value_and_grad(compute_loss, None, optimizer.parameters)
    losses = []
    for _ in range(STEPS):
        value, gradients = step(Tensor(images), Tensor(labels))
        optimizer(gradients)
        losses.append(float(value))
    arrays = {"logits": logits, "losses": losses, "labels": labels}
    np.savez_compressed(FOLDER / "mindspore.npz", images=images, **arrays)


if __name__ == "__main__":
    main()
