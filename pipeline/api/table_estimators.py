"""Runs of `recipe=table` as estimators with scikit-learn's methods. They don't need scikit-learn.

    model = TableClassifier(run_dir="runs/churn").fit(X, y)
    print(model.score(X_test, y_test), model.predict_proba(X_test)[:3])

X is a data frame of pandas, whose columns keep their names, or an array (n, columns) of numbers or
texts; y is (n,). Both are written as Parquet into the run's directory, and a run of the recipe is
trained on them. The directory is a run like any other: `infer`, `export` and `report` read it.
"""

from __future__ import annotations

import inspect
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import jax.numpy as jnp
import numpy as np
from scipy.special import expit, softmax

from pipeline.api.trainer import Trainer
from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path
from pipeline.config.overrides import quote_value
from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.data.tables.fit_table import read_encoded_rows
from pipeline.stages.export.prediction import compile_predict, read_network

TARGET = "target"
DATA = "table.parquet"
PREDICT_BATCH = 256
"""Rows of each call of the network."""
Raised = TypeVar("Raised", bound=Exception)
Columns = dict[str, np.ndarray]


EARLY_STOP = (
    *("eval.every_epochs=4", "checkpoint.every_epochs=4", "checkpoint.best=loss"),
    *("checkpoint.keep=1", "run_features=[]"),
)
"""Keys of the runs of folds: which states are evaluated, and of which the best is kept."""


def find_best_state(trainer: Trainer) -> Path:
    """Return the checkpoint of a finished run with the least loss of its evaluation split, the
    latest of equal ones; the last one if that wasn't kept."""
    losses, steps = trainer.evaluations["loss"], trainer.evaluations["step"]
    saved = {int(step): make_checkpoint_path(trainer.run_dir / FOLDER, int(step)) for step in steps}
    kept = [
        (loss, -step)
        for loss, step in zip(losses.tolist(), steps.tolist(), strict=True)
        if saved[int(step)].is_dir() and math.isfinite(loss)
    ]
    return saved[int(-min(kept)[1])] if kept else trainer.run_dir


class TableEstimator:
    """Base of the estimators: parameters, `fit`, and the outputs of the trained network."""

    task: ClassVar[str]
    kind: ClassVar[str]

    def __init__(
        self,
        recipe: str = "table",
        overrides: Sequence[str] = (),
        run_dir: str | Path | None = None,
        split: float = 0.2,
        random_state: int | None = None,
        folds: int = 0,
    ) -> None:
        """`overrides` are keys as on the command line. `split` is the share of the rows that is
        evaluated, not trained on; the temperature of classes is fitted to it. `folds` is a number
        of runs, each of which trains on all rows but a fold, and stops early by its loss;
        predictions are their mean, without a temperature. `run_dir` is the directory of the run;
        None: a temporary one."""
        self.recipe = recipe
        self.overrides = overrides
        self.run_dir = run_dir
        self.split = split
        self.random_state = random_state
        self.folds = folds

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of `__init__` by name."""
        return {name: getattr(self, name) for name in self._list_names()}

    def set_params(self, **parameters: Any) -> Self:
        """Set parameters of `__init__`. Raises ValueError for another name."""
        for name, value in parameters.items():
            if name not in self._list_names():
                names = ", ".join(self._list_names())
                raise ValueError(f"Invalid parameter {name!r}: must be one of {names}")
            setattr(self, name, value)
        return self

    @classmethod
    def _list_names(cls) -> list[str]:
        return list(inspect.signature(cls.__init__).parameters)[1:]

    def __repr__(self) -> str:
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(type(self).__init__).parameters.items()
        }
        changed = {k: v for k, v in self.get_params().items() if v != defaults[k]}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags, which only scikit-learn asks for."""
        from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

        is_classifier = self.kind == "classifier"
        return Tags(
            estimator_type=self.kind,
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags() if is_classifier else None,
            regressor_tags=None if is_classifier else RegressorTags(),
            input_tags=InputTags(allow_nan=True, categorical=True, string=True),
            non_deterministic=False,
        )

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "run_dir_")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: the weights, but not the directory."""
        return {k: v for k, v in vars(self).items() if k not in ("_temporary", "_predict")}

    def _fit(self, inputs: Any, columns: Columns, labels: np.ndarray) -> Self:
        """Train a run on the columns of inputs and labels (n,). Sets the attributes that end in
        _. Raises ValueError for a `run_dir` that holds a run, whose table would be replaced."""
        count = len(next(iter(columns.values())))
        if count < 2:
            raise ValueError(f"n_samples={count}: must be at least 2 to train and to evaluate")
        if self.folds < 0 or self.folds == 1:
            raise ValueError(f"folds={self.folds}: must be 0, or at least 2")
        self._temporary = None
        if self.run_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="table-estimator-")
        folder = Path(self._temporary.name if self._temporary else self.run_dir or "")
        names = [f"fold_{fold}" for fold in range(self.folds)] or ["run"]
        if any((folder / name).exists() for name in names):
            raise ValueError(f"run_dir={folder}: holds a run already; must be another folder")
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / DATA
        _write_parquet(data, {**columns, TARGET: labels})
        root = quote_value(str(data))
        words = [f"dataset.root={root}", f"dataset.target={TARGET}", f"dataset.task={self.task}"]
        words += ["dataset=parquet", "monitor.tensorboard=false"]
        words += [] if self.random_state is None else [f"seed={int(self.random_state)}"]
        shared = [f"dataset.split={self.split}"]
        if self.folds:
            shared = [f"dataset.eval_path={root}", f"dataset.folds.count={self.folds}", *EARLY_STOP]
        keys = [[f"dataset.folds.index={fold}"] for fold in range(self.folds)] or [[]]
        trained = count - math.ceil(count * (1 / self.folds if self.folds else self.split))
        trainers = [
            self._make_trainer([*words, *shared, *key, *self.overrides], folder / name, trained)
            for name, key in zip(names, keys, strict=True)
        ]
        self.summary_ = [trainer.fit() for trainer in trainers][-1]
        self.run_dir_ = folder if self.folds else trainers[0].run_dir
        self._run = read_network(
            [find_best_state(trainer) if self.folds else trainer.run_dir for trainer in trainers]
        )
        self._predict = compile_predict(self._run)
        self.n_features_in_ = len(columns)
        vars(self).pop("feature_names_in_", None)  # of an earlier fit
        features = getattr(inputs, "columns", None)
        if features is not None and all(isinstance(name, str) for name in features):
            self.feature_names_in_ = np.asarray(features, object)
        return self

    def _make_trainer(self, words: Sequence[str], run_dir: Path, rows: int) -> Trainer:
        """Return the trainer of the recipe, with at least two batches if there are fewer rows than
        a batch has."""
        trainer = Trainer(self.recipe, words, run_dir=run_dir)
        if trainer.recipe.train.batch_size <= rows:
            return trainer
        size = 2 ** int(math.log2(max(rows, 2) / 2))
        return Trainer(self.recipe, [*words, f"train.batch_size={size}"], run_dir=run_dir)

    def _compute_outputs(self, inputs: Any) -> np.ndarray:
        """Return the network's outputs for columns, float32 (n, K). Raises an error if the
        estimator isn't fitted, and ValueError for other columns than `fit` had."""
        if not hasattr(self, "run_dir_"):
            raise _make_unfitted_error(type(self).__name__)
        columns = _read_columns(inputs)
        if len(columns) != self.n_features_in_:
            raise ValueError(
                f"X has {len(columns)} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        table = self._run.samples.table
        assert table is not None, "fit trains on a table"
        with tempfile.TemporaryDirectory(prefix="table-estimator-") as folder:
            data = Path(folder) / DATA
            _write_parquet(data, columns)
            try:
                rows, _ = read_encoded_rows(data, table)
            except DataError as error:
                raise ValueError(f"X: {str(error).removeprefix(f'{data}: ')}") from error
        if not hasattr(self, "_predict"):  # a copy of another process
            self._predict = compile_predict(self._run)
        weights = dict(self._run.arrays)
        outputs = []
        for start in range(0, len(rows), PREDICT_BATCH):
            # All batches have one size, for which the network is compiled once.
            part = rows[start : start + PREDICT_BATCH]
            padded = np.concatenate([part, np.zeros_like(rows[:1]).repeat(PREDICT_BATCH, 0)])
            outputs.append(
                np.asarray(self._predict(weights, jnp.asarray(padded[:PREDICT_BATCH])))[: len(part)]
            )
        return np.concatenate(outputs)


class TableClassifier(TableEstimator):
    """A classifier of the rows of a table."""

    task: ClassVar[str] = "classification"
    kind: ClassVar[str] = "classifier"
    _estimator_type = "classifier"

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 (scikit-learn's name)
        """Train on rows and classes of any type that can be ordered. Returns the estimator."""
        columns = _read_columns(X)
        labels = _read_labels(y, len(next(iter(columns.values()))))
        if labels.dtype.kind == "f" and not (labels == np.rint(labels)).all():
            raise ValueError("Unknown label type: continuous numbers; use TableRegressor")
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {show_name(str(self.classes_[0]))}: must have at least two"
            )
        # Names of one length are sorted as the classes are.
        width = len(str(len(self.classes_) - 1))
        return self._fit(
            X, columns, np.array([f"class {code:0{width}d}" for code in codes], object)
        )

    def decision_function(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return logits (n, C); of two classes their difference, (n,)."""
        logits = self._compute_outputs(X)  # raises before there are classes
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return calibrated probabilities (n, C) in the order of `classes_`."""
        logits = self._compute_outputs(X).astype(np.float64)
        if len(self.classes_) == 2:
            yes = expit(logits[:, 1] - logits[:, 0])
            return np.stack([1 - yes, yes], axis=1)
        return np.asarray(softmax(logits, axis=1))

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the most probable class of each row, (n,)."""
        best = self._compute_outputs(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return the accuracy."""
        predicted = self.predict(X)
        return float(np.mean(predicted == _read_labels(y, len(predicted))))


class TableRegressor(TableEstimator):
    """A regressor of one number of the rows of a table."""

    task: ClassVar[str] = "regression"
    kind: ClassVar[str] = "regressor"
    _estimator_type = "regressor"

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on rows and numbers. Returns the estimator."""
        columns = _read_columns(X)
        labels = _read_labels(y, len(next(iter(columns.values()))))
        try:
            numbers = labels.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError("Unknown label type: must be numbers; use TableClassifier") from error
        return self._fit(X, columns, numbers)

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the number of each row in the units of y, float64 (n,)."""
        outputs = self._compute_outputs(X)
        targets = self._run.samples.targets
        return np.asarray(targets.to_data_units(outputs)[:, 0], np.float64)

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return R2, 1 minus the squared errors over the squares around the mean."""
        predicted = self.predict(X)
        actual = _read_labels(y, len(predicted)).astype(np.float64)
        errors = float(((actual - predicted) ** 2).sum())
        spread = float(((actual - actual.mean()) ** 2).sum())
        if spread == 0:
            return 1.0 if errors == 0 else 0.0
        return 1 - errors / spread


def _read_labels(labels: Any, count: int | None = None) -> np.ndarray:
    """Return labels (n,), with a warning if they are a column (n, 1). Raises ValueError for another
    shape, none, missing ones, and another number of them than `count`."""
    if labels is None:
        raise ValueError("requires y to be passed, but the target y is None")
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        text = "A column-vector y was passed when a 1d array was expected"
        kind = _find_exception("DataConversionWarning", UserWarning)
        warnings.warn(text, kind, stacklevel=3)
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"y should be a 1d array, got an array of shape {array.shape} instead")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("Input y contains NaN or infinity")
    if array.dtype.kind == "O" and any(map(_is_missing, array.tolist())):
        raise ValueError("Input y contains NaN or None")
    if count is not None and len(array) != count:
        raise ValueError(f"X has {count} rows and y has {len(array)}: must be equally many")
    return array


def _read_columns(inputs: Any) -> Columns:
    """Return the columns of a data frame or an array (n, columns) by name, float64 or objects.
    Raises ValueError for other shapes, complex and infinite numbers, and TypeError for sparse
    arrays."""
    if hasattr(inputs, "toarray"):
        raise TypeError("Sparse data was passed for X, but dense data is required")
    if hasattr(inputs, "columns") and hasattr(inputs, "iloc"):
        columns = {
            str(name): np.asarray(inputs.iloc[:, number])
            for number, name in enumerate(inputs.columns)
        }
        if len(columns) != len(inputs.columns) or TARGET in columns:
            raise ValueError(f"X: names of columns must differ, and none may be {TARGET}")
    else:
        array = np.asarray(inputs)
        if array.ndim != 2:
            raise ValueError(
                f"Expected 2D array, got an array of {array.ndim} dimensions. Reshape your data"
            )
        columns = {f"x{number}": array[:, number] for number in range(array.shape[1])}
    if not columns:
        shape = f"(shape=({len(inputs)}, 0))"
        raise ValueError(f"Found array with 0 feature(s) {shape} while a minimum of 1 is required.")
    if not len(next(iter(columns.values()))):
        raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
    return {name: _convert(name, column) for name, column in columns.items()}


def _convert(name: str, column: np.ndarray) -> np.ndarray:
    """Return a column as float64 if all its present values are numbers, else as texts and None."""
    if column.dtype.kind == "c":
        raise ValueError(f"{name}: Complex data not supported")
    if column.dtype.kind in "mM":
        raise TypeError(f"{name}: argument must be a string or a number, not {column.dtype}")
    if column.dtype.kind not in "biuf":
        values = [None if _is_missing(value) else value for value in column.tolist()]
        kinds = (str, int, float, bool, np.number)
        wrong = next((v for v in values if v is not None and not isinstance(v, kinds)), None)
        if wrong is not None:
            raise TypeError(f"{name}: argument must be a string or a number, not {wrong!r:.60}")
        if any(isinstance(value, str) for value in values):
            return np.array([None if v is None else str(v) for v in values], object)
        column = np.array([np.nan if value is None else value for value in values], np.float64)
    numbers = column.astype(np.float64)
    if np.isinf(numbers).any():
        raise ValueError(f"{name}: Input X contains infinity")
    return numbers


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def _write_parquet(file: Path, columns: Mapping[str, np.ndarray]) -> None:
    import pyarrow
    from pyarrow import parquet

    arrays = {name: pyarrow.array(column, from_pandas=True) for name, column in columns.items()}
    parquet.write_table(pyarrow.table(arrays), file)


def _make_unfitted_error(name: str) -> Exception:
    """Return scikit-learn's NotFittedError if it is there, else a ValueError."""
    text = f"This {name} instance is not fitted yet. Call 'fit' before using this estimator."
    return _find_exception("NotFittedError", ValueError)(text)


def _find_exception(name: str, default: type[Raised]) -> type[Raised]:
    """Return scikit-learn's exception of a name; the default if scikit-learn isn't there."""
    try:
        from sklearn import exceptions
    except ImportError:
        return default
    found: type[Raised] = getattr(exceptions, name)
    return found
