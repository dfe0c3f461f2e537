"""The layer `pallas_swish`: kernels by Pallas, interpreted on the CPU, by Triton on a GPU."""

from typing import Any, Literal

import jax
from jax.experimental.pallas import BlockSpec, cdiv, pallas_call, triton

from pipeline.core.registry import component
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.apply_layers import computes


def forward(x: Any, y: Any) -> None:
    y[...] = x[...] * jax.nn.sigmoid(x[...])


def backward(x: Any, dout: Any, dx: Any) -> None:
    gate = jax.nn.sigmoid(x[...])
    dx[...] = dout[...] * gate * (1 + x[...] * (1 - gate))


def run(kernel: Any, *arrays: jax.Array) -> jax.Array:
    flat, block = [array.ravel() for array in arrays], BlockSpec((1024,), lambda i: (i,))
    like, on_cpu = jax.typeof(flat[0]), jax.default_backend() == "cpu"
    options: Any = {"grid": cdiv(like.size, 1024), "compiler_params": triton.CompilerParams()}
    options |= {"in_specs": [block] * len(flat), "out_specs": block, "interpret": on_cpu}
    return pallas_call(kernel, like, **options)(*flat).reshape(arrays[0].shape)


swish = jax.custom_vjp(lambda x: run(forward, x))
swish.defvjp(lambda x: (swish(x), x), lambda x, dout: (run(backward, x, dout),))


@component("layer")
class PallasSwish(LayerSpec):
    name: Literal["pallas_swish"] = "pallas_swish"


computes(PallasSwish)(lambda layer, x, context: swish(x))
