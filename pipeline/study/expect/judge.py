"""Judgement of a recipe's expectations by runs of this side, and of another one.

Equal bits are met by one run of each side. If bits differ, so must step 1 by no more than rounding,
since no update comes before it, and both sides train over the same seeds until the test of
`pipeline.study.paired_test` decides, which is valid after every pair.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import resolve_level
from pipeline.core.errors import PipelineError
from pipeline.core.files.name_text import show_name
from pipeline.study.expect.expectations import (
    LEARNS,
    MAX_STEP,
    TIMES,
    Expectation,
    FigureBound,
    FigureValue,
    RecipeTest,
)
from pipeline.study.expect.outcomes import (
    BitsOrigin,
    ExpectationOutcome,
    Verdict,
    read_origin,
    read_records,
    write_record,
)
from pipeline.study.expect.sides import (
    CodeSide,
    SideError,
    judge_learning,
    make_here,
    make_keys,
    read_figure,
    read_series,
)
from pipeline.study.paired_test import compute_evidence

ERROR = 0.01
"""Upper bound of the probability that sides without a difference are said to differ."""
MIN_PAIRS = 9
"""Fewest pairs that can decide at `ERROR`."""
FEW_PAIRS = 3
"""Pairs of a process after the first `MIN_PAIRS`; from the start if a time is compared, so that
sides alternate."""
LOSS = "loss"
AMPLIFICATION = 100
"""Least ratio of the change of the evaluation\'s loss to the change of the training\'s losses by
which the evaluations differ. Weights that differ by rounding change both losses alike."""
MIN_ROUNDING = 1e-6
"""Relative rounding that evaluations may have although training has the same bits."""
MIN_LOSS = 1e-3
"""Losses below are compared as if they were so large, since rounding is of larger numbers."""
FIRST_STEP_ROUNDING = 1e-3
"""Relative difference that the losses of step 1 may have by rounding in float32."""
Judgement = tuple[Verdict, str]


@dataclass(frozen=True)
class KnownFigures:
    """Figures to compare with: recorded ones, or a run's."""

    label: str
    origin: BitsOrigin | None
    figures: Mapping[str, float | None]


@dataclass
class RecipeProgress:
    """A recipe's expectations, and what is known about them so far."""

    tested: RecipeTest
    scratch: Path
    other: CodeSide | None
    most_pairs: int
    compares_first_step: bool
    """Whether the losses of step 1 decide if they differ by more than rounding."""
    judgements: dict[Expectation, Judgement] = field(default_factory=dict)
    seconds: dict[Expectation, float] = field(default_factory=dict)

    @property
    def pending(self) -> list[Expectation]:
        """The expectations without a judgement."""
        return [item for item in self.tested.expectations if item not in self.judgements]

    def add_time(self, expectation: Expectation, begun: float) -> None:
        """Add the time since `begun`, by `time.perf_counter`, to an expectation."""
        seconds = time.perf_counter() - begun
        self.seconds[expectation] = self.seconds.get(expectation, 0.0) + seconds


def judge_recipe(
    tested: RecipeTest,
    against: CodeSide | Path | None,
    *,
    most_pairs: int,
    records: bool = False,
    draws_differ: bool = False,
) -> list[ExpectationOutcome]:
    """Return the outcome of each expectation of a recipe.

    `against` is another side, or the directory of a run. At most `most_pairs` pairs are run. With
    `records`, figures of this run are recorded before they are compared. With `draws_differ`, the
    sides draw other random numbers on purpose, so pairs alone decide.
    """
    compares_first_step = not draws_differ and _computes_in_float32(tested.recipe)
    with tempfile.TemporaryDirectory(prefix="pipeline-test-") as scratch:
        other = against if isinstance(against, CodeSide) else None
        progress = RecipeProgress(tested, Path(scratch), other, most_pairs, compares_first_step)
        try:
            run_dir = progress.scratch / "run"
            begun = time.perf_counter()
            make_here().train(tested.name, make_keys(tested.steps), run_dir)
            progress.add_time(tested.expectations[0], begun)
            if records:
                _record(tested, run_dir)
            _judge_run(progress, run_dir)
            if isinstance(against, Path):
                _judge_by_reference(progress, run_dir, [_read_reference(tested, against)])
            elif other is None:
                _judge_by_reference(progress, run_dir, _list_recorded(tested))
            else:
                _judge_by_side(progress, run_dir, other)
        except SideError as error:
            verdict: Verdict = "refused" if error.is_refused else "not met"
            progress.judgements.update(dict.fromkeys(progress.pending, (verdict, str(error))))
        except PipelineError as error:
            verdict = "refused" if error.exit_status == 2 else "not met"
            text = " ".join(str(error).split())
            progress.judgements.update(dict.fromkeys(progress.pending, (verdict, text)))
    return [
        ExpectationOutcome(
            tested.name, str(item), *progress.judgements[item], progress.seconds.get(item, 0.0)
        )
        for item in tested.expectations
    ]


def _record(tested: RecipeTest, run_dir: Path) -> None:
    """Record the figures of a run that the recipe compares with recorded ones."""
    figures = {item.key: value for item, value in _read_recordable(tested, run_dir)}
    origin = read_origin(run_dir)
    if figures and origin is not None:
        write_record(tested.file, origin, figures)


def _read_recordable(tested: RecipeTest, run_dir: Path) -> Iterator[tuple[Expectation, float]]:
    for item in tested.expectations:
        if isinstance(item.rule, FigureValue) and item.rule.value is None:
            value = read_figure(run_dir, item.name, item.step)
            if value is not None:
                yield item, value


def _judge_run(progress: RecipeProgress, run_dir: Path) -> None:
    """Judge what needs this side's run alone."""
    for item in progress.pending:
        if item.key == LEARNS:
            has_learnt, why = judge_learning(run_dir, progress.tested.recipe)
            verdict: Verdict = "met" if has_learnt else "not met"
            progress.judgements[item] = "not comparable" if has_learnt is None else verdict, why
            continue
        figure = read_figure(run_dir, item.name, item.step)
        if figure is None:
            progress.judgements[item] = "not met", f"the run has no finite {item.key}"
        elif not item.needs_other_side:
            assert item.rule is not None
            is_met = (
                item.rule.holds(figure)
                if isinstance(item.rule, FigureBound)
                else item.rule.holds(figure, item.rule.value or 0.0)
            )
            progress.judgements[item] = "met" if is_met else "not met", format_figure(figure)


def _list_recorded(tested: RecipeTest) -> list[KnownFigures]:
    records = read_records(tested.file)
    return [KnownFigures("the record", origin, figures) for origin, figures in records]


def _read_reference(tested: RecipeTest, run_dir: Path) -> KnownFigures:
    figures = {item.key: read_figure(run_dir, item.name, item.step) for item in tested.expectations}
    return KnownFigures(show_name(run_dir.name), read_origin(run_dir), figures)


def _judge_by_reference(
    progress: RecipeProgress, run_dir: Path, references: Sequence[KnownFigures]
) -> None:
    """Judge by figures that can't be computed again."""
    origin = read_origin(run_dir)
    for item in progress.pending:
        figure = read_figure(run_dir, item.name, item.step)
        assert figure is not None
        assert item.rule is not None
        having = [past for past in references if past.figures.get(item.key) is not None]
        same = next((past for past in having if past.origin == origin), None)
        if isinstance(item.rule, FigureBound):
            progress.judgements[item] = _judge_factor(item.key, item.rule, figure, same)
        elif same is not None:
            progress.judgements[item] = _judge_bits(figure, same.figures[item.key], same.label)
        else:
            progress.judgements[item] = _judge_elsewhere(
                item.rule, item.key, figure, having, origin
            )


def _judge_factor(
    key: str, rule: FigureBound, figure: float, same: KnownFigures | None
) -> Judgement:
    """Judge a multiple of a figure that a run of this processor has."""
    value = None if same is None else same.figures[key]
    if same is None or not value:
        return "not comparable", f"{format_figure(figure)}; --against names the other side"
    text = f"{figure / value:.3g}x, {format_figure(figure)} and {format_figure(value)}"
    return "met" if rule.holds(figure / value) else "not met", f"{text} in {same.label}"


def _judge_bits(figure: float, value: float | None, label: str) -> Judgement:
    assert value is not None
    if figure == value:
        return "met", f"{format_figure(figure)}, to the bit"
    change = f", {(figure - value) / abs(value):+.2%}" if value else ""
    return "not met", f"{format_figure(figure)}{change}; {label} has {format_figure(value)}"


def _judge_elsewhere(
    rule: FigureValue,
    key: str,
    figure: float,
    having: Sequence[KnownFigures],
    origin: BitsOrigin | None,
) -> Judgement:
    """Judge a figure whose references have another processor or other versions."""
    if not having:
        advice = "no record and no run to compare with has this figure; --record writes one"
        return "not comparable", f"{format_figure(figure)}; {advice}"
    reference = having[-1]
    value = reference.figures[key]
    assert value is not None
    change = "an unknown processor"
    if origin is not None and reference.origin is not None:
        change = origin.describe_difference(reference.origin) or change
    where = f"{format_figure(figure)}; {reference.label} has {format_figure(value)} with {change}"
    if rule.tolerance is None:
        return "not comparable", f"{where}; a tolerance is missing, as in recorded +- 2%"
    return "met" if rule.holds(figure, value) else "not met", where


def _judge_by_side(progress: RecipeProgress, run_dir: Path, other: CodeSide) -> None:
    """Judge by a run of the other side, then by pairs."""
    if not progress.pending:
        return
    other_dir = progress.scratch / "other"
    begun = time.perf_counter()
    other.train(progress.tested.name, make_keys(_find_last_step(progress.pending)), other_dir)
    progress.add_time(progress.pending[0], begun)
    for item in progress.pending:
        if item.name in TIMES:
            continue
        figure = read_figure(run_dir, item.name, item.step)
        value = read_figure(other_dir, item.name, item.step)
        if value is None:
            progress.judgements[item] = "not comparable", f"{other.label} has no finite {item.key}"
        elif figure == value and isinstance(item.rule, FigureValue):
            progress.judgements[item] = _judge_bits(figure, value, other.label)
        elif item.name == LOSS and item.step is None and isinstance(item.rule, FigureValue):
            change = _compare_evaluations(run_dir, other_dir)
            if change is not None:
                progress.judgements[item] = "not met", f"{change} in {other.label}"
    _judge_by_first_step(progress, run_dir, other_dir)
    _judge_by_pairs(progress, other)


def _computes_in_float32(recipe: Recipe) -> bool:
    return resolve_level(recipe) == "O0" and not recipe.train.to_float


def _judge_by_first_step(progress: RecipeProgress, run_dir: Path, other_dir: Path) -> None:
    """Judge what has other bits by the losses of step 1, if they differ by more than rounding.

    No update comes before step 1, so both sides have the same weights, samples and random numbers,
    unless a change of the code changed one of these or the loss itself. A difference of the losses
    is larger by far than what rounding makes, but in the mean over seeds it may be 0.
    """
    losses = [read_series(folder, LOSS, 1).get(1) for folder in (run_dir, other_dir)]
    loss, other_loss = losses
    if not progress.compares_first_step or loss is None or other_loss is None:
        return
    change = abs(loss - other_loss) / max(abs(other_loss), MIN_LOSS)
    # Isn't true if a loss isn't finite.
    if change > FIRST_STEP_ROUNDING:
        assert progress.other is not None
        figures = (
            f"{format_figure(loss)}, and {format_figure(other_loss)} in {progress.other.label}"
        )
        text = f"step 1 differs by more than rounding: loss {figures}; --other-draws allows it"
        for item in progress.pending:
            if isinstance(item.rule, FigureValue):
                progress.judgements[item] = "not met", text


def _compare_evaluations(run_dir: Path, other_dir: Path) -> str | None:
    """Return how the evaluation differs if the training of two runs differs by rounding alone.

    Then the weights are the same but for rounding, so one run of each side shows a change of the
    evaluation, which over seeds may go in both directions. Returns None if nothing can be said.
    """
    curves = [read_series(folder, LOSS, MAX_STEP) for folder in (run_dir, other_dir)]
    losses = [read_figure(folder, LOSS, None) for folder in (run_dir, other_dir)]
    if curves[0].keys() != curves[1].keys() or not curves[0] or None in losses:
        return None
    ours, others = (np.array(list(curve.values())) for curve in curves)
    rounding = float(np.max(np.abs(ours - others) / np.maximum(np.abs(others), MIN_LOSS)))
    loss, other_loss = (value for value in losses if value is not None)
    change = abs(loss - other_loss) / max(abs(other_loss), MIN_LOSS)
    if change <= AMPLIFICATION * max(rounding, MIN_ROUNDING):
        return None
    text = f"training is the same but for {rounding:.1g} of the losses, the evaluation isn't"
    return f"{text}: loss {format_figure(loss)}, and {format_figure(other_loss)}"


def _find_last_step(expectations: Iterable[Expectation]) -> int | None:
    steps = [item.step for item in expectations]
    return None if None in steps else max(step for step in steps if step is not None)


def _judge_by_pairs(progress: RecipeProgress, other: CodeSide) -> None:
    """Train both sides over seeds until each expectation is decided, or the pairs are used."""
    differences: dict[Expectation, list[float]] = {item: [] for item in progress.pending}
    # The recipe's own seed has been compared.
    first_seed = progress.tested.recipe.seed + 1
    num_pairs = 0
    while progress.pending and num_pairs < progress.most_pairs:
        is_timed = any(item.name in TIMES for item in progress.pending)
        size = FEW_PAIRS if is_timed or num_pairs else MIN_PAIRS
        num_left = progress.most_pairs - num_pairs
        # A single pair must not be left, since one seed is no sweep.
        count = num_left if num_left <= size + 1 else size
        seeds = range(first_seed + num_pairs, first_seed + num_pairs + count)
        begun = time.perf_counter()
        pairs = _train_pairs(progress, other, seeds)
        for seed in seeds:
            _judge_by_first_step(progress, *pairs[seed])
            for item in progress.pending:
                differences[item].append(_measure_difference(item, *(pairs[seed])))
                judgement = _decide(item, np.array(differences[item]), other.label)
                if judgement is not None:
                    progress.judgements[item] = judgement
        progress.add_time(progress.tested.expectations[-1], begun)
        num_pairs += count
    for item in progress.pending:
        progress.judgements[item] = _conclude(item, np.array(differences[item]))


def _train_pairs(
    progress: RecipeProgress, other: CodeSide, seeds: Sequence[int]
) -> dict[int, tuple[Path, Path]]:
    """Return the runs of this side and of the other by seed."""
    name = progress.tested.name
    keys = make_keys(_find_last_step(progress.pending))
    runs = [
        side.train_seeds(name, keys, seeds, progress.scratch / f"{number}_{seeds[0]}")
        for number, side in enumerate((make_here(), other))
    ]
    return {seed: (runs[0][seed], runs[1][seed]) for seed in seeds}


def _measure_difference(item: Expectation, run_dir: Path, other_dir: Path) -> float:
    """Return this side's figure minus the other's; of a multiple, the logarithm beyond the bound.

    A figure of a step is the mean over the steps up to it, which varies less. Raises SideError if
    a run lacks the figure.
    """
    figures: list[float] = []
    for folder in (run_dir, other_dir):
        if item.step is not None and isinstance(item.rule, FigureValue):
            series = read_series(folder, item.name, item.step)
            figure = float(np.mean(list(series.values()))) if item.step in series else None
        else:
            figure = read_figure(folder, item.name, item.step)
        if figure is None or (isinstance(item.rule, FigureBound) and figure <= 0):
            raise SideError(f"a run has no finite {item.key} above 0", is_refused=False)
        figures.append(figure)
    ours, others = figures
    if isinstance(item.rule, FigureBound):
        return math.log(ours / others) - math.log(item.rule.number)
    return ours - others


def _decide(item: Expectation, differences: np.ndarray, label: str) -> Judgement | None:
    """Return the judgement if the differences decide; else None."""
    evidence = float(compute_evidence(differences)[-1])
    if len(differences) < MIN_PAIRS or evidence < 1 / ERROR:
        return None
    mean = float(differences.mean())
    pairs = f"in {len(differences)} pairs"
    if isinstance(item.rule, FigureBound):
        is_met = (mean < 0) == item.rule.is_upper
        factor = math.exp(mean) * item.rule.number
        return "met" if is_met else "not met", f"{factor:.3g}x {pairs}"
    what = f"mean {item.name} of {item.step} steps" if item.step else item.name
    text = f"bits differ, and {what} is {mean:+.3g} against {label} {pairs}"
    return "not met", text


def _conclude(item: Expectation, differences: np.ndarray) -> Judgement:
    """Return the judgement of differences that don't decide."""
    mean = float(differences.mean())
    pairs = f"{len(differences)} pairs"
    if not isinstance(item.rule, FigureBound):
        return "met", f"bits differ, but no difference is found in {pairs}: {mean:+.2g}"
    factor = math.exp(mean) * item.rule.number
    is_met = item.rule.holds(factor)
    text = f"{factor:.3g}x on average, not decided in {pairs}"
    return "met" if is_met else "not comparable", text


def format_figure(figure: float) -> str:
    """Return a figure with the digits that tell float32 apart."""
    return f"{figure:.9g}"
