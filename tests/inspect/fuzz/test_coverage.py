"""Coverage of neurons against its definition."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.config.recipe import Recipe
from pipeline.inspect.dumps.opened_recipe import open_recipe
from pipeline.inspect.fuzz.coverage import SECTIONS, NeuronCoverage, apply_with_neurons
from pipeline.training.step import get_evaluated_weights


def test_sections_match_the_definition() -> None:
    generator = np.random.default_rng(1)
    train = generator.normal(size=(50, 6)).astype(np.float32)
    train[:, 5] = 2.0
    coverage = NeuronCoverage(train)
    reached: set[tuple[int, int]] = set()
    for sample in generator.normal(scale=2, size=(300, 6)).astype(np.float32):
        before = len(reached)
        for neuron, value in enumerate(sample.tolist()):
            low = float(train[:, neuron].min())
            high = float(train[:, neuron].max())
            if value < low:
                section = 0
            elif value > high:
                section = SECTIONS + 1
            else:
                section = 1 + min(int((value - low) / (high - low) * SECTIONS), SECTIONS - 1)
            reached.add((neuron, section))
        assert coverage.add(sample) == (len(reached) > before)
    inside = [section for _, section in reached if 0 < section <= SECTIONS]
    shares = coverage.compute_shares()
    assert shares["multisection"] == len(inside) / (6 * SECTIONS)
    assert shares["boundary"] == (len(reached) - len(inside)) / 12
    assert coverage.reached.sum() == len(reached)


@pytest.mark.medium
def test_neurons_are_features_of_all_layers(tiny: Callable[..., Recipe]) -> None:
    opened = open_recipe(tiny())
    config = opened.programs(0).config
    variables = get_evaluated_weights(config, opened.fresh_state())
    images = jnp.asarray(np.random.default_rng(0).random((3, 32, 32, 1), np.float32))
    logits, neurons = apply_with_neurons(config, variables, images)
    expected = config.network.apply(variables, images, train=False)
    assert np.array_equal(logits, expected)
    # The last layer's features are the logits.
    assert np.array_equal(neurons[:, -10:], logits)
    assert neurons.shape[1] > 200


@pytest.mark.medium
def test_neurons_inside_views_are_means_over_views(tiny: Callable[..., Recipe]) -> None:
    layers = "[{name: views, shift: 1, body: [flatten, {name: dense, features: $classes}]}, tanh]"
    opened = open_recipe(tiny("model=layers", f"model.layers={layers}"))
    config = opened.programs(0).config
    variables = get_evaluated_weights(config, opened.fresh_state())
    images = jnp.asarray(np.random.default_rng(0).random((3, 32, 32, 1), np.float32))
    logits, neurons = apply_with_neurons(config, variables, images)
    # The network's dense layer, its views and the activation.
    assert neurons.shape == (3, 30)
    means, last = neurons[:, :20].reshape(3, 2, 10), neurons[:, 20:]
    assert np.allclose(means, np.arctanh(logits)[:, None], atol=1e-5)
    assert np.array_equal(last, logits)
