"""Gradients of imported networks of timm and transformers beside PyTorch's, for several batches.

    python -m benchmarks.foreign_gradients timm/hgnet timm/hardcorenas --batches 6
    python -m benchmarks.foreign_gradients timm/hgnet timm/vgg --batches 3 --float64

For each batch the distance of the gradient of the first step to PyTorch's in float64, in the
Euclidean norm, relative to the norm of the gradient: of the imported network, of PyTorch in
float32, and of PyTorch in float64 with samples that are moved by 1e-6 of their values. Where a ReLU
or a maximum decides within rounding, each of them can differ by more than rounding; a rule that
differs does so in each batch. The parameter with the largest difference is named.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax.traverse_util import flatten_dict
from torch import nn

from benchmarks.foreign import BATCH, QUICK, list_networks, to_samples
from benchmarks.foreign_networks import ForeignNetwork, make_network
from benchmarks.foreign_page import COUNTS
from benchmarks.measure import table
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork, initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module
from pipeline.models.torch_graph.graph import KERNEL_AXES, TorchGraph

MOVE = 1e-6
"""Standard deviation of the factors of moved samples, less 1."""
Gradients = Mapping[str, np.ndarray]
"""Gradients by PyTorch's names of the parameters."""


def main() -> None:
    """Compare and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+", help="such as timm/hgnet")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of variants and weights")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--float64", action="store_true", help="import in float64")
    args = parser.parse_args()
    if args.float64:
        jax.config.update("jax_enable_x64", True)
        # Operators name float32 for sums, which must be as wide as the rest.
        jnp.float32 = jnp.float64
    if unknown := set(args.networks) - set(list_networks(args.seed)):
        parser.error(f"{', '.join(sorted(unknown))}: must be networks that the seed draws")
    header = ["network", "batch", "imported", "PyTorch in float32", "moved in float64", "most in"]
    rows = []
    for name in args.networks:
        for row in compare_gradients(name, args.seed, args.batches, is_wide=args.float64):
            rows.append([name, *row])
            print(" | ".join(rows[-1]), flush=True)
    print(table(header, rows))


def compare_gradients(name: str, seed: int, batches: int, *, is_wide: bool) -> Iterator[list[str]]:
    """Yield a row of figures for each batch. With `is_wide` the imported network is in float64."""
    text, _, family = name.partition("/")
    package = next(package for package in COUNTS if package == text)
    network = make_network(package, family, seed)
    graph = export_module(network.module, network.shape, origin=family, dtype=network.dtype)
    dtype = "float64" if is_wide else "float32"
    imported = TorchNetwork(graph, dtype)
    variables = jax.tree.map(lambda x: np.asarray(x, dtype), initial_variables_of(graph))

    def compute_loss(params: Any, x: Any, labels: Any) -> Any:
        trained = {"params": params, "batch_stats": variables["batch_stats"]}
        keys = {"dropout": jax.random.key(0)}
        logits, _ = imported.apply(trained, x, train=True, mutable=["batch_stats"], rngs=keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    differentiate = jax.jit(jax.grad(compute_loss), compiler_options=dict(QUICK))
    for number, (x, labels) in enumerate(network.draw_batches(batches, BATCH)):
        samples = to_samples(x)
        samples = samples if samples.dtype.kind == "i" else samples.astype(dtype)
        tree = differentiate(variables["params"], samples, jnp.asarray(labels))
        ours = _name_gradients(graph, tree)
        exact = _differentiate_torch(network, x, labels, torch.float64)
        theirs = _differentiate_torch(network, x, labels, torch.float32)
        moved = _differentiate_torch(network, _move(x), labels, torch.float64)
        largest = max(exact, key=lambda key: float(np.abs(ours[key] - exact[key]).max()))
        distances = [f"{_find_distance(of, exact):.1e}" for of in (ours, theirs, moved)]
        yield [str(number), *distances, largest]


def _move(x: np.ndarray) -> np.ndarray:
    """Return samples that are moved by `MOVE` of their values; tokens as they are."""
    if x.dtype.kind == "i":
        return x
    return x * (1 + MOVE * np.random.default_rng(0).normal(size=x.shape))


def _name_gradients(graph: TorchGraph, tree: Any) -> Gradients:
    """Return gradients in PyTorch's order of axes, by its names."""
    specs = {spec.path: spec for spec in graph.arrays}
    gradients = {}
    for path, leaf in flatten_dict(tree, sep="/").items():
        spec = specs[path]
        axes = KERNEL_AXES.get(spec.order, tuple(range(leaf.ndim)))
        gradients[spec.name] = np.asarray(leaf).transpose(np.argsort(axes))
    return gradients


def _differentiate_torch(
    network: ForeignNetwork, x: np.ndarray, labels: np.ndarray, dtype: torch.dtype
) -> Gradients:
    module = copy.deepcopy(network.module).to(dtype).train()
    samples = torch.from_numpy(x)
    samples = samples if network.dtype == "int64" else samples.to(dtype)
    logits = network.choose_logits(module(samples))
    nn.functional.cross_entropy(
        logits.flatten(0, -2), torch.from_numpy(labels).flatten()
    ).backward()
    return {
        name: parameter.grad.numpy()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def _find_distance(gradients: Gradients, exact: Gradients) -> float:
    squares = sum(float(((gradients[name] - exact[name]) ** 2).sum()) for name in exact)
    norm = sum(float((gradient**2).sum()) for gradient in exact.values())
    return float(np.sqrt(squares / norm))


if __name__ == "__main__":
    main()
