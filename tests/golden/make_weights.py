"""Makes tests/golden/weights/: files that MindSpore and PyTorch wrote, and what networks compute.

    python tests/golden/make_weights.py           with mindspore 2.10.0 and torch 2.13.0 (CPU)

Weights and images of networks are drawn by numpy, as the test draws them too.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import mindspore as ms
import numpy as np
import torch
from mindspore import nn as ms_nn
from torch import nn
from torch.nn import functional

FOLDER = Path(__file__).parent / "weights"
SEED = 20
WIDTHS = (16, 32, 64, 128)


class TinyCell(ms_nn.Cell):
    """One layer of each kind that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ms_nn.Conv2d(2, 3, (3, 2), pad_mode="valid", has_bias=True)
        self.bn1 = ms_nn.BatchNorm2d(3)
        self.fc1 = ms_nn.Dense(4, 5)
        self.norm = ms_nn.LayerNorm((5,))


def write_mindspore() -> None:
    """tiny.ckpt, the same with a CRC, one of every dtype, and the values as .npz."""
    rng = np.random.default_rng(SEED)
    net = TinyCell()
    for parameter in net.get_parameters():
        parameter.set_data(ms.Tensor(rng.standard_normal(parameter.shape), ms.float32))
    ms.save_checkpoint(net, str(FOLDER / "mindspore_tiny.ckpt"))
    ms.save_checkpoint(net, str(FOLDER / "mindspore_tiny_crc.ckpt"), crc_check=True)
    values = {p.name: p.asnumpy() for p in net.get_parameters()}
    np.savez(FOLDER / "mindspore_tiny.npz", **values)
    kinds = ("float16", "float64", "bfloat16", "int8", "int32", "int64", "uint8", "bool_")
    entries = [{"name": kind, "data": ms.Tensor([[1, 0, 3]], getattr(ms, kind))} for kind in kinds]
    entries.append({"name": "scalar", "data": ms.Tensor(2.5, ms.float32)})
    ms.save_checkpoint(entries, str(FOLDER / "mindspore_dtypes.ckpt"))


def write_torch() -> None:
    """tiny.pth: dtypes, a transposed view, a shared storage, a parameter and a scalar."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    kinds = ("float16", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
    tensors = OrderedDict(
        (kind, torch.tensor([[1, 0, 3]], dtype=getattr(torch, kind))) for kind in kinds
    )
    tensors["whole"] = base
    tensors["transposed"] = base.T
    tensors["part"] = base[1:, 2:]
    tensors["parameter"] = nn.Parameter(torch.tensor([0.5, -0.5]))
    tensors["scalar"] = torch.tensor(2.5)
    torch.save(tensors, FOLDER / "torch_tiny.pth")
    checkpoint = {
        "epoch": 3,
        "state_dict": {"fc.weight": base, "fc.bias": base[0]},
        "lr": [0.1, None],
    }
    torch.save(checkpoint, FOLDER / "torch_training.pt")


def same_padding(x: torch.Tensor, kernel: int, stride: int) -> torch.Tensor:
    """Zeros around an image as `same` padding puts them: the odd one after, not before."""
    total = max(kernel - stride, 0)
    before, after = total // 2, total - total // 2
    return functional.pad(x, (before, after, before, after))


class SameConv(nn.Conv2d):
    """A convolution with `same` padding at any stride."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(same_padding(x, self.kernel_size[0], self.stride[0]))


class Block(nn.Module):
    """A basic residual block, its names those of the common collections."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = SameConv(channels, width, 3, stride, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = SameConv(width, width, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(
                SameConv(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return functional.relu(self.bn2(self.conv2(y)) + shortcut)


class ResNet18(nn.Module):
    """ResNet-18 with a CIFAR stem."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SameConv(3, WIDTHS[0], 3, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        channels = WIDTHS[0]
        for stage, width in enumerate(WIDTHS, start=1):
            stride = 1 if stage == 1 else 2
            blocks = (Block(channels, width, stride), Block(width, width, 1))
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            channels = width
        self.fc = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


class LeNet5(nn.Module):
    """LeNet-5, whose first dense layer reads flattened images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, bias=False)
        self.conv2 = nn.Conv2d(6, 16, 5, bias=False)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))


class MindSporeBlock(ms_nn.Cell):
    """The same block in MindSpore."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = ms_nn.Conv2d(channels, width, 3, stride, pad_mode="same")
        self.bn1 = ms_nn.BatchNorm2d(width)
        self.conv2 = ms_nn.Conv2d(width, width, 3, 1, pad_mode="same")
        self.bn2 = ms_nn.BatchNorm2d(width)
        self.down_sample = None
        if stride != 1 or channels != width:
            conv = ms_nn.Conv2d(channels, width, 1, stride, pad_mode="same")
            self.down_sample = ms_nn.SequentialCell([conv, ms_nn.BatchNorm2d(width)])

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        y = ms.ops.relu(self.bn1(self.conv1(x)))
        shortcut = x if self.down_sample is None else self.down_sample(x)
        return ms.ops.relu(self.bn2(self.conv2(y)) + shortcut)


class MindSporeResNet18(ms_nn.Cell):
    """The same network in MindSpore."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ms_nn.Conv2d(3, WIDTHS[0], 3, 1, pad_mode="same")
        self.bn1 = ms_nn.BatchNorm2d(WIDTHS[0])
        channels = WIDTHS[0]
        for stage, width in enumerate(WIDTHS, start=1):
            stride = 1 if stage == 1 else 2
            blocks = [MindSporeBlock(channels, width, stride), MindSporeBlock(width, width, 1)]
            setattr(self, f"layer{stage}", ms_nn.SequentialCell(blocks))
            channels = width
        self.fc = ms_nn.Dense(channels, 10)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = ms.ops.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class MindSporeLeNet5(ms_nn.Cell):
    """LeNet-5 as the MindSpore tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ms_nn.Conv2d(1, 6, 5, pad_mode="valid")
        self.conv2 = ms_nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.relu = ms_nn.ReLU()
        self.max_pool2d = ms_nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = ms_nn.Flatten()
        self.fc1 = ms_nn.Dense(400, 120)
        self.fc2 = ms_nn.Dense(120, 84)
        self.fc3 = ms_nn.Dense(84, 10)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.flatten(self.max_pool2d(self.relu(self.conv2(x))))
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


def fill_by_name(net: nn.Module) -> list[tuple[str, list[int]]]:
    """Weights from numpy's generator in the order of the state dict, as the test draws them too."""
    rng = np.random.default_rng(SEED)
    state = net.state_dict()
    shapes = []
    for name, tensor in state.items():
        shapes.append((name, list(tensor.shape)))
        if not name.endswith("num_batches_tracked"):
            state[name] = torch.from_numpy(draw(rng, name, tuple(tensor.shape)))
    net.load_state_dict(state)
    return shapes


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Positive variances and factors around 1, all else around 0, scaled to the inputs."""
    values = rng.standard_normal(shape)
    if name.endswith(("running_var", "moving_variance")):
        return (0.5 + np.abs(values)).astype(np.float32)
    if len(shape) > 1:
        return (values / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
    is_factor = name.endswith(("weight", "gamma"))
    return (is_factor + 0.2 * values).astype(np.float32)


def write_torch_logits(name: str, net: nn.Module, image: tuple[int, int, int]) -> None:
    """What a network of PyTorch makes of the images."""
    shapes = fill_by_name(net)
    net.eval()
    with torch.no_grad():
        logits = net(torch.from_numpy(draw_images(image)))
    write_logits(f"torch_{name}", image, shapes, logits.numpy())


def write_mindspore_logits(name: str, net: ms_nn.Cell, image: tuple[int, int, int]) -> None:
    """What a network of MindSpore makes of the images."""
    rng = np.random.default_rng(SEED)
    shapes = []
    for parameter in net.get_parameters():
        shapes.append((parameter.name, list(parameter.shape)))
        parameter.set_data(ms.Tensor(draw(rng, parameter.name, parameter.shape)))
    net.set_train(False)
    write_logits(f"mindspore_{name}", image, shapes, net(ms.Tensor(draw_images(image))).asnumpy())


def draw_images(image: tuple[int, int, int]) -> np.ndarray:
    """Three images, channels first."""
    images = np.random.default_rng(SEED + 1).random((3, *image), np.float32)
    return images.transpose(0, 3, 1, 2).copy()


def write_logits(
    name: str, image: tuple[int, int, int], shapes: list[tuple[str, list[int]]], logits: np.ndarray
) -> None:
    """Names and shapes of the state, and the logits; the image's channels are last here."""
    values = logits.astype(np.float64).tolist()
    content = {"seed": SEED, "image": image, "state": shapes, "logits": values}
    (FOLDER / f"{name}.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write_mindspore()
    write_torch()
    write_torch_logits("resnet18", ResNet18(), (32, 32, 3))
    write_torch_logits("lenet5", LeNet5(), (32, 32, 1))
    write_mindspore_logits("resnet18", MindSporeResNet18(), (32, 32, 3))
    write_mindspore_logits("lenet5", MindSporeLeNet5(), (32, 32, 1))
