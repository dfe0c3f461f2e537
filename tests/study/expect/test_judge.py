"""Judgement of expectations: by a bound, a record, a run, and by pairs with another side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.study.expect import judge
from pipeline.study.expect.expectations import RecipeTest, parse_expectations
from pipeline.study.expect.outcomes import ExpectationOutcome, find_file
from pipeline.study.expect.sides import CodeSide, SideError
from tests.study.expect.runs import HERE, make_side, write_run

Write = Callable[[Path, int], object]
THERE = {"processor": "there", "instructions": "neon"}


@pytest.fixture(scope="module")
def digits() -> Recipe:
    return load_recipe("lenet5_digits")


@pytest.fixture
def run_test(
    digits: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[ExpectationOutcome]]:
    """Judge a section by runs that `write` writes, against another side."""

    def run(
        section: dict[str, Any],
        write: Write,
        against: CodeSide | Path | None = None,
        *,
        recipe: Recipe = digits,
        **options: bool,
    ) -> list[ExpectationOutcome]:
        monkeypatch.setattr(judge, "make_here", lambda: make_side(write, "here"))
        tested = RecipeTest("mine", tmp_path / "mine.yaml", recipe, parse_expectations(section))
        return judge.judge_recipe(tested, against, most_pairs=16, **options)

    return run


def write_constant(loss: float, **settings: Any) -> Write:
    return lambda folder, _: write_run(folder, [2.0, loss], {"accuracy": 0.9}, **settings)


def write_noisy(shift: float, number: int, scale: float = 0.1) -> Write:
    """Losses around `shift` after the first, whose noise is the same in no two sides; `number` is
    the side's."""

    def write(folder: Path, seed: int) -> None:
        noise = np.random.default_rng((seed, number)).normal(0, scale, 5)
        first = 2 + 1e-6 * noise[0]
        losses = [first, *(1 + shift + noise[1:])]
        write_run(folder, losses, {"accuracy": 0.9 + shift}, step_ms=1 + shift)

    return write


def verdicts(outcomes: list[ExpectationOutcome]) -> list[str]:
    return [outcome.verdict for outcome in outcomes]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (">= 0.9", "met"),
        ("> 0.9", "not met"),
        ("0.91 +- 0.02", "met"),
        ("0.91 +- 1%", "not met"),
        ("0.91 +- 2%", "met"),
    ],
)
def test_figure_is_held_against_its_bound(
    run_test: Callable[..., list[ExpectationOutcome]], rule: str, verdict: str
) -> None:
    (outcome,) = run_test({"accuracy": rule}, write_constant(0.5))
    assert (outcome.verdict, outcome.figure) == (verdict, "0.9")


@pytest.mark.medium
def test_record_is_compared_to_the_bit_on_its_processor(
    run_test: Callable[..., list[ExpectationOutcome]],
) -> None:
    section = {"loss@2": "recorded +- 50%"}
    assert verdicts(run_test(section, write_constant(0.5))) == ["not comparable"]
    assert verdicts(run_test(section, write_constant(0.5), records=True)) == ["met"]
    assert verdicts(run_test(section, write_constant(0.5))) == ["met"]
    (outcome,) = run_test(section, write_constant(0.50000006))
    assert outcome.verdict == "not met"
    assert "the record has 0.5" in outcome.figure


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rule", "loss", "verdict"),
    [
        ("recorded", 0.5, "not comparable"),
        ("recorded +- 2%", 0.505, "met"),
        ("recorded +- 2%", 0.52, "not met"),
    ],
)
def test_record_of_another_processor_needs_a_tolerance(
    run_test: Callable[..., list[ExpectationOutcome]], rule: str, loss: float, verdict: str
) -> None:
    run_test({"loss@2": rule}, write_constant(0.5, machine=THERE), records=True)
    (outcome,) = run_test({"loss@2": rule}, write_constant(loss, machine=HERE))
    assert outcome.verdict == verdict
    assert "processor there, neon" in outcome.figure


@pytest.mark.medium
def test_damaged_record_is_refused(
    run_test: Callable[..., list[ExpectationOutcome]], tmp_path: Path
) -> None:
    file = find_file(tmp_path / "mine.yaml")
    file.parent.mkdir()
    file.write_text("[]")
    (outcome,) = run_test({"loss@2": "recorded"}, write_constant(0.5))
    assert outcome.verdict == "refused"
    assert "mine.json" in outcome.figure


@pytest.mark.medium
def test_run_is_the_other_side(
    run_test: Callable[..., list[ExpectationOutcome]], tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", [2.0, 0.5], {"accuracy": 0.9}, step_ms=0.5)
    section = {"loss@2": "recorded", "step_ms": "<= 1.2x", "accuracy": ">= 0.99x"}
    assert verdicts(run_test(section, write_constant(0.5), run_dir)) == ["met", "not met", "met"]
    assert verdicts(run_test(section, write_constant(0.4), run_dir))[0] == "not met"
    elsewhere = write_run(tmp_path / "elsewhere", [2.0, 0.5], {"accuracy": 0.9}, machine=THERE)
    outcomes = run_test(section, write_constant(0.5), elsewhere)
    assert verdicts(outcomes) == ["not comparable"] * 3


@pytest.mark.medium
def test_equal_bits_need_no_pairs(run_test: Callable[..., list[ExpectationOutcome]]) -> None:
    seeds: list[int] = []

    def write(folder: Path, seed: int) -> None:
        seeds.append(seed)
        write_constant(0.5)(folder, seed)

    outcomes = run_test({"loss@2": "recorded"}, write_constant(0.5), make_side(write))
    assert verdicts(outcomes) == ["met"]
    assert seeds == [1]


@pytest.mark.medium
def test_systematic_difference_is_found_by_pairs(
    run_test: Callable[..., list[ExpectationOutcome]],
) -> None:
    section = {"loss@5": "recorded", "accuracy": "recorded"}
    side = make_side(write_noisy(0.0, 1))
    outcomes = run_test(section, write_noisy(-0.3, 0), side)
    assert verdicts(outcomes) == ["not met", "not met"]
    assert "bits differ, and mean loss of 5 steps is -0.2" in outcomes[0].figure


@pytest.mark.medium
def test_noise_without_a_difference_is_met(
    run_test: Callable[..., list[ExpectationOutcome]],
) -> None:
    (outcome,) = run_test(
        {"loss@5": "recorded"}, write_noisy(0.0, 0), make_side(write_noisy(0.0, 1))
    )
    assert outcome.verdict == "met"
    assert "bits differ, but no difference is found in 16 pairs" in outcome.figure


def write_by_seed(
    losses: dict[int, float], number: int = 0, seeds: list[int] | None = None
) -> Write:
    """Runs whose loss of step 1 is 2 unless `losses` has the seed's; `seeds` gets their seeds.
    `number` is the side's."""

    def write(folder: Path, seed: int) -> None:
        if seeds is not None:
            seeds.append(seed)
        # Later losses differ by rounding, so pairs don't decide.
        rounding = np.random.default_rng((seed, number)).normal(0, 1e-6)
        write_run(folder, [losses.get(seed, 2.0), 1 + rounding], {"accuracy": 0.9 + rounding})

    return write


@pytest.mark.medium
def test_first_step_decides_without_pairs(
    run_test: Callable[..., list[ExpectationOutcome]],
) -> None:
    """Another order of samples has a difference whose mean over seeds is 0."""
    seeds: list[int] = []
    side = make_side(write_constant(0.5))
    section = {"loss@2": "recorded", "accuracy": "recorded"}
    outcomes = run_test(section, write_by_seed({1: 2.01}, seeds=seeds), side)
    assert verdicts(outcomes) == ["not met", "not met"]
    text = "step 1 differs by more than rounding: loss 2.01, and 2 in other"
    assert outcomes[0].figure == f"{text}; --other-draws allows it"
    assert seeds == [1]


@pytest.mark.medium
@pytest.mark.parametrize(("loss", "verdict"), [(2.0019, "met"), (2.0021, "not met")])
def test_first_steps_of_pairs_decide_too(
    run_test: Callable[..., list[ExpectationOutcome]], loss: float, verdict: str
) -> None:
    """Two batches may have nearly the same loss by chance."""
    side = make_side(write_by_seed({1: 2.0001}, 1))
    (outcome,) = run_test({"loss@2": "recorded"}, write_by_seed({5: loss}), side)
    assert outcome.verdict == verdict


@pytest.mark.medium
def test_bound_is_not_decided_by_the_first_step(
    run_test: Callable[..., list[ExpectationOutcome]],
) -> None:
    side = make_side(write_constant(0.5))
    (outcome,) = run_test({"accuracy": ">= 0.9x"}, write_by_seed({1: 2.01}), side)
    assert outcome.verdict == "met"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("draws_differ", "overrides"),
    [
        (True, []),
        (False, ["train.precision=bf16"]),
        (False, ["train.to_float=[{pattern: '*', dtype: bfloat16}]"]),
    ],
    ids=["draws", "bf16", "to_float"],
)
def test_pairs_alone_decide_if_first_steps_may_differ(
    run_test: Callable[..., list[ExpectationOutcome]], draws_differ: bool, overrides: list[str]
) -> None:
    side = make_side(write_by_seed({}, 1))
    recipe = load_recipe("lenet5_digits", overrides)
    write = write_by_seed({1: 2.01, 2: 1.99})
    outcomes = run_test(
        {"loss@2": "recorded"}, write, side, recipe=recipe, draws_differ=draws_differ
    )
    assert verdicts(outcomes) == ["met"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rounding", "change", "verdict"), [(1e-6, 0.01, "not met"), (1e-3, 0.01, "met")]
)
def test_evaluation_that_differs_after_equal_training_is_found(
    run_test: Callable[..., list[ExpectationOutcome]], rounding: float, change: float, verdict: str
) -> None:
    """In both directions over the seeds, so pairs alone wouldn't find it."""

    def write(folder: Path, seed: int) -> None:
        sign = 1 if seed % 2 else -1
        write_run(folder, [2.0, 1.0 + rounding], {"loss": 0.5 + sign * change})

    def write_other(folder: Path, seed: int) -> None:
        write_run(folder, [2.0, 1.0], {"loss": 0.5})

    (outcome,) = run_test({"loss": "recorded"}, write, make_side(write_other))
    assert outcome.verdict == verdict
    assert outcome.figure.startswith("training is the same but for 1e-06 of the losses") is (
        verdict == "not met"
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.5, "not met"), (0.0, "met")], ids=["slower", "as fast"]
)
def test_time_is_compared_by_pairs(
    run_test: Callable[..., list[ExpectationOutcome]], shift: float, verdict: str
) -> None:
    (outcome,) = run_test(
        {"step_ms": "<= 1.2x"}, write_noisy(shift, 0), make_side(write_noisy(0.0, 1))
    )
    assert outcome.verdict == verdict
    assert outcome.figure == f"{1 + shift:.3g}x in 9 pairs"


@pytest.mark.medium
def test_failed_run_ends_no_other_recipe(run_test: Callable[..., list[ExpectationOutcome]]) -> None:
    def fail(folder: Path, seed: int) -> None:
        raise SideError("mine ended with status 1", is_refused=False)

    outcomes = run_test({"loss@2": "recorded", "learns": True}, fail)
    assert verdicts(outcomes) == ["not met", "not met"]
    assert outcomes[0].figure == "mine ended with status 1"


@pytest.mark.medium
def test_missing_figure_is_not_met(run_test: Callable[..., list[ExpectationOutcome]]) -> None:
    outcomes = run_test({"loss@9": "recorded", "top5": "> 0"}, write_constant(0.5))
    assert verdicts(outcomes) == ["not met", "not met"]
    assert outcomes[0].figure == "the run has no finite loss@9"


@pytest.mark.medium
def test_other_sides_missing_figure_is_not_comparable(
    run_test: Callable[..., list[ExpectationOutcome]],
) -> None:
    def write(folder: Path, seed: int) -> None:
        write_run(folder, [2.0])

    (outcome,) = run_test({"loss@2": "recorded"}, write_constant(0.5), make_side(write))
    assert outcome.verdict == "not comparable"


def test_fewest_pairs_can_decide() -> None:
    """Differences that all agree decide after `MIN_PAIRS`, and not earlier."""
    evidence = judge.compute_evidence(np.ones(20))
    deciding = np.flatnonzero(evidence >= 1 / judge.ERROR)[0] + 1
    assert deciding == judge.MIN_PAIRS
