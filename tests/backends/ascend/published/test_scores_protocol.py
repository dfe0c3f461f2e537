"""The classes of all rows, and their split by network.

Observed coverage: counts by hand, and the chart's curves.
The log of scores opens once in seven days.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import date
from pathlib import Path
from statistics import NormalDist
from typing import get_args

import numpy as np
import pytest

from pipeline.backends.ascend.published.scores import (
    COLUMNS,
    LEVELS,
    ClassedRow,
    Part,
    Population,
    RowClass,
    append_scores,
    check_seal,
    count_rows,
    draw_coverage,
    hold_seal,
    load_classes,
    observe_coverage,
    split_by_name,
)
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
    DESCRIBED_LATER,
    SEALED,
    load_published_steps,
)
from pipeline.backends.ascend.validate import main
from pipeline.core.errors import RunError

ROW = dict.fromkeys(COLUMNS, "0")


def test_every_priced_row_has_a_class() -> None:
    classes = load_classes()
    assert {row.id for row in load_published_steps()} <= set(classes)
    qualities = {"device": "device", "at_most": "host", "pair": "doubtful"}
    for row in load_published_steps():
        assert classes[row.id].row_class == qualities[row.quality], row.id


def test_classes_are_known_and_have_reasons() -> None:
    for row in load_classes().values():
        assert row.row_class in get_args(RowClass)
        assert row.population in get_args(Population)
        assert row.row_class == "device" or row.reason, row.id


def test_split_is_by_name_alone() -> None:
    assert [split_by_name(name) for name in ("alexnet", "resnet50", "googlenet")] == [
        "fit",
        "look",
        "seal",
    ]
    networks = {row.network for row in load_classes().values()}
    shares = Counter(map(split_by_name, networks))
    assert set(shares) == set(get_args(Part))
    assert 0.5 < shares["fit"] / len(networks) < 0.7


def test_sealed_rows_are_apart_from_the_others() -> None:
    classes = load_classes()
    described = (*load_published_steps(DESCRIBED), *load_published_steps(DESCRIBED_LATER))
    sealed = load_published_steps(SEALED)
    assert {classes[row.id].part for row in described} == {"fit", "look"}
    assert {classes[row.id].part for row in sealed} == {"seal"}
    assert {classes[row.id].row_class for row in (*described, *sealed)} == {"device"}
    assert len({row.id for row in (*described, *sealed)}) == len(described) + len(sealed)


def test_count_has_rows_and_networks_of_each_class_and_part() -> None:
    # alexnet is in `fit`, resnet50 in `look`.
    rows = [
        ClassedRow("A", "alexnet", "tuned", "device", ""),
        ClassedRow("B", "alexnet", "tuned", "device", ""),
        ClassedRow("C", "alexnet", "community", "host", "slow data"),
        ClassedRow("D", "resnet50", "tuned", "device", ""),
    ]
    lines = count_rows({row.id: row for row in rows}, {"A", "C", "D"})
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert cells == [
        ["rows, networks", "device", "host", "doubtful", "undescribed", "priced"],
        ["fit", "2, 1", "1, 1", "0, 0", "0, 0", "2, 1"],
        ["look", "1, 1", "0, 0", "0, 0", "0, 0", "1, 1"],
        ["seal", "0, 0", "0, 0", "0, 0", "0, 0", "0, 0"],
        ["all", "3, 2", "1, 1", "0, 0", "0, 0", "3, 2"],
    ]


def test_two_hundred_rows_of_a_hundred_and_twenty_networks_are_described(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--count"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    rows, networks = map(int, re.findall(r"\d+", last))
    assert (rows >= 200, networks >= 120) == (True, True)
    assert main(["--count", "--seal"]) == 2
    assert "--count: must be the only option" in capsys.readouterr().err


def test_coverage_matches_counts() -> None:
    # These intervals end at 0.84, 1.04, 1.96 and 2.05 deviations.
    levels = np.array([0.6, 0.7, 0.95, 0.96])
    observed = observe_coverage([0.99, -1.05, 1.99, -2.1], levels)
    assert observed.tolist() == [0, 0.25, 0.5, 0.75]


def test_quantiles_of_the_normal_distribution_are_covered_as_nominal() -> None:
    quantiles = [NormalDist().inv_cdf((place + 0.5) / 1000) for place in range(1000)]
    assert observe_coverage(quantiles) == pytest.approx(LEVELS, abs=0.002)


def test_chart_names_each_group_and_its_steps() -> None:
    chart = draw_coverage({"fit": [0.1, 2.0], "look": [0.5]}).to_file_text()
    assert chart.startswith("<svg")
    for words in ("fit, 2 steps", "look, 1 step<", "as nominal", "nominal coverage"):
        assert words in chart


@pytest.mark.parametrize("today", [date(2026, 3, 1), date(2026, 3, 7), date(2026, 2, 1)])
def test_score_within_seven_days_is_refused(today: date, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    append_scores([ROW | {"date": date(2026, 3, 1)}, ROW | {"date": date(2026, 1, 1)}], log)
    with pytest.raises(RunError) as raised:
        check_seal(today, log)
    assert str(raised.value) == (
        f"--seal: the sealed rows were scored on 2026-03-01, and it is {today}; they are scored at "
        "most once in 7 days, so the next score is on 2026-03-08 (log.csv)"
    )


@pytest.mark.parametrize("is_empty", [False, True])
def test_score_after_seven_days_is_appended(is_empty: bool, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    if is_empty:
        log.touch()
    check_seal(date(2026, 3, 1), log)
    append_scores([ROW | {"date": date(2026, 3, 1)}], log)
    check_seal(date(2026, 3, 8), log)
    append_scores([ROW | {"date": date(2026, 3, 8)}], log)
    head, *lines = log.read_text().splitlines()
    assert head == ",".join(COLUMNS)
    assert [line[:10] for line in lines] == ["2026-03-01", "2026-03-08"]


def test_second_score_at_once_is_refused(tmp_path: Path) -> None:
    """Of two that start at once, one alone prices; its score is found by the other later."""
    log = tmp_path / "log.csv"
    with hold_seal(date(2026, 3, 1), log):
        with (
            pytest.raises(RunError, match="another process scores the sealed rows now"),
            hold_seal(date(2026, 3, 1), log),
        ):
            pytest.fail("the rows would be priced")
        append_scores([ROW | {"date": date(2026, 3, 1)}], log)
    assert log.read_text().splitlines()[0] == ",".join(COLUMNS), "an empty log has its head"
    with pytest.raises(RunError, match="scored on 2026-03-01"), hold_seal(date(2026, 3, 2), log):
        pytest.fail("the rows would be priced")


def test_log_that_cannot_be_written_is_refused_before_pricing(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.mkdir()
    with pytest.raises(RunError, match="can't be written"), hold_seal(date(2026, 3, 1), log):
        pytest.fail("the rows would be priced")


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "date,commit\nyesterday,x\n", "2026-03-01,x\n"])
def test_damaged_log_is_refused(text: str, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(text)
    with pytest.raises(RunError, match=r"not a log of scores .* must be a CSV file with the"):
        check_seal(date(2026, 3, 1), log)
