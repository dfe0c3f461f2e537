"""Runs with adapters: their bits in sinks and after a resume, their checkpoints, and their sum with
the frozen weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.reporter import Reporter
from pipeline.inspect.replay import open_at
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.stages.fine_tuning import restore_weights_of
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.conftest import compose_tiny
from tests.whole_run import run

pytestmark = pytest.mark.usefixtures("optimized_programs_of_module")

Compose = Callable[..., Recipe]

NET = (
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 4}, batch_norm, relu, flatten, "
    "{name: dense, features: 6}, relu, {name: dense, features: $classes}]"
)
BASE = ["model=layers", NET, "train.steps=8", "optimizer=adam", "train.optimizer.lr=0.01"]
EVENTS = ["train.sink_size=7", "checkpoint.every_steps=5", "checkpoint.keep=99"]


@pytest.fixture(scope="module")
def base(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights are frozen by others."""
    run_dir = tmp_path_factory.mktemp("base")
    run(compose_tiny(cache, *BASE), run_dir)
    return run_dir


def list_overrides(base: Path, *more: str) -> list[str]:
    lora = f"train.features=[{{name: lora, rank: 2, base: '{base}', dora: true}}]"
    return [*BASE, "train.steps=21", "train.ema.decay=0.9", lora, *EVENTS, *more]


@pytest.fixture(scope="module")
def whole(base: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    run(compose_tiny(cache, *list_overrides(base)), run_dir)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train.sink_size=1", "train.sink_size=21", "train.sink=false"])
def test_run_does_not_depend_on_the_sinks(
    how: str, base: Path, whole: Path, tiny: Compose, tmp_path: Path
) -> None:
    run(tiny(*list_overrides(base, how)), tmp_path)
    outcome.assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_resumed_run_has_the_same_bits(
    base: Path, whole: Path, tiny: Compose, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    keep_steps(whole, run_dir, 10)
    run(tiny(*list_overrides(base, "train.sink_size=11", f"train.resume={run_dir}")))
    outcome.assert_same_run(run_dir, whole)


def keep_steps(whole: Path, run_dir: Path, last: int) -> None:
    """Copy a run as if it had been killed after its checkpoint of step `last`."""
    shutil.copytree(whole, run_dir)
    (run_dir / "summary.json").unlink()
    for step in outcome.checkpoints(run_dir):
        if step > last:
            shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))


@pytest.mark.slow
def test_resume_with_other_frozen_weights_is_refused(
    base: Path, whole: Path, tiny: Compose, tmp_path: Path
) -> None:
    """The base's folder has another run by then."""
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run(tiny(*list_overrides(base, "train.steps=5")), run_dir)
    hidden = base.with_name("hidden")
    base.rename(hidden)
    try:
        run(tiny(*BASE, "seed=9"), other)
        other.rename(base)
        more = ("train.steps=21", f"train.resume={run_dir}")
        with pytest.raises(DataError, match=r"base of lora = .*: has other weights than when"):
            run(tiny(*list_overrides(base, *more)))
    finally:
        shutil.rmtree(base)
        hidden.rename(base)


@pytest.mark.slow
def test_checkpoint_has_adapters_and_their_sum_is_read(base: Path, whole: Path) -> None:
    saved = outcome.arrays(whole, 21)
    names = {path.split("/")[-1] for path in saved if path.startswith("params/")}
    assert names == {"lora_down", "lora_up", "lora_magnitude"}
    optimizer = [path for path in saved if path.startswith("opt_state/")]
    assert optimizer
    assert not any("kernel" in path or "bias" in path for path in optimizer)
    before, after = read_trained_run(base).arrays, read_trained_run(whole).arrays
    assert {*before} == {*after}
    for name in before:
        if name.startswith("params/") and "dense" not in name:
            np.testing.assert_array_equal(before[name], after[name])
    kernel = before["params/dense_0/kernel"].astype(np.float64)
    down, up, magnitude = (
        saved[f"features/average/dense_0/lora_{part}"].astype(np.float64)
        for part in ("down", "up", "magnitude")
    )
    changed = kernel + 16.0 / 2 * down @ up
    length = np.linalg.norm(kernel, axis=0) + magnitude
    expected = changed * length / np.linalg.norm(changed, axis=0)
    np.testing.assert_allclose(after["params/dense_0/kernel"], expected, rtol=1e-4, atol=1e-6)
    assert not np.allclose(after["params/dense_0/kernel"], kernel, rtol=1e-3)


@pytest.mark.slow
def test_run_can_start_from_the_sum(whole: Path, tiny: Compose) -> None:
    recipe = tiny(*BASE, f"checkpoint.restore={whole}")
    dataset = load_data(recipe, Reporter())
    like = build(recipe, dataset, Reporter()).state
    restored = restore_weights_of(recipe, dataset, like, lambda text: None)
    merged = read_trained_run(whole).arrays
    variables = flatten_by_path(restored.state.variables)
    assert {*variables} == {*merged}
    for name, array in merged.items():
        np.testing.assert_array_equal(variables[name], array)


@pytest.mark.slow
def test_initial_weights_are_the_base_of_null(tiny: Compose, tmp_path: Path) -> None:
    """The run's frozen weights, and those that are read with its checkpoint."""
    lora = "train.features=[{name: lora, rank: 2}]"
    run(tiny(*BASE, "train.steps=1", "train.optimizer.lr=1e-30", lora), tmp_path / "lora")
    run(tiny(*BASE, "train.steps=1", "train.optimizer.lr=1e-30"), tmp_path / "plain")
    one, other = (read_trained_run(tmp_path / name).arrays for name in ("lora", "plain"))
    for name in other:
        # The plain run has moved each parameter by 1e-30.
        np.testing.assert_allclose(one[name], other[name], rtol=1e-6, atol=1e-29, err_msg=name)


@pytest.mark.slow
def test_state_of_a_step_has_the_frozen_weights(base: Path, whole: Path) -> None:
    """Replayed from the start and from a checkpoint, with the numbers of the run's log."""
    frozen = read_trained_run(base).arrays
    for step in (2, 12):
        state = open_at(whole, step, Reporter()).state
        for layer in ("conv_0", "dense_0"):
            kernel = state.params[layer]["kernel"]
            np.testing.assert_array_equal(kernel, frozen[f"params/{layer}/kernel"])


REFUSALS = {
    "{name: lora, rank: 7}": "rank = 7: dense_0/kernel has shape (192, 6); must be at most 6",
    "{name: lora, targets: [conv_0]}": "targets: pattern 'conv_0' matches none of the 2 matrices",
    "{name: lora, targets: [densee_1]}": "did you mean dense_1?",
    "{name: lora, targets: []}": "targets",
}


@pytest.mark.medium
@pytest.mark.parametrize("feature", REFUSALS)
def test_adapters_that_do_not_fit_are_refused(feature: str, tiny: Compose) -> None:
    def build_recipe() -> None:
        recipe = tiny(*BASE, f"train.features=[{feature}]")
        build(recipe, load_data(recipe, Reporter()), Reporter())

    with pytest.raises(RecipeError) as refused:
        build_recipe()
    assert REFUSALS[feature] in str(refused.value)
    assert "train.features.0" in str(refused.value)


KEYS = {
    "train.freeze=[conv_0]": "train.freeze = ['conv_0']: must be [] with lora",
    "checkpoint.restore=base": "checkpoint.restore = base: must be null with lora",
    "checkpoint.prefix=net": "checkpoint.prefix = net: must be null with lora",
    "train.on_nan=rollback": "train.on_nan = rollback: must be another policy with lora",
    "optimizer=thor": "train.optimizer = thor: must be another optimizer with lora",
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_adapters_exclude_are_refused(key: str, tiny: Compose) -> None:
    overrides = [entry for entry in BASE if "optimizer" not in entry]
    with pytest.raises(RecipeError) as refused:
        tiny(*overrides, key, "checkpoint.every_steps=5", "train.features=[{name: lora, rank: 2}]")
    assert KEYS[key] in str(refused.value)


@pytest.mark.slow
def test_missing_base_is_refused_before_compiling(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: there is no such run or weight file"):
        run(tiny(*list_overrides(tmp_path / "nowhere")), tmp_path / "run")


@pytest.mark.slow
def test_base_of_another_network_is_refused(base: Path, tiny: Compose, tmp_path: Path) -> None:
    wider = NET.replace("features: 6", "features: 8")
    with pytest.raises(DataError, match=r"3 arrays don't fit the network, such as params/dense_0"):
        run(tiny(*list_overrides(base), wider), tmp_path)
