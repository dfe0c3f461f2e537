"""A generator and a discriminator: who learns from which score, and what evaluation draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.layers.standard import (
    Adversarial,
    BatchNorm,
    Dense,
    Dropout,
    Flatten,
    LeakyRelu,
    Reshape,
    Tanh,
)
from tests.models.build import draw_variables, network, random, shapes

IMAGES = random(6, 4, 4, 1)
GENERATOR = (Dense(features=16), BatchNorm(), LeakyRelu(), Reshape(shape=(4, 4, 1)), Tanh())
JUDGE = (Flatten(), Dense(features=8), BatchNorm(), LeakyRelu(), Dropout(rate=0.3))
LAYER = Adversarial(
    latent=3, generator=GENERATOR, discriminator=(*JUDGE, Dense(features=1)), scores=3
)
MODULE = network(LAYER)


def train(params: Any, statistics: Any) -> tuple[jax.Array, Any]:
    """Scores of a training step, and the statistics after it."""
    variables = {"params": params, "batch_stats": statistics}
    draws = {"dropout": jax.random.key(5)}
    scores, after = MODULE.apply(variables, IMAGES, train=True, mutable=["batch_stats"], rngs=draws)
    return scores, after["batch_stats"]


@pytest.fixture(scope="module")
def variables() -> Any:
    return draw_variables(shapes(MODULE, IMAGES.shape[1:]))


@pytest.mark.slow
def test_scores_train_either_generator_or_discriminator(variables: Any) -> None:
    def sum_scores(params: Any) -> jax.Array:
        return train(params, variables["batch_stats"])[0].sum(0)

    by_score = jax.jit(jax.jacrev(sum_scores))(variables["params"])["adversarial_0"]
    trains = {
        name: [
            any(np.any(leaf[score] != 0) for leaf in jax.tree.leaves(by_score[name]))
            for score in range(3)
        ]
        for name in by_score
    }
    assert trains == {"generator": [False, False, True], "discriminator": [True, True, False]}


@pytest.mark.medium
def test_statistics_are_updated_once_by_real_and_generated_images(variables: Any) -> None:
    """The third score must not count the generated images again."""
    before = variables["batch_stats"]["adversarial_0"]["discriminator"]["batch_norm_0"]["mean"]
    _, after = jax.jit(train)(variables["params"], variables["batch_stats"])
    mean = after["adversarial_0"]["discriminator"]["batch_norm_0"]["mean"]
    judge = variables["params"]["adversarial_0"]["discriminator"]["dense_0"]
    real = (IMAGES.reshape(6, -1) @ judge["kernel"] + judge["bias"]).mean(0)
    generated = (mean - 0.81 * before - 0.09 * real) / 0.1
    bound = np.abs(judge["kernel"]).sum(0) + np.abs(judge["bias"])
    assert np.all(np.abs(generated) <= bound * 1.001)


@pytest.mark.medium
def test_evaluated_sample_does_not_depend_on_its_batch(variables: Any) -> None:
    score = jax.jit(lambda images: MODULE.apply(variables, images, train=False))
    together = np.asarray(score(IMAGES))
    alone = np.concatenate([score(IMAGES[row : row + 1]) for row in range(6)])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(together[:, 1], together[:, 2])
    assert len(np.unique(together[:, 1])) == 6


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scores": 10}, "has 3 scores, and the dataset 10 labels; must have 3, by the map op"),
        ({"generator": (Dense(features=16),)}, r"the generator returns shape \(6, 16\)"),
        ({"discriminator": JUDGE}, r"the discriminator returns shape \(6, 8\); must be"),
    ],
)
def test_incompatible_layers_are_reported(changes: dict[str, Any], problem: str) -> None:
    module = network(LAYER.model_copy(update=changes))
    with pytest.raises(ValueError, match=f"adversarial_0: {problem}"):
        jax.eval_shape(
            lambda key, x: module.init(key, x, train=False), jax.random.key(0), jnp.asarray(IMAGES)
        )
