"""Recipes for several devices that can't be: one message each."""

from __future__ import annotations

import pytest

from pipeline import load_recipe
from pipeline.config.checks import fit_to_processes
from pipeline.core.errors import RecipeError
from tests.slow_cases import mark_slow_except

DATA = "parallel.mode=data"
MEMORY = "train.memory=auto"
REFUSED = {
    "memory of a shared state": (
        [MEMORY, "parallel.mode=fsdp"],
        "parallel.mode = fsdp: must be none or data with train.memory, which doesn't divide the",
    ),
    "memory of a plan": ([MEMORY, "parallel.mode=auto"], "parallel.mode = auto: must be none or"),
    "memory of a layout": (
        [MEMORY, DATA, "parallel.reproducible=layout"],
        "parallel.reproducible = layout: must be exact with train.memory, or the bits would",
    ),
    "memory of devices": (
        [MEMORY, DATA, "parallel.devices=2"],
        "parallel.devices = 2: must be 1 with train.memory",
    ),
    "emulated memory": (
        [MEMORY, "device=ascend910"],
        "device = ascend: must be cpu or gpu with train.memory; its memory is emulated",
    ),
    "memory of processes": (
        [MEMORY, "launch=local"],
        "launch = local: must be none with train.memory, which is of one process",
    ),
    "memory in eager mode": (
        [MEMORY, "train.mode=eager"],
        "train.mode = eager: must be graph with train.memory = auto",
    ),
    "memory of the hardest samples": (
        ["train.memory=4GB", "train.loss.hardest_share=0.5"],
        "train.loss.hardest_share = 0.5: must be 1.0 with train.memory = 4GB; the hardest",
    ),
    "memory of a part of the data": (
        [MEMORY, "dataset.train.num_shards=2", "dataset.train.shard_id=0"],
        "dataset.train.num_shards = 2: must be null with train.memory = auto, which divides every",
    ),
    "counters": (
        ["profile.mode=on", "profile.aic_metrics=L2Cache"],
        "profile.aic_metrics = L2Cache: no device here counts these; must be PipeUtilization",
    ),
    "no mode": (["parallel.devices=2"], "parallel.devices = 2: needs parallel.mode=data; it is"),
    "mesh": (
        [DATA, "parallel.devices=4", "parallel.mesh={data: 2}"],
        "parallel.devices = 4: must be 2, the devices of parallel.mesh (2 x 1), or null",
    ),
    "devices": (
        [DATA, "parallel.devices=3"],
        "parallel.devices = 3: must divide parallel.shards = 8; give other devices or shards",
    ),
    "shards": ([DATA, "parallel.shards=6"], "parallel.shards = 6: must be a power of two"),
    "batch": (
        [DATA, "train.batch_size=12", "parallel.devices=8"],
        "train.batch_size = 12: must have 8 shards of equal size; give a multiple of 8",
    ),
    "microbatches": (
        [DATA, "train.accumulate_steps=8"],
        "train.batch_size = 32: must have 8 shards of 8 microbatches of equal size",
    ),
    "evaluation": (
        [DATA, "dataset.eval.batch_size=10"],
        "dataset.eval.batch_size = 10: must have 8 shards of equal size",
    ),
    "layout": (
        [DATA, "parallel.devices=5", "parallel.reproducible=layout"],
        "train.batch_size = 32: must be a multiple of the 5 devices",
    ),
    "eager": ([DATA, "train.mode=eager"], "train.mode = eager: must be graph with parallel.mode"),
    "hardest": (
        [DATA, "train.loss.hardest_share=0.5"],
        "train.loss.hardest_share = 0.5: must be 1.0 with parallel.mode = data",
    ),
    "dealt twice": (
        [DATA, "dataset.train.num_shards=2", "dataset.train.shard_id=0"],
        "dataset.train.num_shards = 2: must be null with parallel.mode = data",
    ),
    "shards without devices": (
        ["parallel.shards=4"],
        "parallel.shards = 4: needs parallel.mode=data; it is none",
    ),
    "shards of a layout": (
        [DATA, "parallel.reproducible=layout", "parallel.shards=4"],
        "parallel.shards = 4: must be null with parallel.reproducible = layout, where each device",
    ),
    "shards of a sharded program": (
        ["parallel.mode=semi_auto", "parallel.reproducible=layout", "parallel.shards=4"],
        "parallel.shards = 4: needs parallel.mode=data; it is semi_auto",
    ),
    "a second axis": (
        ["parallel.mode=fsdp", "parallel.mesh={data: 2, model: 2}"],
        "parallel.mesh.model = 2: must be 1 with parallel.mode=fsdp; semi_auto shards parameters",
    ),
    "shared curvature": (
        ["parallel.mode=fsdp", "optimizer=thor"],
        "train.optimizer = thor: must be another optimizer with parallel.mode = fsdp",
    ),
    "histograms of a shared state": (
        ["parallel.mode=fsdp", "launch=local", "monitor.collect_every=5"],
        "monitor.collect_every = 5: must be null with 2 processes and fsdp",
    ),
    "sum without devices": (
        ["parallel.mirror_mean=false"],
        "parallel.mirror_mean = false: needs parallel.mode=data; it is none",
    ),
    "sum of a sharded program": (
        ["parallel.mode=auto", "parallel.reproducible=layout", "parallel.mirror_mean=false"],
        "parallel.mirror_mean = false: needs parallel.mode=data; it is auto",
    ),
    "specs": (
        [DATA, "parallel.specs=[{pattern: fc, axes: [model]}]"],
        "parallel.specs: needs parallel.mode=semi_auto; it is data",
    ),
    "an axis twice": (
        ["parallel.specs=[{pattern: fc, axes: [model, model]}]"],
        "parallel.specs.0: axes",
    ),
    "processes": (
        ["launch.processes=2"],
        "launch.processes = 2: needs launch=local; it is auto",
    ),
    "restarts": (["launch.restarts=2"], "launch.restarts = 2: needs launch=local; it is auto"),
    "restarts without checkpoints": (
        [DATA, "launch=local", "launch.restarts=2", "stages=[data,build,compile,train]"],
        "launch.restarts = 2: needs the stages train and checkpoint",
    ),
    "least processes": (
        [DATA, "launch=local", "launch.min_processes=3"],
        "launch.min_processes = 3: must be at most launch.processes = 2",
    ),
    "least processes of a layout": (
        [DATA, "launch=local", "launch.min_processes=1", "parallel.reproducible=layout"],
        "launch.min_processes = 1: must be null or equal with parallel.reproducible = layout",
    ),
    "launch": (["launch=local"], "launch = local: needs parallel.mode=data; it is none"),
    "uneven": (
        [DATA, "launch=local", "launch.processes=3", "parallel.devices=4"],
        "parallel.devices = 4: must be a multiple of 3 processes",
    ),
}


@pytest.mark.parametrize("case", mark_slow_except([*REFUSED][::4], REFUSED))
def test_incompatible_device_settings_are_refused(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(RecipeError) as refused:
        load_recipe("lenet5_digits", overrides)
    assert message in str(refused.value)


@pytest.mark.medium
@pytest.mark.parametrize("mode", mark_slow_except(["auto"], ["semi_auto", "auto"]))
def test_default_shards_are_not_reported(mode: str) -> None:
    """`exact` fills them in; it alone is refused."""
    with pytest.raises(RecipeError) as refused:
        load_recipe("lenet5_digits", [f"parallel.mode={mode}", "parallel.reproducible=exact"])
    assert "parallel.reproducible = exact" in str(refused.value)
    assert "shards" not in str(refused.value)
    recipe = load_recipe("lenet5_digits", [f"parallel.mode={mode}"])
    assert recipe.parallel.reproducible == "layout"


def test_batch_per_device_sets_total_batch() -> None:
    recipe = load_recipe(
        "lenet5_digits", [DATA, "parallel.devices=8", "parallel.batch_per_device=32"]
    )
    assert recipe.train.batch_size == 256


@pytest.mark.parametrize(
    ("devices", "batch_size", "shards"),
    [
        (2, 12, 4),
        pytest.param(1, 32, 8, marks=pytest.mark.slow),
        pytest.param(8, 32, 8, marks=pytest.mark.slow),
        pytest.param(1, 7, 1, marks=pytest.mark.slow),
        pytest.param(16, 64, 16, marks=pytest.mark.slow),
    ],
)
def test_recipe_has_its_number_of_shards(devices: int, batch_size: int, shards: int) -> None:
    """So that a run that is resumed on other devices has as many."""
    sizes = [f"parallel.devices={devices}", f"train.batch_size={batch_size}"]
    assert load_recipe("lenet5_digits", [DATA, *sizes]).parallel.shards == shards


@pytest.mark.parametrize(
    ("processes", "overrides", "message"),
    [
        (3, [], "parallel.devices = 3: must divide parallel.shards = 8"),
        pytest.param(
            16,
            ["parallel.mode=data", "parallel.shards=8"],
            "parallel.devices = 16: must divide parallel.shards = 8",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            ["train.batch_size=33"],
            "train.batch_size = 33: must have 2 shards of equal size",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            3,
            ["parallel.reproducible=layout"],
            "train.batch_size = 32: must be a multiple of the 3",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            ["monitor.collect_every=5", "parallel.mode=fsdp"],
            "monitor.collect_every = 5: must",
            marks=pytest.mark.slow,
        ),
        (2, ["device=ascend910"], "device = ascend: is emulated by one process"),
        pytest.param(
            20_000,
            [],
            "parallel.devices = 20000: must be less than or equal to 16384",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_count_as_devices_without_devices_key(
    processes: int, overrides: list[str], message: str
) -> None:
    """Checked again once their number is known."""
    recipe = load_recipe("lenet5_digits", [DATA, *overrides])
    with pytest.raises(RecipeError) as refused:
        fit_to_processes(recipe, processes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "processes", "shards"),
    [
        (["parallel.batch_per_device=3"], 2, 2),
        (["parallel.batch_per_device=4"], 2, 8),
        (["train.batch_size=512"], 16, 16),
    ],
)
def test_default_shards_are_of_the_batch_and_devices_of_all_processes(
    overrides: list[str], processes: int, shards: int
) -> None:
    keys = [DATA, "parallel.mode=data", *overrides]
    known = fit_to_processes(load_recipe("lenet5_digits", keys), processes)
    assert known.parallel.shards == shards
    written = load_recipe("lenet5_digits", [*keys, f"parallel.devices={processes}"])
    assert known == written


def test_shards_of_the_recipe_stay_with_any_number_of_processes() -> None:
    keys = [DATA, "parallel.mode=data", "train.batch_size=512", "parallel.shards=8"]
    recipe = load_recipe("lenet5_digits", keys)
    assert fit_to_processes(recipe, 4).parallel.shards == 8
    with pytest.raises(RecipeError, match=r"devices = 16: must divide parallel.shards = 8"):
        fit_to_processes(recipe, 16)


def test_batch_per_device_is_multiplied_by_processes() -> None:
    recipe = load_recipe("lenet5_digits", [DATA, "parallel.batch_per_device=32"])
    known = fit_to_processes(recipe, 4)
    assert (known.parallel.devices, known.train.batch_size) == (4, 128)
    assert fit_to_processes(recipe, 1) == recipe


def test_batches_of_all_processes_leave_steps_after_the_warmup() -> None:
    """40 epochs of 5 steps, and as many of one batch with a length that was shorter before."""
    warmup = [DATA, "parallel.batch_per_device=32", "train.schedule.warmup_steps=200"]
    with pytest.raises(RecipeError, match="warmup of 200 steps must be shorter than the 200 steps"):
        fit_to_processes(load_recipe("lenet5_digits", warmup), 8)
    short = load_recipe("lenet5_digits", [*warmup, "train.steps=100"])
    assert fit_to_processes(short, 8).train.batch_size == 256
