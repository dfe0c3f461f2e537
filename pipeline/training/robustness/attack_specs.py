"""Settings of adversarial training, and of the attacks and corruptions of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import Seq, Spec

Norm = Literal["linf", "l2"]
"""linf: the largest change of a pixel; l2: the root of the sum of squared changes."""
Radius = Annotated[float, Field(gt=0, le=1000)]
"""The largest change of an image by an attack. Pixels of the raw image are from 0 to 1."""
Severity = Annotated[int, Field(ge=1, le=5)]
"""1 is the mildest."""


class AdversarialSpec(Spec):
    """Training on attacked images.

    fgsm: one step (Goodfellow et al. 2015; Wong et al. 2020, arXiv 2001.03994); pgd: several steps
    (Madry et al. 2018, arXiv 1706.06083); trades: the loss of plain images plus `beta` times the
    divergence of the predictions for attacked images (Zhang et al. 2019, arXiv 1901.08573).
    """

    attack: Literal["fgsm", "pgd", "trades"]
    norm: Norm = "linf"
    radius: Radius
    steps: Annotated[PositiveInt, Field(le=1000)] | None = None
    """Steps of the attack; null: 7 of pgd, 10 of trades."""
    step: PositiveFloat | None = None
    """Length of a step; null: 2.5 times the radius divided by the number of steps. With fgsm, null:
    1.25 times the radius if `start` is random, else the radius."""
    start: Literal["random", "image"] = "random"
    """The start of an attack. random: a random image within the radius; image: the image itself."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of samples that are attacked, drawn for each sample and epoch."""
    beta: PositiveFloat = 6.0
    """Weight of the divergence in trades."""
    warmup_steps: NonNegativeInt = 0
    """Number of training steps in which the radius and the step length grow to their full size."""

    @model_validator(mode="after")
    def _require_fitting_keys(self) -> AdversarialSpec:
        if self.attack == "fgsm" and self.steps not in (None, 1):
            raise ValueError(f"steps = {self.steps}: must be 1 with attack = fgsm")
        if self.attack == "trades" and self.start != "random":
            raise ValueError("start = image: must be random with attack = trades")
        if self.attack == "trades" and self.share != 1:
            raise ValueError(f"share = {self.share}: must be 1.0 with attack = trades")
        if self.attack != "trades" and self.beta != 6.0:
            raise ValueError(f"beta = {self.beta}: needs attack = trades")
        return self

    @property
    def num_steps(self) -> int:
        """The number of steps of an attack."""
        return self.steps or {"fgsm": 1, "pgd": 7, "trades": 10}[self.attack]

    @property
    def step_size(self) -> float:
        """The length of a step of an attack."""
        if self.step is not None:
            return self.step
        if self.attack == "fgsm":
            return self.radius * (1.25 if self.start == "random" else 1.0)
        return compute_step_size(self.radius, self.num_steps)


def compute_step_size(radius: float, steps: int) -> float:
    """Return the default length of a step of several."""
    return 2.5 * radius / steps


class _BallAttack(Spec):
    """Base of the attacks within a radius."""

    norms: ClassVar[Sequence[Norm]] = ("linf", "l2")
    norm: Norm | None = None
    """null: the norm of train.adversarial, linf without that section."""
    radius: Radius | None = None
    """null: the radius of train.adversarial. Required without that section or with another norm."""


class NoiseAttack(_BallAttack):
    """A random image within the radius, without gradients. Every other attack should be
    stronger."""

    attack: Literal["noise"]
    steps: ClassVar[int] = 0
    restarts: ClassVar[int] = 1


class FgsmAttack(_BallAttack):
    """One step of the radius from the image (Goodfellow et al. 2015)."""

    attack: Literal["fgsm"]
    steps: ClassVar[int] = 1
    restarts: ClassVar[int] = 1


class PgdAttack(_BallAttack):
    """Steps along the gradient from random images within the radius (Madry et al. 2018)."""

    attack: Literal["pgd"]
    steps: Annotated[PositiveInt, Field(le=100_000)] = 40
    step: PositiveFloat | None = None
    """Length of a step; null: 2.5 times the radius divided by the steps."""
    restarts: Annotated[PositiveInt, Field(le=1000)] = 1


class ApgdAttack(_BallAttack):
    """Steps with momentum, whose length is halved when the loss stops growing (Croce and Hein
    2020, arXiv 2003.01690)."""

    attack: Literal["apgd"]
    losses: Annotated[Seq[Literal["ce", "dlr"]], Field(min_length=1)] = ("ce", "dlr")
    """ce: cross-entropy; dlr: the difference-of-logits ratio, the same for scaled logits."""
    steps: Annotated[PositiveInt, Field(le=100_000)] = 100
    restarts: Annotated[PositiveInt, Field(le=1000)] = 1


class SquareAttack(_BallAttack):
    """Changes of random squares that decrease the logit of the class relative to the others,
    without gradients (Andriushchenko et al. 2020, arXiv 1912.00049)."""

    attack: Literal["square"]
    norms: ClassVar[Sequence[Norm]] = ("linf",)
    steps: Annotated[PositiveInt, Field(le=100_000)] = 1000
    restarts: ClassVar[int] = 1


class CorruptionAttack(Spec):
    """Corruptions, such as noise and blur (Hendrycks and Dietterich 2019, arXiv 1903.12261)."""

    attack: Literal["corruptions"]
    severities: Annotated[Seq[Severity], Field(min_length=1)] = (1, 2, 3, 4, 5)


BallAttack = NoiseAttack | FgsmAttack | PgdAttack | ApgdAttack | SquareAttack
AnyAttack = BallAttack | CorruptionAttack
AttackSpec = Annotated[AnyAttack, Field(discriminator="attack")]


def complete_attacks(
    attacks: Sequence[AnyAttack], trained: AdversarialSpec | None
) -> tuple[AnyAttack, ...]:
    """Return the attacks with norms and radii; missing ones are the norm of training, and its
    radius in that norm. Raises ValueError for a missing radius and a wrong norm or radius. Its text
    begins with position and key."""
    completed: list[AnyAttack] = []
    for position, attack in enumerate(attacks):
        for key in ("losses", "severities"):
            values = getattr(attack, key, ())
            if len(set(values)) < len(values):
                raise ValueError(f"{position}.{key} = {list(values)}: must be different")
        if isinstance(attack, CorruptionAttack):
            completed.append(attack)
            continue
        norm = attack.norm or (trained.norm if trained else "linf")
        if norm not in attack.norms:
            names = f"{' or '.join(attack.norms)} with attack = {attack.attack}"
            raise ValueError(f"{position}.norm = {norm}: must be {names}")
        radius = attack.radius or (trained.radius if trained and trained.norm == norm else None)
        if radius is None:
            where = f"with norm = {norm}" if trained else "without train.adversarial"
            raise ValueError(f"{position}.radius = null: must be a number above 0 {where}")
        if problem := find_norm_problem(norm, radius):
            raise ValueError(f"{position}.{problem}")
        completed.append(attack.model_copy(update={"norm": norm, "radius": radius}))
    return tuple(completed)


def find_norm_problem(norm: Norm, radius: float) -> str | None:
    """Return the problem of a radius as a message; None if none exists."""
    if norm == "linf" and radius > 1:
        return f"radius = {radius}: must be at most 1, the range of a pixel, with norm = linf"
    return None
