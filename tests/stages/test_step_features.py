"""Features of recipes: their order, their pairs, and runs with them on any layout."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import run
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.stages.build import Built, build
from pipeline.stages.data import load_data
from pipeline.training.features.components.weight_averages import LookaheadSpec
from pipeline.training.step_feature import StepFeature
from tests.conftest import ROOT
from tests.outcome import arrays

Tiny = Callable[..., Recipe]

SETTINGS = {
    "freezing": ("train.freeze=[conv_*]",),
    "loss_scale": ("train.loss_scale={name: dynamic, init: 128.0, window: 5}",),
    "non_finite_steps": ("train.on_nan=skip",),
    "adversarial": ("++train.adversarial={attack: pgd, radius: 0.1, steps: 2}",),
    "hardest_samples": ("train.loss.hardest_share=0.5",),
    "privacy": (
        "train.batch_size=64",
        "+privacy={noise: 1.0, delta: 1.0e-3, expected_batch_size: 24, accountant: rdp, seed: 5}",
    ),
    "curvature": ("optimizer=thor",),
    "gradients": ("train.gradients=sam",),
    "accumulation": ("train.accumulate_steps=2",),
    "rate_groups": ("train.lr_rules=[{pattern: '*/bias', factor: 2.0}]",),
    "layer_rates": ("train.lr_decay_by_layer=0.9",),
    "average": ("train.ema.decay=0.9",),
    "ledger": ("train.ledger=true",),
    "lookahead": "{name: lookahead, steps: 3}",
    "gradient_penalty": "gradient_penalty",
    "accumulate_labels": "{name: accumulate_labels, labels: 50}",
    "distill": "{name: distill, teacher: ema}",
    "throughput": "throughput",
    "gradient_noise": "gradient_noise",
    "swa": "{name: swa, start: 0.25, steps: 5}",
    "lawa": "{name: lawa, count: 2, steps: 5}",
    "lora": "{name: lora, rank: 2}",
    "leave_out": "{name: leave_out, samples: 3-5}",
    "schedule_free": ("optimizer=schedule_free_adamw",),
}
"""Overrides that use a feature; a text is an entry of train.features."""
REFUSED = {
    *(("privacy", other) for other in SETTINGS if isinstance(SETTINGS[other], str)),
    ("adversarial", "privacy"),
    ("hardest_samples", "privacy"),
    ("loss_scale", "privacy"),
    ("non_finite_steps", "privacy"),
    ("privacy", "curvature"),
    ("privacy", "gradients"),
    ("privacy", "ledger"),
    ("adversarial", "curvature"),
    ("curvature", "gradient_penalty"),
    ("curvature", "distill"),
    ("hardest_samples", "curvature"),
    ("hardest_samples", "accumulation"),
    ("curvature", "gradients"),
    ("curvature", "accumulate_labels"),
    ("curvature", "swa"),
    ("curvature", "lawa"),
    ("curvature", "lora"),
    ("curvature", "leave_out"),
    ("freezing", "lora"),
    ("lookahead", "schedule_free"),
    ("accumulate_labels", "schedule_free"),
    *combinations(("average", "swa", "lawa", "schedule_free"), 2),
}
"""Pairs of features that no recipe can have together. All other pairs are trained."""
PAIRS = [pair for pair in combinations(SETTINGS, 2) if pair != ("curvature", "schedule_free")]
"""All pairs, but for two that are optimizers: a recipe names one."""
ALONE_REFUSED = {"gradient_noise": "train.accumulate_steps = 1: must be above 1"}
"""Features that need another one."""


def list_overrides(*names: str) -> list[str]:
    settings = [SETTINGS[name] for name in names]
    listed = [entry for entry in settings if isinstance(entry, str)]
    keys = [key for entry in settings if not isinstance(entry, str) for key in entry]
    return [*keys, f"train.features=[{', '.join(listed)}]"] if listed else keys


def build_step(recipe: Recipe) -> Built:
    reporter = Reporter()
    return build(recipe, load_data(recipe, reporter), reporter)


def trace_step(recipe: Recipe) -> None:
    """Trace a step without compiling it."""
    built = build_step(recipe)
    shape = jax.ShapeDtypeStruct
    count = recipe.train.batch_size
    columns = {"image": shape((count, 8, 8, 1), np.uint8), "label": shape((count,), np.int32)}
    scalar = shape((), np.int32)
    batch = Batch(columns, shape((2,), np.uint32), scalar, shape((count,), np.int32), scalar)
    rates = shape(built.learning_rates.shape, np.float32)
    after, record = jax.eval_shape(built.step.step, built.state, batch, rates)
    assert jax.tree.structure(after) == jax.tree.structure(built.state)
    assert len(record.extras) == len(built.step_config.columns)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pair_is_traced_or_refused_by_name(pair: tuple[str, str], tiny: Tiny) -> None:
    """Every pair: a step that keeps the form of its state, or one message with both."""
    extra = [] if "accumulation" in pair or "gradient_noise" not in pair else ["accumulation"]
    overrides = list_overrides(*pair, *extra)
    if pair in REFUSED or pair[::-1] in REFUSED:
        with pytest.raises(RecipeError):
            trace_step(tiny(*overrides))
        return
    if extra and ("hardest_samples" in pair or "privacy" in pair):
        return  # Its partner is refused, or refuses microbatches.
    trace_step(tiny(*overrides))


@pytest.mark.parametrize("name", ALONE_REFUSED)
def test_feature_that_needs_another_says_so(name: str, tiny: Tiny) -> None:
    with pytest.raises(RecipeError, match=ALONE_REFUSED[name]):
        tiny(*list_overrides(name))


@pytest.mark.medium
def test_features_are_in_the_order_of_the_list(tiny: Tiny) -> None:
    recipe = tiny(*list_overrides("average", "rate_groups", "lookahead", "ledger", "freezing"))
    names = [feature.name for feature in build_step(recipe).step_config.features]
    assert names == ["freezing", "loss_scale", "rate_groups", "lookahead", "average", "ledger"]


@pytest.mark.medium
def test_averages_act_after_features_that_change_weights(tiny: Tiny) -> None:
    """`swa` would average the fast weights before `lookahead` moves them."""
    recipe = tiny("train.features=[{name: swa, steps: 2}, lookahead, gradient_penalty]")
    names = [feature.name for feature in build_step(recipe).step_config.features]
    assert names == ["loss_scale", "lookahead", "gradient_penalty", "swa"]


NORMALIZED = (
    "model=layers",
    "model.layers=[{name: conv, features: 2, kernel: 3, stride: 4}, batch_norm, global_avg_pool, "
    "{name: dense, features: $classes}]",
)
STATISTICS = {
    "swa and distill": ["{name: distill, teacher: ema}", "{name: swa, start: 0.25, steps: 5}"],
    "lawa and adversarial": ["{name: lawa, count: 2, steps: 5}"],
    "schedule_free and adversarial": [],
    "schedule_free and distill": ["{name: distill, teacher: ema}"],
}


@pytest.mark.medium
@pytest.mark.parametrize("names", STATISTICS)
def test_statistics_of_averaged_weights_are_not_used_with_others(names: str, tiny: Tiny) -> None:
    keys = [*NORMALIZED, f"train.features=[{', '.join(STATISTICS[names])}]"]
    for name in ("adversarial", "schedule_free"):
        keys += SETTINGS[name] if name in names else ()
    with pytest.raises(RecipeError, match=f"{names}: the running statistics are those of the av"):
        trace_step(tiny(*keys))
    trace_step(tiny(*keys[2:]))  # A network without batch norm has no statistics.


@pytest.mark.medium
def test_feature_listed_twice_is_refused(tiny: Tiny) -> None:
    with pytest.raises(RecipeError, match="has 2 features lookahead"):
        build_step(tiny("train.features=[lookahead, {name: lookahead, steps: 7}]"))


@pytest.mark.medium
def test_two_averages_are_refused(tiny: Tiny) -> None:
    with pytest.raises(
        RecipeError, match="swa and average: both choose the weights of evaluations"
    ):
        build_step(tiny("train.features=[{name: swa, steps: 2}]", "train.ema.decay=0.9"))


@pytest.mark.medium
def test_period_longer_than_the_run_is_refused(tiny: Tiny) -> None:
    problem = r"train\.features\.0 \(swa\): swa: a period has 7 updates; must have at most 6"
    with pytest.raises(RecipeError, match=problem):
        build_step(tiny("train.features=[{name: swa, steps: 7}]", "train.steps=6"))


@pytest.mark.medium
def test_teacher_with_other_outputs_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.features\.0 \(distill\)"):
        build_step(tiny(f"train.features=[{{name: distill, teacher: {tmp_path}}}]"))


LISTED = [name for name in SETTINGS if isinstance(SETTINGS[name], str) and name != "throughput"]
OPTIMIZERS = ("adafactor", "soap")
"""Optimizers whose states have other forms than the parameters."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LISTED, "schedule_free", *OPTIMIZERS])
def test_bits_are_equal_for_every_sink_and_after_resuming(
    name: str, tiny: Tiny, tmp_path: Path
) -> None:
    extra = ["accumulation"] if name == "gradient_noise" else []
    settings = [f"optimizer={name}"] if name in OPTIMIZERS else list_overrides(name, *extra)
    keys = [*settings, "train.steps=24", "checkpoint.every_steps=12"]
    for size in ("1", "7", "-1"):
        run(tiny(*keys, f"train.sink_size={size}"), tmp_path / size)
    shutil.copytree(tmp_path / "7", tmp_path / "parts")
    shutil.rmtree(make_checkpoint_path(tmp_path / "parts" / "checkpoints", 24))
    run(tiny(*keys, f"train.resume={tmp_path / 'parts'}"), tmp_path / "parts")
    reference = arrays(tmp_path / "1", 24)
    for other in ("7", "-1", "parts"):
        compared = arrays(tmp_path / other, 24)
        assert compared.keys() == reference.keys()
        for path, array in reference.items():
            assert np.array_equal(array, compared[path], equal_nan=True), (other, path)
    lines = (tmp_path / "7" / "metrics.jsonl").read_text().splitlines()
    columns = set(json.loads(lines[-1]))
    if name in OPTIMIZERS:
        return
    built = build_step(tiny(*keys))
    assert set(built.step_config.columns) <= columns


@dataclass(frozen=True)
class Wrong(StepFeature):
    """A feature whose `columns` or state have another form than its methods return."""

    name = "wrong"
    columns: tuple[str, ...] = ("own",)
    made: int = 0

    def init(self, trained: Any) -> Any:
        return jnp.float32(0)

    def make_columns(self, state: Any, gradients: Any, outcome: Any) -> Any:
        return (gradients.loss,) * self.made

    def change_step(self, state: Any, outcome: Any) -> Any:
        return state.replace_part(self.name, jnp.zeros(2, jnp.float32))


@dataclass(frozen=True)
class Unreadable(StepFeature):
    """Weights of evaluations that can't be found in a checkpoint."""

    name = "unreadable"

    def init(self, trained: Any) -> Any:
        return trained

    def change_weights(self, state: Any, params: Any) -> Any:
        return state.features[self.name]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("feature", "problem"),
    [
        (Unreadable(), "train.features: unreadable: has change_weights, so its state must be a"),
        (Wrong(), "train.features: wrong: returns 0 columns; must be: own"),
        (Wrong(made=2), "train.features: wrong: returns 2 columns; must be: own"),
        (Wrong(("loss",), 1), "train.features: loss of wrong is a column of every step already"),
        (Wrong(made=1), "train.features: wrong: its state becomes float32[2]; must stay float32[]"),
    ],
)
def test_feature_of_another_form_is_refused_before_compiling(
    feature: StepFeature, problem: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LookaheadSpec, "build", lambda self, context: feature)
    with pytest.raises(RecipeError) as caught:
        build_step(tiny("train.features=[lookahead]"))
    assert problem in str(caught.value)


def test_documented_moments_are_those_of_the_class() -> None:
    text = (ROOT / "docs" / "bring-your-own.md").read_text()
    section = text.partition("### A feature of the step")[2]
    table = section.partition("| moment |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)
    assert documented == [
        name for name, value in vars(StepFeature).items() if inspect.isfunction(value)
    ]
