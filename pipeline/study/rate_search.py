"""Search for a learning rate: one short training at rates that grow exponentially, in one sink.

The method is the range test of Smith 2017, "Cyclical Learning Rates for Training Neural Networks".
At step i of n the rate is low (high / low)^(i / (n - 1)), as in Gugger 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.compile import CompileOptions, compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.fine_tuning import restore_weights_of
from pipeline.stages.lower import lower
from pipeline.stages.runner.adapted_run import read_frozen
from pipeline.training.phased_schedules import TableSchedule
from pipeline.training.schedules import ConstantSchedule

LOW = 1e-6
HIGH = 10.0
"""The first and the last rate of a search."""
SMOOTHED_SHARE = 0.05
"""Standard deviation of the Gaussian that averages losses, as a share of the steps."""
FIRST_SHARE = 0.1
"""Share of the steps, at the start, whose rates are too low to change the loss."""
MAX_RISE = 0.5
"""Losses are capped at the greatest first loss and this share of its size, so that a single huge
loss doesn't decide the average around it."""
MIN_FALL = 4.0
"""Least fall of the averaged loss, in standard errors of the first losses."""
DIVERGED_SHARE = 0.25
"""Rise of the averaged loss, as a share of its fall, at which training diverges."""


@dataclass(frozen=True)
class RateCurve:
    """The losses of a search, up to the first that isn't finite."""

    rates: np.ndarray
    """float64 (steps,): the learning rate of each step."""
    losses: np.ndarray
    """float64 (steps,): the loss of each step's batch before the update."""
    num_steps: int
    """Steps of the search; more than losses if training diverged."""

    @property
    def smoothed(self) -> np.ndarray:
        """float64 (steps,): the losses averaged over neighbours, with a Gaussian's weights."""
        count = len(self.losses)
        kernel = np.exp(-0.5 * (np.arange(1 - count, count) / self._deviation) ** 2)
        # A convolution by FFT: a matrix of weights wouldn't fit into memory.
        rows = np.fft.rfft([self.capped, np.ones(count)], 3 * count)
        sums = np.fft.irfft(rows * np.fft.rfft(kernel, 3 * count), 3 * count)[:, count - 1 :]
        averages: np.ndarray = sums[0, :count] / sums[1, :count]
        return averages

    @property
    def capped(self) -> np.ndarray:
        """float64 (steps,): the losses, at most `MAX_RISE` above the greatest first loss."""
        greatest = self._first_losses.max()
        return np.minimum(self.losses, greatest + MAX_RISE * abs(greatest))

    @property
    def noise(self) -> float:
        """The standard error of an averaged loss, from the scatter of the first losses."""
        num_averaged = 2 * math.sqrt(math.pi) * self._deviation
        return float(self._first_losses.std() / math.sqrt(num_averaged))

    @property
    def _first_losses(self) -> np.ndarray:
        return self.losses[: max(round(FIRST_SHARE * self.num_steps), 2)]

    @property
    def _deviation(self) -> float:
        """Standard deviation of the Gaussian, in steps."""
        return max(SMOOTHED_SHARE * self.num_steps, 1.0)


@dataclass(frozen=True)
class RateSuggestion:
    """A learning rate to start with, and the rates at which the loss is lowest and diverges."""

    rate: float
    """The rate at which the averaged loss falls fastest."""
    lowest_at: float
    """The rate at which the averaged loss is lowest."""
    diverges_at: float | None
    """The rate at which training diverges; None if it doesn't."""

    def __str__(self) -> str:
        if self.diverges_at is None:
            end = f"training doesn't diverge up to {HIGH:g}"
        else:
            end = f"training diverges at {self.diverges_at:.2g}"
        return (
            f"the loss falls fastest at a rate of {self.rate:.2g}, is lowest at "
            f"{self.lowest_at:.2g}, and {end}"
        )


def suggest_rate(curve: RateCurve) -> RateSuggestion:
    """Return the rate at which the averaged loss falls fastest, on a logarithmic scale of rates.

    Raises RunError if the loss doesn't fall by more than its noise.
    """
    smoothed = curve.smoothed
    lowest = int(smoothed.argmin())
    fall = float(smoothed[: lowest + 1].max() - smoothed[lowest])
    if lowest < 2 or fall <= MIN_FALL * curve.noise:
        raise RunError(
            f"the loss doesn't fall at any rate from {LOW:g} to {HIGH:g} within "
            f"{curve.num_steps:,} steps; try more steps, as in --steps {5 * curve.num_steps}"
        )
    slopes = np.gradient(smoothed)[:lowest]
    has_diverged = smoothed[lowest:] > smoothed[lowest] + DIVERGED_SHARE * fall
    diverges_at = None
    if has_diverged.any():
        diverges_at = float(curve.rates[lowest + int(has_diverged.argmax())])
    elif len(curve.rates) < curve.num_steps:
        # The next loss isn't finite.
        diverges_at = float(curve.rates[-1])
    steepest = int(slopes.argmin())
    return RateSuggestion(float(curve.rates[steepest]), float(curve.rates[lowest]), diverges_at)


def measure_rate_curve(recipe: Recipe, num_steps: int, reporter: Reporter) -> RateCurve:
    """Train for `num_steps` in one sink, at rates from `LOW` to `HIGH`.

    Groups of parameters with a custom rate keep their ratio to the main rate. No run directory is
    written. Raises RecipeError if rates come from a file, for a resumed run and with privacy, and
    RunError if the first losses aren't finite.
    """
    if recipe.train.resume is not None:
        problem = "must be null; checkpoint.restore starts the search with the weights of a run"
        raise RecipeError(f"train.resume = {recipe.train.resume}: {problem}")
    if recipe.privacy is not None:
        problem = "must be null; a search has no secret, so its noise would protect no sample"
        raise RecipeError(f"privacy: {problem}")
    if isinstance(recipe.train.schedule, TableSchedule):
        problem = "its rates come from a file, so there is none to search; must be another schedule"
        raise RecipeError(f"train.schedule = table: {problem}")
    run_length = {"epochs": None, "sink_epochs": None, "steps": num_steps}
    train = recipe.train.model_copy(update={"schedule": ConstantSchedule(), **run_length})
    recipe = recipe.model_copy(update={"train": train})
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    backend = recipe.device.open(recipe.parallel)
    built = lower(recipe, dataset, built, backend, None, reporter)
    options = CompileOptions(evaluates_later=True)
    executable = compile_programs(recipe, dataset, built, backend, reporter, options)
    state = executable.init()
    if recipe.checkpoint.restore is not None:
        restored = restore_weights_of(recipe, dataset, built.state, reporter.warn)
        state = executable.put(restored.replace_weights(state, built.step_config))
    if built.step_config.unsaved:
        state = executable.put(read_frozen(recipe, dataset).start(state))
    rates = np.geomspace(LOW, HIGH, num_steps)
    ratios = built.learning_rates[0] / np.float64(built.learning_rates.flat[0])
    executable.set_learning_rates(np.multiply.outer(rates, ratios).astype(np.float32))
    mechanism, _ = backend.choose_mechanism("auto", sink=True)
    with reporter.clock(f"training {num_steps} steps"):
        _, telemetry = executable.run(state, 0, num_steps, mechanism)
        losses = telemetry.loss.astype(np.float64)
    return cut_curve(rates, losses)


def cut_curve(rates: np.ndarray, losses: np.ndarray) -> RateCurve:
    """Return the curve up to the first loss, float64 (steps,), that isn't finite. Raises RunError
    if it is one of the first two."""
    length = int(np.isfinite(losses).cumprod().sum())
    if length < 2:
        # A loss is computed before its step's update, so an earlier rate has made it infinite.
        reason = f"after a rate of {rates[length - 1]:.2g}" if length else "before any update"
        raise RunError(f"the loss isn't finite at step {length + 1}, {reason}")
    return RateCurve(rates[:length], losses[:length], len(losses))
