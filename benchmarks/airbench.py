"""CIFAR-10 to 94 % by airbench94 (Jordan 2024, arXiv 2404.00498) in PyTorch, on the cores at hand.

    python -m benchmarks.airbench --seed 1 --root DIR

Written from the paper's description: whitened patches, initial identities, biases of norms with 64
times the rate, a triangular rate, Nesterov momentum, lookahead, alternating flips, and six views of
an evaluated image. Prints the accuracy after each epoch and the seconds of steps so far.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import load_recipe
from pipeline.config.cache import cache_root

BATCH_SIZE = 1024
EPOCHS = 9.9
WHITENED_EPOCHS = 3
"""Epochs in which the bias behind the whitening is trained."""
WHITENED_IMAGES = 5000
MOMENTUM = 0.85
SUM_FACTOR = 1024 * (1 + 1 / (1 - MOMENTUM))
RATE = 11.5 / SUM_FACTOR
"""Rate of a loss that is summed over a batch."""
DECAY = 0.0153 * BATCH_SIZE / SUM_FACTOR
"""Share of a weight that a step subtracts."""
BIAS_FACTOR = 64
WIDTHS = (64, 256, 256)
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)


class Scaled(nn.Module):
    """The outputs of the last layer over 9."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 9


def make_network(images: Tensor) -> nn.Sequential:
    """Return the network, whose first filters whiten patches of `images` (B, 3, H, W)."""
    whitening = nn.Conv2d(3, 24, 2)
    patches = functional.unfold(images, 2).transpose(1, 2).reshape(-1, 12).double()
    values, vectors = torch.linalg.eigh(torch.cov(patches.T))
    filters = (vectors / torch.sqrt(values + 5e-4)).T.reshape(12, 3, 2, 2)
    whitening.weight.data = torch.cat([filters, -filters]).float()
    whitening.weight.requires_grad = False
    layers: list[nn.Module] = [whitening, nn.GELU()]
    channels = 24
    for width in WIDTHS:
        layers += [_make_convolution(channels, width), nn.MaxPool2d(2), _make_norm(width)]
        layers += [nn.GELU(), _make_convolution(width, width), _make_norm(width), nn.GELU()]
        channels = width
    layers += [nn.MaxPool2d(3), nn.Flatten(), nn.Linear(channels, 10, bias=False), Scaled()]
    return nn.Sequential(*layers)


def _make_convolution(channels: int, width: int) -> nn.Conv2d:
    """Return a convolution whose first filters are the identity."""
    layer = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:channels])
    return layer


def _make_norm(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad = False
    return norm


def list_batches(images: Tensor, labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches of crops without end. Flips alternate from epoch to epoch."""
    draw = torch.Generator().manual_seed(seed)
    flipped_first = torch.rand(len(images), generator=draw) < 0.5
    padded = functional.pad(images, (2, 2, 2, 2), mode="reflect")
    epoch = 0
    while True:
        order = torch.randperm(len(images), generator=draw)
        flips = flipped_first ^ bool(epoch % 2)
        for first in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            rows = order[first : first + BATCH_SIZE]
            corners = torch.randint(0, 5, (BATCH_SIZE, 2), generator=draw).tolist()
            crops = [
                padded[row, :, y : y + 32, x : x + 32]
                for row, (y, x) in zip(rows.tolist(), corners, strict=True)
            ]
            batch = torch.stack(crops)
            batch = torch.where(flips[rows][:, None, None, None], batch.flip(3), batch)
            yield batch.contiguous(memory_format=torch.channels_last), labels[rows]
        epoch += 1


def predict(network: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of six views: the image and two shifts by a pixel, each also mirrored."""
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    views = ((images, 0.5), (padded[..., :32, :32], 0.25), (padded[..., 2:, 2:], 0.25))
    logits = torch.zeros(len(images), 10)
    for view, weight in views:
        logits += weight * 0.5 * (network(view) + network(view.flip(3)))
    return logits


def measure_accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of right predictions."""
    network.eval()
    with torch.no_grad():
        right = [
            (predict(network, images[first : first + 500]).argmax(1) == labels[first : first + 500])
            for first in range(0, len(images), 500)
        ]
    network.train()
    return torch.cat(right).float().mean().item()


def make_optimizer(network: nn.Sequential) -> torch.optim.SGD:
    """Return the optimizer. Decay doesn't depend on the group's rate."""
    biases = [layer.bias for layer in network if isinstance(layer, nn.BatchNorm2d)]
    weights = [layer.weight for layer in network[1:] if isinstance(layer, nn.Conv2d | nn.Linear)]
    groups = [
        {"params": [network[0].bias, *weights], "lr": RATE, "weight_decay": DECAY / RATE},
        {"params": biases, "lr": RATE * BIAS_FACTOR, "weight_decay": DECAY / RATE / BIAS_FACTOR},
    ]
    return torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)


def train(
    network: nn.Sequential,
    train_split: tuple[Tensor, Tensor],
    test_split: tuple[Tensor, Tensor],
    seed: int,
) -> None:
    """Train the network, and print the accuracy on `test_split` after each epoch."""
    epoch_steps = len(train_split[0]) // BATCH_SIZE
    num_steps = math.ceil(EPOCHS * epoch_steps)
    optimizer = make_optimizer(network)
    places = [0, int(0.23 * num_steps), num_steps]
    rates = np.interp(np.arange(num_steps + 1), places, [0.2, 1, 0.07]).tolist()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    slow = {name: value.clone() for name, value in network.state_dict().items()}
    batches = list_batches(*train_split, seed)
    steps_s = 0.0
    for step in range(1, num_steps + 1):
        started_at = time.perf_counter()
        network[0].bias.requires_grad = step <= WHITENED_EPOCHS * epoch_steps
        images, labels = next(batches)
        logits = network(images)
        loss = functional.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        is_last = step == num_steps
        if step % 5 == 0 or is_last:
            look_ahead(network, slow, 1.0 if is_last else 0.95**5 * (step / num_steps) ** 3)
        steps_s += time.perf_counter() - started_at
        if step % epoch_steps == 0 or is_last:
            accuracy = measure_accuracy(network, *test_split)
            epoch = step / epoch_steps
            print(
                f"epoch {epoch:.1f}: accuracy {accuracy:.4f}, {steps_s:.0f} s of steps", flush=True
            )


@torch.no_grad()
def look_ahead(network: nn.Module, slow: dict[str, Tensor], decay: float) -> None:
    """Move slow weights by 1 - `decay` towards the network's, and set the network's to them."""
    for name, value in network.state_dict().items():
        if value.is_floating_point():
            value.copy_(slow[name].lerp_(value, 1 - decay))


def read_split(root: str, name: str) -> tuple[Tensor, Tensor]:
    """Return normalized images (n, 3, 32, 32), float32, and labels of a split of CIFAR-10."""
    recipe = load_recipe("cnn6_cifar10_speedrun", [f"dataset.root={root}"])
    columns = getattr(recipe.dataset.read(cache_root(recipe.cache)), name).columns
    images = (np.asarray(columns["image"]) / 255 - MEAN) / DEVIATION
    tensor = torch.tensor(images.transpose(0, 3, 1, 2), dtype=torch.float32)
    labels = torch.tensor(np.asarray(columns["label"]), dtype=torch.int64)
    return tensor.contiguous(memory_format=torch.channels_last), labels


def main() -> None:
    """Train once and print a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", required=True, help="folder of CIFAR-10's binary files")
    parser.add_argument("--threads", type=int, help="default: all cores")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    train_split = read_split(args.root, "train")
    network = make_network(train_split[0][:WHITENED_IMAGES])
    network = network.to(memory_format=torch.channels_last)
    train(network, train_split, read_split(args.root, "eval"), args.seed)


if __name__ == "__main__":
    main()
