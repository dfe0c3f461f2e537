"""Coverage of a network's layers: k-multisection and boundary coverage of neurons.

A neuron is a feature of a layer's output, averaged over positions (Pei et al. 2017, DeepXplore).
Its range on training samples is cut into k equal sections. A set of samples covers the share of
sections that one of its samples reaches, and of the corners beyond both ends of the range (Ma et
al. 2018, DeepGauge: KMNC and NBC).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.inspect.dumps.layer_observer import LayerObserver
from pipeline.models.modules.apply_layers import intercept_layers
from pipeline.models.modules.layout import to_nhwc
from pipeline.training.step_config import StepConfig

SECTIONS = 100
SAME_VALUES = ("flatten", "dropout")
"""Layers whose outputs are the values of their inputs."""


def apply_with_neurons(config: StepConfig, variables: Any, images: Any) -> tuple[Array, Array]:
    """Return the logits of a network that lists layers, and its neurons, float32 (B, neurons)."""
    observer = LayerObserver()
    with intercept_layers(observer):
        logits: Any = config.network.apply(variables, images, train=False)
    neurons = []
    for path, output in observer.outputs.items():
        form = observer.forms[path]
        if form.kind in SAME_VALUES:
            continue
        values = to_nhwc(output, form.layout).astype(jnp.float32)
        features = values.mean(axis=tuple(range(1, values.ndim - 1)))
        # Layers inside `views` have a row for each view, after one another for an image.
        neurons.append(features.reshape(len(images), -1, features.shape[-1]).mean(1))
    return logits.astype(jnp.float32), jnp.concatenate(neurons, axis=1)


class NeuronCoverage:
    """The sections that samples have reached in the ranges of training samples' neurons, float32
    (n, neurons)."""

    def __init__(self, neurons: np.ndarray) -> None:
        self._low = neurons.min(axis=0)
        self._high = neurons.max(axis=0)
        self.reached = np.zeros((neurons.shape[1], SECTIONS + 2), bool)
        """The first and last section of a neuron are corners."""

    def add(self, neurons: np.ndarray) -> bool:
        """Add a sample, float32 (neurons,), and return whether it reaches a new section."""
        span = np.maximum(self._high.astype(np.float64) - self._low, np.finfo(np.float32).tiny)
        places = np.floor((neurons.astype(np.float64) - self._low) / span * SECTIONS)
        sections = 1 + places.clip(0, SECTIONS - 1).astype(np.int64)
        sections[neurons < self._low] = 0
        sections[neurons > self._high] = SECTIONS + 1
        rows = np.arange(len(sections))
        is_new = not self.reached[rows, sections].all()
        self.reached[rows, sections] = True
        return is_new

    def compute_shares(self) -> dict[str, float]:
        """Return the shares of reached sections (KMNC) and corners (NBC)."""
        sections = float(self.reached[:, 1:-1].mean())
        corners = float(self.reached[:, [0, -1]].mean())
        return {"multisection": sections, "boundary": corners}
