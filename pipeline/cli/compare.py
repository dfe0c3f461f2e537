"""`python -m pipeline compare A B`: two computations of one step, layer by layer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.cli.dump import split_patterns
from pipeline.config.dump_spec import What
from pipeline.core.errors import DataError, RunError, UsageError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.error_text import nearest, no_such
from pipeline.core.reporter import Reporter
from pipeline.inspect.compare.cause_hints import cause_hints, layer_lines
from pipeline.inspect.compare.sides import (
    Side,
    StepComparison,
    changed_side,
    compare_step,
    side_of_recipe,
    side_of_run,
)
from pipeline.inspect.compare.tensor_rows import (
    RANGES,
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

USAGE = (
    "compare takes A B, or A against='KEY=VALUE ...', and step=N, layers=PATTERN,..., "
    "what=input|output|all, map=LEFT:RIGHT+RIGHT,..., cosine=, max_absolute=, "
    "relative_euclidean= and out=FILE"
)
HELP = """usage: python -m pipeline compare A B [step=N] [layers=PATTERN,...] [what=WHAT] [out=FILE]
       python -m pipeline compare A against='KEY=VALUE ...' [...]
       python -m pipeline compare +recipe=NAME [KEY=VALUE ...] against='KEY=VALUE ...'

Compare one step as two sides compute it, by the columns of CANN's accuracy comparison. The left
side is examined, the right one is the reference. Both begin at the reference's state, with the same
batch; random draws are equal on any device and in any precision. Then every layer of the left side
is fed with what the right side's layers read, and those that make more error than their type
explains are named.

  A B                   two runs, or two dumps, of which the files alone are compared
  against=CHANGES       the left side is A with these overrides, such as against='device=gpu',
                        'train.precision=bf16' or 'checkpoint.restore=FILE'; A is the reference
  +recipe=NAME          a recipe without a run, with fresh weights
  step=N                steps done: the next one is computed; that of the newest checkpoint
  layers=PATTERN,...    layers by glob pattern, such as conv_*; all unless it is given
  what=output           rows of input, output or all; output unless it is given
  map=LEFT:RIGHT+RIGHT  a left layer that stands for several right ones, with commas between such
  cosine=0.99           the thresholds beyond which a row is marked: cosine from 0 to 1,
  max_absolute=5          from 1 to 5,
  relative_euclidean=0.1  and from 0 to 1
  out=FILE              also write all rows as CSV

Exit status: 0 no layer is named, and of dumps no row is marked; 1 one is; 2 bad input.

example: python -m pipeline compare outputs/again against=train.precision=bf16
"""
KEYS = ("step", "layers", "what", "against", "map", *RANGES, "out")
SHOWN_ROWS, SHOWN_LAYERS, SHOWN_FINDINGS = 60, 12, 5


@dataclass(frozen=True)
class CompareArguments:
    """The parsed arguments."""

    sides: tuple[str, ...]
    overrides: tuple[str, ...]
    """Those of a recipe that is no run."""
    against: tuple[str, ...]
    step: int | None
    layers: tuple[str, ...]
    what: What
    mapped: Mapped
    thresholds: Thresholds
    out: Path | None


def main(args: Sequence[str]) -> int:
    """Print the comparison; the exit status is 1 where a layer is named, or a row of dumps marked.

    Raises UsageError for other arguments, DataError where a side can't be read or the sides are of
    different networks, RecipeError for a wrong recipe or a pattern that no layer matches.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    given = _parse(args)
    with Reporter() as reporter:
        dumps = [find_dump(Path(name)) for name in given.sides if _is_no_run(name)]
        if len(given.sides) == 2 and len(dumps) == 2:
            return _compare_dumps(given, dumps, reporter)
        left, right = _sides(given)
        reporter.stage("left", f"{left.name} on {left.opened.device_name}")
        reporter.stage("right", f"{right.name} on {right.opened.device_name}, the reference")
        about = given.step, given.layers, given.what, given.mapped, reporter
        with reporter.clock("comparing"):
            found = compare_step(left, right, *about)
        return _show(found, given, reporter)


def _is_no_run(name: str) -> bool:
    return not (Path(name) / RECIPE).is_file()


def _sides(given: CompareArguments) -> tuple[Side, Side]:
    """The left side, and the right one."""
    if not given.against:
        left, right = (side_of_run(Path(name)) for name in given.sides)
        return left, right
    right = side_of_run(Path(given.sides[0])) if given.sides else side_of_recipe(given.overrides)
    return changed_side(right, given.overrides, given.against), right


def _show(found: StepComparison, given: CompareArguments, reporter: Reporter) -> int:
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
    return 1 if blamed else 0


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
        reporter.say(f"  ... {len(rows) - SHOWN_ROWS} more rows; out=FILE writes all")


def _compare_dumps(
    given: CompareArguments, folders: Sequence[Path | None], reporter: Reporter
) -> int:
    """Compare the files of two dumps; the exit status is 1 where a row is marked."""
    records = []
    for name, folder in zip(given.sides, folders, strict=True):
        if folder is None:
            raise DataError(f"{name}: is neither a run directory nor a dump")
        records.append(read_dump(folder))
    left, right = records
    _require_alike(left, right, given.mapped)
    for side, record in (("left", left), ("right", right)):
        about = record.about
        reporter.stage(side, f"{record.folder}: {about.get('model')}, step {about.get('step')}")
        if record.stopped is not None:
            reporter.warn(f"{record.folder}: {record.stopped}")
    require_layers(given.layers, [*left.layers, *right.layers], "layers")
    names, others = (
        [name for name in record.entries if is_wanted(name, given.layers, given.what)]
        for record in records
    )
    rows = compare_tensors(names, others, left.read, right.read, given.mapped)
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
    return 1 if marked else 0


def _require_alike(left: DumpRecord, right: DumpRecord, mapped: Mapped) -> None:
    """Raise DataError where less than half of the layers of two dumps have the same names."""
    one, other = left.layers, right.layers
    shared = sum(path in other or path in mapped for path in one)
    if 2 * shared < max(len(one), len(other)):
        guess = nearest(next((path for path in one if path not in other), ""), other)
        hint = f"; did you mean {guess}?" if guess else ""
        raise DataError(
            f"{left.folder} and {right.folder}: of different networks, {shared} of "
            f"{max(len(one), len(other))} layers have a counterpart; map=LEFT:RIGHT names others"
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
        raise UsageError([f"against={value}"], f"{error}; quote it as a shell does") from error


def _parse(args: Sequence[str]) -> CompareArguments:
    keys: dict[str, str] = {}
    against: list[str] = []
    rest = []
    for arg in args:
        key, equals, value = arg.partition("=")
        if key == "against" and equals:
            against += _overrides_in(value)
        elif key in KEYS and equals and not _is_there(arg):
            keys[key] = value
        else:
            rest.append(arg)
    overrides = [arg for arg in rest if "=" in arg and not _is_there(arg)]
    sides = [arg for arg in rest if arg not in overrides]
    flags = [arg for arg in sides if arg.startswith("-")]
    from_recipe = any(arg.startswith("+recipe=") for arg in overrides)
    if flags or (overrides and not from_recipe):
        wrong = flags or overrides
        key = wrong[0].partition("=")[0]
        raise UsageError(wrong[:1], f"{no_such('key', key, KEYS)}; {USAGE}")
    wanted = 0 if from_recipe else 1 if against else 2
    if len(sides) != wanted or (from_recipe and not against):
        raise UsageError(args, USAGE)
    whats: tuple[What, ...] = get_args(What)
    what = keys.get("what", "output")
    if what not in whats:
        raise UsageError([f"what={what}"], f"must be one of {', '.join(whats)}")
    return CompareArguments(
        tuple(sides),
        tuple(overrides),
        tuple(against),
        _step(keys),
        split_patterns(keys),
        whats[whats.index(what)],
        _mapped(keys),
        Thresholds(**{name: _threshold(name, keys[name]) for name in RANGES if name in keys}),
        Path(keys["out"]) if "out" in keys else None,
    )


def _step(keys: Mapping[str, str]) -> int | None:
    text = keys.get("step")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise UsageError([f"step={text}"], "must be a number of steps done")
    return int(text)


def _threshold(name: str, text: str) -> float:
    low, high = RANGES[name]
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UsageError([f"{name}={text}"], f"must be a number from {low:g} to {high:g}")
    return value


def _mapped(keys: Mapping[str, str]) -> Mapped:
    mapped: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, keys.get("map", "").split(",")):
        left, colon, right = entry.partition(":")
        if not (left and colon and all(right.split("+"))):
            raise UsageError([f"map={entry}"], "must be LEFT:RIGHT or LEFT:RIGHT+RIGHT")
        mapped[left] = tuple(right.split("+"))
    return mapped
