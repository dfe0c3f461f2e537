"""Freezing all but some, thawing, batch statistics and rates by depth in whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.reporter import Reporter
from pipeline.data.columns import Targets
from pipeline.models.networks.plain import MLP
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.build import Built, build
from pipeline.stages.data import load_data
from pipeline.stages.export.network import trace_network_arrays
from pipeline.stages.fine_tuning import restore_weights_of
from pipeline.stages.runner.adapted_run import read_frozen
from pipeline.training.features.components.lora import LoraSpec
from pipeline.training.features.parameter_rates import LayerRates
from tests import outcome
from tests.conftest import compose_tiny
from tests.whole_run import run

pytestmark = pytest.mark.usefixtures("optimized_programs_of_module")

Compose = Callable[..., Recipe]

NET = (
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 4}, batch_norm, relu, "
    "{name: residual, body: [{name: conv, features: 3, kernel: 3}, batch_norm, relu]}, "
    "global_avg_pool, {name: dense, features: $classes}]"
)
SMALL = (
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 4}, batch_norm, relu, "
    "global_avg_pool, {name: dense, features: $classes}]"
)
TUNED = [
    "model=layers",
    NET,
    'train.freeze=["!dense_0"]',
    "train.unfreeze=[{pattern: residual_0, after_epochs: 2}, {pattern: '*', after_steps: 23}]",
    "train.freeze_statistics=frozen",
    "train.lr_decay_by_layer=0.5",
    "train.ema={decay: 0.9, warmup: true}",
    "optimizer=adam",
    "train.optimizer.lr=0.01",
    "train.clip={norm: 1.0}",
    "train.steps=30",
    "train.sink_size=7",
    "eval.every_steps=10",
    "checkpoint.every_steps=5",
    "checkpoint.keep=99",
]


def built(recipe: Recipe) -> Built:
    """The step of a recipe."""
    return build(recipe, load_data(recipe, Reporter()), Reporter())


@pytest.mark.medium
def test_optimizer_of_frozen_parameters_is_refused(tiny: Compose) -> None:
    adam = "{name: adam, lr: 0.1, b1: 0.9, b2: 0.9, eps: 1e-8, weight_decay: 0.0, decay_rules: []}"
    rule = f"train.optimizers=[{{pattern: conv_0, optimizer: {adam}}}]"
    with pytest.raises(RecipeError) as refused:
        built(tiny(rule, "train.freeze=[conv_0]"))
    assert "train.optimizers: pattern 'conv_0' matches none of the 7 trained" in str(refused.value)
    built(tiny(rule, "train.freeze=[conv_1]"))


class TargetsMlp(MLP):
    """A network whose width depends on what is predicted."""

    def fit_to_targets(self, targets: Targets) -> TargetsMlp:
        return self.model_copy(update={"hidden": (3 * len(targets),)})


@pytest.mark.medium
def test_weights_fit_a_network_that_depends_on_the_targets(tiny: Compose, tmp_path: Path) -> None:
    """Those that `restore` and the base of `lora` name, and those that are converted."""
    recipe = tiny("checkpoint.rules=none", f"checkpoint.restore={tmp_path / 'w.npz'}")
    model = TargetsMlp(hidden=(5,), init=recipe.model.init)
    recipe = recipe.model_copy(update={"model": model})
    dataset = load_data(recipe, Reporter())
    state = build(recipe, dataset, Reporter()).state
    variables = flatten_by_path(state.variables)
    assert variables["params/dense_0/kernel"].shape[1] == 30
    arrays = {name: np.ones(leaf.shape, np.float32) for name, leaf in variables.items()}
    write_weights(tmp_path / "w.npz", arrays)
    restored = restore_weights_of(recipe, dataset, state, warn=pytest.fail)
    np.testing.assert_array_equal(restored.state.params["dense_0"]["kernel"], 1.0)
    shapes = trace_network_arrays(recipe).shapes
    assert shapes == {name: array.shape for name, array in arrays.items()}
    lora = LoraSpec(base=str(tmp_path / "w.npz"))
    train = recipe.train.model_copy(update={"features": (lora,)})
    adapted = recipe.model_copy(update={"train": train})
    assert {*read_frozen(adapted, dataset).arrays} == {*arrays}


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 steps in three phases, from 12 and from 23 steps on."""
    run_dir = tmp_path_factory.mktemp("whole")
    run(compose_tiny(cache, *TUNED), run_dir)
    return run_dir


@pytest.mark.slow
def test_parameters_change_from_their_phase(whole: Path) -> None:
    """And batch statistics with them: nothing of a frozen layer changes before."""
    by_step = {step: outcome.arrays(whole, step) for step in (5, 10, 15, 20, 25, 30)}

    def moved(path: str, one: int, other: int) -> bool:
        return not np.array_equal(by_step[one][path], by_step[other][path])

    weights = [p for p in by_step[5] if p.startswith(("params/", "collections/"))]
    assert len(weights) == 12
    for path in weights:
        layer = path.removeprefix("collections/").split("/")[1]
        assert moved(path, 5, 10) == (layer == "dense_0"), path
        assert moved(path, 10, 15) == (layer in ("dense_0", "residual_0")), path
        assert moved(path, 15, 20) == (layer in ("dense_0", "residual_0")), path
        assert moved(path, 20, 25), path
    averages = {path for path in by_step[5] if path.startswith("features/average/")}
    assert len(averages) == 8
    counts = {
        step: sorted(int(a) for p, a in arrays.items() if p.endswith("/count"))
        for step, arrays in by_step.items()
    }
    assert counts[10] == [0, 0, 10]
    assert counts[20] == [0, 8, 20]
    assert counts[30] == [7, 18, 30]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["train.sink=false", "train.sink_size=1000", "train.mechanism=soft", "train.feed=stream"]
)
def test_run_does_not_depend_on_the_sinks(
    how: str, whole: Path, tiny: Compose, tmp_path: Path
) -> None:
    run(tiny(*TUNED, how), tmp_path)
    outcome.assert_same_run(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [10, 20, 25])
def test_run_can_be_resumed_in_every_phase(
    kept: int, whole: Path, tiny: Compose, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    (run_dir / "summary.json").unlink()
    for step in outcome.checkpoints(run_dir):
        if step > kept:
            shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))
    run(tiny(*TUNED, "train.sink_size=11", f"train.resume={run_dir}"))
    outcome.assert_same_run(run_dir, whole)


@pytest.mark.slow
def test_unfreezing_with_shards_and_microbatches(tiny: Compose, tmp_path: Path) -> None:
    """The same bits on one device and on two."""
    more = ["parallel.mode=data", "train.accumulate_steps=2", "parallel.shards=4"]
    more += [SMALL, "train.steps=15", "train.unfreeze=[{pattern: '*', after_steps: 7}]"]
    for devices in (1, 2):
        recipe = tiny(*TUNED, *more, f"parallel.devices={devices}")
        run(recipe, tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "1", tmp_path / "2")


@pytest.mark.slow
@pytest.mark.usefixtures("unoptimized_programs")
def test_unfreezing_in_eager_mode_matches_graph_mode(tiny: Compose, tmp_path: Path) -> None:
    short = [SMALL, "train.steps=4", "train.unfreeze=[{pattern: '*', after_steps: 2}]"]
    for mode in ("graph", "eager"):
        run(tiny(*TUNED, *short, f"train.mode={mode}"), tmp_path / mode)
    graph, eager = (outcome.metrics(tmp_path / mode) for mode in ("graph", "eager"))
    for one, other in zip(graph, eager, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_build_line_counts_trained_parameters(
    tiny: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    step = built(tiny(*TUNED))
    said = " ".join(capsys.readouterr().out.split())
    assert "160 parameters, 40 of them trained, 127 from step 13, 160 from step 24" in said
    layer_rates = step.step_config.find(LayerRates)
    assert layer_rates is not None
    assert layer_rates.factors == {
        "conv_0": 0.25,
        "batch_norm_0": 0.25,
        "residual_0": 0.5,
        "dense_0": 1.0,
    }


@pytest.mark.slow
def test_phase_after_the_last_step_is_warned_of(
    tiny: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    built(tiny(*TUNED, "train.steps=13"))
    said = " ".join(capsys.readouterr().out.split())
    assert "would be trained after 23 steps; the run has 13" in said
    assert "after 12 steps" not in said


REFUSED = {
    "nothing frozen": (
        ["train.unfreeze=[{pattern: conv_0, after_steps: 3}]"],
        "train.unfreeze: needs train.freeze, which names the parameters to freeze at first",
    ),
    "never": (
        ["train.freeze=[conv_0]", "train.unfreeze=[{pattern: conv_0}]"],
        "train.unfreeze.0: set exactly one of after_epochs and after_steps",
    ),
    "except": (
        ["train.freeze=[conv_0]", "train.unfreeze=[{pattern: '!conv_0', after_steps: 1}]"],
        "train.unfreeze.0: pattern = !conv_0: must name the parameters to train, without a !",
    ),
    "thor": (
        [
            *("train.freeze=[conv_0]", "train.unfreeze=[{pattern: conv_0, after_steps: 1}]"),
            *("optimizer=thor", "train.optimizer.lr=0.01"),
        ],
        "train.unfreeze: must be [] with thor, which looks into layers",
    ),
    "statistics of nothing": (
        ["train.freeze_statistics=frozen"],
        "train.freeze_statistics = frozen: needs train.freeze; `all` is for every batch norm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictory_recipe_is_refused(case: str, tiny: Compose) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(RecipeError) as refused:
        tiny(*overrides)
    assert message in str(refused.value)


NOT_BUILT = {
    "another scope": (
        ["train.freeze=[convv_0]"],
        "train.freeze: pattern 'convv_0' matches none of the 8 parameters in conv_0, conv_1, "
        "dense_0 (2), dense_1 (2), dense_2 (2), such as conv_0/kernel; did you mean conv_0?",
    ),
    "all but another scope": (
        ['train.freeze=["!dense_9"]'],
        "train.freeze: pattern 'dense_9' matches none of the 8 parameters",
    ),
    "thaws nothing": (
        ["train.freeze=[conv_0]", "train.unfreeze=[{pattern: conv9, after_steps: 1}]"],
        "train.unfreeze: pattern 'conv9' matches none of the 8 parameters",
    ),
    "thaws what is trained": (
        ["train.freeze=[conv_0]", "train.unfreeze=[{pattern: conv_1, after_epochs: 1}]"],
        "train.unfreeze: conv_1: is trained before step 6 already",
    ),
    "decay of what is frozen": (
        [
            *("train.freeze=[conv_0, conv_1]", "optimizer=adamw"),
            "train.unfreeze=[{pattern: conv_1, after_steps: 9}]",
            "train.optimizer.decay_rules=[{pattern: conv_0, weight_decay: 0.1}]",
        ],
        "train.optimizer: decay_rules: pattern 'conv_0' matches none of the 7 parameters",
    ),
    "no batch norm": (
        ["train.freeze_statistics=all"],
        "train.freeze_statistics = all: lenet5 has no batch norm; must be none",
    ),
    "no frozen batch norm": (
        [*TUNED[:2], "train.freeze=[conv_0]", "train.freeze_statistics=frozen"],
        "train.freeze_statistics = frozen: train.freeze must cover scale and bias of one of the 2 "
        "batch norms, such as batch_norm_0, residual_0/batch_norm_0; else must be all or none",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", NOT_BUILT)
def test_unmatched_patterns_are_refused(case: str, tiny: Compose) -> None:
    overrides, message = NOT_BUILT[case]
    with pytest.raises(RecipeError) as refused:
        built(tiny(*overrides))
    assert message in str(refused.value)
