"""Changes that are tried before a verdict advises them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.inspect.profiler.step_profile import PredictedChange, StepVerdict
from pipeline.inspect.profiler.trial import try_change
from pipeline.inspect.profiler.verdict import RESIDENT
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower
from tests.inspect.profiler.test_verdict import evidence

pytestmark = pytest.mark.slow

Compose = Callable[..., Recipe]
GELUS = f"{{name: sequence, body: [{','.join(['gelu'] * 12)}]}}"
LAYERS = f"[flatten,{{name: dense, features: 256}},{GELUS},{{name: dense, features: $classes}}]"
NETWORK = (
    *("model=layers", f"model.layers={LAYERS}", "profile.mode=only", "train.batch_size=96"),
    *(
        f"dataset.{split}.ops=[{{name: rescale, factor: 0.05, shift: 0.0}}]"
        for split in ("train", "eval")
    ),
)


def tried(recipe: Recipe, verdict: StepVerdict, step_ms: float = 10.0) -> StepVerdict:
    reporter = Reporter()
    dataset, backend = load_data(recipe, reporter), recipe.device.open(recipe.parallel)
    built = lower(recipe, dataset, build(recipe, dataset, reporter), backend, None, reporter)
    executable = compile_programs(recipe, dataset, built, backend, reporter)
    known = evidence()
    known = replace(known, host=replace(known.host, step=step_ms))
    return try_change(verdict, recipe, dataset, backend, executable, known)


def verdict_on(layer: str) -> StepVerdict:
    counted = PredictedChange(f"leave out layer {layer}", 5.0, 2.0, "counted from the trace")
    return StepVerdict("elementwise-bound", 0.9, "slow", counted, layer=layer)


def test_step_is_timed_without_the_named_layer(tiny: Compose) -> None:
    found = tried(tiny(*NETWORK), verdict_on("sequence_0"))
    assert found.change is not None
    assert found.change.basis == "tried here"
    assert found.change.what == "leave out layer sequence_0"
    assert found.change.gain > 1.03


@pytest.mark.parametrize("layer", ["dense_0", "no_such_layer"])
def test_shape_changing_layer_is_not_removed(tiny: Compose, layer: str) -> None:
    assert tried(tiny(*NETWORK), verdict_on(layer)) == verdict_on(layer)


def test_streamed_split_is_tried_as_resident(tiny: Compose) -> None:
    counted = PredictedChange(RESIDENT, 5.0, 2.0, "counted from the trace")
    verdict = StepVerdict("data-bound", 0.9, "slow", counted)
    found = tried(tiny(*NETWORK, "train.feed=stream"), verdict, step_ms=150.0)
    assert found.change is not None
    assert found.change.basis == "tried here"
    assert found.change.gain > 1.5


def test_trials_are_skipped_if_a_step_is_slow(tiny: Compose) -> None:
    verdict = verdict_on("sequence_0")
    assert tried(tiny(*NETWORK), verdict, step_ms=1000.0) == verdict
