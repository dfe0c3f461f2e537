"""The verdict's sentence, and the jobs that it is about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import format_json
from pipeline.stages.record.run_directory import SUMMARY
from pipeline.study.sweep.directory import JobSummary, write_overrides
from pipeline.study.sweep.verdict import PairedVerdict, judge_pairs, read_verdict

VALUES_A = (0.90, 0.92, 0.88, 0.91, 0.89, 0.93)


def make_pairs(
    differences: Sequence[float], metric: str = "accuracy", count: int = 10_000
) -> list[tuple[JobSummary, JobSummary]]:
    values = [VALUES_A[index % len(VALUES_A)] for index in range(len(differences))]
    return [
        (
            JobSummary(status="done", metrics={metric: value, "count": count}),
            JobSummary(status="done", metrics={metric: value + difference, "count": count}),
        )
        for value, difference in zip(values, differences, strict=True)
    ]


def test_better_side_has_its_interval_and_unpaired_cost() -> None:
    verdict = judge_pairs(make_pairs([0.02, 0.021, 0.019, 0.02, 0.022, 0.018]), "accuracy")
    assert verdict.better == "B"
    assert verdict.is_final
    assert 0 < verdict.low < 0.02 < verdict.high
    assert str(verdict).startswith("B is better by 0.02 in accuracy (95 %: 0.017 to 0.023)")
    assert str(verdict).endswith("after 6 pairs; unpaired it would have taken 4116 runs")
    assert verdict.describe_split() is None


def test_smaller_loss_is_better() -> None:
    pairs = make_pairs([0.02, 0.021, 0.019, 0.02, 0.022, 0.018], "loss")
    verdict = judge_pairs(pairs, "loss")
    assert verdict.better == "A"
    assert "A is better by 0.02 in loss" in str(verdict)
    assert "after 6 pairs: keep A" in str(verdict)
    assert verdict.samples is None


def test_later_pairs_do_not_change_a_verdict() -> None:
    decided = make_pairs([0.02, 0.021, 0.019, 0.02, 0.022, 0.018])
    assert judge_pairs(decided, "accuracy") == judge_pairs(
        decided + make_pairs([-1.0, 1.0]), "accuracy"
    )


def test_undecided_verdict_names_the_largest_possible_difference() -> None:
    verdict = judge_pairs(make_pairs([0.02, -0.02, 0.01, -0.01, 0.02, -0.03, 0.01]), "accuracy")
    assert verdict.better is None
    assert not verdict.is_final
    assert str(verdict).startswith(
        f"no difference above {verdict.largest_plausible:.2g} in accuracy after 7"
    )
    assert "pairs: keep A" in str(verdict)


def test_verdict_reports_the_split_uncertainty() -> None:
    verdict = judge_pairs(
        make_pairs([0.02, 0.021, 0.019, 0.02, 0.022, 0.018], count=100), "accuracy"
    )
    share = 0.915
    assert verdict.split_error == pytest.approx(1.96 * (share * (1 - share) / 100) ** 0.5)
    assert "its 100 samples leave accuracy uncertain by 0.055" in str(verdict.describe_split())


def test_identical_metrics_have_a_difference_of_exactly_zero() -> None:
    verdict = judge_pairs(make_pairs([0.0] * 6), "accuracy")
    assert verdict.is_final
    assert str(verdict) == "the difference is exactly 0 in all metrics after 6 pairs: keep A"
    facts = json.loads(format_json(verdict.to_dict()))
    assert (facts["low"], facts["high"], facts["better"]) == (0.0, 0.0, None)


def test_one_equal_metric_is_not_identical_metrics() -> None:
    pairs = make_pairs([0.0] * 6)
    other = JobSummary(status="done", metrics={**pairs[0][1].metrics, "loss": 1.0})
    verdict = judge_pairs([(pairs[0][0], other), *pairs[1:]], "accuracy")
    assert not verdict.is_final
    assert str(verdict) == "no difference above 0.0001 in accuracy after 6 pairs: keep A"


@pytest.mark.parametrize("count", [1, 5])
def test_verdict_requires_six_pairs(count: int) -> None:
    verdict = judge_pairs(make_pairs([0.02, 0.021, 0.019, 0.02, 0.022][:count]), "accuracy")
    assert str(verdict) == f"no verdict after {count} pair{'s' * (count > 1)}: it takes at least 6"
    assert json.loads(format_json(verdict.to_dict()))["low"] is None


def write_job(sweep: Path, number: int, summary: dict[str, Any] | None) -> None:
    folder = sweep / str(number)
    folder.mkdir(parents=True)
    write_overrides(folder, {"side": "AB"[number % 2], "seed": 1 + number // 2})
    if summary is not None:
        (folder / SUMMARY).write_text(json.dumps(summary))


def test_pairs_count_up_to_the_first_unfinished_pair(tmp_path: Path) -> None:
    done = {"status": "done", "metrics": {"accuracy": 0.5}}
    assert read_verdict(tmp_path, None) == "no verdict: no pair is done"
    for number in range(7):
        write_job(tmp_path, number, done)
    write_job(tmp_path, 7, None)
    for number in (8, 9):
        write_job(tmp_path, number, done)
    verdict = read_verdict(tmp_path, None)
    assert isinstance(verdict, PairedVerdict)
    assert verdict.pairs == 3
    write_overrides(tmp_path / "9", {"side": "C"})
    assert read_verdict(tmp_path, None) == verdict, "a job of another sweep isn't counted"
    with pytest.raises(RunError, match="--metric los: there is no such metric of these runs"):
        read_verdict(tmp_path, "los")


def test_failed_job_is_reported(tmp_path: Path) -> None:
    write_job(tmp_path, 0, {"status": "done", "metrics": {"accuracy": 0.5}})
    write_job(tmp_path, 1, {"status": "failed", "reason": "Invalid loss"})
    assert read_verdict(tmp_path, None) == (
        "no verdict: job 1 (side B, seed 1) failed: Invalid loss"
    )


def test_failure_after_the_deciding_pair_is_ignored(tmp_path: Path) -> None:
    for number in range(12):
        metrics = {"accuracy": 0.5 + 0.1 * (number % 2) + 0.001 * (number % 3)}
        write_job(tmp_path, number, {"status": "done", "metrics": metrics})
    write_job(tmp_path, 12, {"status": "failed", "reason": "Invalid loss"})
    verdict = read_verdict(tmp_path, None)
    assert isinstance(verdict, PairedVerdict)
    assert verdict.better == "B"


def test_jobs_without_a_metric_are_an_error(tmp_path: Path) -> None:
    for number in (0, 1):
        write_job(tmp_path, number, {"status": "done", "metrics": {}})
    with pytest.raises(RunError, match="its jobs have no metric"):
        read_verdict(tmp_path, None)


def test_metric_that_is_not_finite_has_no_verdict(tmp_path: Path) -> None:
    for number, value in enumerate((0.5, None)):
        write_job(tmp_path, number, {"status": "done", "metrics": {"rmse": value}})
    with pytest.raises(RunError, match="rmse of a run isn't a finite number"):
        read_verdict(tmp_path, None)


def test_sides_that_evaluate_other_samples_are_an_error(tmp_path: Path) -> None:
    """As `eval.samples=trained` does with another length of training."""
    for number, count in enumerate((30, 40)):
        metrics = {"accuracy": 0.5, "train_loss": 1.0, "count": count}
        write_job(tmp_path, number, {"status": "done", "metrics": metrics})
    with pytest.raises(RunError, match="its sides were evaluated on 30 and 40 samples"):
        read_verdict(tmp_path, "accuracy")
    assert isinstance(read_verdict(tmp_path, "train_loss"), PairedVerdict)
