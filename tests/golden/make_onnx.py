"""Writes onnx/: small networks as PyTorch and scikit-learn export them, and what they compute.

    python tests/golden/make_onnx.py        with torch 2.13.0 (CPU), onnx, onnxscript and skl2onnx

For each network: `<name>.onnx`, and in `<name>.npz` samples NCHW, labels, logits in evaluation, and
the losses of some steps of SGD in training.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

FOLDER = Path(__file__).parent / "onnx"
CLASSES, BATCH, STEPS, RATE = 3, 4, 5, 0.05


class Residual(nn.Module):
    """A stem with max pooling, a residual block, and a head with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8, momentum=0.2)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.0)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(self.relu(self.bn(self.stem(x))))
        x = self.relu(self.bn1(self.conv1(x)) + self.down(x))
        return self.fc(self.drop(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


class Mobile(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard swish, and branches that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.depthwise = nn.Conv2d(8, 8, 5, 1, 4, dilation=2, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.slope = nn.PReLU(8)
        self.up = nn.ConvTranspose2d(8, 4, 3, 2, padding=1, output_padding=1, groups=2)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = functional.hardswish(self.stem(functional.pad(x, (1, 0, 1, 0))))
        y = functional.silu(self.norm(self.depthwise(x)))
        scale = functional.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = self.slope(y * functional.hardsigmoid(self.excite(scale)))
        small = functional.avg_pool2d(x + y, 3, 2, 1)
        large = functional.interpolate(small, scale_factor=2.0, mode="bilinear")
        parts = large.amax((2, 3)), functional.elu(self.up(small)).mean((2, 3))
        return self.fc(torch.cat(parts, 1))


class Patches(nn.Module):
    """Patches as tokens after a class token, one block of attention, and layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 10, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8, eps=1e-6), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.position
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, 2, width // 2)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.softmax(q @ k.transpose(-2, -1) * 0.5, -1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        x = x + self.scale * self.mlp(self.norm2(x))
        return self.head(x[:, 0])


def main() -> None:
    """Write every network."""
    FOLDER.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    for name, kind, options in (
        # With batch norm and dropout as nodes: training=PRESERVE folds neither away.
        ("residual", Residual, {"dynamo": False, "opset_version": 17}),
        ("mobile", Mobile, {"dynamo": False, "opset_version": 13}),
        ("patches", Patches, {"dynamo": False, "opset_version": 11}),
        ("patches_dynamo", Patches, {"dynamo": True, "opset_version": 21}),
        ("mobile_dynamo", Mobile, {"dynamo": True, "opset_version": 18}),
        ("patches_batch1", Patches, {"dynamo": False, "opset_version": 14}),
    ):
        torch.manual_seed(3)
        module = kind()
        module.train()
        with torch.no_grad():
            module(torch.randn(BATCH, 3, 12, 12))
        export(FOLDER / f"{name}.onnx", module, **options)
        write_results(FOLDER / f"{name}.npz", module)
    write_perceptron()


def export(file: Path, module: nn.Module, *, dynamo: bool, opset_version: int) -> None:
    """Export for any batch size, but for `batch1`."""
    is_open = "batch1" not in file.stem
    example = torch.zeros(2 if is_open else 1, 3, 12, 12)
    if dynamo:
        torch.onnx.export(
            module.eval(),
            (example,),
            file,
            dynamo=True,
            external_data=False,
            opset_version=opset_version,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
        return
    torch.onnx.export(
        module.train(),
        (example,),
        file,
        dynamo=False,
        opset_version=opset_version,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        input_names=["images"],
        dynamic_axes={"images": {0: "batch"}} if is_open else None,
    )


def write_results(file: Path, module: nn.Module) -> None:
    """Write samples, logits, and losses of steps of SGD."""
    images, labels = torch.randn(BATCH, 3, 12, 12), torch.arange(BATCH) % CLASSES
    with torch.no_grad():
        logits = module.eval()(images).numpy()
    optimizer = torch.optim.SGD(module.train().parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(module(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    arrays = {"logits": logits, "losses": losses, "labels": labels.numpy()}
    np.savez_compressed(file, images=images.numpy(), **arrays)


def write_perceptron() -> None:
    """Write a classifier of scikit-learn, and the losses of the same layers in PyTorch."""
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPClassifier

    random = np.random.default_rng(3)
    x = random.normal(size=(60, 12)).astype(np.float32)
    classifier = MLPClassifier((8,), random_state=3, max_iter=30).fit(x, np.arange(60) % CLASSES)
    model = to_onnx(classifier, x[:1], target_opset=15)
    (FOLDER / "perceptron.onnx").write_bytes(model.SerializeToString())
    module = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    layers = zip((module[0], module[2]), classifier.coefs_, classifier.intercepts_, strict=True)
    for layer, weight, bias in layers:
        layer.weight.data = torch.tensor(weight.T, dtype=torch.float32)
        layer.bias.data = torch.tensor(bias, dtype=torch.float32)
    samples, labels = torch.tensor(x[:BATCH]), torch.arange(BATCH) % CLASSES
    logits = module(samples).detach().numpy()
    probabilities = classifier.predict_proba(x[:BATCH])
    np.testing.assert_allclose(functional.softmax(torch.tensor(logits), 1), probabilities, 1e-4)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(module(samples), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    arrays = {"logits": logits, "losses": losses, "labels": labels.numpy()}
    images = x[:BATCH].reshape(BATCH, 1, 1, 12)
    np.savez_compressed(FOLDER / "perceptron.npz", images=images, **arrays)


if __name__ == "__main__":
    main()
