"""Networks of torchvision, imported: logits, losses and time of import beside PyTorch's.

    python -m benchmarks.torch_networks --save
    python -m benchmarks.torch_networks --networks resnet18,vit_b_16 --rounds 3

For each network, from the same weights with the same batches: the largest difference of logits in
evaluation, relative to the largest logit; the largest relative difference of the losses of 20 steps
of SGD with momentum in float32, beside the same of PyTorch's float32 to its float64; the seconds of
`torch.export` for both forms, and of the import with it, in turn. Then the step of ResNet-18
imported, beside the step of `model=resnet18`. Dropout and stochastic depth are off, since their
draws differ.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torchvision
from torch import nn

from benchmarks.imported_step import make_step
from benchmarks.layouts import Contestant
from benchmarks.measure import add_save, alternate, heading, publish, table
from pipeline.core.plugins.loading import export_plugins
from pipeline.core.registry import load_all
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork, initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module

PACKAGES = ("jax", "jaxlib", "torch", "torchvision")
NETWORKS = {
    "resnet18": 96,
    "mobilenet_v3_small": 96,
    "vit_b_16": 64,
    "densenet121": 96,
    "alexnet": 96,
    "vgg11": 96,
    "efficientnet_b0": 96,
    "squeezenet1_1": 96,
    "convnext_tiny": 96,
    "swin_t": 96,
    "mobilenet_v2": 96,
    "mnasnet1_0": 96,
    "shufflenet_v2_x1_0": 96,
    "regnet_y_400mf": 96,
    "resnext50_32x4d": 96,
    "googlenet": 96,
}
"""Height and width of the images, by network."""
RATE = 1e-4
RATES = dict.fromkeys(list(NETWORKS)[-6:], 1e-6)
"""Learning rates of networks whose batch norm over few samples makes PyTorch's float32 part from
its float64 within a few steps of the common rate."""
CLASSES = 10
BATCH = 8
BATCHES = 4
STEPS = 20
_OPS = "[{name:resize,size:[64,64],interpolation:linear},{name:rescale,factor:0.0039,shift:0.0}]"
COMMON = [
    *("dataset=synthetic", "dataset.like=cifar10", "dataset.train_size=256"),
    *("dataset.eval_size=64", f"dataset.train.ops={_OPS}", f"dataset.eval.ops={_OPS}"),
    *("train.batch_size=32", "train.epochs=null", "train.epochs=null", "train.steps=100"),
    *("train.sink_size=100", "train.feed=resident"),
]


@dataclass(frozen=True)
class Comparison:
    """Figures of one network."""

    name: str
    side: int
    rate: float
    nodes: int
    logits: float
    losses: float
    torch_losses: float
    export_s: list[float]
    import_s: list[float]

    def make_row(self) -> list[str]:
        """Return the figures as a row of the table."""
        export_s = statistics.median(self.export_s)
        import_s = statistics.median(self.import_s)
        return [
            self.name,
            f"{self.side}x{self.side}",
            f"{self.rate:.0e}",
            f"{self.nodes:,}",
            f"{self.logits:.1e}",
            f"{self.losses:.1e}",
            f"{self.torch_losses:.1e}",
            f"{export_s:.1f}",
            f"{import_s:.1f}",
            f"{import_s - export_s:+.1f}",
        ]


def main() -> None:
    """Compare and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=3, help="of exports, and of timed steps")
    parser.add_argument("--steps", type=int, default=4, help="of ResNet-18 in a timed round")
    add_save(parser, "torch_networks.md")
    args = parser.parse_args()
    rows = []
    for name in filter(None, args.networks.split(",")):
        rows.append(compare(name, NETWORKS[name], args.rounds).make_row())
        print(" | ".join(rows[-1]), flush=True)
    text = heading(
        "Networks of torchvision, imported", "python -m benchmarks.torch_networks", PACKAGES
    )
    header = ["network", "images", "rate", "nodes", "logits", "losses"]
    header += ["PyTorch float32 to float64", "torch.export, s", "import, s", "more, s"]
    text += f"\n{table(header, rows)}\n{_time_steps(args.rounds, args.steps)}"
    publish(text, args.save)


def compare(name: str, side: int, rounds: int) -> Comparison:
    """Compare an imported network with PyTorch's."""
    module = make_module(name, side)
    rate = RATES.get(name, RATE)
    example = torch.zeros(2, 3, side, side)
    calls = {
        "export": lambda: _time_call(lambda: _export_both(module, example)),
        "import": lambda: _time_call(lambda: export_module(module, (3, side, side))),
    }
    times = alternate(calls, rounds)
    _warm_statistics(module, side)
    graph = export_module(module, (3, side, side), origin=name)
    network = TorchNetwork(graph, "float32")
    variables = initial_variables_of(graph)
    images = np.random.default_rng(1).normal(size=(4, 3, side, side)).astype(np.float32)
    apply = jax.jit(lambda variables, x: network.apply(variables, x, train=False))
    logits = np.asarray(apply(variables, to_nhwc(images)))
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(images)).numpy()
    batches = list(_draw_batches(side))
    losses = np.array(train_jax(network, variables, batches, rate))
    in_64_bits = np.array(train_torch(copy.deepcopy(module).double(), batches, rate, torch.float64))
    in_32_bits = np.array(train_torch(module, batches, rate, torch.float32))
    return Comparison(
        name,
        side,
        rate,
        len(graph.training.nodes),
        float(np.abs(logits - expected).max() / np.abs(expected).max()),
        _find_largest(losses, in_32_bits),
        _find_largest(in_64_bits, in_32_bits),
        times["export"],
        times["import"],
    )


def _find_largest(losses: np.ndarray, expected: np.ndarray) -> float:
    return float((np.abs(losses - expected) / np.abs(expected)).max())


def _time_call(work: Any) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def _export_both(module: nn.Module, example: torch.Tensor) -> None:
    """Export both forms as the import does, and nothing else."""
    dims = ({0: torch.export.Dim("batch", min=1, max=1 << 20)},)
    for train in (True, False):
        torch.export.export(module.train(train), (example,), dynamic_shapes=dims, strict=False)


def make_module(name: str, side: int) -> nn.Module:
    """Make a network of torchvision, or else of timm, without random draws in training."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"image_size": side} if name.startswith("vit") else {}
    if name == "googlenet":
        options = {"aux_logits": False, "init_weights": False}
    if hasattr(torchvision.models, name):
        module = getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **options)
    else:
        import timm

        module = timm.create_model(name, num_classes=CLASSES)
    for layer in module.modules():
        if isinstance(layer, nn.Dropout) or type(layer).__name__ == "StochasticDepth":
            layer.p = 0.0
    for path, parameter in module.named_parameters():
        # ViT's head starts at zero, so that all logits would be zero.
        if path.startswith("heads."):
            nn.init.normal_(parameter.data, std=0.05)
    return module


def _warm_statistics(module: nn.Module, side: int) -> None:
    module.train()
    with torch.no_grad():
        for _ in range(3):
            module(torch.randn(BATCH, 3, side, side))


Batches = Sequence[tuple[np.ndarray, np.ndarray]]
"""Images NCHW and labels of each step."""


def _draw_batches(side: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCHES, BATCH, 3, side, side)).astype(np.float32)
    labels = random.integers(0, CLASSES, (BATCHES, BATCH))
    for step in range(STEPS):
        yield images[step % BATCHES], labels[step % BATCHES]


def to_nhwc(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1))


def train_torch(
    module: nn.Module, batches: Batches, rate: float, dtype: torch.dtype
) -> list[float]:
    """Train a module, and return the loss of each step."""
    optimizer = torch.optim.SGD(module.train().parameters(), lr=rate, momentum=0.9)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        logits = module(torch.from_numpy(images).to(dtype))
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_jax(network: TorchNetwork, variables: Any, batches: Batches, rate: float) -> list[float]:
    """Train an imported network, and return the loss of each step."""
    optimizer = optax.sgd(rate, momentum=0.9)
    step = jax.jit(make_step(network, optimizer))
    params = variables["params"]
    stats = variables["batch_stats"]
    state = optimizer.init(params)
    losses = []
    for images, labels in batches:
        x = jnp.asarray(to_nhwc(images))
        params, stats, state, loss = step(params, stats, state, x, jnp.asarray(labels))
        losses.append(float(loss))
    return losses


def _time_steps(rounds: int, steps: int) -> str:
    """Time the step of ResNet-18, of this project and imported, in turn."""
    export_plugins(["torchvision.models"])
    load_all()
    imported = ["model=torch", "model.import=torchvision.models:resnet18"]
    imported.append("model.arguments={num_classes:$classes}")
    contestants = {
        "model=resnet18": Contestant("lenet5_digits", ["model=resnet18", *COMMON], steps),
        "imported": Contestant("lenet5_digits", [*imported, *COMMON], steps),
    }
    times = alternate(contestants, rounds * 2 + 1)
    base = statistics.median(times["model=resnet18"])
    rows = [_make_step_row(name, column, base) for name, column in times.items()]
    header = ["ResNet-18, 64x64, batch 32, float32", "ms/step", "range", "ratio"]
    return table(header, rows)


def _make_step_row(name: str, times: Sequence[float], base: float) -> list[str]:
    median = statistics.median(times)
    span = f"{min(times):,.0f} to {max(times):,.0f}"
    return [name, f"{median:,.0f}", span, f"{median / base:.2f}x"]


if __name__ == "__main__":
    main()
