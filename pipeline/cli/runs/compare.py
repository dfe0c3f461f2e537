"""`python -m pipeline compare A B`: two computations of one step, layer by layer."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.cli.commands.command import CommandResult
from pipeline.config.inspection_specs import What
from pipeline.core.errors import DataError, UsageError
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.name_text import find_nearest
from pipeline.core.reporter import Reporter
from pipeline.inspect.compare.layer_errors import format_layers, list_hints
from pipeline.inspect.compare.reference import pair_reference, read_reference
from pipeline.inspect.compare.sides import (
    CompareRequest,
    Side,
    capture_tensors,
    compare_step,
    open_changed_side,
    open_recipe_side,
    open_run_side,
)
from pipeline.inspect.compare.tensor_rows import (
    HEADER,
    Mapped,
    TensorRow,
    TensorSide,
    Thresholds,
    compare_tensors,
    format_rows,
    require_mapped,
    to_csv,
    write_page,
)
from pipeline.inspect.dumps.dump_files import find_dump, is_selected, read_dump, require_layers
from pipeline.inspect.dumps.dump_step import compare_losses
from pipeline.inspect.replay import mark
from pipeline.stages.record.run_directory import RECIPE

USAGE = "compare takes A B, or A or +recipe=NAME with --against CHANGES or --reference FOLDER"
SHOWN_ROWS = 60
SHOWN_FINDINGS = 5


def main(
    words: Sequence[Path],
    against: Sequence[str] = (),
    step: int | None = None,
    layers: Sequence[str] = (),
    what: What = "output",
    mapped: str = "",
    out: Path | None = None,
    reference: Path | None = None,
    *,
    approximate: bool = False,
    **thresholds: float | None,
) -> CommandResult:
    """Print the comparison; the exit status is 1 if it names a layer, or marks a row of dumps.

    `words` are two runs or dumps; with `against` or `reference`, one run or the keys of a recipe.
    Raises UsageError for other words, DataError if a side can't be read or the networks differ,
    RunError if a state of the run can't be had, unless `approximate`, RecipeError for a wrong
    recipe or a pattern that no layer matches.
    """
    if against and reference is not None:
        raise UsageError(["--against", "--reference"], f"exclude each other; {USAGE}")
    texts = [str(word) for word in words]
    sides, overrides = _split_sides(texts, has_one_side=bool(against or reference))
    changes = tuple(change for text in against for change in _split_shell_words(text))
    limits = Thresholds(**{name: value for name, value in thresholds.items() if value is not None})
    request = CompareRequest(
        step, tuple(layers), what, _parse_map(mapped), limits, out, approximate
    )
    with Reporter() as reporter:
        # Sides without a recipe have to be dumps.
        dump_names = [name for name in sides if not (Path(name) / RECIPE).is_file()]
        if reference is not None:
            operators = read_reference(reference)
            if dump_names and find_dump(Path(dump_names[0])) is not None:
                tensors = _open_dump(dump_names[0])
            else:
                tensors = capture_tensors(_open_side(sides, overrides), request, reporter)
            require_mapped(request.mapped, list(tensors.layers), list(operators.layers))
            tensors, operators, pairs = pair_reference(tensors, operators, request.mapped)
            return _compare_files(tensors, operators, replace(request, mapped=pairs), reporter)
        if len(dump_names) == 2:
            left_dump, right_dump = map(_open_dump, dump_names)
            _require_shared_layers(left_dump, right_dump, request.mapped)
            return _compare_files(left_dump, right_dump, request, reporter)
        if changes:
            right = _open_side(sides, overrides)
            left = open_changed_side(right, overrides, changes)
        else:
            left, right = (open_run_side(Path(name)) for name in sides)
        return _compare_steps(left, right, request, reporter)


def _open_side(sides: Sequence[str], overrides: Sequence[str]) -> Side:
    return open_run_side(Path(sides[0])) if sides else open_recipe_side(overrides)


def _compare_steps(
    left: Side, right: Side, request: CompareRequest, reporter: Reporter
) -> CommandResult:
    """Compute a step on two sides and compare it; the exit status is 1 if a layer is named."""
    reporter.print_stage("left", f"{left.name} on {left.opened.device_name}")
    reporter.print_stage("right", f"{right.name} on {right.opened.device_name}, the reference")
    with reporter.clock("comparing"):
        comparison = compare_step(left, right, request, reporter)
    left_loss = "none" if comparison.left_loss is None else f"{comparison.left_loss:.8g}"
    text = f"step {comparison.step}: left {left_loss}, right {comparison.right_loss:.8g}"
    if comparison.run_loss is not None:
        text += f" ({compare_losses(comparison.right_loss, comparison.run_loss)})"
    lost = comparison.lost
    reporter.print_stage("loss", mark(lost, text))
    for note in comparison.notes:
        reporter.print_stage("note", note)
    if lost:
        reporter.print_lines("\napproximate:")
    if lost and request.out is not None:
        # The file has the mark in its name.
        request = replace(request, out=request.out.with_stem(f"{request.out.stem}.approximate"))
    _show_rows(comparison.rows, request, reporter)
    if comparison.forced.errors:
        heading = mark(lost, "layers by themselves, with the inputs of the right side's layers:")
        reporter.print_lines(f"\n{heading}")
        for line in format_layers(comparison.forced):
            reporter.print_lines(line)
    reporter.print_lines("")
    for hint in list_hints(comparison.rows, comparison.forced):
        reporter.print_stage("hint", hint)
    findings = comparison.forced.findings
    for finding in findings[:SHOWN_FINDINGS]:
        reporter.print_stage("culprit", mark(lost, str(finding)))
    if len(findings) > SHOWN_FINDINGS:
        reporter.print_stage("culprit", f"and {len(findings) - SHOWN_FINDINGS} more layers")
    if not findings:
        verdict = "no layer makes more error than its type explains"
        reporter.print_stage("verdict", mark(lost, verdict))
    facts = {
        "step": comparison.step,
        "left_loss": comparison.left_loss,
        "right_loss": comparison.right_loss,
        "approximate": list(lost),
        "culprits": [str(finding) for finding in findings],
        "rows": _rows_to_dicts(comparison.rows),
    }
    return CommandResult(facts, exit_status=1 if findings else 0)


def _rows_to_dicts(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """Return rows for JSON, with the names and cells of the CSV file."""
    return [dict(zip(HEADER, row.cells, strict=True)) for row in rows]


def _show_rows(rows: Sequence[TensorRow], request: CompareRequest, reporter: Reporter) -> None:
    """Print the first rows, and write all rows if `request.out` names a file, as a page or CSV."""
    if request.out is not None and request.out.suffix.lower() in (".html", ".htm"):
        write_page(rows, request.out, request.limits)
        reporter.print_stage("rows", f"{len(rows)}: {request.out}")
    elif request.out is not None:
        with convert_write_errors(request.out):
            write_whole(request.out, to_csv(rows))
        reporter.print_stage("rows", f"{len(rows)}: {request.out}")
    reporter.print_lines("")
    for line in format_rows(rows[:SHOWN_ROWS], request.limits):
        reporter.print_lines(line)
    if len(rows) > SHOWN_ROWS:
        reporter.print_lines(f"  ... {len(rows) - SHOWN_ROWS} more rows; --out FILE writes all")


def _open_dump(name: str) -> TensorSide:
    """Open a dump that this project wrote. Raises DataError if the folder isn't one."""
    folder = find_dump(Path(name))
    if folder is None:
        raise DataError(f"{name}: must be a run directory or a dump")
    record = read_dump(folder)
    about = f"{record.about.get('model')}, step {record.about.get('step')}"
    names = list(record.entries)
    return TensorSide(str(record.folder), about, record.layers, names, record.read, record.warning)


def _compare_files(
    left: TensorSide, right: TensorSide, request: CompareRequest, reporter: Reporter
) -> CommandResult:
    """Compare the tensors of two sides; the exit status is 1 if a row is marked."""
    for label, side in (("left", left), ("right", right)):
        reporter.print_stage(label, f"{side.name}: {side.about}")
        if side.warning is not None:
            reporter.warn(f"{side.name}: {side.warning}")
    require_layers(request.layers, [*left.layers, *right.layers], "--layers")
    require_mapped(request.mapped, list(left.layers), list(right.layers))
    left_names = [name for name in left.names if is_selected(name, request.layers, request.what)]
    counterparts = {layer for name in left_names for layer in request.mapped.get(name.layer, ())}
    right_names = []
    for name in right.names:
        # Without patterns, all layers are selected.
        patterns = () if name.layer in counterparts else request.layers
        if is_selected(name, patterns, request.what):
            right_names.append(name)
    rows = compare_tensors(left_names, right_names, left.read, right.read, request.mapped)
    _show_rows(rows, request, reporter)
    reporter.print_lines("")
    for hint in list_hints(rows, None):
        reporter.print_stage("hint", hint)
    marked = [row for row in rows if request.limits.are_exceeded(row.columns)]
    text = f"{len(marked)} of {len(rows)} rows are beyond a threshold"
    if marked:
        text += f", the first is {marked[0].left or marked[0].right}"
    reporter.print_stage("verdict", f"{text}; compare runs to find the layer that makes the error")
    facts = {"marked": _rows_to_dicts(marked), "rows": _rows_to_dicts(rows)}
    return CommandResult(facts, exit_status=1 if marked else 0)


def _require_shared_layers(left: TensorSide, right: TensorSide, mapped: Mapped) -> None:
    """Raise DataError if less than half of the layers have a counterpart in the other dump."""
    shared = sum(path in right.layers or path in mapped for path in left.layers)
    total = max(len(left.layers), len(right.layers))
    if 2 * shared < total:
        unmatched = next((path for path in left.layers if path not in right.layers), "")
        guess = find_nearest(unmatched, right.layers)
        hint = f"; did you mean {guess}?" if guess else ""
        raise DataError(
            f"{left.name} and {right.name}: of different networks, {shared} of {total} layers "
            f"have a counterpart; --map LEFT:RIGHT names others{hint}"
        )


def _split_shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError([f"--against {text}"], f"{error}; quote it as a shell does") from error


def _split_sides(
    words: Sequence[str], *, has_one_side: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of the sides, and the overrides of a side that is a recipe.

    With `has_one_side`, the words name one side, which may be a recipe; otherwise two folders.
    Raises UsageError for a wrong number of sides.
    """
    overrides = tuple(word for word in words if "=" in word and not os.path.exists(word))
    sides = tuple(word for word in words if word not in overrides)
    is_recipe = any(override.startswith("+recipe=") for override in overrides)
    if overrides and not is_recipe:
        raise UsageError(overrides[:1], f"needs +recipe=NAME, whose key it is; {USAGE}")
    num_sides = 1 if has_one_side else 2
    if len(sides) + is_recipe != num_sides or (is_recipe and not has_one_side):
        raise UsageError(words, USAGE)
    return sides, overrides


def _parse_map(text: str) -> Mapped:
    mapped: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, text.split(",")):
        left, colon, right = entry.partition(":")
        if not (left and colon and all(right.split("+"))):
            raise UsageError([f"--map {entry}"], "must be LEFT:RIGHT or LEFT:RIGHT+RIGHT")
        mapped[left] = tuple(right.split("+"))
    return mapped
