"""Functions around the layers of a network, in one another."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.layers import standard, tokens
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.apply_layers import (
    COMPUTATIONS,
    _import_and_apply,
    find_computation,
    intercept_layers,
    record_layers,
)
from tests.models.build import network

LAYERS = network(standard.Flatten(), standard.Relu())
IMAGES = jnp.array([[[[-1.0], [2.0]]]])


def test_layers_are_recorded_by_nested_recorders() -> None:
    outer: list[str] = []
    inner: list[str] = []
    alone: list[str] = []
    key = jax.random.key(0)
    with record_layers(lambda path, kind, y: outer.append(kind)):
        with record_layers(lambda path, kind, y: inner.append(kind)):
            LAYERS.init_with_output(key, IMAGES, train=False)
        LAYERS.init_with_output(key, IMAGES, train=False)
    with record_layers(lambda path, kind, y: alone.append(kind)):
        LAYERS.init_with_output(key, IMAGES, train=False)
    assert alone == ["flatten", "relu"]
    assert inner == alone
    assert outer == [*alone, *alone]


def test_outer_interceptor_receives_the_result_of_the_inner_one() -> None:
    def double(layer: Any, compute: Any, x: Any, context: Any) -> Any:
        return 2 * compute(x)

    def add_one(layer: Any, compute: Any, x: Any, context: Any) -> Any:
        return 1 + compute(x)

    with intercept_layers(double), intercept_layers(add_one):
        result, _ = LAYERS.init_with_output(jax.random.key(0), IMAGES, train=False)
    # Flatten: 2 * (x + 1); ReLU: 2 * (relu + 1).
    assert result.tolist() == [[2.0, 14.0]]


def test_each_layer_is_listed_with_the_module_that_computes_it() -> None:
    """A layer that is missing from the list would have no computation until another imports it."""
    found: dict[str, set[type[LayerSpec]]] = {}
    for name in COMPUTATIONS:
        source = Path(import_module(name).__file__ or "").read_text()
        layers = re.findall(r"^@computes\((standard|tokens)\.(\w+)\)", source, re.MULTILINE)
        files = {"standard": standard, "tokens": tokens}
        found[name] = {getattr(files[file], layer) for file, layer in layers}
    assert found == {name: set(layers) for name, layers in COMPUTATIONS.items()}
    late = [layer for layers in found.values() for layer in layers]
    assert all(
        getattr(find_computation(layer), "func", None) != _import_and_apply for layer in late
    )
