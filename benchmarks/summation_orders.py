"""Losses of first steps in float32, by orders of summation, against float64.

    python -m benchmarks.summation_orders --save
    python -m benchmarks.summation_orders --networks resnet18 --seeds 3

A network in training with batch norm over few samples magnifies rounding: a sum in another order
moves a value across a ReLU's zero, and the next losses part. For each seed of batches, it prints
relative differences from PyTorch's losses in float64: of PyTorch as it is; with images NHWC;
without oneDNN; on one thread; with weights that differ by about 2^-24; and of the imported network,
in NHWC.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

import benchmarks.torch_networks as networks
from benchmarks.measure import add_save, heading, publish, table
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork, initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module

PACKAGES = ("jax", "jaxlib", "torch", "torchvision", "timm")
SIDE = 64
RATE = 1e-2
STEPS = 4


def main() -> None:
    """Compare and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default="repvgg_a0")
    parser.add_argument("--seeds", type=int, default=3)
    add_save(parser, "summation_orders.md")
    args = parser.parse_args()
    rows = []
    for name in args.networks.split(","):
        module = networks.make_module(name, SIDE)
        for seed in range(args.seeds):
            for row in compare(module, seed):
                rows.append([name, str(seed), *row])
                print(" | ".join(rows[-1]), flush=True)
    text = heading("Orders of summation", "python -m benchmarks.summation_orders", PACKAGES)
    text += f"\nImages {SIDE}x{SIDE}, batch {networks.BATCH}, SGD with momentum at {RATE}.\n"
    header = ["network", "seed", "float32", *(f"loss {step + 1}" for step in range(STEPS))]
    publish(f"{text}\n{table(header, rows)}", args.save)


def compare(module: nn.Module, seed: int) -> Iterator[list[str]]:
    """Yield the differences from the losses in float64, by order of summation."""
    random = np.random.default_rng(seed)
    images = random.normal(size=(STEPS, networks.BATCH, 3, SIDE, SIDE)).astype(np.float32)
    labels = random.integers(0, networks.CLASSES, (STEPS, networks.BATCH))
    batches = list(zip(images, labels, strict=True))

    def train(module: nn.Module, dtype: torch.dtype = torch.float32) -> np.ndarray:
        return np.array(networks.train_torch(copy.deepcopy(module), batches, RATE, dtype))

    exact = train(copy.deepcopy(module).double(), torch.float64)

    def show(order: str, losses: np.ndarray) -> list[str]:
        return [order, *(f"{error:+.0e}" for error in (losses - exact) / exact)]

    yield show("PyTorch", train(module))
    last = copy.deepcopy(module).to(memory_format=torch.channels_last)
    yield show("PyTorch, NHWC", train(last))
    with torch.backends.mkldnn.flags(enabled=False):
        yield show("PyTorch, without oneDNN", train(module))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield show("PyTorch, one thread", train(module))
    torch.set_num_threads(threads)
    yield show("PyTorch, other weights", train(_move_weights(module)))
    graph = export_module(module, (3, SIDE, SIDE))
    losses = networks.train_jax(
        TorchNetwork(graph, "float32"), initial_variables_of(graph), batches, RATE
    )
    yield show("imported, NHWC", np.array(losses))


def _move_weights(module: nn.Module) -> nn.Module:
    """Return a copy whose weights differ by a standard deviation of 2^-24 of their values."""
    moved = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 2**-24 * torch.randn(parameter.shape, generator=generator))
    return moved


if __name__ == "__main__":
    main()
