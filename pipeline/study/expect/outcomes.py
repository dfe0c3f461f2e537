"""Outcomes of expectations, as lines, facts and a JUnit file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from pipeline.core.errors import RunError, printable
from pipeline.core.files.value_text import count_noun

Verdict = Literal["met", "not met", "not comparable", "refused"]
MARKS: dict[Verdict, str] = {"not met": "failure", "not comparable": "skipped", "refused": "error"}
"""Elements of JUnit for what isn't met."""


@dataclass(frozen=True)
class ExpectationOutcome:
    """An expectation, whether it is met, and by which figure."""

    recipe: str
    expectation: str
    verdict: Verdict
    figure: str
    seconds: float = 0.0
    """Time that it took, besides the run that all expectations of the recipe share."""

    def __str__(self) -> str:
        return f"{self.recipe:<22} {self.expectation:<30} {self.verdict:<14} {self.figure}"


def count_verdicts(outcomes: Sequence[ExpectationOutcome]) -> str:
    """Return a line such as `3 expectations: 2 met, 1 not met`."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{count_noun(len(outcomes), 'expectation')}: {parts}"


def find_exit_status(outcomes: Sequence[ExpectationOutcome]) -> int:
    """Return 2 if a recipe is refused, 1 if something isn't met or nothing compares, else 0."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if "refused" in verdicts:
        return 2
    return 0 if "not met" not in verdicts and "met" in verdicts else 1


def describe_facts(outcomes: Sequence[ExpectationOutcome]) -> dict[str, Any]:
    """Return the outcomes for JSON."""
    return {"expectations": [asdict(outcome) for outcome in outcomes]}


def write_junit(file: Path, outcomes: Sequence[ExpectationOutcome]) -> None:
    """Write a JUnit file with a suite for each recipe. Raises RunError if it can't be written."""
    root = Element("testsuites", name="expectations")
    for name in dict.fromkeys(outcome.recipe for outcome in outcomes):
        of_recipe = [outcome for outcome in outcomes if outcome.recipe == name]
        counts = Counter(MARKS.get(outcome.verdict, "met") for outcome in of_recipe)
        numbers = {
            "tests": len(of_recipe),
            "failures": counts["failure"],
            "errors": counts["error"],
            "skipped": counts["skipped"],
        }
        attributes = {key: str(number) for key, number in numbers.items()}
        seconds = sum(outcome.seconds for outcome in of_recipe)
        suite = SubElement(
            root, "testsuite", {"name": name, "time": f"{seconds:.3f}", **attributes}
        )
        for outcome in of_recipe:
            case = SubElement(
                suite,
                "testcase",
                classname=name,
                name=outcome.expectation,
                time=f"{outcome.seconds:.3f}",
            )
            text = printable(outcome.figure)
            if outcome.verdict in MARKS:
                SubElement(case, MARKS[outcome.verdict], message=text)
            else:
                SubElement(case, "system-out").text = text
    indent(root)
    try:
        ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise RunError(f"{file}: can't be written: {error.strerror}") from error
