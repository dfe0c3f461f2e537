"""Runs in Python: run a whole recipe, or train sink by sink, evaluate and predict."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from pipeline.config.compose import check_tree, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.core.host.signals import Interrupted, Signals
from pipeline.data.columns import ColumnSpec, SplitKey
from pipeline.data.inputs import Dataset
from pipeline.engine.callback_calls import RunView
from pipeline.engine.callbacks.callback import Callback, Evaluation, RunControl, SinkReport
from pipeline.engine.loop import exhaust
from pipeline.engine.monitors.log_lines import EVALS, METRICS
from pipeline.models.layers.path_patterns import is_frozen
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages import run as stages
from pipeline.stages.data import load_data, read_batch
from pipeline.stages.export.prediction import compile_predict
from pipeline.stages.fine_tuning import make_phases
from pipeline.stages.record.run_record import read_arrays
from pipeline.stages.record.summary import Summary
from pipeline.stages.record.trained_run import Samples, TrainedRun, read_trained_run
from pipeline.stages.runner.context import RunOptions
from pipeline.training.features.averages import find_evaluated
from pipeline.training.state import merge_params

PREDICT_BATCH = 64
"""Most samples per call of the network. It is compiled again for every other number of samples, so
only a call of `predict` with fewer samples has a smaller batch."""
_NO_PARAMETERS = "there are no parameters yet; call fit(), or Trainer.load(RUN_DIR)"


def run(recipe: Recipe, run_dir: Path | None = None, callbacks: Sequence[Callback] = ()) -> Summary:
    """Run the stages that a recipe names, and return a summary of the result.

    The run writes into `run_dir`, or a new directory under `outputs/`. `callbacks` are called after
    the recipe's callbacks. Raises PipelineError if the run fails. If a signal stops the run, saves
    it and raises Interrupted.
    """
    options = RunOptions(run_dir, callbacks=callbacks)
    summary = stages.run(recipe, options)
    options.signals.check()
    return summary


class Trainer:
    """A run of a recipe, and the network that it trains.

        trainer = Trainer("lenet5_mnist", ["train.epochs=1"])
        trainer.fit()
        print(trainer.evaluate()["accuracy"], trainer.predict(images).argmax(-1))

    `recipe` is a Recipe, or the name or file of a recipe, to which `overrides` apply as on the
    command line. Raises RecipeError with every problem of the recipe, ValueError for overrides of a
    Recipe.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path = "lenet5_digits",
        overrides: Sequence[str] = (),
        *,
        callbacks: Sequence[Callback] = (),
        run_dir: Path | str | None = None,
    ) -> None:
        if isinstance(recipe, Recipe) and overrides:
            raise ValueError(f"overrides = {list(overrides)}: need the name or file of a recipe")
        if not isinstance(recipe, Recipe):
            recipe = load_recipe(str(recipe), overrides)
        self.recipe: Recipe = recipe
        self.summary: Summary | None = None
        """The result of the last `fit`."""
        self._callbacks = tuple(callbacks)
        self._requested_dir = None if run_dir is None else Path(run_dir)
        self._watch = _Watch()
        self._trained: TrainedRun | None = None

    @classmethod
    def load(cls, run_dir: Path | str) -> Trainer:
        """Return the trainer of a run that has saved a checkpoint, to predict and to evaluate.

        Raises DataError if `run_dir` isn't a run or has no checkpoint.
        """
        trained = read_trained_run(Path(run_dir))
        trainer = cls(trained.recipe)
        trainer._trained = trained
        trainer._watch.run_dir = Path(run_dir)
        return trainer

    @property
    def run_dir(self) -> Path:
        """The directory of the run. Raises RunError if nothing has run yet."""
        if self._watch.run_dir is None:
            raise RunError("nothing has run yet; call fit(), or Trainer.load(RUN_DIR)")
        return self._watch.run_dir

    def fit(self) -> Summary:
        """Train to the end, evaluate, and return the summary.

        Raises PipelineError if the run fails. If a signal stops the run, saves it with its summary
        and raises Interrupted.
        """
        for _ in self.sinks():
            pass
        assert self.summary is not None, "sinks() sets the summary at its end"
        return self.summary

    def sinks(self) -> Iterator[SinkReport]:
        """Train, and yield the report of each sink after its evaluation and before its checkpoint.

        Between two sinks the caller may change parameters and learning rates, and evaluate. If the
        caller leaves the loop early, the run is saved and can be resumed. If the process ends
        inside the loop, only earlier checkpoints remain. If a signal stops the run, saves it and
        raises Interrupted.
        """
        signals = Signals()
        options = RunOptions(
            self._requested_dir,
            signals=signals,
            callbacks=(*self._callbacks, self._watch),
        )
        reports = stages.run_in_sinks(self.recipe, options)
        has_ended = False
        is_exiting = False

        def end_with_process() -> None:
            nonlocal has_ended, is_exiting
            has_ended = True
            is_exiting = True
            # The run isn't saved: that would need a new thread, and none can be started any more.
            with suppress(StopIteration):
                reports.throw(Interrupted("the process ended inside the loop over sinks"))

        atexit.register(end_with_process)
        try:
            while True:
                try:
                    report = next(reports)
                except BaseException as end:
                    has_ended = True
                    if not isinstance(end, StopIteration):
                        raise
                    self.summary = end.value
                    signals.check()
                    return
                yield report
        finally:
            if not is_exiting:
                atexit.unregister(end_with_process)
            if not has_ended:
                signals.stop = "the loop over its sinks was left"
                self.summary = exhaust(reports)

    @property
    def control(self) -> RunControl:
        """The control of the run in progress, to read its step, change learning rates and stop it.
        Raises RunError if no training is in progress."""
        if self._watch.view is None or not self._watch.is_training:
            raise RunError("no training is in progress; use this in a loop over sinks()")
        return self._watch.view

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current parameters; return the metrics by name.

        Precision, recall and f1 are macro averages. Raises RunError before there are parameters,
        PipelineError if the data can't be read, and Interrupted after a signal to stop.
        """
        view = self._watch.view
        if view is not None:
            return view.evaluate().scalars()
        # A loaded run isn't in memory, so a temporary run evaluates its checkpoint.
        tree = self.recipe.whole_tree()
        tree["stages"] = ["data", "build", "compile", "eval"]
        tree["train"]["resume"] = None
        tree["checkpoint"] |= {"restore": str(self.run_dir), "rules": "none", "renames": []}
        tree["monitor"]["tensorboard"] = False
        with tempfile.TemporaryDirectory() as folder:
            recipe = check_tree(tree, length_replaced=True)
            options = RunOptions(Path(folder) / "run")
            summary = stages.run(recipe, options)
            options.signals.check()
        return Evaluation(summary.metrics, None).scalars()

    def predict(self, samples: np.ndarray | Mapping[str, np.ndarray]) -> np.ndarray:
        """Return logits, float32 (n, ...), of samples before map ops: images (n, H, W, C), encoded
        rows (n, columns), tokens (n, T), or a mapping if the network reads several columns.

        Samples have the dataset's shape and type; the evaluation ops are applied. Raises RunError
        before there are parameters. Raises DataError for samples of another shape, and for
        values that the dataset's type can't hold, such as 0.5 in uint8.
        """
        snapshot = self._make_snapshot()
        formats = snapshot.samples
        if not isinstance(samples, Mapping):
            if len(formats.columns) > 1:
                names = ", ".join(formats.columns)
                raise DataError(f"the network reads the columns {names}: must be a mapping of them")
            samples = {next(iter(formats.columns)): samples}
        missing = [name for name in formats.columns if name not in samples]
        if missing:
            raise DataError(f"lacks the columns {', '.join(missing)}, which the network reads")
        columns = {
            name: _convert_column(name, np.asarray(samples[name]), spec)
            for name, spec in formats.columns.items()
        }
        lengths = {name: len(column) for name, column in columns.items()}
        count = min(lengths.values())
        if max(lengths.values()) > count:
            raise DataError(f"must have equally many samples, not {lengths}")
        weights = {path: jnp.asarray(array) for path, array in snapshot.arrays.items()}
        logits = []
        for start in range(0, count, PREDICT_BATCH):
            # The last batch is padded with its last sample, so that all have one size.
            rows = np.arange(start, start + min(PREDICT_BATCH, count))
            padded = {name: column[np.minimum(rows, count - 1)] for name, column in columns.items()}
            batch = padded if len(padded) > 1 else next(iter(padded.values()))
            logits.append(np.asarray(self._predict(weights, batch))[: count - start])
        return np.concatenate(logits) if logits else np.zeros((0, len(formats.classes)), np.float32)

    __call__ = predict

    @property
    def parameters(self) -> MutableMapping[str, np.ndarray]:
        """Copies of the parameters by path, such as `conv_0/kernel`, in the network's order.

        Between two sinks, `parameters[path] = array` sets a parameter. Raises RunError if there are
        no parameters yet.
        """
        if self._watch.view is None and self._trained is None:
            raise RunError(_NO_PARAMETERS)
        return _Parameters(self)

    @property
    def trainable_parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters that the next step updates, by path: all that aren't frozen.

        Raises RunError before there are parameters.
        """
        train = self.recipe.train
        frozen_patterns = train.freeze
        step = self._make_snapshot().step
        if train.unfreeze:
            for phase in make_phases(train, self.dataset.train_order.steps_per_epoch):
                if phase.start <= step:
                    frozen_patterns = phase.frozen
        return {
            path: array
            for path, array in _Parameters(self)._copy_arrays().items()
            if not is_frozen(frozen_patterns, tuple(path.split("/")))
        }

    def save_weights(self, file: Path | str) -> None:
        """Write parameters and batch statistics to a weight file, as `convert weights` does.

        Its suffix is .safetensors, .ckpt or .npz. Raises RunError before there are parameters or
        the file can't be written, and DataError for another suffix.
        """
        write_weights(Path(file), self._make_snapshot().arrays)

    def tuples(self, split: SplitKey = "train", epoch: int = 0) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield each batch that `dicts` yields as a tuple: the columns that the network reads, the
        label and the other columns."""
        names = self.dataset.inputs.columns
        for batch in self.dicts(split, epoch):
            inputs = [batch.pop(name) for name in names if name in batch]
            yield (*inputs, batch.pop("label"), *batch.values())

    def dicts(self, split: SplitKey = "train", epoch: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Yield the columns of each batch of an epoch by name, as the network reads them.

        Images are float32 (B, H, W, C). The last batch may be smaller. The first epoch is 0. Order
        and random augmentation are the same as in that epoch of training. Raises ValueError for
        another split or a negative epoch.
        """
        if split not in get_args(SplitKey):
            raise ValueError(f"split = {split!r}: must be one of {', '.join(get_args(SplitKey))}")
        if epoch < 0:
            raise ValueError(f"epoch = {epoch}: must be at least 0")
        dataset = self.dataset
        order = dataset.train_order if split == "train" else dataset.eval_order
        for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
            batches = order.batches(step, 1)
            columns = read_batch(self.recipe, dataset, split, batches, step)
            for array in dataset.inputs.arrays:
                if array.column in columns:
                    columns[array.column] = array.convert(np, columns[array.column])
            yield {name: array[: int(batches.counts[0])] for name, array in columns.items()}

    @cached_property
    def dataset(self) -> Dataset:
        """The dataset: its splits, before map ops, and the order of samples."""
        return load_data(self.recipe)

    @property
    def steps(self) -> dict[str, np.ndarray]:
        """Numbers of every step so far, an array for each: step, loss, learning_rate, ...

        A loss that isn't finite is NaN.
        """
        return self._read_log(METRICS)

    @property
    def evaluations(self) -> dict[str, np.ndarray]:
        """Step and metrics of every evaluation during training, an array for each.

        Precision, recall and f1 are macro averages.
        """
        return self._read_log(EVALS)

    def _read_log(self, name: str) -> dict[str, np.ndarray]:
        if self._watch.view is not None:
            self._watch.view.flush()
        return read_arrays(self.run_dir / name)

    def _make_snapshot(self) -> TrainedRun:
        """Return the run as it is now, with copies of its parameters, or of their averages. Raises
        RunError before there are parameters."""
        view = self._watch.view
        if view is None or view.state is None:
            if self._trained is None:
                raise RunError(_NO_PARAMETERS)
            return self._trained
        dataset = self.dataset
        samples = Samples(
            dataset.raw_inputs,
            dataset.targets,
            dataset.table,
            dataset.text,
            dataset.scale,
            audio=dataset.audio,
        )
        state = view.state
        params = merge_params(state.params, find_evaluated(state.features))
        for feature in self.recipe.train.features:
            params = feature.merge_params(params)
        tree = {**state.variables, "params": params}
        weights = {path: np.array(array) for path, array in flatten_dict(tree, sep="/").items()}
        return TrainedRun(self.recipe, weights, int(state.step), samples)

    @cached_property
    def _predict(self) -> Callable[..., Any]:
        return compile_predict(self._make_snapshot())


class _Watch(Callback):
    """Callback that stores the last run's directory and view, which the trainer reads."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.view: RunView | None = None
        self.is_training = False

    def on_begin(self, run: RunControl) -> None:
        assert isinstance(run, RunView), "the training loop passes a RunView"
        self.view = run
        self.run_dir = run.run_dir
        self.is_training = True

    def on_end(self, run: RunControl, status: str) -> None:
        self.is_training = False


def _convert_column(name: str, values: np.ndarray, spec: ColumnSpec) -> np.ndarray:
    """Return values in the shape and type of a column. Raises DataError for others."""
    if values.shape[1:] != spec.shape:
        raise DataError(f"{name}.shape = {values.shape}: must be {('n', *spec.shape)}")
    with np.errstate(invalid="ignore"):
        converted = values.astype(spec.dtype)
    if np.issubdtype(converted.dtype, np.integer) and not np.array_equal(converted, values):
        value = values[converted != values].flat[0]
        raise DataError(f"{name} has the value {value}: must be {spec.dtype}, as in the dataset")
    return converted


class _Parameters(MutableMapping[str, np.ndarray]):
    """The mapping that `Trainer.parameters` returns. Every access copies the current arrays."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def _copy_arrays(self) -> dict[str, np.ndarray]:
        view = self._trainer._watch.view
        if view is not None:
            return view.parameters()
        return {
            path.removeprefix("params/"): array
            for path, array in self._trainer._make_snapshot().arrays.items()
            if path.startswith("params/")
        }

    def __getitem__(self, path: str) -> np.ndarray:
        return self._copy_arrays()[path]

    def __setitem__(self, path: str, array: np.ndarray) -> None:
        self._trainer.control.set_parameters({path: array})

    def __delitem__(self, path: str) -> None:
        raise TypeError(f"{path}: parameters can be set, not removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._copy_arrays())

    def __len__(self) -> int:
        return len(self._copy_arrays())
