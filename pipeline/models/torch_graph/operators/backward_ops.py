"""PyTorch's operators of gradients, and operators of custom backward passes.

Gradients are computed by JAX's derivatives of the forward operators; `apply_graph` computes custom
backward passes.

Programs have operators of gradients if a custom backward pass calls `torch.autograd.grad`. The
functions of a custom pass's operators only have the parameters, against which arguments are
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.torch_graph.graph import COTANGENT, CUSTOM_GRADIENT
from pipeline.models.torch_graph.operator_table import (
    OPERATORS,
    AtenOperator,
    OperatorContext,
    TorchTensor,
    aten,
    plain,
    to_tensor,
)

Gradients = tuple[TorchTensor | None, ...]


def _differentiate(
    function: Callable[..., Any], inputs: Sequence[TorchTensor | None], cotangent: TorchTensor
) -> list[TorchTensor | None]:
    """Return the gradients of a function's first result with respect to its inputs."""
    arrays = [None if x is None else x.plain() for x in inputs]

    def compute(*arrays: Array | None) -> Array:
        result = function(*(None if x is None else to_tensor(x) for x in arrays))
        first = result[0] if isinstance(result, tuple) else result
        return first.plain()

    y, pull_back = jax.vjp(compute, *arrays)
    gradients = pull_back(cotangent.plain().astype(y.dtype))
    return [None if g is None else to_tensor(g) for g in gradients]


def _select(gradients: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    """Return the gradients that a mask names, and None for others."""
    return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))


@aten("convolution_backward.default")
def differentiate_convolution(
    context: OperatorContext,
    cotangent: TorchTensor,
    x: TorchTensor,
    weight: TorchTensor,
    bias_sizes: Sequence[int] | None,
    *settings: Any,
) -> Gradients:
    """Return the gradients of a convolution's images, kernel and bias."""
    *options, mask = settings
    shape = tuple(bias_sizes) if bias_sizes else (cotangent.shape[1],)
    bias = to_tensor(jnp.zeros(shape, jnp.float32))
    convolve = OPERATORS["aten.convolution.default"]
    gradients = _differentiate(
        lambda x, w, b: convolve(context, x, w, b, *options), (x, weight, bias), cotangent
    )
    return _select(gradients, mask)


def _register_pool(name: str, forward: str, num_ignored: int = 0) -> None:
    """Register the gradient of a pool; its last `num_ignored` arguments aren't of the pool."""

    @aten(name)
    def differentiate_pool(
        context: OperatorContext, cotangent: TorchTensor, x: TorchTensor, *settings: Any
    ) -> TorchTensor:
        options = settings[: len(settings) - num_ignored]
        pool = OPERATORS[forward]
        (gradient,) = _differentiate(lambda x: pool(context, x, *options), (x,), cotangent)
        assert gradient is not None
        return gradient


_register_pool("avg_pool2d_backward.default", "aten.avg_pool2d.default")
# The last argument is the indices of the maxima.
_register_pool("max_pool2d_with_indices_backward.default", "aten.max_pool2d.default", 1)


@aten("_adaptive_avg_pool2d_backward.default")
def differentiate_adaptive_pool(
    context: OperatorContext, cotangent: TorchTensor, x: TorchTensor
) -> TorchTensor:
    """Return the gradient of an adaptive average pool's images."""
    pool = OPERATORS["aten.adaptive_avg_pool2d.default"]
    size = cotangent.shape[-2:]
    (gradient,) = _differentiate(lambda x: pool(context, x, size), (x,), cotangent)
    assert gradient is not None
    return gradient


@aten("embedding_dense_backward.default")
@plain
def differentiate_embedding(
    cotangent: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """Return the gradient of an embedding's table."""
    flat = indices.reshape(-1)
    rows = cotangent.reshape(flat.shape[0], -1)
    rows = jnp.where((flat == padding_idx)[:, None], jnp.zeros_like(rows), rows)
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, rows.dtype).at[flat].add(1)
        rows = rows / counts[flat][:, None]
    return jnp.zeros((num_weights, rows.shape[1]), rows.dtype).at[flat].add(rows)


def _differentiate_norm(x: Array, slope: Array, deviation: Array, axes: Sequence[int]) -> Array:
    """Return the gradient of x of a norm over axes.

    x is normalised, `slope` the gradient of it, and `deviation` 1 / the standard deviation.
    """
    mean = slope.mean(axes, keepdims=True)
    return deviation * (slope - mean - x * (slope * x).mean(axes, keepdims=True))


@aten("native_layer_norm_backward.default")
@plain
def differentiate_layer_norm(
    cotangent: Any, x: Any, shape: Sequence[int], mean: Any, deviation: Any, *others: Any
) -> Any:
    """Return the gradients of a layer norm's input, scale and bias."""
    weight, _, mask = others
    y = (x.astype(jnp.float32) - mean) * deviation
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    batch = tuple(range(x.ndim - len(shape)))
    slope = cotangent.astype(jnp.float32)
    scaled = slope if weight is None else slope * weight
    dx = _differentiate_norm(y, scaled, deviation, axes).astype(x.dtype)
    return _select((dx, (slope * y).sum(batch), slope.sum(batch)), mask)


@aten("native_group_norm_backward.default")
@plain
def differentiate_group_norm(cotangent: Any, x: Any, mean: Any, *others: Any) -> Any:
    """Return the gradients of a group norm's input, scale and bias."""
    deviation, weight, batch, channels, _, num_groups, mask = others
    grouped = (batch, num_groups, -1)
    mean, deviation = (a.reshape(batch, num_groups, 1) for a in (mean, deviation))
    y = (x.astype(jnp.float32).reshape(grouped) - mean) * deviation
    slope = cotangent.astype(jnp.float32).reshape(batch, channels, -1)
    scaled = slope if weight is None else slope * weight[:, None]
    dx = _differentiate_norm(y, scaled.reshape(grouped), deviation, (2,))
    weighted = (slope * y.reshape(slope.shape)).sum((0, 2))
    return _select((dx.reshape(x.shape).astype(x.dtype), weighted, slope.sum((0, 2))), mask)


def _take_cotangent(output: Any) -> Any:
    raise ValueError("is computed in a backward pass only")


def _take_gradient(inputs: Any, outputs: Any, cotangents: Any, gradients: Any) -> Any:
    raise ValueError("is computed with its backward pass only")


OPERATORS[COTANGENT] = AtenOperator(_take_cotangent)
OPERATORS[CUSTOM_GRADIENT] = AtenOperator(_take_gradient)
