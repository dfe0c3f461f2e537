"""Robustness of a run's weights: the accuracy on evaluation samples under attacks and corruptions,
and signs of masked gradients.

Each attack is one compiled program. Random draws are a pure function of (seed, restart, sample).
They don't depend on the secret of a private run. Gradients are masked if an attack fails because
they don't lead to wrong predictions, not because the network is robust.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.atomic_write import write_json
from pipeline.core.reporter import Reporter
from pipeline.data.batch import read_chunks
from pipeline.data.inputs import Dataset
from pipeline.data.random import seed_words
from pipeline.stages.feature_facts import make_pixel_scale
from pipeline.stages.record.run_directory import ROBUSTNESS
from pipeline.stages.runner.context import CompiledRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.parallel.state_sharing import gather_arrays
from pipeline.training.robustness.adversarial_rule import PixelScale
from pipeline.training.robustness.attack_specs import (
    AnyAttack,
    ApgdAttack,
    BallAttack,
    CorruptionAttack,
    PgdAttack,
    complete_attacks,
)
from pipeline.training.robustness.attacks import AttackedNetwork, attack_images, compute_l2
from pipeline.training.robustness.corruptions import CORRUPTIONS, corrupt
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights, map_batch
from pipeline.training.step_config import StepConfig

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


CHUNK_SAMPLES = 256


@dataclass(frozen=True)
class AttackPlan:
    """The attacks of an evaluation, and its number of samples."""

    attacks: tuple[AnyAttack, ...]
    """Each with its norm and radius."""
    scale: PixelScale
    samples: int
    """Number of samples, evenly spread over the evaluation split."""


def plan_attacks(
    recipe: Recipe, dataset: Dataset, attacks: Sequence[AnyAttack], samples: int | None = None
) -> AttackPlan:
    """Return a plan of attacks on `samples` evaluation samples, on all if None.

    The attacks must have a norm and a radius. Raises RecipeError if the data can't be attacked.
    """
    scale = make_pixel_scale(recipe, dataset, "eval")
    classes = len(dataset.targets)
    uses_dlr = any(isinstance(attack, ApgdAttack) and "dlr" in attack.losses for attack in attacks)
    if uses_dlr and classes < 3:
        raise RecipeError(f"losses of apgd: dlr needs 3 classes, not {classes}; must be [ce]")
    return AttackPlan(tuple(attacks), scale, min(samples or len(dataset.eval), len(dataset.eval)))


@register_dataclass
@dataclass(frozen=True)
class _Chunk:
    """Samples that one call of a program attacks."""

    pixels: Array
    """float32 (B, H, W, C), from 0 to 1."""
    labels: Array
    """int32 (B,)."""
    sample: Array
    """Positions in the evaluation split, int32 (B,)."""
    count: int = field(metadata={"static": True})
    """Number of samples. Later rows repeat these samples."""


@dataclass(frozen=True, eq=False)
class RobustnessMeasure:
    """The evaluation of weights under the attacks of a plan, on one device."""

    config: StepConfig
    variables: Any
    """Parameters and batch statistics, which the compiled programs take as an argument."""
    dataset: Dataset
    plan: AttackPlan
    seed: int
    reporter: Reporter
    check: Callable[[], None] = lambda: None
    """Called before each restart on a chunk and each corruption; raises to stop the evaluation."""

    def measure(self, step: int) -> RobustnessReport:
        """Attack the weights; report and return the results. `step` is the step of the weights."""
        chunks = list(self._read_chunks())
        is_fooled = self._compile(lambda attacked, chunk: attacked.is_fooled(chunk.pixels))
        wrong = [np.asarray(is_fooled(self.variables, chunk)) for chunk in chunks]
        accuracy = self._compute_accuracy(chunks, wrong)
        self.reporter.print_stage(
            "attack", f"none: accuracy {accuracy:.4f} over {self.plan.samples:,}"
        )
        rows: list[AttackRow] = []
        corruptions: list[CorruptionRow] = []
        for attack in self.plan.attacks:
            if isinstance(attack, CorruptionAttack):
                corruptions += self._corrupt(attack.severities, chunks)
                continue
            rows.append(self._attack(attack, attack.attack, chunks, wrong))
            if isinstance(attack, PgdAttack):
                # Within the largest distance of two images, no network is robust.
                radius = 1.0 if attack.norm == "linf" else float(chunks[0].pixels[0].size) ** 0.5
                changes = {"radius": radius, "restarts": 1, "step": None}
                unbounded = attack.model_copy(update=changes)
                rows.append(self._attack(unbounded, UNBOUNDED, chunks, wrong))
        classes = len(self.dataset.targets)
        report = RobustnessReport(
            step, self.plan.samples, classes, accuracy, tuple(rows), tuple(corruptions)
        )
        for sign in report.masked_gradients:
            self.reporter.warn(f"masked gradients: {sign}")
        return report

    def _read_chunks(self) -> Iterator[_Chunk]:
        """Yield the samples of the plan after their map ops."""
        split = self.dataset.eval
        count = self.plan.samples
        map_chunk = jax.jit(partial(map_batch, self.config, self.config.eval_ops))
        rows = np.arange(count) * len(split) // count
        for batch, num_new in read_chunks(split, rows, self.seed, min(CHUNK_SAMPLES, count)):
            images, labels = map_chunk(batch)
            classes = labels.argmax(axis=-1) if labels.ndim == 2 else labels
            pixels = self.plan.scale.to_pixels(images)
            yield _Chunk(pixels, classes.astype(jnp.int32), batch.sample, num_new)

    def _compile(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function (variables, chunk, *arguments) -> result of `compute`.

        `compute` takes (attacked network, chunk, *arguments).
        """
        network = self.config.network

        def call(variables: Any, chunk: _Chunk, *arguments: Any) -> Any:
            def apply(pixels: Array) -> Array:
                inputs = self.plan.scale.to_inputs(pixels)
                logits: Any = network.apply(variables, inputs, train=False)
                return logits.astype(jnp.float32)

            attacked = AttackedNetwork(self.config.apply_lowerings(apply), chunk.labels)
            return compute(attacked, chunk, *arguments)

        return jax.jit(call)

    def _compute_accuracy(self, chunks: Sequence[_Chunk], wrong: Sequence[np.ndarray]) -> float:
        """Return the share of right predictions; `wrong` has a bool (B,) for each chunk."""
        pairs = zip(chunks, wrong, strict=True)
        num_wrong = sum(int(is_wrong[: chunk.count].sum()) for chunk, is_wrong in pairs)
        return 1 - num_wrong / self.plan.samples

    def _attack(
        self,
        attack: BallAttack,
        name: str,
        chunks: Sequence[_Chunk],
        wrong: Sequence[np.ndarray],
    ) -> AttackRow:
        """Return the row of an attack, which restarts on a chunk while some predictions are right.

        `wrong` has, for each chunk, which predictions are wrong without an attack, bool (B,). The
        row's means are over the images that fool the network only under the attack.
        """
        seed = jnp.asarray(seed_words(self.seed))

        def search(attacked: AttackedNetwork, chunk: _Chunk, restart: Array) -> Any:
            images, fooled = attack_images(
                attack, attacked, chunk.pixels, chunk.sample, (seed, restart)
            )
            changes = images - chunk.pixels
            probabilities = jax.nn.softmax(attacked.predict(images))
            figures = (
                probabilities.max(axis=-1),
                compute_l2(changes)[:, 0, 0, 0],
                jnp.abs(changes).max(axis=(1, 2, 3)),
            )
            return fooled, jnp.stack(figures, axis=-1)

        program = self._compile(search)
        results = []
        figures = []
        with self.reporter.clock(f"attacking by {name}"):
            for chunk, wrong_before in zip(chunks, wrong, strict=True):
                fooled = wrong_before.copy()
                for restart in range(attack.restarts):
                    if fooled[: chunk.count].all():
                        break
                    self.check()
                    outputs = program(self.variables, chunk, jnp.int32(restart))
                    is_wrong, image_figures = jax.tree.map(np.asarray, outputs)
                    is_new = (is_wrong & ~fooled)[: chunk.count]
                    figures.append(image_figures[: chunk.count][is_new])
                    fooled |= is_wrong
                results.append(fooled)
        all_figures = np.concatenate([np.zeros((0, 3)), *figures])
        means = [None] * 3 if not len(all_figures) else all_figures.mean(axis=0).tolist()
        assert attack.norm is not None, "attacks are completed"
        assert attack.radius is not None, "attacks are completed"
        row = AttackRow(
            attack=name,
            norm=attack.norm,
            radius=attack.radius,
            steps=attack.steps,
            restarts=attack.restarts,
            accuracy=self._compute_accuracy(chunks, results),
            confidence=means[0],
            mean_l2=means[1],
            mean_linf=means[2],
        )
        self.reporter.print_stage("attack", str(row))
        return row

    def _corrupt(self, severities: Sequence[int], chunks: Sequence[_Chunk]) -> list[CorruptionRow]:
        """Return the row of each corruption, with its accuracy at each severity."""
        rows = []
        for name in CORRUPTIONS:
            accuracies = {
                severity: self._measure_corruption(name, severity, chunks)
                for severity in severities
            }
            rows.append(CorruptionRow(name, accuracies))
            self.reporter.print_stage("attack", str(rows[-1]))
        return rows

    def _measure_corruption(self, name: str, severity: int, chunks: Sequence[_Chunk]) -> float:
        """Return the accuracy under the corruption `name`."""
        seed = jnp.asarray(seed_words(self.seed))

        def predict(attacked: AttackedNetwork, chunk: _Chunk) -> Array:
            return attacked.is_fooled(corrupt(name, severity, chunk.pixels, seed, chunk.sample))

        self.check()
        program = self._compile(predict)
        fooled = [np.asarray(program(self.variables, chunk)) for chunk in chunks]
        return self._compute_accuracy(chunks, fooled)


def conclude_robustness(run: CompiledRun, state: TrainState) -> None:
    """Measure the robustness of the final state, and record it in the summary and in a file.

    All processes measure, so that none waits for another. The first writes the file.
    """
    context = run.context
    recipe = context.recipe
    config = run.built.step_config
    weights = jax.tree.map(jnp.asarray, gather_arrays(get_evaluated_weights(config, state)))
    attacks = complete_attacks(recipe.eval.robustness, recipe.train.adversarial)
    plan = plan_attacks(recipe, run.dataset, attacks)
    check = context.options.signals.check
    measure = RobustnessMeasure(
        config, weights, run.dataset, plan, recipe.seed, context.reporter, check
    )
    report = measure.measure(int(state.step))
    if context.ranks.is_first:
        write_json(context.run_dir / ROBUSTNESS, report.to_document())
    if report.robust_accuracy is not None:
        context.summary.metrics["robust_accuracy"] = report.robust_accuracy


class FinalRobustness(RunFeature):
    """The robustness of a run with `eval.robustness`, at its end."""

    def conclude(self, run: CompiledRun, state: TrainState) -> None:
        """Measure the final state if the run evaluates."""
        if "eval" in run.context.recipe.stages:
            conclude_robustness(run, state)
