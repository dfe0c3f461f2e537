"""Scripts of Keras as recipes: they are parsed, and never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.foreign.adopt import Adoption
from pipeline.config.foreign.keras_script import adopt_keras, uses_keras
from pipeline.config.foreign.script import parse_script
from pipeline.core.errors import RecipeError
from pipeline.training.optimizers.first_order import Momentum
from tests.config.foreign.files import KERAS
from tests.config.foreign.rows import (
    find_conflicts,
    list_keys,
    list_rows,
    require_a_row_each,
    write_recipe,
)
from tests.whole_run import run

FIT = "model.fit(x, y, epochs=2)\n"


def adopt_script(folder: Path, text: str) -> Adoption:
    file = folder / "train.py"
    file.write_text(text)
    return adopt_keras(file, parse_script(file))


def compile_with(arguments: str) -> str:
    """Return a script whose `compile` has these arguments."""
    return f"import keras\nmodel.compile({arguments})\n{FIT}"


def test_every_argument_and_statement_has_a_row(tmp_path: Path) -> None:
    adoption = adopt_script(tmp_path, KERAS)
    require_a_row_each(adoption)
    assert not list(find_conflicts(adoption))
    compiled = ["optimizer", "optimizer.learning_rate", "optimizer.momentum"]
    compiled += [
        "optimizer.global_clipnorm",
        "loss",
        "loss.from_logits",
        "metrics.MeanSquaredError",
    ]
    rates = ["initial_learning_rate", "decay_steps", "decay_rate", "staircase"]
    compiled += [f"optimizer.learning_rate.{name}" for name in rates]
    fitted = ["x", "y", "batch_size", "epochs", "validation_split", "class_weight", "initial_epoch"]
    fitted += ["callbacks.EarlyStopping", "callbacks.ReduceLROnPlateau"]
    fitted += [f"callbacks.EarlyStopping.{name}" for name in ("monitor", "patience")]
    fitted += ["callbacks.ReduceLROnPlateau.patience"]
    names = {f"compile.{name}" for name in compiled} | {f"fit.{name}" for name in fitted}
    names.add("load_data")
    # pattern = ..., the scaler, the network and print.
    lines = {name for name in adoption.settings if name.startswith("line ")}
    assert len(lines) == 4
    assert set(adoption.settings) == names | lines


@pytest.mark.medium
def test_values_are_in_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, adopt_script(tmp_path, KERAS))
    train = recipe.train
    assert (train.epochs, train.batch_size, train.clip.norm) == (6, 64, 1.0)
    assert isinstance(train.optimizer, Momentum)
    assert (train.optimizer.lr, train.optimizer.momentum) == (0.1, 0.9)
    schedule = train.schedule.model_dump()
    assert (schedule["decay_steps"], schedule["decay_rate"], schedule["staircase"]) == (
        20,
        0.5,
        True,
    )
    assert train.loss.name == "cross_entropy"
    stop = recipe.monitor.early_stop
    assert (stop.metric, stop.patience) == ("accuracy", 5)
    plateau = train.callbacks[0].model_dump()
    assert (plateau["metric"], plateau["patience"], plateau["min_delta"]) == ("loss", 3, 1e-4)
    assert recipe.eval.every_epochs == 1


def test_values_that_are_no_constants_name_their_line(tmp_path: Path) -> None:
    rows = list_rows(adopt_script(tmp_path, KERAS))
    for setting in ("fit.initial_epoch", "fit.class_weight"):
        assert not rows[setting].keys
        assert rows[setting].note.endswith("isn't a constant, and the script isn't run")
    line = 1 + KERAS[: KERAS.index("initial_epoch")].count("\n")
    assert rows["fit.initial_epoch"].note.startswith(f"line {line}: ")
    assert rows["fit.x"].note.startswith("is code: the samples are those of the")
    assert list_rows(adopt_script(tmp_path, compile_with("")))["fit.x"].note == (
        "is code: choose dataset="
    )


@pytest.mark.parametrize(
    ("text", "dataset"),
    [
        ("import keras\nkeras.datasets.cifar10.load_data()", "cifar10"),
        ("import tensorflow as tf\ntf.keras.datasets.mnist.load_data()", "mnist"),
        ("from tensorflow import keras\nkeras.datasets.cifar100.load_data()", "cifar100"),
        ("from keras.datasets import fashion_mnist as f\nf.load_data()", "fashion_mnist"),
        ("from keras.datasets.mnist import load_data\nload_data()", "mnist"),
        ("import keras.datasets.mnist as m\nm.load_data()", "mnist"),
        ("import keras\nkeras.datasets.imdb.load_data()", None),
        ("import keras\nkeras.datasets.cifar100.load_data(label_mode='coarse')", None),
        ("import keras\nfrom mine.datasets import mnist\nmnist.load_data()", None),
        ("import keras\nload_data()", None),
    ],
)
def test_loaded_data_is_the_dataset(text: str, dataset: str | None, tmp_path: Path) -> None:
    adoption = adopt_script(tmp_path, f"{text}\n{FIT}")
    require_a_row_each(adoption)
    assert list_keys(adoption)["dataset"] == (dataset or "digits")  # which stands in
    assert any(name.startswith("line ") for name in adoption.settings) is (dataset is None)


def test_second_loaded_dataset_is_named(tmp_path: Path) -> None:
    loads = "".join(f"keras.datasets.{name}.load_data()\n" for name in ("cifar10", "mnist"))
    adoption = adopt_script(tmp_path, f"import keras\n{loads}{FIT}")
    require_a_row_each(adoption)
    assert list_keys(adoption)["dataset"] == "cifar10"
    assert (
        "load_data is used; a recipe has one" in list_rows(adoption)["load_data of line 3, 0"].note
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("ExponentialDecay(0.4, 2, 0.25)", [0.4, 0.2, 0.1, 0.05]),
        ("ExponentialDecay(0.4, 2, 0.5, True)", [0.4, 0.4, 0.2, 0.2]),
        # The value changes after the boundary's step.
        ("PiecewiseConstantDecay([1, 2], [0.4, 0.2, 0.1])", [0.4, 0.4, 0.2, 0.1]),
        ("PolynomialDecay(0.4, 4, 0.1, power=2)", [0.4, 0.26875, 0.175, 0.11875]),
        ("CosineDecay(0.4, 4, alpha=0.5)", [0.4, 0.3707107, 0.3, 0.2292893]),
        ("CosineDecay(0.0, 2, warmup_target=0.4, warmup_steps=2)", [0.2, 0.4, 0.4, 0.2]),
        ("CosineDecayRestarts(0.4, 2)", [0.4, 0.4, 0.4, 0.4]),
    ],
)
def test_rates_are_those_of_keras(schedule: str, rates: list[float], tmp_path: Path) -> None:
    """Four updates, by the formulas of Keras' documentation."""
    text = compile_with(f"keras.optimizers.Adam(keras.optimizers.schedules.{schedule})")
    train = write_recipe(tmp_path, adopt_script(tmp_path, text)).train
    np.testing.assert_allclose(train.schedule.table(train.optimizer.lr, 4, 2), rates, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ("'adam'", {"optimizer": "adam", "train.optimizer.eps": 1e-7}),
        ("", {}),
        ("loss='mse'", {"optimizer": "rmsprop", "loss": "mse"}),
        ("loss=keras.losses.categorical_crossentropy", {"loss": "cross_entropy"}),
        ("loss=keras.losses.Huber(0.5)", {"loss": "huber", "train.loss.delta": 0.5}),
        (
            "loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1)",
            {"train.loss.smoothing": 0.1, "train.loss.smoothing_convention": "uniform"},
        ),
        (
            "keras.optimizers.AdamW(1e-2)",
            {"optimizer": "adamw", "train.optimizer.weight_decay": 0.004},
        ),
        (
            "keras.optimizers.Adam(weight_decay=0.5)",
            {"optimizer": "adamw", "train.optimizer.weight_decay": 0.5},
        ),
        ("keras.optimizers.Adam(amsgrad=True)", {"optimizer": "amsgrad"}),
        ("keras.optimizers.SGD()", {"optimizer": "sgd"}),
        ("keras.optimizers.SGD(2 * 0.05 / 4)", {"train.optimizer.lr": 0.025}),
        ("keras.optimizers.SGD(clipvalue=0.5)", {"train.clip.value": 0.5}),
        (
            "keras.optimizers.SGD(use_ema=True)",
            {"train.ema.decay": 0.99, "train.ema.warmup": False},
        ),
        (
            "keras.optimizers.SGD(gradient_accumulation_steps=4)",
            {"train.batch_size": 128, "train.accumulate_steps": 4},
        ),
        ("'sgd', run_eagerly=True", {"train.mode": "eager"}),
        ("'sgd', steps_per_execution=8", {"train.sink_size": 8}),
    ],
)
def test_compile_sets_keys(arguments: str, keys: dict[str, Any], tmp_path: Path) -> None:
    found = list_keys(adopt_script(tmp_path, compile_with(arguments)))
    assert found.items() >= keys.items()


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ("", {"train.epochs": 1, "train.batch_size": 32, "eval.every_epochs": 1}),
        ("epochs=3, steps_per_epoch=5", {"train.steps": 15, "eval.every_steps": 5}),
        ("epochs=args.epochs", {"train.epochs": 1}),
        ("batch_size=args.size", {"train.epochs": 1}),
        ("validation_freq=2", {"eval.every_epochs": 2}),
        ("shuffle=False", {"dataset.train.shuffle": False}),
        ("class_weight={0: 1, 1: 2.5}", {"train.loss.class_weights": [1.0, 2.5]}),
        (
            "callbacks=[keras.callbacks.ModelCheckpoint('a', save_freq=20)]",
            {"checkpoint.every_steps": 20},
        ),
        (
            "callbacks=[keras.callbacks.ModelCheckpoint('a', 'val_accuracy', save_best_only=True)]",
            {"checkpoint.best": "accuracy", "checkpoint.every_epochs": 1},
        ),
        (
            "callbacks=[keras.callbacks.TensorBoard(write_graph=True)]",
            {"monitor.tensorboard": True, "monitor.graph": True},
        ),
        (
            "callbacks=[keras.callbacks.EarlyStopping()]",
            {"monitor.early_stop.metric": "loss", "monitor.early_stop.patience": 1},
        ),
        ("callbacks=[keras.callbacks.TerminateOnNaN()]", {"train.on_nan": "stop"}),
    ],
)
def test_fit_sets_keys(arguments: str, keys: dict[str, Any], tmp_path: Path) -> None:
    adoption = adopt_script(tmp_path, f"import keras\nmodel.fit(x, y, {arguments})\n")
    require_a_row_each(adoption)
    assert list_keys(adoption).items() >= keys.items()


@pytest.mark.parametrize(
    ("arguments", "setting", "note"),
    [
        ("class_weight={0: 1, 2: 2}", "fit.class_weight", "set train.loss.class_weights"),
        ("class_weight={0: 'a'}", "fit.class_weight", "set train.loss.class_weights"),
        ("**options", "fit.**", "line 2: isn't a constant"),
        ("*options", "fit.batch_size", "line 2: isn't a constant"),
        ("epochs=10 ** 9 ** 9", "fit.epochs", "line 2: isn't a constant"),
        (
            "callbacks=[keras.callbacks.EarlyStopping('loss')]",
            "fit.callbacks.EarlyStopping.monitor",
            "evaluations have no such metric",
        ),
        ("validation_freq=[1, 5]", "fit.validation_freq", "set eval.every_epochs"),
        (
            "callbacks=[keras.callbacks.LearningRateScheduler(f)]",
            "fit.callbacks.LearningRateScheduler",
            "is code: choose schedule=",
        ),
    ],
)
def test_unmapped_argument_has_its_reason(
    arguments: str, setting: str, note: str, tmp_path: Path
) -> None:
    adoption = adopt_script(tmp_path, f"import keras\nmodel.fit(x, y, {arguments})\n")
    row = list_rows(adoption)[setting]
    assert not row.keys
    assert row.note.startswith(note)


@pytest.mark.parametrize(
    "call",
    [
        "EarlyStopping(monitor=args.metric)",
        "ReduceLROnPlateau(args.metric, patience=3)",
        "ReduceLROnPlateau('val_dice', patience=3)",
        "ModelCheckpoint('a', args.metric, save_best_only=True)",
    ],
)
def test_unknown_metric_leaves_its_callback_unmapped(call: str, tmp_path: Path) -> None:
    text = f"import keras\nmodel.fit(x, y, callbacks=[keras.callbacks.{call}])\n"
    adoption = adopt_script(tmp_path, text)
    require_a_row_each(adoption)
    keys = list_keys(adoption)
    unmapped = ("monitor.early_stop", "train.callbacks", "checkpoint.best")
    assert not [key for key in keys if key.startswith(unmapped)]


def test_loss_of_two_classes_is_explained(tmp_path: Path) -> None:
    row = list_rows(adopt_script(tmp_path, compile_with("'adam', 'binary_crossentropy'")))
    assert row["compile.loss"].note.startswith("loss=cross_entropy is for two classes")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("schedule", "note"),
    [
        ("ExponentialDecay(0.4, count(), 0.25)", "needs constants: decay_steps"),
        ("PiecewiseConstantDecay(steps, [0.4, 0.2])", "needs constants: boundaries"),
        ("PiecewiseConstantDecay([3], [0.4])", "needs N boundaries and N + 1 rates"),
        ("PiecewiseConstantDecay([3], [0.4, 'a'])", "needs N boundaries and N + 1 rates"),
    ],
)
def test_schedule_that_is_not_constant_leaves_the_rest(
    schedule: str, note: str, tmp_path: Path
) -> None:
    text = compile_with(f"keras.optimizers.Adam(keras.optimizers.schedules.{schedule})")
    adoption = adopt_script(tmp_path, text)
    require_a_row_each(adoption)
    row = list_rows(adoption)["compile.optimizer.learning_rate"]
    assert not row.keys
    assert row.note.startswith(note)
    assert write_recipe(tmp_path, adoption).train.schedule.name == "constant"


def test_second_fit_is_named(tmp_path: Path) -> None:
    text = compile_with("'adam'") + compile_with("keras.optimizers.SGD(0.5)")
    rows = list_rows(adopt_script(tmp_path, text.replace("epochs=2)\nimport", "epochs=7)\nimport")))
    assert rows["fit.epochs"].keys == {"train.epochs": 7}
    assert rows["fit.epochs of line 6"].note == "fit.epochs is used; a recipe has one"
    assert not rows["compile.optimizer of line 5"].keys
    assert not rows["compile.optimizer of line 5.learning_rate"].keys


@pytest.mark.parametrize(
    "text",
    [
        "import keras\nmodel = keras.Model()\n",
        "import keras, re\nre.compile('a')\nfit(3)\n",
    ],
)
def test_script_without_fit_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.py: never calls fit; must be a script"):
        adopt_script(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = A(b)\nb = A(a)\nmodel.fit(x, y, callbacks=a)\n", "isn't Python|has more than"),
        (
            "a0 = A()\n"
            + "".join(f"a{n} = A(x=a{n - 1}, y=a{n - 1})\n" for n in range(1, 40))
            + "model.fit(x, y, callbacks=a39)\n",
            "has more than 2,000 arguments",
        ),
        ("model.fit(x, y, epochs=" + "1+" * 3000 + "1)\n", "isn't Python"),
    ],
)
def test_script_that_is_too_deep_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        adopt_script(tmp_path, f"import keras\n{text}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import keras", True),
        ("from keras.layers import Dense", True),
        ("from tensorflow import keras", True),
        ("import tensorflow as tf\ntf.keras.Model()", True),
        ("import tf_keras", True),
        ("import torch\nkeras = 3", False),
    ],
)
def test_keras_is_recognised(text: str, expected: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    assert uses_keras(parse_script(file)) is expected


@pytest.mark.slow
def test_adopted_script_trains(tmp_path: Path, cache: Path) -> None:
    digits = ["dataset=digits", f"cache.root={cache}"]
    recipe = write_recipe(tmp_path, adopt_script(tmp_path, KERAS), *digits)
    assert run(recipe, tmp_path / "run").status == "done"
