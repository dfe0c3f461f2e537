"""What the Adversarial Robustness Toolbox makes of digits, written to attacks/art.npz.

    python tests/golden/make_attacks.py          with adversarial-robustness-toolbox 1.20.1

The attacked network has one hidden layer. It is computed by numpy in float64, and its weights are
in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from art.attacks.evasion import (
    AutoProjectedGradientDescent,
    FastGradientMethod,
    ProjectedGradientDescentNumpy,
    SquareAttack,
)
from art.estimators.classification.classifier import ClassifierMixin
from art.estimators.estimator import BaseEstimator, LossGradientsMixin, NeuralNetworkMixin

FILE = Path(__file__).parent / "attacks" / "art.npz"
DIGITS = Path(__file__).parents[2] / "pipeline" / "data" / "sources" / "digits.npz"
HIDDEN = 32
CLASSES = 10
ATTACKED = 48
RADII = {"linf": (np.inf, 0.15), "l2": (2, 0.8)}
STEPS = 10
SEED = 5


class NumpyNetwork(ClassifierMixin, LossGradientsMixin, NeuralNetworkMixin, BaseEstimator):
    """A dense layer, a ReLU and a dense layer; predictions are logits."""

    def __init__(self, weights: list[np.ndarray]) -> None:
        super().__init__(model=None, clip_values=(0.0, 1.0), channels_first=False)
        self.nb_classes = CLASSES
        self.weights = weights

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 8, 8, 1

    def _forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, first_bias, second, second_bias = self.weights
        flat = x.reshape(len(x), -1).astype(np.float64)
        hidden = flat @ first + first_bias
        return flat, hidden, np.maximum(hidden, 0) @ second + second_bias

    def predict(self, x: np.ndarray, **_: Any) -> np.ndarray:
        return self._forward(x)[2]

    def gradients(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Gradients of the summed cross-entropy, of images and of weights."""
        flat, hidden, logits = self._forward(x)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        outer = powers / powers.sum(axis=1, keepdims=True) - y
        inner = outer @ self.weights[2].T * (hidden > 0)
        of_weights = [flat.T @ inner, inner.sum(0), np.maximum(hidden, 0).T @ outer, outer.sum(0)]
        return (inner @ self.weights[0].T).reshape(x.shape), of_weights

    def loss_gradient(self, x: np.ndarray, y: np.ndarray, **_: Any) -> np.ndarray:
        return self.gradients(x, y)[0]

    def compute_loss(self, x: np.ndarray, y: np.ndarray, **_: Any) -> np.ndarray:
        logits = self._forward(x)[2]
        logits = logits - logits.max(axis=1, keepdims=True)
        losses: np.ndarray = np.log(np.exp(logits).sum(axis=1)) - (logits * y).sum(axis=1)
        return losses

    def fit(self, x: np.ndarray, y: np.ndarray, **_: Any) -> None:
        for _step in range(300):
            of_weights = self.gradients(x, y)[1]
            changes = [0.5 * g / len(x) for g in of_weights]
            self.weights = [w - c for w, c in zip(self.weights, changes, strict=True)]

    def get_activations(self, *_: Any, **__: Any) -> np.ndarray:
        raise NotImplementedError

    def save(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def main() -> None:
    """Write the file."""
    with np.load(DIGITS) as arrays:
        images = arrays["image"][..., None].astype(np.float64) / 16
        labels = arrays["label"]
    generator = np.random.default_rng(SEED)
    weights = [
        generator.normal(0, 0.2, (64, HIDDEN)),
        np.zeros(HIDDEN),
        generator.normal(0, 0.2, (HIDDEN, CLASSES)),
        np.zeros(CLASSES),
    ]
    network = NumpyNetwork(weights)
    hot = np.eye(CLASSES)[labels]
    network.fit(images, hot)
    network.weights = [w.astype(np.float32) for w in network.weights]
    x = images[:ATTACKED].astype(np.float32)
    y = hot[:ATTACKED]
    values: dict[str, np.ndarray] = {"images": x, "labels": labels[:ATTACKED].astype(np.int32)}
    values |= {f"weight_{n}": w for n, w in enumerate(network.weights)}
    for name, (norm, radius) in RADII.items():
        values[f"fgsm_{name}"] = FastGradientMethod(network, norm, radius).generate(x, y)
        pgd = ProjectedGradientDescentNumpy(
            network, norm, radius, radius / 4, max_iter=STEPS, verbose=False
        )
        values[f"pgd_{name}"] = pgd.generate(x, y)
        np.random.seed(SEED)
        apgd = AutoProjectedGradientDescent(
            network, norm, radius, 2 * radius, max_iter=40, nb_random_init=1, verbose=False
        )
        values[f"apgd_{name}"] = is_fooled(network, apgd.generate(x, y), y)
    np.random.seed(SEED)
    square = SquareAttack(network, np.inf, max_iter=300, eps=RADII["linf"][1], verbose=False)
    values["square_linf"] = is_fooled(network, square.generate(x, y), y)
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **values)


def is_fooled(network: NumpyNetwork, images: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether each prediction is wrong."""
    wrong: np.ndarray = network.predict(images).argmax(axis=1) != y.argmax(axis=1)
    return wrong


if __name__ == "__main__":
    main()
