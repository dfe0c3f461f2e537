"""Writes onnx/: torchvision's networks with few channels, and layers over time and of volumes.

    python tests/golden/make_onnx_torchvision.py        with torchvision 0.28.0, torch 2.13.0 (CPU),
                                                         onnx and onnxscript

The files are those of make_onnx.py, with the losses of 20 steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial

import make_onnx
import torch
from make_onnx import BATCH, CLASSES, FOLDER, export, write_results
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models
from torchvision.models import convnext, efficientnet, mobilenetv3, regnet

STEPS, RATE = 20, 0.02


class Recurrent(nn.Module):
    """An LSTM of two layers in both directions on the rows of an image, and a GRU on top."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 4, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y, _ = self.lstm(x.mean(1))
        _, last = self.gru(y.transpose(0, 1))
        return self.head(last[0])


class Volumes(nn.Module):
    """A convolution and both poolings of images with their channels as the depth."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.pool = nn.MaxPool3d((1, 2, 2))
        self.mean = nn.AvgPool3d((3, 3, 3), (1, 2, 2), padding=1)
        self.fc = nn.Linear(4 * 3 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(functional.relu(self.conv(x[:, None])))
        return self.fc(self.mean(x).flatten(1))


def make_swin() -> nn.Module:
    """Shifted windows, on a side that isn't a multiple of the window."""
    sizes = ([2, 2], 8, [2, 2], [1, 2], [2, 2])
    return models.SwinTransformer(*sizes, stochastic_depth_prob=0.0, num_classes=CLASSES)


def make_convnext() -> nn.Module:
    """Two stages; the scale of layers is large enough to matter."""
    stages = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(stages, layer_scale=0.5, num_classes=CLASSES)


def make_vit() -> nn.Module:
    """A vision transformer whose head doesn't start at zero."""
    module = models.VisionTransformer(12, 4, 1, 2, 8, 16, num_classes=CLASSES)
    nn.init.normal_(module.heads.head.weight)
    return module


def make_mobilenet_v3() -> nn.Module:
    """Two blocks, with and without squeeze and excitation."""
    config = partial(mobilenetv3.InvertedResidualConfig, width_mult=1.0)
    blocks = [config(8, 3, 16, 8, True, "RE", 2, 1), config(8, 5, 24, 8, False, "HS", 1, 1)]
    return models.MobileNetV3(blocks, 16, num_classes=CLASSES, dropout=0.0)


def make_efficientnet() -> nn.Module:
    """Two stages."""
    config = efficientnet.MBConvConfig
    stages = [config(1, 3, 1, 8, 8, 1), config(4, 5, 2, 8, 8, 2)]
    return models.EfficientNet(stages, 0.0, 0.0, num_classes=CLASSES, last_channel=16)


def make_regnet() -> nn.Module:
    """Two stages of grouped convolutions with squeeze and excitation."""
    blocks = regnet.BlockParams([1, 1], [8, 16], [4, 8], [1.0, 1.0], [2, 2], 0.25)
    return models.RegNet(blocks, num_classes=CLASSES, stem_width=8)


LEGACY = {"dynamo": False, "opset_version": 17}
DYNAMO = {"dynamo": True, "opset_version": 18}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict]] = {
    "swin": (make_swin, DYNAMO),
    "convnext": (make_convnext, DYNAMO),
    "vit": (make_vit, DYNAMO),
    "densenet": (lambda: models.DenseNet(4, (2, 2), 8, num_classes=CLASSES), LEGACY),
    "mobilenet_v3": (make_mobilenet_v3, LEGACY),
    "efficientnet": (make_efficientnet, LEGACY),
    "shufflenet": (
        lambda: models.ShuffleNetV2([1, 1, 1], [8, 8, 16, 32, 16], num_classes=CLASSES),
        LEGACY,
    ),
    "regnet": (make_regnet, LEGACY),
    "recurrent": (Recurrent, LEGACY),
    "recurrent_dynamo": (Recurrent, DYNAMO),
    "volumes": (Volumes, DYNAMO),
}


def main() -> None:
    """Write every network, or those that are named."""
    warnings.simplefilter("ignore")
    make_onnx.STEPS = STEPS
    make_onnx.RATE = RATE
    for name in sys.argv[1:] or NETWORKS:
        make, options = NETWORKS[name]
        torch.manual_seed(3)
        module = make()
        module.train()
        with torch.no_grad():
            # Exporters leave biases of zero out.
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
            for _ in range(20):
                module(torch.randn(BATCH, 3, 12, 12))
        export(FOLDER / f"{name}.onnx", module, **options)
        write_results(FOLDER / f"{name}.npz", module)


if __name__ == "__main__":
    main()
