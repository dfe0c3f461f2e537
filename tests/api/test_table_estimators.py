"""Estimators on tables in memory, as scikit-learn calls them."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from pipeline.api.table_estimators import (
    TableClassifier,
    TableRegressor,
    _read_columns,
    find_best_state,
)
from pipeline.api.trainer import Trainer
from pipeline.core.errors import RunError
from pipeline.data.tables.fit_table import read_encoded_rows
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.run_record import read_arrays
from pipeline.stages.record.trained_run import read_trained_run

FAST = (
    *("model.hidden=[8]", "model.members=2", "model.frequencies=4", "train.batch_size=16"),
    *("train.epochs=12", "eval.every_epochs=12", "cache.compiled=false"),
)
GENERATOR = np.random.default_rng(0)


class Frame:
    """The part of a data frame that the estimators use."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns
        self.columns = list(columns)
        self.iloc = self

    def __getitem__(self, place: tuple[slice, int]) -> np.ndarray:
        rows, number = place
        return np.array(self._columns[self.columns[number]], object)[rows]


def test_columns_are_numbers_or_texts() -> None:
    frame = Frame({"a": [1, None, 2.5], "b": ["x", None, "y"], "c": [True, False, True]})
    columns = _read_columns(frame)
    np.testing.assert_array_equal(columns["a"], [1, np.nan, 2.5])
    assert columns["b"].tolist() == ["x", None, "y"]
    assert columns["c"].dtype == np.float64
    assert list(_read_columns(np.zeros((2, 3)))) == ["x0", "x1", "x2"]


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        (np.zeros(3), ValueError, "Expected 2D array"),
        (np.zeros((0, 2)), ValueError, r"Found array with 0 sample\(s\)"),
        (np.zeros((2, 0)), ValueError, r"Found array with 0 feature\(s\) \(shape=\(2, 0\)\)"),
        (np.array([[1.0, np.inf]]), ValueError, "infinity"),
        (np.array([[1 + 2j]]), ValueError, "Complex data not supported"),
        (np.array([[{}]], object), TypeError, "argument must be a string or a number"),
        (np.zeros((2, 1), "M8[ns]"), TypeError, r"a string or a number, not datetime64\[ns\]"),
        (np.zeros((2, 1), "m8[us]"), TypeError, r"a string or a number, not timedelta64\[us\]"),
        (Frame({"target": [1]}), ValueError, "none may be target"),
    ],
)
def test_wrong_inputs_are_refused(inputs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _read_columns(inputs)


def test_parameters_are_read_and_set() -> None:
    model = TableClassifier(overrides=("train.epochs=3",))
    assert model.set_params(split=0.3).get_params()["split"] == 0.3
    assert repr(model) == "TableClassifier(overrides=('train.epochs=3',), split=0.3)"
    with pytest.raises(ValueError, match="Invalid parameter 'depth': must be one of recipe,"):
        model.set_params(depth=3)
    with pytest.raises(ValueError, match="not fitted yet"):
        model.predict(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="X has 2 rows and y has 3: must be equally many"):
        model.fit(np.zeros((2, 2)), ["a", "b", "b"])
    with pytest.raises(ValueError, match="y has one class, a: must have at least two"):
        model.fit(np.zeros((2, 2)), ["a", "a"])
    with pytest.raises(ValueError, match="use TableRegressor"):
        model.fit(np.zeros((2, 2)), [0.5, 1.5])
    with pytest.raises(ValueError, match="use TableClassifier"):
        TableRegressor().fit(np.zeros((2, 2)), ["a", "b"])


@pytest.mark.slow
def test_classifier_learns_and_repeats(tmp_path: Path) -> None:
    numbers = GENERATOR.normal(size=(160, 2))
    kinds = np.where(numbers[:, 0] > 0, "on", "off")
    frame = Frame({"n": numbers[:, 0].tolist(), "m": numbers[:, 1].tolist()})
    models = [
        TableClassifier(overrides=FAST, run_dir=tmp_path / name, random_state=1).fit(frame, kinds)
        for name in ("a", "b")
    ]
    shares = [model.predict_proba(frame) for model in models]
    np.testing.assert_array_equal(*shares)
    assert models[0].score(frame, kinds) > 0.9
    np.testing.assert_allclose(shares[0].sum(axis=1), 1)
    assert models[0].classes_.tolist() == ["off", "on"]
    np.testing.assert_array_equal(models[0].decision_function(frame) > 0, shares[0][:, 1] > 0.5)
    assert (tmp_path / "a" / "run" / "summary.json").is_file()
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(models[0])).predict_proba(frame), shares[0]
    )
    with pytest.raises(ValueError, match="X has 1 features, but TableClassifier is expecting 2"):
        models[0].predict(Frame({"n": [1.0]}))


@pytest.mark.slow
def test_regressor_predicts_in_the_units_of_the_labels(tmp_path: Path) -> None:
    numbers = GENERATOR.normal(size=(200, 1))
    labels = 1000 + 50 * numbers[:, 0]
    model = TableRegressor(overrides=(*FAST, "train.epochs=40"), run_dir=tmp_path)
    assert model.fit(numbers, labels).score(numbers, labels) > 0.8
    assert abs(model.predict(numbers).mean() - 1000) < 15
    with pytest.raises(ValueError, match="holds a run already; must be another folder"):
        model.fit(numbers, labels)


def test_best_state_is_the_kept_one_with_the_least_loss(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(run_dir=tmp_path)
    losses = {4: 0.5, 8: 0.1, 12: 0.3, 16: 0.3, 20: np.nan}
    trainer.evaluations = {
        "step": np.array([*losses], float),
        "loss": np.array([*losses.values()]),
    }
    assert find_best_state(trainer) == tmp_path
    for step in (4, 12, 16, 20):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert find_best_state(trainer).name == "16"


def test_batches_of_few_rows_are_smaller(tmp_path: Path) -> None:
    model = TableClassifier()
    words = ["dataset=csv", "dataset.root=x.csv", "dataset.target=y"]
    for rows, size in ((128, 128), (127, 32), (12, 4), (3, 1), (1, 1)):
        trainer = model._make_trainer(words, tmp_path, rows)
        assert trainer.recipe.train.batch_size == size


@pytest.mark.parametrize("kind", [TableClassifier, TableRegressor])
def test_column_of_labels_is_read_with_a_warning(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise TrainsError

    monkeypatch.setattr("pipeline.api.table_estimators.Trainer", refuse)
    numbers = GENERATOR.normal(size=(90, 2))
    labels = (numbers[:, :1] > 0).astype(int)
    with pytest.warns(UserWarning, match="A column-vector y was passed"), suppress(TrainsError):
        kind(run_dir=tmp_path).fit(numbers, labels)
    with pytest.raises(ValueError, match="y should be a 1d array"):
        kind().fit(numbers, np.concatenate([labels, labels], axis=1))


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_missing_label_is_refused(missing: Any) -> None:
    with pytest.raises(ValueError, match="y contains NaN or None"):
        TableClassifier().fit(np.zeros((3, 1)), np.array(["a", missing, "b"], object))


@pytest.mark.parametrize("kind", [TableClassifier, TableRegressor])
def test_score_needs_a_label_for_each_row(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One label would be compared with all rows."""
    monkeypatch.setattr(kind, "predict", lambda self, inputs: np.zeros(len(inputs)))
    assert kind().score(np.zeros((2, 1)), [0, 0]) == 1
    with pytest.raises(ValueError, match="X has 2 rows and y has 1"):
        kind().score(np.zeros((2, 1)), [0])


def test_earlier_run_keeps_its_table(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "table.parquet").touch()
    with pytest.raises(ValueError, match="holds a run already; must be another folder"):
        TableRegressor(run_dir=tmp_path).fit(np.zeros((3, 1)), np.arange(3.0))
    assert not (tmp_path / "table.parquet").read_bytes()


def test_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = []

    def end(trainer: Trainer) -> None:
        roots.append(trainer.recipe.dataset.root)
        raise RunError("no training")

    monkeypatch.setattr(Trainer, "fit", end)
    for folds in (0, 2):
        folder = tmp_path / f"it's {folds}, (1)"
        with pytest.raises(RunError, match="no training"):
            TableRegressor(run_dir=folder, folds=folds).fit(np.zeros((9, 1)), np.arange(9.0))
        assert roots[-1] == folder / "table.parquet"


@pytest.mark.slow
def test_folds_train_on_all_rows_and_predict_their_mean(tmp_path: Path) -> None:
    numbers = GENERATOR.normal(size=(90, 2))
    labels = numbers[:, 0] > 0
    keys = (*FAST, "train.epochs=3", "train.batch_size=15", "eval.every_epochs=1")
    keys += ("checkpoint.every_epochs=1",)
    model = TableClassifier(overrides=keys, run_dir=tmp_path, folds=3).fit(numbers, labels)
    members = []
    for fold in range(3):
        root = tmp_path / f"fold_{fold}"
        losses = read_arrays(root / "evals.jsonl")
        assert losses["step"].tolist() == [4, 8, 12]
        best = int(losses["step"][losses["loss"].argmin()])
        members.append(read_trained_run(root / "checkpoints" / str(best)))
    rows, _ = read_encoded_rows(tmp_path / "table.parquet", members[0].samples.table, ["target"])
    shares = [np.asarray(softmax(make_predict(run)(run.arrays, rows), axis=1)) for run in members]
    np.testing.assert_allclose(model.predict_proba(numbers), np.mean(shares, axis=0), atol=1e-5)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(numbers), model.predict(numbers))
    with pytest.raises(ValueError, match="folds=1: must be 0, or at least 2"):
        model.set_params(folds=1).fit(numbers, labels)


class TrainsError(Exception):
    """Raised in place of training."""


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:Estimator Table.*does not inherit:UserWarning")
@pytest.mark.parametrize("kind", [TableClassifier, TableRegressor])
def test_scikit_learn_checks_pass(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `check_estimator` that train nothing: about half. The others take half an hour."""
    checks = pytest.importorskip("sklearn.utils.estimator_checks")

    def refuse(*_: Any, **__: Any) -> None:
        raise TrainsError

    monkeypatch.setattr("pipeline.api.table_estimators.Trainer", refuse)
    passed = 0
    for estimator, check in checks.estimator_checks_generator(kind()):
        name = getattr(check, "func", check).__name__
        if name in ("check_positive_only_tag_during_fit", "check_array_api_input"):
            continue  # the first reads the error of training, the second needs a variable
        with suppress(TrainsError):
            check(estimator)
            passed += 1
    assert passed >= 20
