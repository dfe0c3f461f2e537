"""The same bits on 1, 2, 4 and 8 devices: losses, weights, statistics and evaluations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.backends.graph.hlo_program import read_collectives
from pipeline.checkpoint.restore import read_saved
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.training.parallel.state_sharing import find_sharded_dimension
from tests import outcome
from tests.conftest import compose_tiny
from tests.layouts import matrix
from tests.whole_run import run

pytestmark = pytest.mark.usefixtures("optimized_programs_of_module")

Compose = Callable[..., Recipe]
MLP = ("model=mlp", "model.hidden=[12]", "train.optimizer.lr=0.05")
POOLED = (
    *("model=layers", "train.optimizer.lr=0.05"),
    "model.layers=[{name: avg_pool, kernel: 7}, flatten, {name: dense, features: 12}, relu,"
    "{name: dense, features: $classes}]",
)
SHORT = ("train.steps=20", "train.sink_size=7", "eval.every_steps=10", "parallel.mode=data")
EVERYTHING = (
    "model=layers",
    "model.layers=[{name: conv, features: 6, kernel: 3, stride: 2}, batch_norm, relu, flatten,"
    "{name: dropout, rate: 0.3}, {name: dense, features: $classes}]",
    "train.accumulate_steps=2",
    "train.ema.decay=0.9",
    "train.loss_scale={name: dynamic, init: 128.0, factor: 2.0, window: 6}",
    "optimizer=adam",
    "train.optimizer.lr=0.01",
    "train.clip.norm=0.5",
    "checkpoint.every_steps=10",
    *SHORT,
)
"""Batch norm, dropout, accumulation, a loss scale, an average of weights, Adam and clipping."""


def train(
    tiny: Compose, folder: Path, overrides: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the records of a run, and the arrays of its last checkpoint by path."""
    assert run(tiny(*overrides), folder).status == "done"
    return read(folder)


def read(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Read the records of a run, and the arrays of its last checkpoint by path."""
    records = [outcome.metrics(folder), outcome.read_lines(folder / "evals.jsonl")]
    return records, dict(read_saved(folder).arrays)


def differences(one: Any, other: Any) -> list[str]:
    """What of two results is not the same bits: the records, and arrays by path."""
    found = ["records"] if one[0] != other[0] else []
    paths = sorted(one[1].keys() | other[1].keys())
    bits = (
        [result[1][path].tobytes() if path in result[1] else None for path in paths]
        for result in (one, other)
    )
    pairs = zip(paths, *bits, strict=True)
    return found + [path for path, ours, theirs in pairs if ours != theirs]


@pytest.mark.slow
def test_one_and_four_devices_have_the_same_bits(tiny: Compose, tmp_path: Path) -> None:
    one, four = (
        train(tiny, tmp_path / str(devices), [*MLP, *SHORT, f"parallel.devices={devices}"])
        for devices in (1, 4)
    )
    assert differences(one, four) == []


@pytest.mark.slow
def test_shards_of_one_sample_have_the_same_bits(tiny: Compose, tmp_path: Path) -> None:
    """The norm of the gradients reads a sum of 16 terms here, of which devices add parts there."""
    fixed = [*MLP, *SHORT, "train.batch_size=16", "parallel.shards=16", "optimizer=lion"]
    one, two = (
        train(tiny, tmp_path / str(devices), [*fixed, f"parallel.devices={devices}"])
        for devices in (1, 2)
    )
    assert differences(one, two) == []


@pytest.fixture(scope="module")
def single(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run with everything on one device."""
    compose = partial(compose_tiny, cache)
    folder = tmp_path_factory.mktemp("single")
    return train(compose, folder, [*EVERYTHING, "parallel.devices=1"])


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "feed"), [(2, "resident"), (4, "stream"), (8, "resident")])
def test_any_number_of_devices_has_the_same_bits(
    tiny: Compose, tmp_path: Path, single: Any, devices: int, feed: str
) -> None:
    """In any sink and from any loader."""
    more = [f"parallel.devices={devices}", f"train.feed={feed}", f"train.sink_size={devices + 1}"]
    assert differences(single, train(tiny, tmp_path, [*EVERYTHING, *more])) == []


LAYERS_OF_THOR = (
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 4}, relu, global_avg_pool,"
    "{name: dense, features: $classes}]",
)
CURVED = (
    *(*SHORT, "checkpoint.every_steps=10", "optimizer=thor"),
    *("train.optimizer.frequency=6", "train.accumulate_steps=2"),
    *LAYERS_OF_THOR,
)


PHASES = (
    "model=layers",
    "model.layers=[{name: conv, features: 6, kernel: 3, stride: 2}, batch_norm, relu, flatten,"
    "{name: dense, features: $classes}]",
    *("train.freeze=[batch_norm_*]", "train.optimizer.lr=0.01", "train.steps=12"),
    *("train.unfreeze=[{pattern: batch_norm_*, after_steps: 5}]", "parallel.mode=data"),
)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "nadam"])
def test_unfrozen_parameters_have_the_same_bits(
    tiny: Compose, tmp_path: Path, optimizer: str
) -> None:
    """Two divisions by one number are rewritten otherwise than by two equal ones."""
    one, two = (
        train(
            tiny,
            tmp_path / str(devices),
            [*PHASES, f"optimizer={optimizer}", f"parallel.devices={devices}"],
        )
        for devices in (1, 2)
    )
    assert differences(one, two) == []


GPT = (
    *("model=gpt2", "model.features=16", "model.hidden=32", "model.heads=2", "model.blocks=1"),
    *("dataset=text", "dataset.length=16", "optimizer=sgd", "schedule=constant"),
    *("train.optimizer.lr=0.1", "train.clip.norm=1.0", "train.batch_size=16", "train.steps=12"),
    *("eval.every_steps=6", "monitor.tensorboard=false", "monitor.sample_images=0"),
)


def train_gpt(cache: Path, folder: Path, *overrides: str) -> Any:
    """Train a small GPT with clipped gradients, and read its results."""
    recipe = load_recipe("gpt_text", [*GPT, *overrides, f"cache.root={cache}"])
    assert run(recipe, folder).status == "done"
    return read(folder)


@pytest.mark.slow
def test_clipped_gradients_of_attention_have_the_same_bits(cache: Path, tmp_path: Path) -> None:
    """A sum of products with dropout's factor is rewritten if the product is read twice."""
    one, two = (
        train_gpt(
            cache, tmp_path / str(devices), "parallel.mode=data", f"parallel.devices={devices}"
        )
        for devices in (1, 2)
    )
    assert differences(one, two) == []


@pytest.mark.slow
def test_streamed_evaluations_have_the_same_bits(cache: Path, tmp_path: Path) -> None:
    resident, streamed = (
        train_gpt(cache, tmp_path / feed, f"train.feed={feed}") for feed in ("resident", "stream")
    )
    assert differences(resident, streamed) == []


ROWS = tuple(row for row in matrix.list_feature_rows() if row.name != "privacy")


@pytest.mark.slow
@pytest.mark.parametrize("row", random.Random(0).sample(ROWS, 2), ids=lambda row: row.name)
def test_drawn_row_of_the_matrix_has_the_same_bits(
    cache: Path, tmp_path: Path, row: matrix.Row
) -> None:
    """`python -m tests.layouts.matrix --all` compares all rows in all cells."""
    assert list(matrix.compare_row(row, matrix.DRAWN, tmp_path, cache)) == []


@pytest.fixture(scope="module")
def curved(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with THOR on one device."""
    compose = partial(compose_tiny, cache)
    return train(compose, tmp_path_factory.mktemp("curved"), [*CURVED, "parallel.devices=1"])


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["[]", "[0]"], ids=["one group", "two groups"])
def test_curvature_has_the_same_bits(
    tiny: Compose, tmp_path: Path, curved: Any, groups: str
) -> None:
    """L-06: THOR's A and G are those of the whole batch, exchanged in groups or at once."""
    four = [f"train.optimizer.split_indices={groups}", "parallel.devices=4", "train.sink_size=5"]
    assert differences(curved, train(tiny, tmp_path, [*CURVED, *four])) == []


@pytest.mark.slow
@pytest.mark.usefixtures("unoptimized_programs")
def test_sharded_curvature_matches_the_complete_batch(tiny: Compose, tmp_path: Path) -> None:
    """Inverses after a refresh at step 1, and losses of the steps that use them."""
    length = ("train.steps=3", "checkpoint.every_steps=3")
    fixed = (*SHORT[:-1], *LAYERS_OF_THOR, "optimizer=thor", *length)
    whole = train(tiny, tmp_path / "whole", fixed)
    for number, how in enumerate(
        (["parallel.devices=4"], ["parallel.devices=2", "parallel.reproducible=layout"])
    ):
        spread = train(tiny, tmp_path / str(number), [*fixed, "parallel.mode=data", *how])
        inverses = [path for path in whole[1] if "inverses" in path]
        assert len(inverses) == 4
        for path in inverses:
            largest = np.abs(whole[1][path]).max()
            np.testing.assert_allclose(spread[1][path], whole[1][path], rtol=0, atol=1e-4 * largest)
        ours, theirs = ([row["loss"] for row in rows[0]] for rows, _ in (spread, whole))
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_run_continues_on_other_devices(tiny: Compose, tmp_path: Path, single: Any) -> None:
    """Stopped on two devices, resumed on eight: as one that was never stopped, on one."""
    run(tiny(*EVERYTHING, "parallel.devices=2", "train.end_step=10"), tmp_path)
    resumed = run(tiny(*EVERYTHING, "parallel.devices=8", f"train.resume={tmp_path}"))
    assert resumed.status == "done"
    assert differences(single, read(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("unoptimized_programs")
def test_ignored_labels_are_counted_over_the_complete_batch(tiny: Compose, tmp_path: Path) -> None:
    """The mean is over the valid labels of all shards, not of each."""
    fixed = (*MLP, *SHORT, "dataset.ignore_index=3")
    sharded = train(tiny, tmp_path / "shards", [*fixed, "parallel.devices=2"])
    whole = train(tiny, tmp_path / "whole", [*fixed[:-2], fixed[-1]])
    ours, theirs = (records[0][0]["loss"] for records, _ in (sharded, whole))
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
def test_added_gradients_are_larger_by_the_number_of_devices(tiny: Compose, tmp_path: Path) -> None:
    """X-03: `mirror_mean` false adds the gradients of devices that averages would divide."""
    fixed = (*MLP, *SHORT, "parallel.devices=4")
    mean = train(tiny, tmp_path / "mean", fixed)[0][0][0]
    added = train(tiny, tmp_path / "sum", [*fixed, "parallel.mirror_mean=false"])[0][0][0]
    assert added["loss"] == mean["loss"]
    assert added["grad_norm"] == pytest.approx(4 * mean["grad_norm"], rel=1e-6)


@pytest.mark.slow
def test_layout_sums_are_close_to_exact_sums(tiny: Compose, tmp_path: Path) -> None:
    fixed = (*MLP, *SHORT, "parallel.devices=4")
    exact = train(tiny, tmp_path / "exact", fixed)[0][0]
    layout = train(tiny, tmp_path / "layout", [*fixed, "parallel.reproducible=layout"])[0][0]
    ours, theirs = ([row["loss"] for row in rows] for rows in (exact, layout))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.medium
def test_missing_devices_are_refused(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny(*MLP, *SHORT, "device=gpu", "parallel.devices=2", "train.precision=O0")
    with pytest.raises(RunError, match=r"parallel.devices = 2: 2 devices are needed, and JAX sees"):
        run(recipe, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("unoptimized_programs")
def test_synchronised_batch_norm_matches_the_complete_batch(tiny: Compose, tmp_path: Path) -> None:
    """Statistics, losses and gradients of four devices are those of one that has the batch."""
    layers = (
        "model=layers",
        "model.layers=[{name: conv, features: 6, kernel: 3, stride: 2}, batch_norm, relu, flatten,"
        "{name: dense, features: $classes}]",
        "checkpoint.every_steps=10",
    )
    synced = ("parallel.devices=4", "parallel.reproducible=layout", "parallel.sync_batch_norm=true")
    whole = train(tiny, tmp_path / "whole", [*layers, *SHORT[:-1]])
    spread = train(tiny, tmp_path / "spread", [*layers, *SHORT, *synced])
    for path, array in whole[1].items():
        np.testing.assert_allclose(spread[1][path], array, rtol=2e-3, atol=2e-5, err_msg=path)
    ours, theirs = ([row["grad_norm"] for row in rows[0][:5]] for rows, _ in (spread, whole))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("unoptimized_programs")
def test_sharded_parameters_train_as_on_one_device(tiny: Compose, tmp_path: Path) -> None:
    """Two layers sharded along a second axis, as Megatron shards them, and resumed halfway."""
    sharding = (
        "parallel.mode=semi_auto",
        "parallel.reproducible=layout",
        "parallel.mesh={data: 2, model: 4}",
        "parallel.specs=[{pattern: dense_0/kernel, axes: [null, model]},"
        "{pattern: dense_1/kernel, axes: [model, null]}]",
        "parallel.constraints=[{pattern: dense_0, axes: [data, model]}]",
    )
    momentum = ("optimizer=momentum", "train.ema.decay=0.9", "checkpoint.every_steps=10")
    whole = train(tiny, tmp_path / "whole", [*MLP, *SHORT[:-1], *momentum])
    sharded = [*MLP, *SHORT[:-1], *momentum, *sharding]
    run(tiny(*sharded, "train.end_step=10"), tmp_path / "shared")
    resumed = run(tiny(*sharded, f"train.resume={tmp_path / 'shared'}"))
    assert resumed.status == "done"
    shared = read(tmp_path / "shared")
    for path, array in whole[1].items():
        np.testing.assert_allclose(shared[1][path], array, rtol=1e-3, atol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("sink", [1, 7, 20])
def test_fsdp_has_the_bits_of_data_parallelism(
    tiny: Compose, tmp_path: Path, single: Any, sink: int
) -> None:
    """At sinks of 1 step, 7 and all."""
    shared = ("parallel.mode=fsdp", "parallel.devices=8", f"train.sink_size={sink}")
    assert differences(single, train(tiny, tmp_path, [*EVERYTHING, *shared])) == []


LAMB = (
    *(*MLP, *SHORT, "optimizer=lamb", "train.optimizer.lr=0.01", "train.clip.norm=0.5"),
    *("train.ema.decay=0.9", "checkpoint.every_steps=5"),
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["layout", "exact"])
def test_fsdp_norms_have_the_bits_of_data_parallelism(
    tiny: Compose, tmp_path: Path, how: str
) -> None:
    """LAMB scales by norms of whole arrays of the state; 4 devices can't share 10 biases."""
    fixed = [*LAMB, "parallel.devices=4", f"parallel.reproducible={how}"]
    data = train(tiny, tmp_path / "data", fixed)
    shared = train(tiny, tmp_path / "shared", [*fixed, "parallel.mode=fsdp"])
    assert differences(data, shared) == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", matrix.OFTEN)
def test_matrices_of_an_optimizer_have_the_same_bits(
    tiny: Compose, tmp_path: Path, optimizer: str
) -> None:
    """Shampoo's blocks and SOAP's bases, whole on each device or shared, in sinks of all, 1, 7.

    Of 16 pixels: a basis of 784 takes minutes.
    """
    fixed = [*POOLED, *SHORT, f"optimizer={optimizer}", *matrix.OFTEN[optimizer]]
    one, *others = (
        train(
            tiny,
            tmp_path / f"{mode}{devices}",
            [*fixed, f"parallel.mode={mode}", f"parallel.devices={devices}", sink],
        )
        for mode, devices, sink in (
            ("data", 1, "train.sink_size=20"),
            ("data", 4, "train.sink_size=1"),
            ("fsdp", 4, "train.sink_size=7"),
        )
    )
    assert [differences(one, other) for other in others] == [[], []]
    matrices = [array for path, array in one[1].items() if "roots" in path or "bases" in path]
    assert len(matrices) == 4
    assert all(np.abs(array).max() > 0 for array in matrices)


@pytest.mark.slow
def test_run_continues_with_and_without_a_shared_state(tiny: Compose, tmp_path: Path) -> None:
    """Data parallel, shared, on one device without a mode, and shared by others."""
    whole = train(tiny, tmp_path / "whole", [*LAMB, "parallel.devices=4"])
    folder = tmp_path / "part"
    layouts = (("data", 4), ("fsdp", 8), ("none", 1), ("fsdp", 4))
    for number, (mode, devices) in enumerate(layouts, 1):
        layout = [f"parallel.mode={mode}", f"parallel.devices={devices}"]
        end = [f"train.end_step={5 * number}"] if number < len(layouts) else []
        if number == 1:
            run(tiny(*LAMB, *layout, *end), folder)
        else:
            run(tiny(*LAMB, *layout, *end, f"train.resume={folder}"))
    # Each end has an evaluation.
    assert outcome.metrics(folder) == whole[0][0]
    assert differences(whole, (whole[0], read(folder)[1])) == []
    run(tiny(*LAMB, "parallel.mode=none", "train.end_step=5"), tmp_path / "none")
    other = [*LAMB, "parallel.mode=fsdp", f"train.resume={tmp_path / 'none'}"]
    with pytest.raises(RecipeError, match=r"parallel.mode = fsdp: was none"):
        run(tiny(*other))


@pytest.mark.slow
def test_fsdp_devices_have_parts_of_the_state(tiny: Compose) -> None:
    """8 devices have at most a seventh each; a step gathers weights and gradients, nothing else."""
    network = ("model=mlp", "model.hidden=[64]")
    recipe = tiny(*network, "parallel.mode=fsdp", "parallel.devices=8", "optimizer=adam")
    reporter = Reporter()
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    backend = recipe.device.open(recipe.parallel)
    executable = compile_programs(recipe, dataset, built, backend, reporter)
    state = executable.init()
    state, _ = executable.run(state, 0, 2, "loop")
    leaves = jax.tree.leaves((state.params, state.opt_state))
    whole_bytes = sum(leaf.nbytes for leaf in leaves)
    for device in range(8):
        part_bytes = sum(leaf.addressable_shards[device].data.nbytes for leaf in leaves)
        assert part_bytes <= whole_bytes / 7
    entry = executable.program_text.partition("\n")[0]
    kernel = built.state.params["dense_0"]["kernel"]
    rows, columns = kernel.shape
    assert f"f32[{rows // 8},{columns}]" in entry
    assert f"f32[{rows},{columns}]" not in entry
    shared_bytes = sum(
        4 * leaf.size
        for leaf in jax.tree.leaves(built.state.params)
        if find_sharded_dimension(leaf.shape, 8) is not None
    )
    gathered = [op for op in read_collectives(executable.program_text) if op.kind == "all_gather"]
    gathered_bytes = sum(op.nbytes for op in gathered)
    # The sum of the gradients also has the loss, and is padded.
    assert shared_bytes < gathered_bytes - built.parameter_bytes < shared_bytes + 64
