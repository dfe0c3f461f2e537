"""Whole runs with THOR: sinks change nothing, and an interrupted run continues exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests import outcome
from tests.conftest import compose_tiny
from tests.training.optimizers.thor.same_bits import require_same_bits
from tests.whole_run import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized_programs_of_module")]

Compose = Callable[..., Recipe]

NETWORK = [
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 4}, relu, flatten,"
    "{name: dense, features: 8}, relu, {name: dense, features: $classes}]",
]
THOR = [
    *NETWORK,
    "optimizer=thor",
    "train.optimizer.frequency=4",
    "train.optimizer.weight_decay=0.001",
    "train.optimizer.damping={initial: 0.1, decay_rate: 0.5, decay_steps: 20}",
    "train.steps=22",
    "checkpoint={every_steps: 6, keep: 9}",
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """22 steps that the host saw one by one; curvature at steps 1, 5, 9, 13, 17 and 21."""
    run_dir = tmp_path_factory.mktemp("reference")
    run(compose_tiny(cache, *THOR, "train.sink=false"), run_dir)
    return run_dir


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.sink_size=1"],
        ["train.sink_size=7"],
        ["train.sink_size=-1"],
        ["train.sink_size=20", "train.mechanism=soft"],
        ["train.sink_size=20", "train.feed=stream"],
    ],
    ids=["1", "7", "an epoch", "soft", "stream"],
)
def test_run_does_not_depend_on_the_sinks(
    overrides: list[str], reference: Path, tiny: Compose, tmp_path: Path
) -> None:
    """L-06, S-02..S-08: losses, weights and inverses, bit for bit."""
    run(tiny(*THOR, *overrides), tmp_path)
    assert outcome.metrics(tmp_path) == outcome.metrics(reference)
    assert outcome.checkpoints(tmp_path) == outcome.checkpoints(reference) == [6, 12, 18, 22]
    for step in outcome.checkpoints(reference):
        outcome.assert_equal_arrays(outcome.arrays(tmp_path, step), outcome.arrays(reference, step))


def test_resumed_run_equals_an_unbroken_one(reference: Path, tiny: Compose, tmp_path: Path) -> None:
    """Resumed after step 6, between two refreshes: the inverses come from the checkpoint."""
    run_dir = shutil.copytree(reference, tmp_path / "run")
    (run_dir / "summary.json").unlink()
    for step in (12, 18, 22):
        shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))
    summary = run(tiny(*THOR, "train.sink_size=7", f"train.resume={run_dir}"))
    assert summary.resumed_from == {"run": str(run_dir), "step": 6}
    assert outcome.metrics(run_dir) == outcome.metrics(reference)
    outcome.assert_equal_arrays(outcome.arrays(run_dir), outcome.arrays(reference))


SINKS = (["train.sink_size=7"], ["train.sink_size=-1"])


def test_planned_shardings_have_the_same_bits_in_every_sink(tiny: Compose, tmp_path: Path) -> None:
    auto = [*NETWORK, "parallel.mode=auto", "parallel.devices=2", "parallel.reproducible=layout"]
    require_same_bits(tiny, tmp_path, auto, SINKS)


@pytest.mark.usefixtures("unoptimized_programs")
def test_sharded_and_unsharded_kernels_have_the_same_curvature(
    tiny: Compose, tmp_path: Path
) -> None:
    """Losses within rounding: sums over devices have another order."""
    sharded = [
        *("parallel.mode=semi_auto", "parallel.mesh={data: 2, model: 2}"),
        *("parallel.reproducible=layout", "train.steps=6"),
        "parallel.specs=[{pattern: dense_1/kernel, axes: [null, model]}]",
    ]
    losses = []
    for number, keys in enumerate((["train.steps=6"], sharded)):
        run(tiny(*THOR, *keys), tmp_path / str(number))
        losses.append([row["loss"] for row in outcome.metrics(tmp_path / str(number))])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_emulated_devices_match_the_host_and_exchange_curvature(
    tiny: Compose, tmp_path: Path
) -> None:
    """Two devices on the host, then four emulated ones, whose estimate has the exchange."""
    emulated = ["device=ascend910", "parallel.devices=4", "train.sink_size=5"]
    keys = [*NETWORK, "parallel.mode=data", "train.optimizer.split_indices=[0,1]"]
    first = require_same_bits(tiny, tmp_path, [*keys, "parallel.devices=2"], [emulated])
    assert not (first / "price.json").exists()
    with_thor = json.loads((tmp_path / "0" / "price.json").read_text())
    run(tiny(*keys[:-1], *emulated, "train.steps=2"), tmp_path / "momentum")
    without = json.loads((tmp_path / "momentum" / "price.json").read_text())
    thor, momentum = (price["modelled_communication"] for price in (with_thor, without))
    inverses = {path: array for path, array in outcome.arrays(first).items() if "inverses" in path}
    assert thor["count"] == momentum["count"] + 3
    exchanged = thor["nbytes"] - momentum["nbytes"]
    assert exchanged == sum(array.nbytes for array in inverses.values())
    assert with_thor["modelled_step_ms"] > without["modelled_step_ms"]


def test_state_has_the_inverses_of_every_kernel(reference: Path) -> None:
    """conv 9 -> 3, and dense 192 -> 8 -> 10, split into blocks of at most 128."""
    arrays = outcome.arrays(reference)
    shapes = {path: array.shape for path, array in arrays.items() if "inverses" in path}
    assert sorted(shapes.values()) == sorted(
        [(1, 9, 9), (1, 3, 3), (2, 96, 96), (1, 8, 8), (1, 8, 8), (1, 10, 10)]
    )


def test_split_index_beyond_the_layers_is_refused(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        run(tiny(*THOR, "train.optimizer.split_indices=[1,3]"), tmp_path / "run")
    problem = "train.optimizer.split_indices = [1, 3]: must be below 3, the number of dense and"
    assert problem in str(caught.value)


@pytest.mark.usefixtures("unoptimized_programs")
def test_microbatches_have_the_curvature_of_their_batch(tiny: Compose, tmp_path: Path) -> None:
    """The same sum, in another order of additions."""
    losses = []
    for microbatches in (1, 4):
        folder = tmp_path / str(microbatches)
        run(tiny(*THOR, "train.steps=6", f"train.accumulate_steps={microbatches}"), folder)
        losses.append([row["loss"] for row in outcome.metrics(folder)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
