"""The page of a comparison shows its pairs, each interval and the cost without pairs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import RunError
from pipeline.study.paired_test import compute_interval
from pipeline.study.sweep.directory import JobSummary
from pipeline.study.sweep.verdict import SideTexts, judge_pairs, write_verdict_page
from tests.study.sweep.test_verdict import make_pairs

EFFECT = [0.02, 0.021, 0.019, 0.02, 0.022, 0.018]
UNDECIDED = [0.02, -0.01, 0.013, -0.02, 0.004, -0.003, 0.011, -0.008]
HOSTILE = "</p><script>alert(1)</script>"


def write(
    path: Path, pairs: list[tuple[JobSummary, JobSummary]], words: str = "A has x", first: int = 1
) -> str:
    metric = next(iter(pairs[0][0].metrics))
    verdict = judge_pairs(pairs, metric)
    write_verdict_page(path, verdict, dict(enumerate(pairs, first)), SideTexts(words, words))
    return path.read_text()


def find_bars(page: str) -> int:
    """Return the number of intervals that are drawn."""
    return len(re.findall(r'<line class="dot curve blue"', page))


def test_deciding_pairs_are_shown_and_later_ones_are_not(tmp_path: Path) -> None:
    pairs = make_pairs([*EFFECT, -0.5, 0.5])
    page = write(tmp_path / "page.html", pairs, first=40)
    assert "B is better by 0.02 in accuracy" in page
    assert "<td>4,116</td>" in page, "runs without pairs"
    for seed in range(40, 46):
        assert f"<td>{seed}</td>" in page
    assert "<td>46</td>" not in page
    assert find_bars(page) == 1


def test_sides_are_named_at_the_top_by_what_differs(tmp_path: Path) -> None:
    contrast = "A has train.optimizer.lr=0.05; B has train.optimizer.lr=0.1"
    page = write(tmp_path / "page.html", make_pairs(EFFECT), contrast)
    top = page.partition("<body>")[2].partition("<dl")[0]
    assert f"<p>{contrast}. Result: B is better by 0.02 in accuracy" in top


def test_intervals_of_undecided_pairs_begin_with_the_sixth(tmp_path: Path) -> None:
    pairs = make_pairs(UNDECIDED)
    page = write(tmp_path / "page.html", pairs)
    assert find_bars(page) == 3
    low, high = compute_interval(
        np.array([b.numbers()["accuracy"] - a.numbers()["accuracy"] for a, b in pairs])
    )
    assert f"<dd>{low:.2g} to {high:.2g}</dd>" in page


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_pairs_have_a_page_without_intervals(tmp_path: Path, count: int) -> None:
    page = write(tmp_path / "page.html", make_pairs(UNDECIDED[:count]))
    assert "it takes at least 6" in page
    assert find_bars(page) == 0
    assert not re.search(r"\b(inf|nan)\b", page)


def test_equal_differences_have_no_unpaired_cost(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html", make_pairs([0.0] * 6))
    assert "exactly 0 in all metrics" in page
    assert "no number of separate seeds" in page


@pytest.mark.medium
def test_many_pairs_have_a_bounded_page(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html", make_pairs([0.01, -0.01] * 100))
    assert "The first 100 of 200 pairs" in page
    assert find_bars(page) <= 60


def test_page_without_verdict_has_the_reason_and_hostile_keys_are_text(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_verdict_page(path, f"no verdict: {HOSTILE}", {}, SideTexts(HOSTILE, HOSTILE))
    page = path.read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 3
    page = write(path, make_pairs(EFFECT), HOSTILE)
    assert "<script" not in page


def test_unwritable_page_is_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"page.html: can't be written"):
        write_verdict_page(tmp_path / "none" / "page.html", "no verdict", {}, SideTexts("", ""))
