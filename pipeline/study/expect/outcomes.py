"""Outcomes of expectations, as lines, facts and a JUnit file, and the recorded figures of a recipe:
the file `expected/NAME.json` in the recipe's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from pydantic import BaseModel, ConfigDict

from pipeline.core.errors import DataError, RunError, get_system_reason, printable
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.error_text import validate_file
from pipeline.core.files.value_text import count_noun
from pipeline.stages.record.provenance import read_provenance

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
    return f"{count_noun(len(outcomes), 'expectation')}{': ' if parts else ''}{parts}"


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
            root, "testsuite", {"name": printable(name), "time": f"{seconds:.3f}", **attributes}
        )
        for outcome in of_recipe:
            case = SubElement(
                suite,
                "testcase",
                classname=printable(name),
                name=printable(outcome.expectation),
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


FOLDER = "expected"
DECIDING = ("jax", "jaxlib", "flax", "optax", "numpy")
"""Packages whose versions decide bits."""


@dataclass(frozen=True)
class BitsOrigin:
    """Processor, versions and settings, which decide the bits of a run of a recipe and its code."""

    processor: str
    """The processor, its instructions and cores."""
    device: str
    versions: str
    settings: str
    """Variables of the environment, empty without those that change numbers."""

    def describe_difference(self, other: BitsOrigin) -> str | None:
        """Return what the other origin has instead; None if they are equal."""
        ours, others = asdict(self), asdict(other)
        changes = [f"{key} {others[key] or 'none'}" for key in ours if ours[key] != others[key]]
        return ", ".join(changes) or None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: BitsOrigin
    figures: dict[str, float]


class _Records(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    records: list[_Record]


def read_origin(run_dir: Path) -> BitsOrigin | None:
    """Return the origin of a run; None without provenance. Raises DataError for a damaged file."""
    processes = read_provenance(run_dir)
    if not processes:
        return None
    process = processes[0]
    machine = _section(process, "machine")
    versions = _section(process, "versions")
    return BitsOrigin(
        processor=f"{machine.get('processor')}, {machine.get('instructions')}",
        device=str(machine.get("device")),
        versions=", ".join(f"{name} {versions.get(name)}" for name in DECIDING),
        settings=" ".join(f"{key}={value}" for key, value in _section(process, "settings").items()),
    )


def _section(process: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = process.get(key)
    return section if isinstance(section, Mapping) else {}


def find_file(recipe_file: Path) -> Path:
    """Return the path of the recorded figures of a recipe."""
    return recipe_file.parent / FOLDER / f"{recipe_file.stem}.json"


def read_records(recipe_file: Path) -> list[tuple[BitsOrigin, Mapping[str, float]]]:
    """Return the recorded figures by origin; [] without a file. Raises DataError for a bad one."""
    file = find_file(recipe_file)
    try:
        tree = read_json(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read: {get_system_reason(error)}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{file}: must hold a section of keys")
    return [(item.origin, item.figures) for item in validate_file(_Records, tree, file).records]


def write_record(recipe_file: Path, origin: BitsOrigin, figures: Mapping[str, float]) -> Path:
    """Write the figures of an origin, and keep other origins'. Raises RunError if that fails, and
    DataError if the file is damaged."""
    file = find_file(recipe_file)
    records = [(o, f) for o, f in read_records(recipe_file) if o != origin]
    records.append((origin, figures))
    tree = {"records": [{"origin": asdict(o), "figures": dict(f)} for o, f in records]}
    try:
        file.parent.mkdir(exist_ok=True)
        write_whole(file, format_json(tree, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{file}: can't be written: {error.strerror}") from error
    return file
