"""Writes fine_tuning.npz: a fine-tuning by PyTorch, first of the head, then of everything.

    python tests/golden/make_fine_tuning.py        with torch 2.13.0 (CPU)

Convolution, batch norm, ReLU, twice, then the mean of all places and a dense layer. For three steps
the first convolution and both batch norms are frozen (`requires_grad=False`), the batch norms in
evaluation; then everything is trained, batch norm on the batch, by an optimizer that was given the
new parameters with `add_param_group`. Learning rates halve with every layer from the last one down.
Arrays have this project's names and orders of axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

FILE = Path(__file__).parent / "fine_tuning.npz"
BATCH, SIDE, CHANNELS, CLASSES, STEPS, THAWS = 6, 5, 2, 3, 6, 3
RATE, DECAY = 0.05, 0.5
OPTIMIZERS = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9, weight_decay=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-4),
}


class Net(nn.Module):
    """Two convolutions with batch norm, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_0, self.batch_norm_0 = nn.Conv2d(CHANNELS, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv_1, self.batch_norm_1 = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.dense_0 = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = functional.relu(self.batch_norm_0(self.conv_0(x)))
        x = functional.relu(self.batch_norm_1(self.conv_1(x)))
        return self.dense_0(x.mean((2, 3)))


def arrays_of(net: Net) -> dict[str, np.ndarray]:
    """Parameters and statistics, by the names of this project."""
    names = {"running_mean": "batch_stats/{}/mean", "running_var": "batch_stats/{}/var"}
    results = {}
    for name, tensor in net.state_dict().items():
        scope, leaf = name.split(".")
        array = tensor.detach().numpy().copy()
        if leaf in names:
            results[names[leaf].format(scope)] = array
        elif leaf == "weight":
            kind = "scale" if array.ndim == 1 else "kernel"
            axes = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}[array.ndim]
            results[f"params/{scope}/{kind}"] = array.transpose(axes)
        elif leaf == "bias":
            results[f"params/{scope}/bias"] = array
    return results


def groups_of(modules: Mapping[nn.Module, int]) -> list[dict[str, object]]:
    """A group of parameters for each module, with the rate of its depth from the last layer."""
    return [
        {"params": list(module.parameters()), "lr": RATE * DECAY**depth}
        for module, depth in modules.items()
    ]


def fine_tune(
    net: Net, images: torch.Tensor, labels: torch.Tensor, name: str
) -> dict[str, np.ndarray]:
    """Losses, and the arrays after each phase."""
    first = {net.conv_1: 1, net.dense_0: 0}
    later = {net.conv_0: 2, net.batch_norm_0: 2, net.batch_norm_1: 1}
    for module in later:
        module.requires_grad_(False)
    optimizer = OPTIMIZERS[name](groups_of(first))
    losses, results = [], {}
    for step in range(STEPS):
        if step == THAWS:
            results |= {f"{name} thaws {key}": array for key, array in arrays_of(net).items()}
            for module in later:
                module.requires_grad_(True)
            for group in groups_of(later):
                optimizer.add_param_group(group)
        net.train()
        if step < THAWS:
            net.batch_norm_0.eval()
            net.batch_norm_1.eval()
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(images[step]), labels[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results |= {f"{name} ends {key}": array for key, array in arrays_of(net).items()}
    return {**results, f"{name} losses": np.array(losses)}


def main() -> None:
    """Write the file."""
    random = np.random.default_rng(0)
    images = random.normal(size=(STEPS, BATCH, SIDE, SIDE, CHANNELS)).astype(np.float32)
    labels = random.integers(0, CLASSES, (STEPS, BATCH))
    torch.manual_seed(0)
    start = Net().state_dict()
    for name in ("batch_norm_0", "batch_norm_1"):
        size = start[f"{name}.running_mean"].shape
        start[f"{name}.running_mean"] = 0.3 * torch.randn(size)
        start[f"{name}.running_var"] = torch.rand(size) + 0.5
        start[f"{name}.weight"] = torch.rand(size) + 0.5
        start[f"{name}.bias"] = 0.3 * torch.randn(size)
    results: dict[str, np.ndarray] = {"images": images, "labels": labels.astype(np.int32)}
    inputs = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 1, 4, 2, 3)))
    for name in OPTIMIZERS:
        net = Net()
        net.load_state_dict(start)
        results |= {f"start {key}": array for key, array in arrays_of(net).items()}
        results |= fine_tune(net, inputs, torch.from_numpy(labels), name)
    np.savez_compressed(FILE, **results)


if __name__ == "__main__":
    main()
