"""Receipt of a run, written while it trains: a record of the chain every `receipt.every_steps`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.atomic_write import convert_write_errors, format_json, write_whole
from pipeline.core.files.trusted_files import open_unshared
from pipeline.core.files.value_text import count_noun
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.engine.callbacks.callback import Evaluation, Monitor
from pipeline.engine.monitors.log_lines import EVALS, METRICS, finite_number, read_lines
from pipeline.inspect.receipts.chain import (
    ChainRecord,
    Numbers,
    digest_arrays,
    digest_json,
    digest_rows,
    digest_state,
    extend_chain,
    format_records,
    list_evaluations,
    read_chain,
)
from pipeline.stages.compile import MACHINE_KEYS
from pipeline.stages.record.continuity import list_decisive_settings
from pipeline.stages.record.recorded_recipe import LENGTH, hash_recipe
from pipeline.stages.record.run_directory import CHAIN
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.features.non_finite_steps import Rollback
from pipeline.training.parallel.state_sharing import gather_arrays
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry

if TYPE_CHECKING:
    from pipeline.backends.base import Estimate
    from pipeline.engine.history import History
    from pipeline.stages.runner.context import CompiledRun

TRAIN_LOSS = "train_loss"
"""Final metric that is the loss of the last step."""
MOST_SHARE = 0.01
"""Share of the time of training above which the run advises fewer links."""
LEAST_S = 10.0
"""Seconds of training from which the share is judged; a short one has the time of its start."""


def describe_environment(process: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a process decides bits, for a receipt: versions, code, machine, settings.

    `process` is as in provenance.json.
    """
    machine = process.get("machine") or {}
    code = process.get("code") or {}
    versions = process.get("versions") or {}
    return {
        # The number of devices, which is in their name, changes no bit.
        "versions": {name: value for name, value in versions.items() if name != "device"},
        "code": code.get("sha256"),
        "machine": {name: machine.get(name) for name in MACHINE_KEYS},
        "numerics": process.get("numerics"),
        "settings": list_decisive_settings(process.get("settings") or {}),
        "plugins": process.get("plugins"),
    }


def make_origin(recipe: Recipe, process: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the body of the origin of the steps after `step`."""
    tree = recipe.model_dump(mode="json")
    data = dict(process.get("data") or {})
    data.pop("eval", None)
    return {
        "kind": "origin",
        "step": step,
        "recipe": hash_recipe(tree),
        "length": {name: tree["train"][name] for _, name in LENGTH},
        "environment": describe_environment(process),
        # As JSON: tuples become lists.
        "data": json.loads(format_json(data)),
    }


def digest_evaluation(step: int, metrics: Mapping[str, Any]) -> str:
    """Return the digest of an evaluation, as its line of evals.jsonl has it."""
    return digest_json(json.loads(format_json({**metrics, "step": step})))


def select_numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics that are numbers; None for one that isn't finite."""
    return {
        name: finite_number(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def select_final(metrics: Mapping[str, Any], evaluated: Iterable[str]) -> dict[str, float | None]:
    """Return the numbers among final metrics that a verification computes: the names of the final
    evaluation, and the loss of the last step. Others, such as a robust accuracy, aren't claimed."""
    names = {TRAIN_LOSS, *evaluated}
    return {name: v for name, v in select_numbers(metrics).items() if name in names}


class RunReceipt(RunFeature, Monitor):
    """The chain of a run with `receipt.every_steps`. The first process writes it.

    A resumed run continues the links before its first step, and repeats the link at it. Without
    such links the chain begins there, as a fork's does.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Raise RecipeError if steps may be undone, or the length isn't known."""
        problems = []
        if isinstance(recipe.train.on_nan, Rollback):
            problems.append("train.on_nan: must be stop or skip with receipt.every_steps")
        if recipe.privacy is not None:
            problems.append("privacy: must be null with receipt.every_steps, which digests rows")
        if recipe.train.deadline is not None:
            problems.append(f"train.{recipe.train.deadline}: must be null with receipt.every_steps")
        if problems:
            raise RecipeError(problems)
        period = recipe.receipt.every_steps
        assert period is not None, "a run with links"
        self._period = period
        self._run: CompiledRun | None = None
        self._history: History | None = None
        self._records: list[ChainRecord] = []
        self._written: int | None = None
        """Records in the file; None before the first write of this process."""
        self._numbers = Numbers()
        self._evaluations: list[list[Any]] = []
        self._seconds = 0.0

    def check(self, run: CompiledRun) -> None:
        """Warn if no segment can begin at a checkpoint."""
        saves = run.context.recipe.checkpoint.every_steps
        if saves is not None and saves % self._period:
            run.context.reporter.warn(
                f"receipt.every_steps = {self._period}: segments can be replayed only from a "
                f"checkpoint at a link; make checkpoint.every_steps = {saves} a multiple of it"
            )

    @property
    def monitors(self) -> Sequence[Monitor]:
        return (self,)

    @property
    def state_periods(self) -> Sequence[int]:
        return (self._period,)

    def start_state(self, run: CompiledRun, state: TrainState, *, resumed: bool) -> TrainState:
        """Open the chain at the state with which training begins."""
        self._run = run
        step = int(state.step)
        with self._clock():
            gathered = self._gather(state)
            if not run.context.ranks.is_first:
                return state
            if resumed:
                self._continue_chain(step)
            self._add_origin(step, gathered)
            if self._last_link is None:
                self._add_link(gathered, step)
        return state

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Add the numbers of steps to the next link."""
        with self._clock():
            self._numbers.add(telemetry)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Add an evaluation to the next link."""
        self._evaluations.append([step, digest_evaluation(step, evaluation.metrics)])

    def see_state(self, state: TrainState, step: int) -> None:
        """Write the link at a step, unless the chain has it already."""
        with self._clock():
            gathered = self._gather(state)
            last = self._last_link
            if self._is_first and (last is None or last.step < step):
                self._add_link(gathered, step)
                self._write()

    def record(self, run: CompiledRun, history: History) -> None:
        self._history = history
        run.context.summary.time["receipt_s"] = self._seconds

    def conclude_training(
        self, run: CompiledRun, estimate: Estimate | None, state: TrainState
    ) -> None:
        """Write the link of the last state, and report how long the chain took."""
        self.see_state(state, int(state.step))
        if not self._is_first:
            return
        with self._clock():
            self._write()
        summary = run.context.summary
        summary.time["receipt_s"] = self._seconds
        links = sum(record.kind == "link" for record in self._records)
        train_s = summary.time.get("train_s") or 0.0
        share = self._seconds / train_s if train_s else 0.0
        text = f"{count_noun(links, 'link')} in {CHAIN}, {share:.2%} of the time of training"
        run.context.reporter.print_stage("receipt", text)
        if share > MOST_SHARE and train_s >= LEAST_S:
            period = int(np.ceil(self._period * share / MOST_SHARE))
            run.context.reporter.warn(
                f"receipt.every_steps = {self._period}: took {share:.1%} of the time of training; "
                f"{period} or more would take at most {MOST_SHARE:.0%}"
            )

    def conclude(self, run: CompiledRun, state: TrainState) -> None:
        """Write the end: the final metrics, and the final evaluation unless a link has it."""
        if not self._is_first or self._last_link is None:
            return
        step = self._last_link.step
        final = None if self._history is None else self._history.evaluated.get(step)
        if final is not None and step not in list_evaluations(self._records):
            self.on_eval(step, final)
        body = {
            "kind": "end",
            "step": step,
            "evaluations": self._take_evaluations(),
            "metrics": select_final(run.context.summary.metrics, final.metrics if final else ()),
        }
        self._records.append(extend_chain(self._records, body))
        self._write()

    @property
    def _opened(self) -> CompiledRun:
        assert self._run is not None, "the state has begun"
        return self._run

    @property
    def _is_first(self) -> bool:
        return self._opened.context.ranks.is_first

    @property
    def _last_link(self) -> ChainRecord | None:
        links = (record for record in reversed(self._records) if record.kind == "link")
        return next(links, None)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        began_at = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began_at

    def _gather(self, state: TrainState) -> TrainState:
        """Return a state that this process can read; all processes call it."""
        context = self._opened.context
        is_shared = context.recipe.parallel.mode != "data" and context.ranks.size > 1
        gathered: TrainState = gather_arrays(state) if is_shared else state
        return gathered

    def _continue_chain(self, step: int) -> None:
        """Read the links before the first step of this process, and what the next begins with."""
        context = self._opened.context
        file = context.run_dir / CHAIN
        if not file.exists():
            return
        try:
            records = read_chain(file)
        except DataError as error:
            context.reporter.warn(f"{error}; the receipt begins at step {step:,}")
            return
        links = [record for record in records if record.kind == "link"]
        kept = [
            record
            for record in records
            if record.step < step or record in links[:1] or record.kind == "origin"
            if record.step <= step and record.kind != "end"
            # A link that isn't due ended the earlier process. The chain goes on without it.
            if record.kind == "origin" or record.step % self._period == 0 or record in links[:1]
        ]
        self._records = _chain_again(kept)
        last = self._last_link
        if last is None:
            self._records = []
            return
        self._read_logs(context.run_dir, last.step, step)

    def _read_logs(self, run_dir: Path, start: int, stop: int) -> None:
        """Add the numbers of steps after the last link that are logged already, and the evaluations
        that no link has: also of the end that the chain no longer has."""
        with suppress(FileNotFoundError):
            for line in read_lines(run_dir / METRICS):
                if start < line.step <= stop:
                    self._numbers.add_line(line)
        known = list_evaluations(self._records)
        begin = next(record.step for record in self._records if record.kind == "link")
        # The evaluation at the first step is repeated if it was interrupted.
        with suppress(FileNotFoundError):
            for line in read_lines(run_dir / EVALS):
                if begin < line.step <= stop and line.step not in known:
                    fields = {name: v for name, v in line.fields.items() if name != "step"}
                    self._evaluations.append([line.step, digest_evaluation(line.step, fields)])

    def _add_origin(self, step: int, state: TrainState) -> None:
        """Add the origin of the steps after `step`, unless the chain's last one is the same."""
        run = self._opened
        process = run.context.process
        assert process is not None, "the first process has a provenance"
        body = make_origin(run.context.recipe, vars(process), step)
        select = run.built.step_config.select_saved
        saved = flatten_by_path(select(state))
        unsaved = {path: leaf for path, leaf in flatten_by_path(state).items() if path not in saved}
        body["unsaved"] = digest_arrays(unsaved) if unsaved else None
        origins = [record for record in self._records if record.kind == "origin"]
        if origins and {**origins[-1].body, "step": step} == body:
            return
        self._records.append(extend_chain(self._records, body))

    def _add_link(self, state: TrainState, step: int) -> None:
        run = self._opened
        last = self._last_link
        start = step if last is None else last.step
        body = {
            "kind": "link",
            "step": step,
            "state": digest_state(state, run.built.step_config.select_saved),
            "rows": digest_rows(run.dataset.train_order, start, step),
            "numbers": self._numbers.finish(),
            "evaluations": self._take_evaluations(),
        }
        self._records.append(extend_chain(self._records, body))
        self._numbers = Numbers()

    def _take_evaluations(self) -> list[list[Any]]:
        """Return the evaluations since the last link; of a step that has several, the last one."""
        taken: dict[int, str] = dict(self._evaluations)
        self._evaluations = []
        return [[step, digest] for step, digest in sorted(taken.items())]

    def _write(self) -> None:
        """Append the new records; the first write of a process replaces the file."""
        file = self._opened.context.run_dir / CHAIN
        with convert_write_errors(file):
            if self._written is None:
                write_whole(file, format_records(self._records))
            else:
                with open(file, "a", encoding="utf-8", opener=open_unshared) as opened:
                    opened.write(format_records(self._records[self._written :]))
        self._written = len(self._records)


def _chain_again(records: Sequence[ChainRecord]) -> list[ChainRecord]:
    """Return records with the digests that they have without those left out between them."""
    chained: list[ChainRecord] = []
    for record in records:
        chained.append(extend_chain(chained, record.body))
    return chained
