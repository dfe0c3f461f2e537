"""The network of the search in a tree: its gradients, against jax's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends.ascend.tune.tile_search import DecisionNetwork, make_inputs

LIMITS = (1, 288, 98, 32)


@pytest.mark.slow
def test_gradients_match_cross_entropy_gradients() -> None:
    generator = np.random.default_rng(1)
    network = DecisionNetwork(generator)
    network.output = generator.normal(size=network.output.shape)
    inputs = make_inputs([1, 8], [1, 2, 4], LIMITS, 32)
    shares = np.array([0.2, 0.7, 0.1])

    def cross_entropy(hidden: jax.Array, output: jax.Array) -> jax.Array:
        return -(shares * jax.nn.log_softmax(jnp.tanh(inputs @ hidden) @ output)).sum()

    expected = jax.grad(cross_entropy, (0, 1))(network.hidden, network.output)
    for gradient, other in zip(network.compute_gradients(inputs, shares), expected, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=2e-4, atol=1e-6)


def test_network_learns_the_shares_of_a_decision() -> None:
    network = DecisionNetwork(np.random.default_rng(1))
    inputs = make_inputs([1], [1, 2, 4, 8], LIMITS, 32)
    shares = np.array([0.0, 0.1, 0.8, 0.1])
    np.testing.assert_allclose(network.compute_chances(inputs), 0.25)
    for _ in range(3000):
        network.learn(inputs, shares)
    np.testing.assert_allclose(network.compute_chances(inputs), shares, atol=0.05)
