"""`python -m pipeline compare A B`: two computations of one step, layer by layer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.commands.command import CommandResult
from pipeline.config.dump_spec import What
from pipeline.core.errors import DataError, RunError, UsageError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.error_text import nearest
from pipeline.core.reporter import Reporter
from pipeline.inspect.compare.cause_hints import cause_hints, layer_lines
from pipeline.inspect.compare.sides import (
    CompareRequest,
    Side,
    StepComparison,
    changed_side,
    compare_step,
    side_of_recipe,
    side_of_run,
)
from pipeline.inspect.compare.tensor_rows import (
    HEADER,
    Mapped,
    Row,
    Thresholds,
    compare_tensors,
    to_csv,
    to_text,
)
from pipeline.inspect.dumps.dump_files import DumpRecord, find_dump, read_dump
from pipeline.inspect.dumps.dump_step import loss_check
from pipeline.inspect.dumps.tensor_names import is_wanted, require_layers
from pipeline.stages.record.run_directory import RECIPE

USAGE = "compare takes A B, or A --against CHANGES, or +recipe=NAME --against CHANGES"
SHOWN_ROWS, SHOWN_LAYERS, SHOWN_FINDINGS = 60, 12, 5


@dataclass(frozen=True)
class CompareArguments:
    """The parsed arguments."""

    sides: tuple[str, ...]
    overrides: tuple[str, ...]
    """Those of a recipe without a run."""
    against: tuple[str, ...]
    request: CompareRequest
    thresholds: Thresholds
    out: Path | None


def main(
    words: Sequence[Path],
    against: Sequence[str] = (),
    step: int | None = None,
    layers: Sequence[str] = (),
    what: What = "output",
    mapped: str = "",
    out: Path | None = None,
    **thresholds: float | None,
) -> CommandResult:
    """Print the comparison; the exit status is 1 if a layer is named, or a row of dumps marked.

    `words` are two runs or dumps, or with `against` one, or the keys of a recipe. Raises UsageError
    for others, DataError if a side can't be read or the sides are of different networks,
    RecipeError for a wrong recipe or a pattern that no layer matches.
    """
    sides, overrides = _split(tuple(map(str, words)), against)
    arguments = CompareArguments(
        sides,
        overrides,
        tuple(change for text in against for change in _overrides_in(text)),
        CompareRequest(step, tuple(layers), what, _mapped(mapped)),
        Thresholds(**{name: value for name, value in thresholds.items() if value is not None}),
        out,
    )
    with Reporter() as reporter:
        dumps = [find_dump(Path(name)) for name in sides if _is_no_run(name)]
        if len(sides) == 2 and len(dumps) == 2:
            return _compare_dumps(arguments, dumps, reporter)
        left, right = _sides(arguments)
        reporter.stage("left", f"{left.name} on {left.opened.device_name}")
        reporter.stage("right", f"{right.name} on {right.opened.device_name}, the reference")
        with reporter.clock("comparing"):
            comparison = compare_step(left, right, arguments.request, reporter)
        return _show(comparison, arguments, reporter)


def _is_no_run(name: str) -> bool:
    return not (Path(name) / RECIPE).is_file()


def _sides(given: CompareArguments) -> tuple[Side, Side]:
    """The left side, and the right one."""
    if not given.against:
        left, right = (side_of_run(Path(name)) for name in given.sides)
        return left, right
    right = side_of_run(Path(given.sides[0])) if given.sides else side_of_recipe(given.overrides)
    return changed_side(right, given.overrides, given.against), right


def _show(found: StepComparison, given: CompareArguments, reporter: Reporter) -> CommandResult:
    reporter.stage("loss", _losses(found))
    for note in found.notes:
        reporter.stage("note", note)
    _show_rows(found.rows, given, reporter)
    if found.forced.errors:
        reporter.say("\nlayers by themselves, fed with what the right side's layers read:")
        for line in layer_lines(found.forced, SHOWN_LAYERS):
            reporter.say(line)
    reporter.say("")
    for hint in cause_hints(found.rows, found.forced):
        reporter.stage("hint", hint)
    blamed = found.forced.findings
    for finding in blamed[:SHOWN_FINDINGS]:
        reporter.stage("culprit", str(finding))
    if len(blamed) > SHOWN_FINDINGS:
        reporter.stage("culprit", f"and {len(blamed) - SHOWN_FINDINGS} more layers")
    if not blamed:
        reporter.stage("verdict", "no layer makes more error than its type explains")
    facts = {
        "step": found.step,
        "left_loss": found.left_loss,
        "right_loss": found.right_loss,
        "culprits": list(map(str, blamed)),
        "rows": _rows_to_dicts(found.rows),
    }
    return CommandResult(facts, exit_status=1 if blamed else 0)


def _rows_to_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows for JSON, as the cells of the CSV file."""
    return [dict(zip(HEADER, row.cells, strict=True)) for row in rows]


def _losses(found: StepComparison) -> str:
    left = "none" if found.left_loss is None else f"{found.left_loss:.8g}"
    text = f"step {found.step}: left {left}, right {found.right_loss:.8g}"
    if found.run_loss is not None:
        text += f" ({loss_check(found.right_loss, found.run_loss)})"
    return text


def _show_rows(rows: Sequence[Row], given: CompareArguments, reporter: Reporter) -> None:
    if given.out is not None:
        try:
            write_whole(given.out, to_csv(rows))
        except OSError as error:
            raise RunError(f"{given.out}: can't be written: {error.strerror}") from error
        reporter.stage("rows", f"{len(rows)}: {given.out}")
    reporter.say("")
    for line in to_text(rows[:SHOWN_ROWS], given.thresholds):
        reporter.say(line)
    if len(rows) > SHOWN_ROWS:
        reporter.say(f"  ... {len(rows) - SHOWN_ROWS} more rows; --out FILE writes all")


def _compare_dumps(
    given: CompareArguments, folders: Sequence[Path | None], reporter: Reporter
) -> CommandResult:
    """Compare the files of two dumps; the exit status is 1 where a row is marked."""
    records = []
    for name, folder in zip(given.sides, folders, strict=True):
        if folder is None:
            raise DataError(f"{name}: is neither a run directory nor a dump")
        records.append(read_dump(folder))
    left, right = records
    request = given.request
    _require_alike(left, right, request.mapped)
    for side, record in (("left", left), ("right", right)):
        about = record.about
        reporter.stage(side, f"{record.folder}: {about.get('model')}, step {about.get('step')}")
        if record.stopped is not None:
            reporter.warn(f"{record.folder}: {record.stopped}")
    require_layers(request.layers, [*left.layers, *right.layers], "--layers")
    names, others = (
        [name for name in record.entries if is_wanted(name, request.layers, request.what)]
        for record in records
    )
    rows = compare_tensors(names, others, left.read, right.read, request.mapped)
    _show_rows(rows, given, reporter)
    reporter.say("")
    for hint in cause_hints(rows, None):
        reporter.stage("hint", hint)
    marked = [row for row in rows if given.thresholds.are_exceeded(row.columns)]
    text = f"{len(marked)} of {len(rows)} rows are beyond a threshold"
    if marked:
        first = marked[0].left or marked[0].right
        text += f", the first is {first}"
    reporter.stage("verdict", f"{text}; which layer makes the error, only runs can show")
    facts = {"marked": _rows_to_dicts(marked), "rows": _rows_to_dicts(rows)}
    return CommandResult(facts, exit_status=1 if marked else 0)


def _require_alike(left: DumpRecord, right: DumpRecord, mapped: Mapped) -> None:
    """Raise DataError where less than half of the layers of two dumps have the same names."""
    one, other = left.layers, right.layers
    shared = sum(path in other or path in mapped for path in one)
    if 2 * shared < max(len(one), len(other)):
        guess = nearest(next((path for path in one if path not in other), ""), other)
        hint = f"; did you mean {guess}?" if guess else ""
        raise DataError(
            f"{left.folder} and {right.folder}: of different networks, {shared} of "
            f"{max(len(one), len(other))} layers have a counterpart; --map LEFT:RIGHT names others"
            f"{hint}"
        )


def _is_there(argument: str) -> bool:
    try:
        return Path(argument).exists()
    except OSError:
        # It is too long for the name of a file.
        return False


def _overrides_in(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise UsageError([f"--against {value}"], f"{error}; quote it as a shell does") from error


def _split(words: Sequence[str], against: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the sides, and the keys of a recipe. Raises UsageError for another number of them."""
    overrides = tuple(word for word in words if "=" in word and not _is_there(word))
    sides = tuple(word for word in words if word not in overrides)
    from_recipe = any(override.startswith("+recipe=") for override in overrides)
    if overrides and not from_recipe:
        raise UsageError(overrides[:1], f"needs +recipe=NAME, whose key it is; {USAGE}")
    wanted = 0 if from_recipe else 1 if against else 2
    if len(sides) != wanted or (from_recipe and not against):
        raise UsageError(words, USAGE)
    return sides, overrides


def _mapped(text: str) -> Mapped:
    mapped: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, text.split(",")):
        left, colon, right = entry.partition(":")
        if not (left and colon and all(right.split("+"))):
            raise UsageError([f"--map {entry}"], "must be LEFT:RIGHT or LEFT:RIGHT+RIGHT")
        mapped[left] = tuple(right.split("+"))
    return mapped
