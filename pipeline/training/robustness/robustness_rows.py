"""The figures of a robustness evaluation, and the signs of masked gradients: an attack fails
because gradients don't lead to wrong predictions, not because the network is robust."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MARGIN = 0.01
"""A larger difference between accuracies isn't taken for chance."""
UNBOUNDED = "pgd, unbounded"
"""Name of the attack whose radius reaches every image."""
WHITE_BOX = ("pgd", "apgd")
"""Attacks by several steps along gradients."""
WEAKER_ATTACKS = {
    "square": "the black box beats the white box",
    "fgsm": "a single step beats many steps",
    "noise": "random noise beats steps along gradients",
}
"""Attacks that fool fewer images than `WHITE_BOX` if gradients aren't masked, and the text of the
sign if they fool more."""


@dataclass(frozen=True)
class AttackRow:
    """The accuracy under an attack, and figures of the fooling images: the attacked images whose
    predictions are wrong under the attack alone."""

    attack: str
    norm: str
    radius: float
    steps: int
    restarts: int
    accuracy: float
    confidence: float | None
    """Mean probability of the predicted class of fooling images; None if none exist."""
    mean_l2: float | None
    """Mean L2 norm of the changes of fooling images."""
    mean_linf: float | None

    def __str__(self) -> str:
        parts = [f"{self.attack}, {self.norm} {self.radius:g}"]
        if self.steps > 1:
            parts.append(f"{self.steps:,} steps")
        if self.restarts > 1:
            parts.append(f"{self.restarts:,} restarts")
        return f"{', '.join(parts)}: accuracy {self.accuracy:.4f}"


@dataclass(frozen=True)
class CorruptionRow:
    """The accuracy under a corruption, by severity."""

    corruption: str
    accuracies: Mapping[int, float]

    def __str__(self) -> str:
        parts = [f"{value:.4f} at severity {n}" for n, value in self.accuracies.items()]
        return f"{self.corruption}: accuracy {', '.join(parts)}"


@dataclass(frozen=True)
class RobustnessReport:
    """The accuracy of a run's weights under attacks and corruptions."""

    step: int
    samples: int
    classes: int
    clean: float
    """The accuracy without attack or corruption."""
    attacks: tuple[AttackRow, ...]
    corruptions: tuple[CorruptionRow, ...]

    def to_document(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {
            **asdict(self),
            "attacks": [asdict(row) for row in self.attacks],
            "corruptions": [
                {
                    "corruption": row.corruption,
                    **{f"severity_{n}": value for n, value in row.accuracies.items()},
                }
                for row in self.corruptions
            ],
            "robust_accuracy": self.robust_accuracy,
            "masked_gradients": self.masked_gradients,
        }

    @property
    def robust_accuracy(self) -> float | None:
        """The least accuracy under an attack within its radius; None without one.

        The share of images that withstand all attacks together may be smaller.
        """
        bounded = [row.accuracy for row in self.attacks if row.attack != UNBOUNDED]
        return min(bounded, default=None)

    def _compare_attacks(self, least: Mapping[str, float]) -> Iterator[str]:
        """Yield the signs in the accuracies of the attacks on one ball."""
        strong = [name for name in WHITE_BOX if name in least]
        if not strong:
            return
        white = min(least[name] for name in strong)
        for name, sign in WEAKER_ATTACKS.items():
            if least.get(name, 1.0) < white - MARGIN:
                names = " and ".join(strong)
                yield f"{sign}: {least[name]:.4f} under {name}, {white:.4f} under {names}"
        if "noise" in least and white == least["noise"] < self.clean:
            yield f"random noise equals steps along gradients: {white:.4f} under both"

    @property
    def masked_gradients(self) -> list[str]:
        """Signs of masked gradients (Athalye et al. 2018, arXiv 1802.00420, section 3.1). Attacks
        are compared within a norm and a radius."""
        # The least accuracy of each attack, by norm and radius.
        least_by_ball: dict[tuple[str, float], dict[str, float]] = {}
        for row in self.attacks:
            least = least_by_ball.setdefault((row.norm, row.radius), {})
            least[row.attack] = min(row.accuracy, least.get(row.attack, 1.0))
        signs = []
        for (norm, radius), least in least_by_ball.items():
            signs += [f"{norm} {radius:g}: {sign}" for sign in self._compare_attacks(least)]
        unbounded = max((r.accuracy for r in self.attacks if r.attack == UNBOUNDED), default=0.0)
        chance = 1 / self.classes
        if unbounded > chance + MARGIN:
            sign = f"a radius that reaches every image leaves {unbounded:.4f}"
            signs.append(f"{sign}; chance is {chance:.4f}")
        return signs
