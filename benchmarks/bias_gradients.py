"""Gradients of the biases of PyTorch networks in 16 bits, against float64, beside PyTorch's own.

    python -m benchmarks.bias_gradients --save
    python -m benchmarks.bias_gradients --networks alexnet,repvgg_a0 --precisions bf16

For each network, from the same weights with the same batch: PyTorch's gradients in float64; those
of the imported network in bf16 and O2; and PyTorch's own in `torch.autocast` to bfloat16 and
float16. An error is the norm of the difference of a bias's gradient, relative to the norm of its
gradient in float64. Biases whose gradient is zero in exact arithmetic, such as those before a batch
norm, are left out. Losses are scaled by 16,384 in float16, on both sides. Dropout and stochastic
depth are off, since their draws differ.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax.traverse_util import flatten_dict
from torch import nn

from benchmarks.measure import add_save, heading, publish, table
from benchmarks.torch_networks import make_module, to_nhwc
from pipeline.models.layers.precision import LEVELS, Level
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork, initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module
from pipeline.models.torch_graph.graph import TorchGraph

PACKAGES = ("jax", "jaxlib", "torch", "torchvision", "timm")
NETWORKS = ("alexnet", "vgg11", "squeezenet1_1", "mobilenet_v3_small", "convnext_tiny", "swin_t")
AUTOCAST: Mapping[Level, torch.dtype] = {"bf16": torch.bfloat16, "O2": torch.float16}
SCALE: Mapping[Level, float] = {"bf16": 1.0, "O2": 16384.0}
"""Factors of the loss, by which small gradients of float16 aren't zero."""
SIDE = 64
CLASSES = 10
ZERO = 1e-9
"""Norm of a bias's gradient, relative to all biases', below which it is rounding alone."""
Gradients = dict[str, np.ndarray]


def main() -> None:
    """Compare and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--precisions", default=",".join(AUTOCAST))
    parser.add_argument("--batch", type=int, default=32)
    add_save(parser, "bias_gradients.md")
    args = parser.parse_args()
    rows = []
    for name in args.networks.split(","):
        for row in compare(name, args.batch, args.precisions.split(",")):
            rows.append(row)
            print(" | ".join(row), flush=True)
    text = heading(
        "Gradients of biases in 16 bits", "python -m benchmarks.bias_gradients", PACKAGES
    )
    text += f"\nImages {SIDE}x{SIDE}, batch {args.batch}.\n"
    header = ["network", "precision", "biases"]
    header += ["all", "PyTorch's", "median", "PyTorch's", "largest", "PyTorch's", "ratio of all"]
    publish(f"{text}\n{table(header, rows)}", args.save)


def compare(name: str, batch: int, precisions: list[Level]) -> list[list[str]]:
    """Return a row of the table for each precision."""
    module = make_module(name, SIDE).train()
    graph = export_module(module, (3, SIDE, SIDE), origin=name)
    random = np.random.default_rng(1)
    images = random.normal(size=(batch, 3, SIDE, SIDE)).astype(np.float32)
    labels = random.integers(0, CLASSES, batch)
    exact = _differentiate_torch(copy.deepcopy(module).double(), images, labels, None)
    paths = {spec.name: spec.path for spec in graph.arrays}
    total = float(np.linalg.norm([np.linalg.norm(array) for array in exact.values()]))
    exact = {key: g for key, g in exact.items() if np.linalg.norm(g) > ZERO * total}
    rows = []
    for level in precisions:
        ours = _differentiate_jax(graph, images, labels, level)
        theirs = _differentiate_torch(copy.deepcopy(module), images, labels, level)
        our_errors = _errors({key: ours[paths[key]] for key in exact}, exact)
        their_errors = _errors({key: theirs[key] for key in exact}, exact)
        cells = [
            f"{value:.2%}" for pair in zip(our_errors, their_errors, strict=True) for value in pair
        ]
        rows.append(
            [name, level, str(len(exact)), *cells, f"{our_errors[0] / their_errors[0]:.2f}x"]
        )
    return rows


def _errors(gradients: Gradients, exact: Gradients) -> tuple[float, float, float]:
    """Return the error of all biases together, and the median and largest of one bias."""
    pairs = [(gradients[key], exact[key]) for key in exact]
    differences = np.array([np.linalg.norm(g - e) for g, e in pairs])
    norms = np.array([np.linalg.norm(e) for _, e in pairs])
    errors = differences / norms
    together = np.linalg.norm(differences) / np.linalg.norm(norms)
    return float(together), float(np.median(errors)), float(errors.max())


def _differentiate_torch(
    module: nn.Module, images: np.ndarray, labels: np.ndarray, level: Level | None
) -> Gradients:
    """Return the gradients of biases: in the type of the module, or by autocast."""
    dtype = torch.float64 if level is None else torch.float32
    inputs = torch.from_numpy(images).to(dtype)
    autocast_type = torch.bfloat16 if level is None else AUTOCAST[level]
    with torch.autocast("cpu", autocast_type, enabled=level is not None):
        logits = module(inputs)
    loss = nn.functional.cross_entropy(logits.to(dtype), torch.from_numpy(labels))
    scale = 1.0 if level is None else SCALE[level]
    (loss * scale).backward()
    return {
        name: parameter.grad.double().numpy() / scale
        for name, parameter in module.named_parameters()
        if name.endswith("bias") and parameter.grad is not None
    }


def _differentiate_jax(
    graph: TorchGraph, images: np.ndarray, labels: np.ndarray, level: Level
) -> dict[str, Any]:
    """Return the gradients of all parameters of the imported network by their paths."""
    precision = LEVELS[level]
    network = TorchNetwork(graph, precision.dtype, rules=precision.rules)
    variables = initial_variables_of(graph)
    scale = SCALE[level]

    def loss_of(params: Any, images: Any) -> Any:
        inputs = variables | {"params": params}
        key = {"dropout": jax.random.key(0)}
        logits, _ = network.apply(inputs, images, train=True, mutable=["batch_stats"], rngs=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean() * scale

    gradients = jax.jit(jax.grad(loss_of))(variables["params"], to_nhwc(images))
    flat = flatten_dict(gradients, sep="/")
    return {path: np.asarray(array, np.float64) / scale for path, array in flat.items()}


if __name__ == "__main__":
    main()
