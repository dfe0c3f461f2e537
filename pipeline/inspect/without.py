"""The run as if samples weighed nothing, from the first step that read one of them.

The steps before it are the run's own: with a weight of nothing for a sample that no batch has, a
step has the same bits. From there on the run's program with the feature `leave_out` trains them
again, in the same batches.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, RunError, UsageError
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.value_text import count_noun, join_first
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.batch import Batch, read_chunks
from pipeline.data.columns import Split
from pipeline.data.inputs import Dataset
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, rebuild
from pipeline.inspect.replay import Replay
from pipeline.training.bucketing import apply_in_bucket
from pipeline.training.features.components.leave_out import format_ranges, parse_ranges
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights, predict
from pipeline.training.step_config import StepConfig

FEATURE = "leave_out"
STEPS_AT_ONCE = 4096
MAX_NAMED = 5
MAX_ROWS_BYTES = 64 * 2**20
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*(\w[\w ]*?)\s*(==|!=|<=|>=|<|>)\s*(.+?)\s*")


def parse_rows(text: str) -> np.ndarray:
    """Return the row numbers of a text such as 3,17,40-59, or of a file with such lines.

    Raises DataError for a file that can't be read, UsageError for other texts.
    """
    try:
        return parse_ranges(text)
    except ValueError as error:
        path = Path(text)
        if not path.is_file():
            raise UsageError([text[:60]], f"{error}, or a file with them") from error
    try:
        lines = read_text(path, MAX_ROWS_BYTES).split("\n")
        return parse_ranges(",".join(line for line in lines if line.strip()))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


def select_rows(dataset: Dataset, condition: str) -> np.ndarray:
    """Return the rows, as they were read, for which a condition such as `label == 7` holds.

    A class may be named instead of numbered. Raises UsageError for another text, an unknown column,
    and a column with several numbers for each sample.
    """
    match = _CONDITION.fullmatch(condition)
    argument = [f"--where {condition!r}"]
    if match is None:
        raise UsageError(argument, "must be COLUMN == VALUE, or with !=, <, <=, > or >=")
    name, sign, text = match.groups()
    split = dataset.train
    if name not in split.columns:
        rule = f"the columns are {join_first(sorted(split.columns), 20)}"
        if dataset.table is not None:
            rule += "; a table's own are numbers in features, so pass the numbers of rows instead"
        raise UsageError(argument, f"there is no column {name}; {rule}")
    if len(split.columns[name].shape) != 1:
        raise UsageError(argument, f"{name} has several numbers for each sample; must have one")
    word = text.strip("'\"")
    is_class = name == "label" and dataset.targets.task == "classification"
    try:
        value = _find_class(dataset.classes, sign, word) if is_class else float(word)
    except ValueError as error:
        raise UsageError(
            argument, str(error) if is_class else f"{word!r:.40} isn't a number"
        ) from None
    values = np.asarray(split.columns[name][:])
    rows: np.ndarray = split.list_rows()[np.flatnonzero(COMPARISONS[sign](values, value))]
    if not len(rows):
        raise DataError(f"--where {condition!r}: holds for no training sample")
    return rows


def _find_class(classes: Sequence[str], sign: str, word: str) -> float:
    """Return the number of the class that a word names, or else numbers. Raises ValueError for
    other words, and for a number or an order where names are other numbers."""
    numbers = [str(number) for number in range(len(classes))]
    has_other_numbers = list(classes) != numbers and any(map(_is_number, classes))
    if has_other_numbers and (sign not in ("==", "!=") or word not in classes):
        names = join_first(classes, 20)
        raise ValueError(f"classes have numbers as names, so must be == or != one of {names}")
    if word in classes:
        return float(classes.index(word))
    if not _is_number(word):
        raise ValueError(f"{word!r:.40} isn't a number or a class")
    return float(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def name_classes(dataset: Dataset, positions: np.ndarray) -> list[str]:
    """Return the names of the classes of training samples; [] for other labels."""
    label = dataset.train.columns.get("label")
    if dataset.targets.task != "classification" or label is None or len(label.shape) != 1:
        return []
    return [dataset.classes[int(number)] for number in np.unique(np.asarray(label[positions]))]


def find_positions(split: Split, rows: np.ndarray) -> np.ndarray:
    """Return the positions in the training split of rows as they were read, int64 (n,).

    Raises DataError for rows that it hasn't: beyond the data, in the evaluation split, or left out
    by `dataset.selections`.
    """
    numbers = split.list_rows()
    order = np.argsort(numbers, kind="stable")
    places = np.searchsorted(numbers, rows, sorter=order).clip(max=len(numbers) - 1)
    positions: np.ndarray = order[places]
    absent = rows[numbers[positions] != rows]
    if len(absent):
        names = join_first([str(row) for row in absent], MAX_NAMED)
        noun = "row" if len(absent) == 1 else "rows"
        last = int(numbers.max())
        raise DataError(
            f"{noun} {names}: not in the training split, whose {len(numbers):,} rows are from "
            f"{int(numbers.min())} to {last}; rows of the evaluation split, and rows that a "
            "selection left out, train nothing"
        )
    return np.unique(positions)


def find_first_step(dataset: Dataset, positions: np.ndarray, steps: int) -> int | None:
    """Return the number of steps before the first one that reads a sample; None if none of `steps`
    does."""
    is_left_out = np.zeros(len(dataset.train), bool)
    is_left_out[positions] = True
    for start in range(0, steps, STEPS_AT_ONCE):
        batches = dataset.train_order.batches(start, min(STEPS_AT_ONCE, steps - start))
        is_read = is_left_out[batches.rows].any(axis=1)
        if is_read.any():
            return start + int(is_read.argmax())
    return None


def make_recipe(recipe: Recipe, positions: np.ndarray) -> Recipe:
    """Return a recipe whose samples at some positions of the training split weigh nothing.

    Raises RecipeError if a part of the recipe needs every sample.
    """
    if any(feature.name == FEATURE for feature in recipe.train.features):
        raise RecipeError(f"train.features: must have no {FEATURE} for without")
    tree = recipe.whole_tree()
    feature = {"name": FEATURE, "samples": format_ranges(positions)}
    tree["train"]["features"] = [*tree["train"]["features"], feature]
    tree["train"]["resume"] = None
    return check_tree(tree, length_replaced=True)


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """A run beside the run without samples, both after the same steps."""

    steps: int
    first: int | None
    """Steps before the first that read one of the samples; None if none did."""
    state: TrainState
    """Final state of the run, in numpy."""
    other: TrainState
    """Final state without the samples."""
    metrics: Mapping[str, float]
    other_metrics: Mapping[str, float]
    outputs: np.ndarray
    """Outputs of the evaluation samples, float32 (n, ...)."""
    other_outputs: np.ndarray
    has_classes: bool
    """Whether the largest output is the prediction, as for classes and tokens."""

    @property
    def saved_steps(self) -> int:
        """Steps that didn't have to be trained again."""
        return self.steps if self.first is None else self.first

    def measure_distance(self) -> float:
        """Return the distance of the parameters, by their norm in the run."""
        ours, theirs = (flatten_by_path(state.params) for state in (self.state, self.other))
        squares = [
            (np.square(np.asarray(theirs[path], np.float64) - np.asarray(ours[path])).sum())
            for path in ours
        ]
        norms = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in ours.values()]
        return float(np.sqrt(sum(squares) / max(sum(norms), np.finfo(float).tiny)))

    def find_changed(self) -> np.ndarray:
        """Return the evaluation samples with another prediction: another largest output, or another
        one at any position. Of numbers and labels, those with other bits at any output."""
        if self.has_classes and self.outputs.shape[-1] > 1:
            is_other = self.outputs.argmax(-1) != self.other_outputs.argmax(-1)
        else:
            is_other = self.outputs.view(np.uint32) != self.other_outputs.view(np.uint32)
        changed: np.ndarray = np.flatnonzero(is_other.reshape(len(is_other), -1).any(axis=1))
        return changed


def compute_counterfactual(replay: Replay, positions: np.ndarray, steps: int) -> Counterfactual:
    """Train a run again without the samples at some positions of its training split.

    Raises the errors of `make_recipe` and `Replay.go_to`, and RunError if a step without them isn't
    finite.
    """
    opened = replay.opened
    recipe = make_recipe(opened.recipe, positions)
    has_classes = opened.dataset.targets.task in ("classification", "next_token")
    first = find_first_step(opened.dataset, positions, steps)
    begin = None if first is None else replay.go_to(first)
    state = replay.go_to(steps)
    metrics = replay.evaluate(state).scalars()
    outputs = compute_outputs(opened, state)
    if begin is None or first is None:
        return Counterfactual(
            steps, None, state, state, metrics, metrics, outputs, outputs, has_classes
        )
    changed = rebuild(replace(opened, recipe=recipe), replay.run_dir)
    with Replay(changed, replay.run_dir, replay.reporter, advice="") as other_replay:
        other = begin
        done = first
        with replay.reporter.clock(f"training steps {first + 1:,} to {steps:,} without them"):
            for reached, record in other_replay.run_steps(begin, first, steps):
                other = reached
                done += len(record)
        if done < steps or record.non_finite_step is not None:
            raise RunError(f"{replay.run_dir}: step {done:,} isn't finite without the samples")
        other = jax.tree.map(np.array, other)
        other_metrics = other_replay.evaluate(other).scalars()
    other_outputs = compute_outputs(opened, other)
    return Counterfactual(
        steps, first, state, other, metrics, other_metrics, outputs, other_outputs, has_classes
    )


def compute_outputs(opened: OpenedRecipe, state: TrainState) -> np.ndarray:
    """Return the network's outputs of all evaluation samples, float32 (n, ...)."""
    config = opened.built.step_config
    split = opened.dataset.eval
    compute = jax.jit(partial(_predict, config))
    parts = []
    with jax.default_device(opened.backend.device):
        size = min(len(split), opened.dataset.eval_order.batch_size)
        for batch, count in read_chunks(split, np.arange(len(split)), opened.recipe.seed, size):
            parts.append(np.asarray(compute(state, batch), np.float32)[:count])
    return np.concatenate(parts)


def _predict(config: StepConfig, state: TrainState, batch: Batch) -> Array:
    weights = get_evaluated_weights(config, state)
    outputs: Array = apply_in_bucket(
        config.padding,
        batch,
        lambda cropped: predict(config, weights, cropped)[0],
        is_random=False,
    )
    return outputs


def describe_rows(rows: np.ndarray, total: int) -> str:
    """Describe the samples that are left out."""
    text = format_ranges(rows)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return f"{count_noun(len(rows), 'sample')} of {total:,}: {text}"
