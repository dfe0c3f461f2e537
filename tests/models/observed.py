"""Observed layers of a network, and the law that ties them to the gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from pipeline.models.modules.layer_capture import (
    LayerCapture,
    Observations,
    grad_observing_layers,
)
from tests.models.build import QUICK, draw_variables, shapes


def scalar(module: nn.Module, variables: dict[str, Any], images: np.ndarray) -> Any:
    """A function of parameters in which every logit weighs differently, with the logits."""

    def function(params: Any) -> tuple[jax.Array, jax.Array]:
        logits, _ = module.apply(
            {**variables, "params": params},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(1)},
        )
        return jnp.sum(jnp.sin(1 + jnp.arange(logits.size)).reshape(logits.shape) * logits), logits

    return function


def observe(module: nn.Module, images: np.ndarray) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients and logits as jax has them, then both and the observations as we have them."""
    variables = jax.tree.map(jnp.asarray, draw_variables(shapes(module, images.shape[1:])))
    function = scalar(module, variables, images)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params: Any) -> tuple[Any, ...]:
        plain = jax.grad(function, has_aux=True)
        return *plain(params), *grad_observing_layers(function, params)

    return compute(variables["params"])  # type: ignore[no-any-return]


def patches(layer: LayerCapture) -> np.ndarray:
    """The patch of every output pixel: (batch, height, width, kernel * channels)."""
    assert layer.window is not None
    chwn = layer.layout == "chwn"
    images = np.asarray(layer.inputs)
    images = images.transpose(3, 1, 2, 0) if chwn else images
    rows, columns = layer.window.rows, layer.window.columns
    padded = np.pad(images, ((0, 0), rows.pads, columns.pads, (0, 0)))
    rows_of_patches = [
        [
            padded[
                :,
                y * rows.stride : y * rows.stride + rows.dilated_extent + 1 : rows.dilation,
                x * columns.stride : x * columns.stride
                + columns.dilated_extent
                + 1 : columns.dilation,
            ].reshape(len(images), -1)
            for x in range(columns.output_size)
        ]
        for y in range(rows.output_size)
    ]
    return np.array(rows_of_patches).transpose(2, 0, 1, 3)


def require_products(module: nn.Module, images: np.ndarray) -> Observations:
    """Inputs times cotangents are the gradients of the observed kernels, which are returned."""
    gradients, logits, ours, our_logits, seen = observe(module, images)
    np.testing.assert_allclose(our_logits, logits, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, gradients
    )
    kernels = flatten_dict(gradients, sep="/")
    for path, layer in seen.items():
        inputs = np.asarray(layer.inputs) if layer.window is None else patches(layer)
        cotangents = np.asarray(layer.cotangents)
        if layer.layout == "chwn":
            cotangents = cotangents.transpose(3, 1, 2, 0)
        assert inputs.shape[:-1] == cotangents.shape[:-1]
        product = np.tensordot(inputs, cotangents, axes=(range(inputs.ndim - 1),) * 2)
        kernel = np.asarray(kernels[f"{path}/kernel"])
        np.testing.assert_allclose(product.reshape(kernel.shape), kernel, rtol=1e-3, atol=1e-3)
    return seen  # type: ignore[no-any-return]
