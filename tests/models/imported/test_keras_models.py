"""Models of Keras as networks of a recipe."""

from __future__ import annotations

import os
import random as python_random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.plugins.loading import KERAS_BACKEND, VARIABLE, load_named
from pipeline.core.registry import list_components
from tests import outcome
from tests.models.build import initialise, parameters, random
from tests.whole_run import run

IMAGES = random(4, 8, 8, 1)
Build = Callable[..., Any]

OWN = """
import keras
from keras import layers

def make_model(classes, width=4, last=None, penalty=None):
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(width, 3, padding="same", kernel_regularizer=penalty),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(classes, activation=last),
    ])

def unbuilt(classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(classes)])

def functional(kind=keras.Model, change=None, constraint=None):
    images = keras.Input((8, 8, 1))
    x = layers.Dense(4, kernel_constraint=constraint, name="first")(layers.Flatten()(images))
    if change is not None:
        x = keras.layers.Lambda(change)(x)
    return kind(images, layers.Dense(10)(x))

class TrainsItself(keras.Model):
    def train_step(self, *args):
        raise NotImplementedError

class ComputesItsLoss(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return 0.0

class TestsItself(keras.Model):
    def test_step(self, *args):
        raise NotImplementedError

class AddsLosses(keras.Model):
    def __init__(self):
        super().__init__()
        self.flat, self.dense = layers.Flatten(), layers.Dense(10)

    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return self.dense(self.flat(x))

def own_train_step():
    return functional(TrainsItself)

def own_loss():
    return functional(ComputesItsLoss)

def own_test_step():
    return functional(TestsItself)

def set_train_step():
    model = functional()
    model.train_step = lambda *args: None
    return model

def constrained():
    return functional(constraint=keras.constraints.MaxNorm(1.0))

def penalised():
    images = keras.Input((8, 8, 1))
    x = layers.Dense(4, activity_regularizer="l2")(layers.Flatten()(images))
    return keras.Model(images, layers.Dense(10)(x))

def added():
    return AddsLosses()

@keras.ops.custom_gradient
def reverse(x):
    return x, lambda *args, upstream=None: -3 * (upstream if args == () else args[0])

def reversed_gradient(change=reverse):
    return functional(change=change)

def plain_gradient():
    return functional(change=lambda x: x)

def number():
    return 3

made = make_model(10)
"""


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ.setdefault(KERAS_BACKEND, "jax")
    pytest.importorskip("keras", reason="Keras is an extra: pip install 'recipe-pipeline[keras]'")
    file = tmp_path_factory.mktemp("own") / "own_models.py"
    file.write_text(OWN)
    return file


@pytest.fixture
def build(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    monkeypatch.setenv(VARIABLE, str(plugin))
    list(load_named())

    def model(name: str, dtype: str = "float32", **arguments: Any) -> Any:
        tree = {"name": "keras", "import": f"own_models:{name}", "arguments": arguments, "init": {}}
        return list_components("model")["keras"].model_validate(tree).build(10, dtype)

    return model


def train(module: Any, variables: Any, key: int) -> tuple[Any, Any]:
    rngs = {"dropout": jax.random.key(key)}
    return module.apply(variables, IMAGES, train=True, mutable=["batch_stats"], rngs=rngs)


def test_keras_model_keeps_its_variable_names(build: Build) -> None:
    variables = initialise(build("make_model"), IMAGES)
    assert sorted(parameters(variables)) == [
        "batch_normalization/beta",
        "batch_normalization/gamma",
        "conv2d/bias",
        "conv2d/kernel",
        "dense/bias",
        "dense/kernel",
    ]
    statistics = variables["batch_stats"]
    assert sorted(statistics["batch_normalization"]) == ["moving_mean", "moving_variance"]
    assert set(statistics) == {"batch_normalization"}, "no state of random numbers"


def test_results_match_keras(build: Build, plugin: Path) -> None:
    import keras
    from own_models import make_model  # type: ignore[import-not-found]

    module = build("make_model").clone(seed=7)
    variables = initialise(module, IMAGES)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    own = make_model(10)
    ours = module.apply(variables, IMAGES, train=False)
    np.testing.assert_allclose(ours, own(IMAGES, training=False), rtol=1e-4, atol=1e-5)
    _, changed = train(module, variables, 0)
    own(IMAGES, training=True)
    np.testing.assert_allclose(
        changed["batch_stats"]["batch_normalization"]["moving_mean"],
        own.layers[1].moving_mean.numpy(),
        rtol=1e-4,
        atol=1e-6,
    )


def test_dropout_depends_on_the_key_and_weights_on_the_seed(build: Build) -> None:
    module = build("make_model")
    variables = initialise(module, IMAGES)
    first, again, other = (train(module, variables, key)[0] for key in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    kernels = [
        parameters(initialise(build("make_model").clone(seed=seed), IMAGES))["dense/kernel"]
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


def test_global_random_state_is_restored(build: Build) -> None:
    python_random.seed(3)
    np.random.seed(3)
    expected = python_random.random(), np.random.random()
    python_random.seed(3)
    np.random.seed(3)
    initialise(build("make_model"), IMAGES)
    assert (python_random.random(), np.random.random()) == expected


def test_model_without_an_input_is_built_for_the_images(build: Build) -> None:
    module = build("unbuilt")
    assert parameters(initialise(module, IMAGES))["dense/kernel"].shape == (64, 10)


def test_resumed_run_is_bit_equal_to_the_unbroken_one(
    build: Build, tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    keys = ["model=keras", "model.import=own_models:make_model", "train.steps=12"]
    keys += ["train.sink_size=4", "checkpoint.every_steps=6"]
    keys += ["dataset.train.ops=[]", "dataset.eval.ops=[]"]
    run(tiny(*keys), whole)
    shutil.copytree(whole, broken)
    shutil.rmtree(make_checkpoint_path(broken / "checkpoints", 12))
    run(tiny(*keys, f"train.resume={broken}"))
    assert outcome.metrics(broken) == outcome.metrics(whole)
    outcome.assert_equal_arrays(outcome.arrays(broken, 12), outcome.arrays(whole, 12))


@pytest.mark.parametrize(
    ("name", "dtype", "arguments", "said"),
    [
        ("make_model", "float32", {"last": "softmax"}, "ends in softmax; must end in logits"),
        ("make_model", "float32", {"penalty": "l2"}, "adds 1 losses, by"),
        ("own_train_step", "float32", {}, "TrainsItself overrides train_step, which the recipe's"),
        ("set_train_step", "float32", {}, "Functional overrides train_step"),
        ("own_loss", "float32", {}, "overrides compute_loss.* must not: loss=NAME names the loss"),
        ("own_test_step", "float32", {}, "overrides test_step.* eval.metrics="),
        ("constrained", "float32", {}, "first/kernel has the constraint MaxNorm"),
        ("penalised", "float32", {}, "adds 1 losses, by regularizers or add_loss"),
        ("added", "float32", {}, "adds 1 losses, by regularizers or add_loss"),
        ("number", "float32", {}, "makes a int; must make a keras.Model"),
        ("made", "bfloat16", {}, "computes in float32, and the recipe in bfloat16"),
        ("made", "float32", {"width": 3}, "is a model; arguments must be {}"),
    ],
)
def test_untrainable_models_are_refused(
    name: str, dtype: str, arguments: dict[str, Any], said: str, build: Build
) -> None:
    with pytest.raises(ValueError, match=said):
        initialise(build(name, dtype, **arguments), IMAGES)


def test_custom_gradient_is_honoured(build: Build) -> None:
    found = []
    for name in ("plain_gradient", "reversed_gradient"):
        module = build(name)
        variables = initialise(module, IMAGES)

        def loss(params: Any, module: Any = module, variables: Any = variables) -> Any:
            logits = module.apply({**variables, "params": params}, IMAGES, train=False)
            return (logits * np.arange(10)).sum()

        found.append(jax.jit(jax.grad(loss))(variables["params"]))
    plain, reverse = found
    np.testing.assert_allclose(
        reverse["first"]["kernel"], -3 * plain["first"]["kernel"], rtol=1e-5, atol=1e-6
    )
