"""A small network that rates the options of a decision about a tiling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DECISIONS_COUNT = 5
"""Among how many cores to split the batch, m, k and n: four decisions; then which block to use."""
INPUTS_COUNT = 2 * DECISIONS_COUNT + 7
"""The decision (one-hot, 5), 4 limits, earlier choices (5, the last is always 0), and 3 numbers of
an option (`make_inputs`)."""
HIDDEN_COUNT = 16
LEARNING_RATE = 0.1


class DecisionNetwork:
    """Chances of a decision's options, by a network with a hidden layer of tanh units.

    It guides a tree search and learns from it, as in AlphaZero (Silver et al. 2017). The tree gives
    each option a share, larger for a better reward; shares sum to 1. Each step descends the
    cross-entropy of shares and chances.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self.hidden = generator.normal(0, INPUTS_COUNT**-0.5, (INPUTS_COUNT, HIDDEN_COUNT))
        # From zeros, all options have the same chance at first.
        self.output = np.zeros(HIDDEN_COUNT)

    def compute_chances(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the chance of each option, from inputs (options, INPUTS_COUNT)."""
        scores = np.tanh(inputs @ self.hidden) @ self.output
        powers = np.exp(scores - scores.max())
        return np.asarray(powers / powers.sum())

    def compute_gradients(
        self, inputs: NDArray[np.float64], shares: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the gradients by hidden and output of the cross-entropy with shares."""
        units = np.tanh(inputs @ self.hidden)
        errors = self.compute_chances(inputs) - shares
        by_unit = errors[:, None] * self.output * (1 - units**2)
        return inputs.T @ by_unit, units.T @ errors

    def learn(self, inputs: NDArray[np.float64], shares: NDArray[np.float64]) -> None:
        """Make one step of gradient descent."""
        hidden, output = self.compute_gradients(inputs, shares)
        self.hidden -= LEARNING_RATE * hidden
        self.output -= LEARNING_RATE * output


def make_inputs(
    choices: Sequence[int], options: Sequence[int], limits: Sequence[int], cores_count: float
) -> NDArray[np.float64]:
    """Return the network's inputs (options, INPUTS_COUNT) for the decision after some choices.

    All options share the decision (one-hot), `limits` (the product's batch, m, k and n) and the
    choices. A number x is log(x + 1) to the base `cores_count` + 1. An option's numbers are its
    logarithm, or a block's place; the square of it; and whether the option divides its limit.
    """
    depth = len(choices)
    scale = np.log2(cores_count + 1)
    state = np.zeros(INPUTS_COUNT - 3)
    state[depth] = 1.0
    state[DECISIONS_COUNT : DECISIONS_COUNT + 4] = np.log2(np.add(limits, 1)) / scale
    state[DECISIONS_COUNT + 4 : DECISIONS_COUNT + 4 + depth] = np.log2(np.add(choices, 1)) / scale
    values = np.array(options, dtype=np.float64)
    if depth == DECISIONS_COUNT - 1:
        scaled = (values + 1) / len(options)
        divides = np.zeros_like(scaled)
    else:
        scaled = np.log2(values + 1) / scale
        divides = (limits[depth] % values == 0).astype(np.float64)
    features = np.stack([scaled, scaled**2, divides], axis=1)
    return np.concatenate([np.tile(state, (len(options), 1)), features], axis=1)
