"""Runs below a folder, read from their files, and the keys that differ between runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from pipeline.checkpoint.checkpoint_folder import FOLDER as CHECKPOINTS
from pipeline.checkpoint.checkpoint_folder import list_saved_steps
from pipeline.core.errors import DataError, shorten
from pipeline.core.files.bounded_read import read_json, read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, RepeatedYaml, parse_written_yaml
from pipeline.core.files.tree_diff import find_value
from pipeline.engine.monitors.live_status import STATUS, LiveStatus
from pipeline.engine.monitors.log_lines import EVALS, METRICS, LogLine, finite_number, parse_line
from pipeline.stages.record.provenance import PROVENANCE, read_provenance
from pipeline.stages.record.run_directory import (
    ESTIMATE,
    FOLDERS,
    RECIPE,
    SUMMARY,
    Descendant,
    is_free,
    read_descendants,
)
from pipeline.training.telemetry import PLACES

MAX_DEPTH = 8
"""Number of folder levels that are searched."""
PLACE_KEYS = ("run_dir", "cache.root", "train.resume", "hydra.")
"""Prefixes of keys about where a run reads and writes files, which are left out."""
MINOR = ("monitor.", "checkpoint.", "debug", "stages", "launch.", "autotune")
"""Prefixes of keys about what a run records and how it starts, which are listed last."""
MAX_LIVE_S = 60.0
"""Age of a status above which its run counts as dead. A single step may take long."""
MAX_POINTS = 48
"""A curve has at most this many points, besides the first line."""
MAX_ESTIMATE = 200
"""Most letters of an estimate."""
MAX_LINE_BYTES = 1 << 20
"""Longest line that is read; evaluations with very many classes may exceed it."""


@dataclass(frozen=True)
class LoggedCurve:
    """Logged values of a metric, at steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run, as read from its directory."""

    name: str
    """Path of the directory, relative to the searched folder."""
    run_dir: Path
    status: str
    """done, pruned, stopped or failed; `unfinished` without a summary."""
    begun: str
    """Start of its first process, ISO 8601; empty if it wasn't recorded."""
    keys: Mapping[str, Any]
    """The recipe's values by dotted key."""
    figures: Mapping[str, float]
    """Metrics and times of the summary; for a metric by class, its macro average."""
    curves: Mapping[str, LoggedCurve]
    """Sampled curves of the logs by name, such as `loss` or `eval accuracy`."""
    data: str
    """Fingerprints of the columns, shortened; empty if they weren't recorded."""
    commits: tuple[str, ...]
    """Shortened commits of each process's code, with `+` if files were changed."""
    sources: Mapping[str, str]
    """Origins of the run by relation: the step if `resumed`, the path if `restored`."""
    problem: str = ""
    """Names of files that could not be read, with reasons."""
    made: tuple[Descendant, ...] = ()
    """Exports and runs that use this run."""
    live: LiveStatus | None = None
    """The newest status of a running run; None if it has ended or has written none lately."""
    interruption: str = ""
    """Text about what continues the run, if its process ended without a summary; else empty."""
    estimate: str = ""
    """Text about where a running run will end, if it has the feature `estimate`; else empty."""


def find_runs(root: Path) -> list[Path]:
    """Find the run directories below a folder, in the order of their paths; links aren't followed.

    Raises DataError if the folder can't be read.
    """
    if not root.is_dir():
        raise DataError(f"{root}: must be a folder; runs are written to outputs/ by default")
    return sorted(_find_runs_below(root, 0))


def _find_runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run directories in a folder `depth` levels deep, and below it."""
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
    except OSError as error:
        if depth == 0:
            raise DataError(f"{folder}: can't be read: {error.strerror}") from error
        return
    names = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    is_run = RECIPE in names and bool(names & {SUMMARY, METRICS})
    if is_run:
        yield folder
    if depth == MAX_DEPTH:
        return
    skipped = set(FOLDERS) if is_run else set()
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.name not in skipped:
            yield from _find_runs_below(Path(entry.path), depth + 1)


def read_runs(root: Path, *, curves: bool) -> list[RecordedRun]:
    """Read all runs below a folder; a run with files that can't be read has a `problem`.

    Raises DataError if the folder can't be read or has no run.
    """
    yaml = RepeatedYaml()
    runs = [read_run(run_dir, root, curves=curves, yaml=yaml) for run_dir in find_runs(root)]
    if not runs:
        raise DataError(f"{root}: has no run; a run directory has {RECIPE} and {METRICS}")
    return runs


def read_run(
    run_dir: Path, root: Path, *, curves: bool, yaml: RepeatedYaml | None = None
) -> RecordedRun:
    """Read a run, with samples of its logs if `curves` is set. `yaml` is faster for many runs."""
    problems: list[str] = []
    parse = parse_written_yaml if yaml is None else yaml.parse
    recipe = _read_or(problems, RECIPE, lambda: _read_recipe(run_dir / RECIPE, parse), {})
    summary = _read_or(problems, SUMMARY, lambda: _read_summary(run_dir / SUMMARY), {})
    processes = _read_or(problems, PROVENANCE, lambda: list(read_provenance(run_dir)), [])
    logged = _read_or(problems, METRICS, lambda: _read_curves(run_dir), {}) if curves else {}
    first = processes[0] if processes else {}
    live, interruption, estimate = None, "", ""
    if not summary and is_free(run_dir):
        interruption = describe_interruption(run_dir)
    elif not summary:
        live = _read_or(problems, STATUS, lambda: read_live_status(run_dir), None)
    if live is not None:
        estimate = _read_or(problems, ESTIMATE, lambda: read_estimate(run_dir), "")
    name = os.path.relpath(run_dir, root)
    return RecordedRun(
        name=run_dir.resolve().name if name == "." else name,
        run_dir=run_dir,
        status=str(summary.get("status", "unfinished")),
        begun=str(first.get("begun", "")),
        keys=flatten_keys(recipe),
        figures=_collect_figures(summary),
        curves=logged,
        data=_join_fingerprints(first.get("data")),
        commits=tuple(dict.fromkeys(filter(None, map(_find_commit, processes)))),
        sources=dict(_list_sources(recipe, summary, str(first.get("folder", "")))),
        problem="; ".join(problems),
        made=tuple(read_descendants(run_dir)),
        live=live,
        interruption=interruption,
        estimate=estimate,
    )


def describe_interruption(run_dir: Path) -> str:
    """Return the key that continues a run whose process ended early, and the step."""
    try:
        saved = list_saved_steps(run_dir / CHECKPOINTS)
    except OSError:
        saved = []
    if not saved:
        return "not running, and no step is saved"
    return f"not running; train.resume={run_dir} continues from step {saved[-1]:,}"


def _read_or(problems: list[str], name: str, read: Callable[[], Any], otherwise: Any) -> Any:
    """Return the result of `read`; if it raises, add a problem and return `otherwise`."""
    try:
        return read()
    except (DataError, OSError, ValueError) as error:
        problems.append(f"{name}: {' '.join(str(error).split())}")
        return otherwise


def _read_recipe(file: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    return _require_keys(parse(read_text(file, MAX_BYTES)))


def _read_summary(file: Path) -> Mapping[str, Any]:
    try:
        return _require_keys(read_json(file))
    except FileNotFoundError:
        return {}


def _require_keys(tree: Any) -> Mapping[str, Any]:
    if not isinstance(tree, dict):
        raise ValueError("must hold keys and values")
    return tree


def _read_curves(run_dir: Path) -> Mapping[str, LoggedCurve]:
    steps = run_dir / METRICS
    evaluations = run_dir / EVALS
    curves = dict(sample_log(steps)) if steps.is_file() else {}
    if evaluations.is_file():
        curves |= {f"eval {name}": curve for name, curve in sample_log(evaluations).items()}
    return curves


def flatten_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values by dotted key; a list of scalars is one value, as text."""
    flat: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                add(f"{key}.{name}", item)
        elif not isinstance(value, list):
            flat[key] = value
        elif any(isinstance(item, dict | list) for item in value):
            for number, item in enumerate(value):
                add(f"{key}.{number}", item)
        else:
            flat[key] = f"[{', '.join(map(str, value))}]"

    for section, value in recipe.items():
        add(section, value)
    return {key: value for key, value in flat.items() if not key.startswith(PLACE_KEYS)}


def _collect_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    metrics = summary.get("metrics")
    values = dict(metrics) if isinstance(metrics, Mapping) else {}
    values |= {name: summary.get(name) for name in ("parameters", "steps")}
    values |= {name: find_value(summary, ("time", name)) for name in ("step_ms", "train_s")}
    for split in ("train", "eval"):
        values[f"{split}_samples"] = find_value(summary, ("data", "samples", split))
    numbers = {name: finite_number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _join_fingerprints(splits: Any) -> str:
    """Return the first digits of the fingerprint of each column of the training split."""
    columns = find_value(splits, ("train",))
    if not isinstance(columns, Mapping):
        return ""
    digests = (find_value(column, ("sha256",)) for column in columns.values())
    return " ".join(str(digest)[:8] for digest in digests if digest)


def _find_commit(process: Mapping[str, Any]) -> str:
    commit = find_value(process, ("code", "git", "commit"))
    if isinstance(commit, str):
        return commit[:10] + ("+" if find_value(process, ("code", "git", "dirty")) else "")
    return str(find_value(process, ("code", "sha256"), ""))[:10]


def _list_sources(
    recipe: Mapping[str, Any], summary: Mapping[str, Any], folder: str
) -> Iterator[tuple[str, str]]:
    """Yield the origins of a run; `folder` is its working directory, to resolve relative paths."""
    resumed = summary.get("resumed_from")
    if isinstance(resumed, Mapping):
        yield "resumed", f"at step {resumed.get('step')}"
    restored = find_value(recipe, ("checkpoint", "restore"))
    if isinstance(restored, str):
        yield "restored", os.path.normpath(os.path.join(folder, restored))


def list_differing_keys(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the keys with several values among the runs, the most varied first.

    A run that lacks a key doesn't differ in it, since older versions had fewer keys.
    """
    first: dict[str, Any] = {}
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.keys.items():
            if first.setdefault(key, value) is not value:
                values.setdefault(key, {repr(first[key])}).add(repr(value))
    differing = [key for key, distinct in values.items() if len(distinct) > 1]
    return sorted(differing, key=lambda key: (key.startswith(MINOR), -len(values[key]), key))


def find_common_keys(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the keys with the same value in all runs, and that value."""
    first: Mapping[str, Any] = runs[0].keys if runs else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in run.keys and run.keys[key] == value for run in runs)
    }


def read_live_status(run_dir: Path) -> LiveStatus | None:
    """Read the status of a running run; None if it is missing or older than `MAX_LIVE_S`.

    Raises OSError and ValueError if the file can't be read or isn't valid.
    """
    try:
        status = TypeAdapter(LiveStatus).validate_python(read_json(run_dir / STATUS))
    except FileNotFoundError:
        return None
    if math.isnan(status.left_s):
        raise ValueError("left_s = nan: must be a number")
    written = datetime.fromisoformat(status.written)
    if written.tzinfo is None:
        raise ValueError(f"written = {status.written}: must have a time zone")
    age_s = (datetime.now(UTC) - written).total_seconds()
    return status if abs(age_s) < MAX_LIVE_S else None


def read_estimate(run_dir: Path) -> str:
    """Read where a running run will end, as text; empty without the file.

    Raises OSError and ValueError if the file can't be read or isn't valid.
    """
    try:
        text = _require_keys(read_json(run_dir / ESTIMATE)).get("text")
    except FileNotFoundError:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"text = {text}: must be a text")
    return shorten(text, MAX_ESTIMATE)


def sample_log(log: Path) -> Mapping[str, LoggedCurve]:
    """Sample metrics.jsonl or evals.jsonl, and return a curve of every metric by name.

    The value of a metric by class is its macro average. Raises DataError if the log can't be read.
    """
    points: dict[str, dict[int, float]] = {}
    for line in _sample_lines(log):
        for name, value in line.fields.items():
            number = finite_number(value)
            if number is not None and name not in (*PLACES, "count"):
                points.setdefault(name, {})[line.step] = float(number)
    return {
        name: LoggedCurve(tuple(curve), tuple(curve.values())) for name, curve in points.items()
    }


def _sample_lines(log: Path) -> list[LogLine]:
    """Return the first and the last line, and evenly spread lines between, in the order of steps.

    Lines that can't be parsed are skipped.
    """
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            texts = dict.fromkeys(_read_spread_lines(file, size))
    except OSError as error:
        raise DataError(f"{log}: can't be read: {error.strerror}") from error
    lines = []
    for text in texts:
        try:
            lines.append(parse_line(text, str(log)))
        except DataError:
            continue
    return sorted(lines, key=lambda line: line.step)


def _read_spread_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield whole lines: all of a short log, or those that follow evenly spread offsets."""
    first = file.readline(MAX_LINE_BYTES)
    if first.endswith(b"\n"):
        yield first
    if size <= len(first) * MAX_POINTS:
        while (text := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            yield text
        return
    for number in range(1, MAX_POINTS):
        # The offset is inside a line, so the next line is used.
        offset = len(first) + (size - len(first)) * number // (MAX_POINTS - 1)
        file.seek(min(offset, size - 1))
        file.readline(MAX_LINE_BYTES)
        text = file.readline(MAX_LINE_BYTES)
        if text.endswith(b"\n"):
            yield text
    # The last line may be longer than the first.
    tail_bytes = min(size, max(4 * len(first), 4096))
    file.seek(size - tail_bytes)
    lines = file.read(tail_bytes).split(b"\n")[:-1]
    if lines:
        yield lines[-1] + b"\n"
