"""A run in Python: between its sinks, after it, and where its loop is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pipeline
from pipeline import Trainer
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.engine.callbacks.callback import Callback, RunControl, SinkReport
from pipeline.models.weights.files.weight_files import read_weights
from pipeline.training.telemetry import Telemetry
from tests import outcome
from tests.conftest import TINY, compose_tiny
from tests.slow_cases import mark_slow_except
from tests.whole_run import run

Compose = Callable[..., Recipe]
MLP = ("model=mlp", "model.hidden=[8]", "train.steps=24", "train.sink_size=8", "eval.every_steps=8")
NO_RUN = "nothing has run yet; call fit(), or Trainer.load(RUN_DIR)"
NO_PARAMETERS = "there are no parameters yet; call fit(), or Trainer.load(RUN_DIR)"


@pytest.fixture
def recipe(tiny: Compose) -> Recipe:
    return tiny(*MLP)


@pytest.fixture
def trainer(recipe: Recipe, tmp_path: Path) -> Trainer:
    return Trainer(recipe, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda trainer: trainer.run_dir, NO_RUN),
        (lambda trainer: trainer.evaluate(), NO_RUN),
        (lambda trainer: trainer.steps, NO_RUN),
        (lambda trainer: trainer.evaluations, NO_RUN),
        (lambda trainer: trainer.predict(np.zeros((1, 8, 8, 1))), NO_PARAMETERS),
        (lambda trainer: trainer(np.zeros((1, 8, 8, 1))), NO_PARAMETERS),
        (lambda trainer: trainer.parameters, NO_PARAMETERS),
        (
            lambda trainer: trainer.control,
            "no training is in progress; use this in a loop over sinks()",
        ),
    ],
)
def test_access_before_a_run_raises_run_error(
    use: Callable[[Trainer], object], message: str, trainer: Trainer
) -> None:
    with pytest.raises(RunError) as caught:
        use(trainer)
    assert str(caught.value) == message


def test_overrides_of_a_loaded_recipe_are_refused(recipe: Recipe) -> None:
    """They would do nothing."""
    with pytest.raises(ValueError, match="need the name or file of a recipe"):
        Trainer(recipe, ["train.steps=3"])


def test_one_text_as_overrides_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a list, as in \['train\.steps=3'\]"):
        Trainer("lenet5_digits", "train.steps=3")


def test_loading_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"isn't a run directory; it holds no recipe.yaml"):
        Trainer.load(tmp_path)


def test_python_callbacks_are_refused_with_several_processes(tiny: Compose, tmp_path: Path) -> None:
    """The trainer's own is one of them."""
    launched = tiny(*MLP, "parallel.mode=data", "launch=local", "launch.processes=2")
    with pytest.raises(RecipeError, match="launch = local: must be none with callbacks"):
        Trainer(launched, run_dir=tmp_path / "run").fit()
    with pytest.raises(RecipeError, match="name them in train"):
        run(launched, tmp_path / "run", callbacks=[Callback()])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_trainer_accepts_a_name_or_a_file_with_overrides(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("defaults: [override /model: mlp]\ntrain: {steps: 3}\n")
    for recipe in (file, str(file)):
        assert Trainer(recipe, ["seed=7"]).recipe.seed == 7
    with pytest.raises(RecipeError, match="there is no such recipe"):
        Trainer("no_such")


@pytest.mark.slow
def test_fit_equals_the_run_of_the_command(recipe: Recipe, cache: Path, tmp_path: Path) -> None:
    overrides = [*TINY, *MLP, f"cache.root={cache}"]
    trainer = Trainer("lenet5_digits", overrides, run_dir=tmp_path / "run")
    summary = trainer.fit()
    run(recipe, tmp_path / "command")
    outcome.assert_same_run(tmp_path / "run", tmp_path / "command")
    assert (summary.status, summary.steps) == ("done", 24)
    assert trainer.summary is summary
    assert trainer.run_dir == tmp_path / "run"
    assert trainer.steps["step"].tolist() == list(range(1, 25))
    assert trainer.steps["loss"].dtype == np.float64
    assert trainer.evaluations["step"].tolist() == [8, 16, 24]
    evaluated = trainer.evaluate()
    assert evaluated == {
        name: values[-1] for name, values in trainer.evaluations.items() if name in evaluated
    }
    assert "count" not in evaluated
    with pytest.raises(RunError, match="no training is in progress"):
        trainer.parameters["dense_0/bias"] = np.zeros(8)


@pytest.mark.slow
def test_run_is_read_and_changed_between_sinks(trainer: Trainer, tmp_path: Path) -> None:
    reports = []
    for report in trainer.sinks():
        reports.append(report)
        assert trainer.control.step == report.step == len(trainer.steps["step"])
        assert trainer.evaluations["step"][-1] == report.step
        if report.step == 8:
            trainer.control.set_learning_rate(0.0)
            before = trainer.parameters["dense_1/kernel"]
        if report.step == 16:
            # A rate of 0 leaves all as it is.
            np.testing.assert_array_equal(trainer.parameters["dense_1/kernel"], before)
            trainer.parameters["dense_1/kernel"] = np.zeros_like(before)
            trainer.parameters["dense_1/bias"] = np.arange(10)
            assert trainer.evaluate()["accuracy"] == pytest.approx(0.1, abs=0.1)
    assert [type(report) for report in reports] == 3 * [SinkReport]
    assert outcome.arrays(tmp_path / "run")["params/dense_1/bias"].tolist() == list(range(10))
    shown = trainer.predict(np.zeros((3, 8, 8, 1), np.uint8))
    assert shown.tolist() == 3 * [list(range(10))]
    assert trainer.summary is not None
    assert trainer.evaluate()["loss"] == trainer.summary.metrics["loss"]


@pytest.fixture(scope="module")
def whole_loop(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose loop halves the rate after each of the first two sinks."""
    whole = Trainer(compose_tiny(cache, *MLP), run_dir=tmp_path_factory.mktemp("whole") / "run")
    for report in whole.sinks():
        if report.step <= 16:
            whole.control.scale_learning_rate(0.5)
    return whole.run_dir


@pytest.mark.slow
@pytest.mark.parametrize("how", ["break", "exception", "dropped"])
def test_interrupted_loop_can_be_resumed(
    how: str, trainer: Trainer, whole_loop: Path, tiny: Compose, tmp_path: Path
) -> None:
    def leave() -> None:
        for report in trainer.sinks():
            trainer.control.scale_learning_rate(0.5)
            if report.step == 16 and how == "break":
                break
            if report.step == 16 and how == "exception":
                raise KeyError("mine")

    if how == "dropped":
        sinks = trainer.sinks()
        for _ in range(2):
            next(sinks)
            trainer.control.scale_learning_rate(0.5)
        del sinks
    elif how == "exception":
        with pytest.raises(KeyError, match="mine"):
            leave()
    else:
        leave()
    assert trainer.summary is not None
    assert (trainer.summary.status, trainer.summary.steps) == ("stopped", 16)
    assert trainer.summary.reason == "the loop over its sinks was left"
    assert outcome.checkpoints(tmp_path / "run") == [16]
    with pytest.raises(RunError, match="no training is in progress"):
        _ = trainer.control

    # As by the command, without the loop: what it has set is part of the run.
    run(tiny(*MLP, f"train.resume={tmp_path / 'run'}"))
    left, unbroken = tmp_path / "run", whole_loop
    assert outcome.metrics(left) == outcome.metrics(unbroken)
    assert outcome.read_lines(left / "evals.jsonl") == outcome.read_lines(unbroken / "evals.jsonl")
    outcome.assert_equal_arrays(outcome.arrays(left), outcome.arrays(unbroken))


@pytest.mark.slow
def test_refused_fit_inside_the_loop_does_not_change_where_it_stops(trainer: Trainer) -> None:
    for _ in trainer.sinks():
        with pytest.raises(RunError, match="holds a run already"):
            trainer.fit()
        break
    assert trainer.summary is not None
    assert (trainer.summary.status, trainer.summary.steps) == ("stopped", 8)


@pytest.mark.slow
def test_loop_continues_a_run(trainer: Trainer, tiny: Compose, tmp_path: Path) -> None:
    for report in trainer.sinks():
        if report.step == 8:
            break
    again = Trainer(tiny(*MLP, f"train.resume={tmp_path / 'run'}"))
    assert [report.step for report in again.sinks()] == [16, 24]
    assert again.run_dir == tmp_path / "run"
    assert len(again.steps["step"]) == 24


@pytest.mark.slow
def test_trainers_are_independent(recipe: Recipe, tmp_path: Path) -> None:
    for name in ("one", "other"):
        Trainer(recipe, run_dir=tmp_path / name).fit()
    outcome.assert_same_run(tmp_path / "one", tmp_path / "other")


@pytest.mark.slow
def test_failing_callback_ends_the_loop(recipe: Recipe, tmp_path: Path) -> None:
    class Failing(Callback):
        def on_sink(self, run: RunControl, report: SinkReport) -> None:
            raise ValueError("mine")

    trainer = Trainer(recipe, callbacks=[Failing()], run_dir=tmp_path / "run")
    with pytest.raises(RunError, match="callback Failing, on_sink: ValueError: mine"):
        trainer.fit()
    assert outcome.checkpoints(tmp_path / "run") == [8]
    assert trainer.parameters["dense_0/bias"].shape == (8,)


@pytest.mark.slow
def test_callback_class_instead_of_instance_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    trainer = Trainer(recipe, callbacks=[Callback], run_dir=tmp_path / "run")  # type: ignore[list-item]
    with pytest.raises(RecipeError, match="must be an instance of a subclass of Callback"):
        trainer.fit()


@pytest.mark.slow
def test_loaded_trainer_has_the_parameters(trainer: Trainer, tmp_path: Path) -> None:
    trainer.fit()
    loaded = Trainer.load(tmp_path / "run")
    assert dict(loaded.parameters).keys() == dict(trainer.parameters).keys()
    for path, array in loaded.parameters.items():
        np.testing.assert_array_equal(array, trainer.parameters[path])
    images = loaded.dataset.eval.columns["image"][:70]
    np.testing.assert_array_equal(loaded.predict(images), trainer.predict(images))
    assert loaded.evaluate() == trainer.evaluate()
    assert loaded.steps["loss"].tolist() == trainer.steps["loss"].tolist()
    with pytest.raises(RunError, match="no training is in progress"):
        loaded.parameters["dense_0/bias"] = np.zeros(8)
    with pytest.raises(TypeError, match="parameters can be set, not removed"):
        del loaded.parameters["dense_0/bias"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt", ".npz"])
def test_saved_weights_have_parameters_and_statistics(
    trainer: Trainer, suffix: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="there are no parameters yet"):
        trainer.save_weights(tmp_path / f"net{suffix}")
    trainer.fit()
    trainer.save_weights(tmp_path / f"net{suffix}")
    saved = read_weights(tmp_path / f"net{suffix}")
    expected = {f"params/{path}": array for path, array in trainer.parameters.items()}
    assert set(expected) <= set(saved)
    for path, array in expected.items():
        np.testing.assert_array_equal(saved[path], array)


@pytest.mark.slow
def test_trainable_parameters_are_those_a_step_updates(tiny: Compose, tmp_path: Path) -> None:
    """M-05, with a bias that is trained from step 16 on; compared with what the steps change."""
    unfreeze = "train.unfreeze=[{pattern: dense_0/bias, after_steps: 16}]"
    trainer = Trainer(tiny(*MLP, "train.freeze=[dense_0]", unfreeze), run_dir=tmp_path / "run")
    with pytest.raises(RunError, match="there are no parameters yet"):
        _ = trainer.trainable_parameters
    earlier: dict[str, np.ndarray] = {}
    trainable: dict[str, np.ndarray] = {}
    for _ in trainer.sinks():
        current = dict(trainer.parameters)
        if earlier:
            changed = [p for p in current if not np.array_equal(current[p], earlier[p])]
            assert sorted(changed) == sorted(trainable)
        earlier = current
        trainable = trainer.trainable_parameters
    assert sorted(trainable) == ["dense_0/bias", "dense_1/bias", "dense_1/kernel"]
    assert list(Trainer.load(tmp_path / "run").trainable_parameters) == list(trainable)


@pytest.mark.slow
def test_predict_matches_numpy(trainer: Trainer) -> None:
    """Against numpy; the evaluation ops resize to 32x32 and rescale to 0 to 1."""
    trainer.fit()
    images = trainer.dataset.eval.columns["image"][:9]
    seen = np.concatenate([batch["image"] for batch in trainer.dicts("eval")])[:9]
    values = dict(trainer.parameters)
    hidden = seen.reshape(9, -1) @ values["dense_0/kernel"] + values["dense_0/bias"]
    expected = np.maximum(hidden, 0) @ values["dense_1/kernel"] + values["dense_1/bias"]
    np.testing.assert_allclose(trainer.predict(images), expected, rtol=1e-4, atol=1e-5)
    assert trainer.predict(images[:0]).shape == (0, 10)


@pytest.mark.slow
def test_images_of_another_shape_or_range_are_refused(trainer: Trainer) -> None:
    trainer.fit()
    for shape in ((8, 8, 1), (1, 8, 8), (1, 32, 32, 1), (1, 8, 8, 3)):
        with pytest.raises(DataError, match=r"must be \('n', 8, 8, 1\)"):
            trainer.predict(np.zeros(shape))
    with pytest.raises(DataError, match=r"image has the value 0.5: must be uint8"):
        trainer.predict(np.full((1, 8, 8, 1), 0.5))
    with pytest.raises(DataError, match=r"image has the value 256: must be uint8"):
        trainer.predict(np.full((1, 8, 8, 1), 256))
    whole = np.full((1, 8, 8, 1), 7)
    np.testing.assert_array_equal(trainer(whole.astype(np.float64)), trainer(whole))


class _Terminate(Callback):
    """Sends this process SIGTERM at a step."""

    def on_steps(self, run: RunControl, steps: Telemetry) -> None:
        if run.step == 8:
            signal.raise_signal(signal.SIGTERM)


def _fit(recipe: Recipe, run_dir: Path) -> object:
    return Trainer(recipe, callbacks=[_Terminate()], run_dir=run_dir).fit()


def _loop(recipe: Recipe, run_dir: Path) -> object:
    trainer = Trainer(recipe, callbacks=[_Terminate()], run_dir=run_dir)
    return [report.step for report in trainer.sinks()]


def _run(recipe: Recipe, run_dir: Path) -> object:
    return pipeline.run(recipe, run_dir, [_Terminate()])


@pytest.mark.medium
@pytest.mark.parametrize("train", mark_slow_except({_fit}, [_fit, _loop, _run]))
def test_signal_raises_interrupted_after_saving(
    train: Callable[[Recipe, Path], object], recipe: Recipe, tmp_path: Path
) -> None:
    """Else a script would go on with its next run."""
    with pytest.raises(pipeline.Interrupted, match=r"^SIGTERM received$"):
        train(recipe, tmp_path / "run")
    assert outcome.read_summary(tmp_path / "run")["status"] == "stopped"
    assert outcome.checkpoints(tmp_path / "run") == [8]


@pytest.mark.medium
def test_stop_by_a_callback_does_not_raise(recipe: Recipe, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_sink(self, run: RunControl, report: SinkReport) -> None:
            run.stop("enough")

    assert Trainer(recipe, callbacks=[Stop()], run_dir=tmp_path / "run").fit().steps == 8


ITERATOR = """
import sys
from pipeline import Trainer
trainer = Trainer("lenet5_digits", sys.argv[2:], run_dir=sys.argv[1])
sinks = trainer.sinks()
next(sinks)
print("the end")
"""


@pytest.mark.slow
def test_unfinished_iterator_is_closed_at_exit(cache: Path, tmp_path: Path) -> None:
    options = *MLP, "checkpoint.every_steps=8", "monitor.tensorboard=false", f"cache.root={cache}"
    result = subprocess.run(
        [sys.executable, "-c", ITERATOR, str(tmp_path / "run"), *options],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    summary = outcome.read_summary(tmp_path / "run")
    assert summary["status"] == "stopped"
    assert summary["reason"] == "the process ended inside the loop over sinks"
