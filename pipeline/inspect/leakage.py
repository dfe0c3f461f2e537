"""Leakage: how well shadow networks recognise the training samples of a run.

A shadow network is of the run's recipe, trained on half of the audited samples. Scores of
membership identify members and held-out samples at some rates.

One compiled program trains all shadow networks. Its arguments are the data, their order and the
seed, which are a pure function of (seed of the run, number of the network).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.backends.xla import XlaExecutable
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch, read_chunks
from pipeline.data.columns import Split
from pipeline.data.inputs import Dataset
from pipeline.data.order import draw_words, permute
from pipeline.data.poisson_order import PoissonOrder
from pipeline.data.random import seed_words
from pipeline.data.row_views import RowView
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, make_silent_reporter
from pipeline.stages.compile import compile_to_executable, make_compile_inputs
from pipeline.stages.private_run import set_secret, share_secret
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights, predict

STREAM = 3 << 60
"""Number of an audit's first random draw. Epochs have smaller numbers."""
CHUNK_SAMPLES = 256
DISPATCH_STEPS = 1000
"""Steps of a dispatch. Ctrl-C ends the command after a dispatch."""
FALSE_POSITIVE_RATES = (0.001, 0.01)
SEPARATE_VARIANCE_SHADOWS = 64
"""With fewer shadow networks, one variance serves all samples (Carlini et al. 2022, VI-D)."""
LEAST_SHADOWS = 4
"""Two with and two without each sample: a variance needs two values."""


@dataclass(frozen=True, eq=False)
class Audit:
    """The audited samples, in pairs of a member and a held-out sample.

    A shadow network is trained on one sample of each pair, and on all training samples outside of
    the pairs, so that it has the run's number of training samples.
    """

    opened: OpenedRecipe
    step: int
    """Number of steps of the run and of each shadow network."""
    members: np.ndarray
    """Rows of the training split, int64 (pairs,)."""
    held_out: np.ndarray
    """Rows of the evaluation split, int64 (pairs,)."""

    def compute_margins(self, state: TrainState) -> np.ndarray:
        """Return log(p / (1 - p)) of the class of each member, then of each held-out sample.

        float64 (2 pairs,). It orders samples as p does, but isn't rounded near p = 1.
        """
        config = self.opened.built.step_config
        variables = jax.tree.map(np.asarray, get_evaluated_weights(config, state))
        dataset = self.opened.dataset
        return np.concatenate(
            [
                np.asarray(self._margins(variables, batch), np.float64)[:new]
                for split, rows in ((dataset.train, self.members), (dataset.eval, self.held_out))
                for batch, new in read_chunks(split, rows, self.opened.recipe.seed, CHUNK_SAMPLES)
            ]
        )

    @cached_property
    def _margins(self) -> Callable[[Any, Batch], Array]:
        """The compiled function from variables and a batch to margins, float32 (B,)."""
        config = replace(self.opened.built.step_config, shards=None)

        @jax.jit
        def compute(variables: Any, batch: Batch) -> Array:
            logits, labels = predict(config, variables, batch)
            logits = logits.astype(jnp.float32)
            classes = labels.argmax(axis=-1) if labels.ndim == 2 else labels
            is_class = jax.nn.one_hot(classes, logits.shape[-1], dtype=bool)
            class_logit = jnp.where(is_class, logits, 0).sum(axis=-1)
            other_logsumexp = jax.nn.logsumexp(jnp.where(is_class, -jnp.inf, logits), axis=-1)
            return class_logit - other_logsumexp

        return compute

    def train_shadows(self, count: int, reporter: Reporter) -> tuple[np.ndarray, np.ndarray]:
        """Return margins of `count` networks, and which samples each read, (count, 2 pairs)."""
        keeps = draw_subsets(self.opened.recipe.seed, count, len(self.members))
        executable: XlaExecutable | None = None
        rows = []
        for number, keep in enumerate(keeps):
            with reporter.clock(f"training shadow network {number + 1} of {count}"):
                state, executable = self._train_shadow(number, keep, executable)
                rows.append(self.compute_margins(state))
        return np.stack(rows), np.concatenate([keeps, ~keeps], axis=1)

    def _train_shadow(
        self, number: int, keep: np.ndarray, compiled: XlaExecutable | None
    ) -> tuple[TrainState, XlaExecutable]:
        """Return the state of a trained shadow network, and the executable for later networks.

        It is compiled if `compiled` is None. `keep` is a row of `draw_subsets`.
        """
        opened = self.opened
        words = draw_words(opened.recipe.seed, STREAM + 1 + number, 5)
        seed = int(words[0] >> np.uint64(33))
        dataset = opened.dataset
        order = replace(dataset.train_order, seed=seed)
        dataset = replace(dataset, train=self.swap_samples(keep), train_order=order)
        secret = None
        if opened.built.privacy is not None:
            secret = (words[1:] >> np.uint64(32)).astype(np.uint32)
            dataset = share_secret(dataset, secret)
        built = replace(opened.built, seed=seed_words(seed))
        reporter = make_silent_reporter()
        backend = opened.backend
        inputs = make_compile_inputs(opened.recipe, dataset, built, backend, reporter)
        try:
            if compiled is None:
                executable = compile_to_executable(inputs, opened.recipe, backend, reporter)
                if type(executable) is not XlaExecutable:
                    raise RecipeError(
                        f"device = {opened.recipe.device.name}: doesn't train shadow networks; "
                        "must be cpu or gpu, or use --shadows 0"
                    )
            else:
                executable = replace(compiled, work=replace(inputs, step=compiled.work.step))
            shadow = replace(opened, dataset=dataset, built=built)
            state = jax.tree.map(np.array, shadow.fresh_state())
            if secret is not None and built.privacy is not None:
                state = set_secret(state, secret, built.privacy)
            state = executable.put(state)
            for start in range(0, self.step, DISPATCH_STEPS):
                end = min(self.step, start + DISPATCH_STEPS)
                state, telemetry = executable.run(state, start, end, "loop")
                if telemetry.non_finite_step is not None:
                    raise RunError(
                        f"shadow network {number + 1}: step {telemetry.non_finite_step} isn't "
                        "finite, so it can't be compared; --shadows 0 needs none"
                    )
        finally:
            inputs.train.close()
        return jax.tree.map(np.array, state), executable

    def swap_samples(self, keep: np.ndarray) -> Split:
        """Return the training split with the held-out sample of each pair whose `keep` is false."""
        train = self.opened.dataset.train
        held_out = self.opened.dataset.eval
        split_ids = np.zeros(len(train), np.int64)
        rows = np.arange(len(train))
        split_ids[self.members[~keep]] = 1
        rows[self.members[~keep]] = self.held_out[~keep]
        columns = {}
        for name, column in train.columns.items():
            view = RowView((column, held_out.columns[name]), split_ids, rows)
            columns[name] = view[:] if isinstance(column, np.ndarray) else view
        return replace(train, columns=columns)


def plan_audit(opened: OpenedRecipe, step: int, samples: int) -> Audit:
    """Return the audit of `samples` pairs, or of fewer if a split is smaller.

    Raises RecipeError if the samples can't be audited.
    """
    recipe = opened.recipe
    dataset = opened.dataset
    name = recipe.dataset.name
    if dataset.targets.task != "classification" or dataset.label_positions:
        raise RecipeError(f"dataset = {name}: must have one class for each sample")
    if recipe.dataset.buckets is not None:
        raise RecipeError("dataset.buckets: must be null, since samples of one size are swapped")
    if dataset.train.specs() != dataset.eval.specs():
        raise RecipeError(
            f"dataset = {name}: training and evaluation samples differ in shape or type, so they "
            "can't be compared"
        )
    members = _list_members(dataset, step)
    pairs = min(samples, len(members), len(dataset.eval))
    held_out = permute(np.arange(pairs), len(dataset.eval), recipe.seed, STREAM - 1)
    positions = permute(np.arange(pairs), len(members), recipe.seed, STREAM - 2)
    return Audit(opened, step, members[positions], held_out)


def _list_members(dataset: Dataset, step: int) -> np.ndarray:
    """Return the rows that `step` steps read, or may draw by Poisson sampling, except canaries."""
    order = dataset.train_order
    if isinstance(order, PoissonOrder):
        return np.setdiff1d(order.list_reachable(), order.canaries)
    steps = min(step, order.steps_per_epoch)
    return np.unique(order.batches(0, steps).rows).astype(np.int64)


def draw_subsets(seed: int, count: int, pairs: int) -> np.ndarray:
    """Draw whether each shadow network is trained on the member of each pair, bool (count, pairs).

    Each member is in half of the networks, rounded down, and its held-out sample in the others.
    """
    words = [draw_words(seed, STREAM + (1 << 40) + number, pairs) for number in range(count)]
    ranks = np.stack(words).argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    return ranks < count // 2


@dataclass(frozen=True)
class MembershipRow:
    """Success of an attack at a limit of the false positive rate."""

    attack: str
    auc: float
    """Probability that a member has a larger score than a held-out sample; 0.5 is a guess."""
    auc_error: float
    """Standard error of `auc` (Hanley and McNeil 1982)."""
    false_positive_rate: float
    false_positives: int
    """Held-out samples within the limit. The fewer they are, the less exact are the rates."""
    true_positives: int | None
    """Members that are recognised; None if the limit is less than one held-out sample."""
    true_positive_rate: float | None
    bound: float | None
    """The largest rate that differential privacy allows; None if the run isn't private."""

    def __str__(self) -> str:
        auc = f"{self.attack}: AUC {self.auc:.4f} +- {self.auc_error:.4f}"
        limit = f"{self.false_positive_rate:.1%} false positives"
        if self.true_positive_rate is None:
            least = math.ceil(1 / self.false_positive_rate)
            return f"{auc}; {limit} are less than one, {least:,} held-out samples would do"
        bound = "" if self.bound is None else f", at most {self.bound:.4f} by its privacy"
        return (
            f"{auc}; at {limit} ({self.false_positives:,} samples) true positives "
            f"{self.true_positive_rate:.4f} ({self.true_positives:,} members){bound}"
        )


@dataclass(frozen=True)
class PrivacyBound:
    """Differential privacy of a run."""

    epsilon: float
    delta: float

    def limit_rate(self, false_positive_rate: float) -> float:
        """Return the largest true positive rate (Kairouz et al. 2015, theorem 2.1)."""
        # exp overflows from 709 on; the second limit is then 1.
        factor = math.exp(min(self.epsilon, 700.0))
        return min(
            factor * false_positive_rate + self.delta,
            1 - (1 - self.delta - false_positive_rate) / factor,
            1.0,
        )


def rate_scores(
    attack: str, members: np.ndarray, held_out: np.ndarray, bound: PrivacyBound | None
) -> list[MembershipRow]:
    """Return a row for each of FALSE_POSITIVE_RATES; `members` (m,), `held_out` (n,) are scores."""
    ordered = np.sort(held_out)
    below = np.searchsorted(ordered, members, side="left")
    not_above = np.searchsorted(ordered, members, side="right")
    auc = float((below + not_above).mean() / 2 / len(ordered))
    error = _compute_auc_error(auc, len(members), len(ordered))
    rows = []
    for rate in FALSE_POSITIVE_RATES:
        # The product of a rate and a number of samples may be just below a whole number.
        max_false = math.floor(rate * len(ordered) + 1e-9)
        num_caught = int((members > ordered[-max_false - 1]).sum()) if max_false else None
        true_rate = None if num_caught is None else num_caught / len(members)
        max_rate = None if bound is None else bound.limit_rate(rate)
        rows.append(
            MembershipRow(attack, auc, error, rate, max_false, num_caught, true_rate, max_rate)
        )
    return rows


def _compute_auc_error(auc: float, members: int, held_out: int) -> float:
    """Return the standard error of an AUC (Hanley and McNeil 1982)."""
    pair_of_members = auc / (2 - auc) - auc**2
    pair_of_held_out = 2 * auc**2 / (1 + auc) - auc**2
    spread = auc * (1 - auc) + (members - 1) * pair_of_members + (held_out - 1) * pair_of_held_out
    return math.sqrt(max(spread, 0.0) / (members * held_out))


def score_by_shadows(
    margins: np.ndarray, shadow_margins: np.ndarray, was_trained_on: np.ndarray
) -> np.ndarray:
    """Return the likelihood ratio of membership, float64 (n,) (LiRA, Carlini et al. 2022).

    `margins` (n,) are log(p / (1 - p)) of each sample's class under the attacked network, and
    `shadow_margins` (shadows, n) under shadow networks. `was_trained_on`, bool (shadows, n), is
    whether a network was trained on a sample. Both groups' margins are assumed to be normal.
    """
    densities = []
    for group in (was_trained_on, ~was_trained_on):
        counts = group.sum(axis=0)
        means = np.where(group, shadow_margins, 0).sum(axis=0) / counts
        squares = np.where(group, shadow_margins - means, 0) ** 2
        variances = squares.sum(axis=0) / np.maximum(counts - 1, 1)
        if len(group) < SEPARATE_VARIANCE_SHADOWS:
            variances = np.full_like(variances, squares.sum() / (counts - 1).sum())
        variances = np.maximum(variances, 1e-12)
        densities.append(-((margins - means) ** 2) / (2 * variances) - np.log(variances) / 2)
    return np.asarray(densities[0] - densities[1])
