"""Outcomes of expectations: exit statuses, and a JUnit file that is valid XML."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.core.errors import RunError
from pipeline.study.expect.outcomes import (
    ExpectationOutcome,
    Verdict,
    count_verdicts,
    find_exit_status,
    write_junit,
)


def make_outcomes(*verdicts: Verdict) -> list[ExpectationOutcome]:
    return [
        ExpectationOutcome("mine", f"loss@{n}: recorded", v, "0.5", 1.5)
        for n, v in enumerate(verdicts)
    ]


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (["met", "met"], 0),
        (["met", "not comparable"], 0),
        (["not comparable"], 1),
        (["met", "not met"], 1),
        (["met", "not met", "refused"], 2),
    ],
)
def test_exit_status_is_the_worst(verdicts: list[Verdict], status: int) -> None:
    assert find_exit_status(make_outcomes(*verdicts)) == status


def test_counts_are_one_line() -> None:
    line = count_verdicts(make_outcomes("met", "not met", "met"))
    assert line == "3 expectations: 2 met, 1 not met"
    assert count_verdicts([]) == "0 expectations"


def test_junit_file_has_a_case_for_each_expectation(tmp_path: Path) -> None:
    outcomes = make_outcomes("met", "not met", "not comparable", "refused")
    outcomes.append(ExpectationOutcome("a \x07 bell", "a: < \x07", "met", "a \x07 bell <&>"))
    write_junit(tmp_path / "x.xml", outcomes)
    root = ElementTree.parse(tmp_path / "x.xml").getroot()
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["mine", r"a \x07 bell"]
    counts = [suites[0].get(key) for key in ("tests", "failures", "skipped", "errors", "time")]
    assert counts == ["4", "1", "1", "1", "6.000"]
    marks = [[child.tag for child in case] for case in suites[0].findall("testcase")]
    assert marks == [["system-out"], ["failure"], ["skipped"], ["error"]]


def test_junit_file_that_cant_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="can't be written"):
        write_junit(tmp_path / "missing" / "x.xml", make_outcomes("met"))
