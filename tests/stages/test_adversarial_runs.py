"""Runs with two optimizers in a step: any sink, resumed, evaluated."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests import outcome
from tests.outcome import assert_same_run, read_lines
from tests.whole_run import run

GENERATOR = "[{name: dense, features: 64}, batch_norm, leaky_relu, {name: reshape, shape: [8,8,1]}]"
JUDGE = "[flatten, {name: dense, features: 16}, leaky_relu, {name: dropout, rate: 0.2}, \
{name: dense, features: 1}]"
ADAM = (
    "{name: adam, lr: 0.001, b1: 0.5, b2: 0.999, eps: 1.0e-8, weight_decay: 0.0, decay_rules: []}"
)
OPS = "[{name: rescale, factor: 0.125, shift: -1.0}, \
{name: constant_labels, values: {real: 1, generated: 0, convincing: 1}}]"
GAN = [
    "dataset.name=synthetic",
    "+dataset.like=digits",
    "+dataset.train_size=96",
    "+dataset.eval_size=40",
    f"dataset.train.ops={OPS}",
    f"dataset.eval.ops={OPS}",
    "model=layers",
    f"model.layers=[{{name: adversarial, latent: 5, generator: {GENERATOR}, \
discriminator: {JUDGE}}}]",
    "optimizer=adam",
    "loss=adversarial",
    "schedule=constant",
    f"train.optimizers=[{{pattern: adversarial_0/discriminator, optimizer: {ADAM}}}]",
    "train.batch_size=16",
    "train.steps=20",
    "eval.every_steps=9",
    "eval.metrics=[discriminator_loss, generator_loss]",
    "monitor.tensorboard=false",
]


def compose(cache: Path, *overrides: str) -> Recipe:
    return load_recipe("lenet5_digits", [*GAN, f"cache.root={cache}", *overrides])


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_gan_is_the_same_at_any_sink_size_and_after_a_resume(cache: Path, tmp_path: Path) -> None:
    for sink in (1, 7, 20):
        run(compose(cache, f"train.sink_size={sink}"), tmp_path / str(sink))
        assert_same_run(tmp_path / "1", tmp_path / str(sink))
    half = compose(cache, "train.sink_size=7", "train.end_step=9")
    run(half, tmp_path / "half")
    whole = compose(cache, "train.sink_size=7", f"train.resume={tmp_path / 'half'}")
    run(whole)
    losses = outcome.metrics(tmp_path / "half")
    assert losses == outcome.metrics(tmp_path / "7")
    outcome.assert_equal_arrays(outcome.arrays(tmp_path / "half"), outcome.arrays(tmp_path / "7"))


@pytest.mark.slow
def test_generator_and_discriminator_have_separate_optimizers(cache: Path, tmp_path: Path) -> None:
    """The losses add up, and a rate of nearly 0 for one of both leaves it as it was."""
    still = ADAM.replace("0.001", "1.0e-20")
    optimizers = f"train.optimizers=[{{pattern: adversarial_0/discriminator, optimizer: {still}}}]"
    run(compose(cache, optimizers, "checkpoint.every_steps=10"), tmp_path)
    (*_, last) = read_lines(tmp_path / "evals.jsonl")
    assert last["loss"] == pytest.approx(last["discriminator_loss"] + last["generator_loss"])
    assert all(math.isfinite(value) for value in last.values() if isinstance(value, float))
    steps = outcome.checkpoints(tmp_path)
    before, after = (outcome.arrays(tmp_path, step) for step in (steps[0], steps[-1]))
    moved = {
        name: any(
            not np.allclose(before[path], leaf, atol=1e-12)
            for path, leaf in after.items()
            if path.startswith(f"params/adversarial_0/{name}/")
        )
        for name in ("generator", "discriminator")
    }
    assert moved == {"generator": True, "discriminator": False}


@pytest.mark.medium
def test_optimizer_pattern_without_parameters_is_refused(cache: Path, tmp_path: Path) -> None:
    optimizers = f"train.optimizers=[{{pattern: conv_7, optimizer: {ADAM}}}]"
    with pytest.raises(RecipeError, match=r"train\.optimizers: pattern 'conv_7' matches none"):
        run(compose(cache, optimizers, "stages=[data,build]"), tmp_path)


@pytest.mark.medium
def test_gan_with_class_labels_is_refused(cache: Path, tmp_path: Path) -> None:
    plain = OPS.partition(", {name: constant")[0] + "]"
    overrides = [f"dataset.train.ops={plain}", f"dataset.eval.ops={plain}"]
    with pytest.raises(RecipeError, match="has 3 scores, and the dataset 10 labels"):
        run(compose(cache, *overrides, "stages=[data,build]"), tmp_path)
