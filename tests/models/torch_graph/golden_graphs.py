"""Graphs that PyTorch was asked about, and what it computed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from pipeline.models.torch_graph.computation.graph_file import read_graph
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork, initial_variables_of
from pipeline.models.torch_graph.graph import TorchGraph

FOLDER = Path(__file__).parents[2] / "golden" / "torch_graphs"
NAMES = sorted(path.name.removesuffix(".npz") for path in FOLDER.glob("*.npz"))
TO_AXES = {"torch": None, "hwio": (2, 3, 1, 0), "io": (1, 0)}
LABELS = np.arange(4) % 3


@cache
def golden_graph(name: str) -> TorchGraph:
    """A graph of tests/golden/torch_graphs."""
    return read_graph(FOLDER / f"{name}.torch.json")


@cache
def golden_results(name: str) -> dict[str, np.ndarray]:
    """What PyTorch computed: images NHWC, logits, loss, gradients and buffers by name."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    return {**arrays, "images": arrays["images"].transpose(0, 2, 3, 1)}


def network_of(graph: TorchGraph, **fields: Any) -> TorchNetwork:
    """The graph as a flax module in float32."""
    return TorchNetwork(graph, **{"dtype": "float32", **fields})


def train_once(
    graph: TorchGraph, images: np.ndarray, **fields: Any
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loss, gradients and buffers of one step, by PyTorch's names."""
    network, variables = network_of(graph, **fields), initial_variables_of(graph)

    @jax.jit
    def step(params: Any, stats: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits, changed = network.apply(
                {"params": params, "batch_stats": stats},
                images,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.key(0)},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
            return losses.mean(), changed

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    (loss, changed), gradients = step(variables["params"], variables["batch_stats"])
    stats = flatten_dict(changed.get("batch_stats", {}), sep="/")
    by_path = flatten_dict(gradients, sep="/")
    names = {spec.path: spec for spec in graph.arrays}
    return (
        float(loss),
        {
            names[path].name: _restore_torch_order(g, names[path].order)
            for path, g in by_path.items()
        },
        {names[path].name: np.asarray(array) for path, array in stats.items()},
    )


def _restore_torch_order(array: Any, order: str) -> np.ndarray:
    axes = TO_AXES[order]
    return np.asarray(array) if axes is None else np.asarray(array).transpose(np.argsort(axes))
