"""A comparison of losses with formulas of one sample in float64 numpy.

The formulas share no code with the package. Their gradients are central differences.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

STEP = 1e-5


def differentiate(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """The gradient of a function of an array, float64, by central differences."""
    at = np.asarray(at, np.float64)
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        ends = []
        for sign in (1, -1):
            moved = at.copy()
            moved[index] += sign * STEP
            ends.append(function(moved))
        gradient[index] = (ends[0] - ends[1]) / (2 * STEP)
    return gradient


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities along the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def assert_agrees(
    loss: Callable[..., jax.Array],
    formula: Callable[[np.ndarray, np.ndarray], float],
    logits: np.ndarray,
    labels: np.ndarray,
    where: np.ndarray | None = None,
) -> None:
    """Losses of samples, and the gradient of their sum, are those of the formula of one sample.

    Entries that `where` leaves out aren't passed to the formula, and get no gradient.
    """

    def expect(logits: np.ndarray) -> float:
        return sum(expect_sample(number, logits[number]) for number in range(len(logits)))

    def expect_sample(number: int, logits: np.ndarray) -> float:
        valid = Ellipsis if where is None else where[number]
        return formula(logits[valid], labels[number][valid])

    arguments = [jnp.asarray(labels), *([] if where is None else [jnp.asarray(where)])]
    losses = loss(jnp.asarray(logits, jnp.float32), *arguments)
    expected = [expect_sample(number, row.astype(float)) for number, row in enumerate(logits)]
    np.testing.assert_allclose(losses, expected, rtol=2e-5, atol=1e-6)
    gradient = jax.grad(lambda logits: loss(logits, *arguments).sum())(
        jnp.asarray(logits, jnp.float32)
    )
    np.testing.assert_allclose(gradient, differentiate(expect, logits), rtol=1e-3, atol=2e-6)
