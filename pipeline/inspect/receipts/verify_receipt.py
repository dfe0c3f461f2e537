"""Verification of a receipt: its chain, the files of the run, and random segments trained again.

What a receipt says is compared with the run's files everywhere. What must be computed is compared
too, but a difference counts only on the machine's class and with the versions that the receipt
names: elsewhere it is "not comparable".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path
from pipeline.checkpoint.restore import arrange_arrays, read_checkpoint
from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import count_total_steps
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import show
from pipeline.core.host.platforms import get_platform
from pipeline.data.order import draw_permutation
from pipeline.engine.monitors.log_lines import METRICS, read_lines
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, rebuild
from pipeline.inspect.receipts.chain import (
    ChainRecord,
    Numbers,
    digest_rows,
    digest_state,
    list_evaluations,
)
from pipeline.inspect.receipts.recorded_checks import (
    Problem,
    ReplayedSegment,
    Verification,
    make_adder,
    read_metrics,
)
from pipeline.inspect.receipts.run_receipt import (
    TRAIN_LOSS,
    describe_environment,
    digest_evaluation,
    make_origin,
    select_numbers,
)
from pipeline.inspect.receipts.statement import Receipt
from pipeline.inspect.replay import Replay, find_last_step
from pipeline.stages.build import fingerprint_rate_files
from pipeline.stages.record.provenance import describe_process
from pipeline.stages.record.recorded_recipe import LENGTH
from pipeline.stages.record.run_directory import read_outcome
from pipeline.stages.record.summary import list_versions
from pipeline.stages.record.trained_run import read_run_recipe
from pipeline.training.state import TrainState

MAX_STAGE_STEPS = 10**7
"""Most steps of a stranger's length, whose learning rates take up to 32 bytes each."""


def check_computed(verification: Verification, replay: Replay) -> None:
    """Compare a receipt with what follows from the recipe and the data here: recipe, environment,
    data, rows and the first state."""
    receipt, opened = verification.receipt, replay.opened
    differs = make_adder(verification, "differs")
    versions = list_versions(opened.backend.describe())
    splits = {"train": opened.dataset.train}
    process = vars(describe_process(opened.recipe.seed, versions, opened.backend.device, splits))
    if rate_files := fingerprint_rate_files(opened.recipe.train):
        process["data"] = {**process["data"], "learning rates": rate_files}
    here = make_origin(read_run_recipe(replay.run_dir), process, 0)
    environment = describe_environment(process)
    changes = [list_other_environment(origin.body, environment) for origin in receipt.origins]
    verification.causes += dict.fromkeys(text for texts in changes for text in texts)
    if not get_platform(opened.backend.device.platform).is_host:
        verification.causes.append("equal bits are promised for the CPU alone")
    if opened.recipe.train.callbacks:
        verification.causes.append("train.callbacks, which aren't called")
    if opened.recipe.parallel.reproducible is False:
        verification.causes.append("parallel.reproducible = false")
    origins = [origin.body for origin in receipt.origins]
    if any(origin.get("recipe") != here["recipe"] for origin in origins):
        differs("recipe.yaml: isn't the recipe of the receipt")
    is_last = verification.later_step is None
    if is_last and origins[-1].get("length") != here["length"]:
        differs("recipe.yaml: has another length than the receipt")
    if any(origin.get("data") != here["data"] for origin in origins):
        differs("the training data aren't those of the receipt")
    verification.notes += _list_lengths(receipt, here["length"])
    start = receipt.links[0].step
    for link in receipt.links:
        if link.body["rows"] != digest_rows(opened.dataset.train_order, start, link.step):
            differs(f"steps {start + 1:,} to {link.step:,} read other rows by this recipe")
            break
        start = link.step
    if receipt.links[0].step == 0:
        state = jax.tree.map(np.array, opened.fresh_state())
        if _digest(replay, state) != receipt.links[0].body["state"]:
            differs("the first state isn't that of the recipe")


def _list_lengths(receipt: Receipt, length: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each part of a run whose length isn't that of the recipe at its end."""
    origins = receipt.origins
    stops = [*(origin.step for origin in origins[1:]), receipt.last_step]
    for origin, stop in zip(origins, stops, strict=True):
        recorded = _read_length(origin)
        if recorded != length and origin.step < stop:
            keys = [f"train.{key}={show(v)}" for key, v in recorded.items() if v is not None]
            yield f"steps {ReplayedSegment(origin.step, stop)} with {show_name(', '.join(keys))}"


def _read_length(origin: ChainRecord) -> dict[str, Any]:
    length = origin.body.get("length")
    length = length if isinstance(length, Mapping) else {}
    return {key: length.get(key) for _, key in LENGTH}


def list_other_environment(origin: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """Return a text for each part of the environment that differs from a receipt's."""
    recorded = origin.get("environment")
    recorded = recorded if isinstance(recorded, Mapping) else {}
    texts = []
    for part, current in environment.items():
        former = recorded.get(part)
        if isinstance(current, Mapping) and isinstance(former, Mapping):
            for name in dict.fromkeys((*former, *current)):
                if former.get(name) != current.get(name):
                    text = f"{part} {name}: {show(former.get(name))} -> {show(current.get(name))}"
                    texts.append(show_name(text))
        elif former != current:
            texts.append(show_name(f"{part}: {show(former)} -> {show(current)}"))
    return texts


def _digest(replay: Replay, state: TrainState) -> str:
    return digest_state(state, replay.opened.built.step_config.select_saved)


def draw_segments(verification: Verification, share: float) -> None:
    """List the segments of a receipt, and draw a share of them, rounded up, without repetition."""
    receipt = verification.receipt
    links = [link.step for link in receipt.links]
    saved = [step for step in links if step == 0 or step in verification.checkpoints]
    starts = [step for step in saved if step < links[-1]]
    stops = [*starts[1:], links[-1]][: len(starts)]
    verification.segments = [
        ReplayedSegment(start, stop) for start, stop in zip(starts, stops, strict=True)
    ]
    # Also steps before the chain: nothing shows that its first state, a fork's or another, was
    # trained.
    begin = starts[0] if starts else links[-1]
    if begin > 0:
        verification.uncovered = [ReplayedSegment(0, begin)]
    total = len(verification.segments)
    if total:
        count = min(total, max(1, math.ceil(share * total - 1e-9)))
        positions = sorted(draw_permutation(verification.seed, 0, total)[:count].tolist())
        verification.drawn = [verification.segments[position] for position in positions]


def replay_segments(verification: Verification, replay: Replay) -> None:
    """Train the drawn segments again, and compare the state and the numbers at each link; evaluate
    the last state again."""
    receipt = verification.receipt
    last_state = None
    with ExitStack() as stack:
        stages = _open_stages(receipt, replay, stack) if verification.drawn else []
        for segment in verification.drawn:
            reached = _replay_segment(receipt, stages, segment)
            if isinstance(reached, str):
                verification.problems.append(Problem("differs", reached))
            elif segment.stop == receipt.last_step:
                last_state = reached
    _check_metrics(verification, replay, last_state)


def _check_metrics(
    verification: Verification, replay: Replay, last_state: TrainState | None
) -> None:
    """Compare the final metrics with an evaluation of the last state: a checkpoint's, or the one
    that training again has reached."""
    receipt = verification.receipt
    end = receipt.end
    outcome = read_outcome(replay.run_dir)
    if end is None:
        if outcome.get("status") == "done" and outcome.get("steps") == receipt.last_step:
            text = "the final metrics of summary.json: the chain has no end with them"
            verification.unproven.append(text)
        return
    if receipt.last_step in verification.checkpoints:
        last_state = _read_state(replay, receipt.last_step)
    if last_state is None:
        verification.unproven.append(
            f"the final metrics: the state of step {receipt.last_step:,} isn't in a checkpoint, "
            "and its segment wasn't trained again; --share 100% does"
        )
        return
    differs = make_adder(verification, "differs")
    metrics = replay.evaluate(last_state).metrics
    computed = {**select_numbers(metrics), TRAIN_LOSS: _read_loss(replay, receipt.last_step)}
    for name, recorded in read_metrics(end).items():
        value = computed.get(name)
        if name not in computed:
            differs(f"{show_name(name)}: isn't a metric of the run, the receipt has it")
        elif recorded != value and (name != TRAIN_LOSS or recorded is not None):
            text = f"{show_name(name)} of the last state is {show(value)}, the receipt has "
            differs(text + show(recorded))
    digest = list_evaluations(receipt.records).get(receipt.last_step)
    if digest is not None and digest != digest_evaluation(receipt.last_step, metrics):
        differs("the last state, evaluated again, has other metrics than the receipt")


def _read_loss(replay: Replay, step: int) -> float | None:
    """Return the loss of a step in the log, whose numbers were compared with the chain."""
    log = replay.run_dir / METRICS
    lines = read_lines(log) if log.is_file() else ()
    loss = next((line.numbers().get("loss") for line in lines if line.step == step), None)
    return None if loss is None else float(np.float32(loss))


class _Stage(NamedTuple):
    """A part of a run with one length of its recipe."""

    step: int
    """Steps before it."""
    replay: Replay


def _open_stages(receipt: Receipt, replay: Replay, stack: ExitStack) -> list[_Stage]:
    """Open the run's recipe with the length of each origin, on which learning rates depend.

    Raises DataError for a length that no recipe has, or that is far above the run's: its learning
    rates are in memory.
    """
    opened = replay.opened
    current = opened.recipe.model_dump(mode="json")["train"]
    stages: list[_Stage] = []
    for origin in receipt.origins:
        recorded = _read_length(origin)
        stage_replay = replay
        if recorded != {key: current[key] for key in recorded}:
            recipe = _replace_length(opened, recorded, origin)
            changed = rebuild(replace(opened, recipe=recipe), replay.run_dir)
            stage_replay = Replay(changed, replay.run_dir, replay.reporter, advice="")
            stack.enter_context(stage_replay)
        stages.append(_Stage(origin.step, stage_replay))
    return stages


def _replace_length(opened: OpenedRecipe, length: Mapping[str, Any], origin: ChainRecord) -> Recipe:
    """Return a run's recipe with the length of an origin. Raises DataError; see `_open_stages`."""
    tree = opened.recipe.whole_tree()
    tree["train"] |= length
    where = f"the receipt's origin of step {origin.step:,}"
    try:
        recipe = check_tree(tree, length_replaced=True)
        steps = count_total_steps(recipe.train, opened.dataset.train_order.steps_per_epoch)
    except (RecipeError, ValueError) as error:
        text = "; ".join(error.problems) if isinstance(error, RecipeError) else str(error)
        raise DataError(f"{where} has a length of no recipe: {text}") from error
    most = max(MAX_STAGE_STEPS, 10 * opened.built.run_schedule.total)
    # A deadline has no table of rates.
    if recipe.train.deadline is None and steps > most:
        raise DataError(f"{where} has {steps:,} steps; must be at most {most:,} to verify")
    return recipe


def _read_state(replay: Replay, step: int) -> TrainState:
    """Return the state of a link, from the recipe or the checkpoint whose digest was compared."""
    opened = replay.opened
    if step == 0:
        state: TrainState = jax.tree.map(np.array, opened.fresh_state())
        return state
    checkpoint = read_checkpoint(make_checkpoint_path(replay.run_dir / FOLDER, step))
    built = opened.built
    state = arrange_arrays(
        checkpoint.folder, checkpoint.arrays, built.step_config.select_saved(built.state)
    )
    return opened.complete_state(state, replay.run_dir)


def _replay_segment(
    receipt: Receipt, stages: Sequence[_Stage], segment: ReplayedSegment
) -> str | TrainState:
    """Return the state at the end of a segment, or a text about the first link that differs."""
    state = _read_state(stages[0].replay, segment.start)
    position = segment.start
    for link in receipt.links:
        if not segment.start < link.step <= segment.stop:
            continue
        numbers = Numbers()
        where = f"steps {position + 1:,} to {link.step:,}, trained again, have"
        while position < link.step:
            stage = next(stage for stage in reversed(stages) if stage.step <= position)
            later = [other.step for other in stages if other.step > position]
            stop = min([link.step, *later])
            done = position
            for reached, steps in stage.replay.run_steps(state, position, stop):
                numbers.add(steps)
                done += len(steps)
                state = reached
            if done < stop:
                return f"{where} a step that isn't finite: {done:,}"
            position = stop
        if numbers.finish() != link.body["numbers"]:
            return f"{where} other numbers"
        if _digest(stages[0].replay, state) != link.body["state"]:
            return f"{where} another state"
    return state


def require_same_run(receipt: Receipt, run_dir: Path) -> None:
    """Raise DataError if the run has fewer steps than its receipt."""
    last = find_last_step(run_dir)
    if last < receipt.last_step:
        raise DataError(
            f"{run_dir}: has done {last:,} steps, the receipt is of {receipt.last_step:,}"
        )
