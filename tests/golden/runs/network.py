"""A user's own network for the golden runs."""

from typing import Any

import flax.linen as nn
import jax


class Perceptron(nn.Module):
    """A hidden layer between an image and its classes."""

    classes: int = 10

    @nn.compact
    def __call__(self, image: jax.Array) -> Any:
        """Return logits, (batch, classes)."""
        flat = image.reshape((image.shape[0], -1))
        return nn.Dense(self.classes)(nn.relu(nn.Dense(16)(flat)))
