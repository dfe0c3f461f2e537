"""Module paths from name stacks, as JAX writes them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from pipeline.models.modules.name_stack import DATA, find_layer


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("", ""),
        ("jit(step)", ""),
        (DATA, ""),
        ("jvp(Net)/conv_0", "conv_0"),
        ("transpose(jvp(Net))/conv_0", "conv_0"),
        ("vmap(jvp(Net))/block/conv_0", "block/conv_0"),
        ("jvp(encoder)/attention", "encoder/attention"),
        ("jvp(Net)/checkpoint/dense_0", "dense_0"),
        ("transpose(jvp(Net))/rematted_computation/Net/dense_0", "Net/dense_0"),
        ("transpose(jvp(block))/x/jvp(block)/dense_0", "block/dense_0"),
    ],
)
def test_layer_name_is_its_path_below_the_network(scope: str, layer: str) -> None:
    assert find_layer(scope) == layer


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2, name="head")(nn.Dense(3, name="body")(x))


@pytest.mark.medium
def test_equations_of_both_passes_have_flax_layer_names() -> None:
    variables = Net().init(jax.random.key(0), jnp.ones((1, 4)))
    traced = jax.make_jaxpr(jax.grad(lambda v: Net().apply(v, jnp.ones((1, 4))).sum()))(variables)
    stacks = {str(equation.source_info.name_stack) for equation in traced.eqns}
    assert any("transpose" in stack for stack in stacks)
    assert {find_layer(stack) for stack in stacks} - {""} == {"head", "body"}
