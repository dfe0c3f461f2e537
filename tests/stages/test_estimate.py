"""A run on an emulated device is priced first: reported, written down, and refused if too big."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from pipeline import load_recipe
from pipeline.backends.base import StepToPrice
from pipeline.config.checks import make_batching
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import count_total_steps
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.stages.estimate import describe_step, estimate_cost
from pipeline.stages.record.run_directory import RunFolder
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]

PRICED = ("device=ascend910", "stages=[data,build,compile]")


def eight_devices(batch: int) -> tuple[str, ...]:
    return "parallel.mode=data", "parallel.devices=8", f"train.batch_size={batch}"


def proposal(recipe: Recipe) -> StepToPrice:
    reporter = Reporter()
    dataset = load_data(recipe, reporter)
    return describe_step(recipe, dataset, build(recipe, dataset, reporter))


@pytest.mark.slow
def test_proposal_has_the_shapes_of_the_run(tiny: Compose) -> None:
    made = proposal(tiny("train.sink_size=20"))
    images, labels = made.batch(8)
    assert (images.shape, str(images.dtype)) == ((8, 32, 32, 1), "float32")
    assert (labels.shape, str(labels.dtype)) == ((8,), "int32")
    assert (made.batch_size, made.device_batch, made.devices) == (16, 16, 1)
    assert (made.sink, made.sink_steps, made.steps_per_epoch, made.total_steps) == (True, 20, 6, 45)
    state, loss = jax.eval_shape(made.step, made.state, made.batch(8))
    assert loss.shape == ()
    assert jax.tree.structure(state) == jax.tree.structure(made.state)


def test_present_device_is_not_estimated(tiny: Compose, tmp_path: Path) -> None:
    recipe, reporter = tiny(), Reporter()
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    assert (
        estimate_cost(
            recipe,
            dataset,
            built,
            recipe.device.open(recipe.parallel),
            RunFolder(tmp_path),
            reporter,
        )
        is None
    )
    assert list(tmp_path.iterdir()) == []


MODES = {
    "a sink": (["train.sink_size=20"], "loop_sink", 20),
    "a sink per epoch": (["train.sink_size=-1"], "loop_sink", 6),
    "no sink": (["train.sink=false", "train.sink_size=7"], "graph_sink", 7),
    "eager": (["train.mode=eager", "train.sink_size=7"], "op_by_op", 7),
    "as the device says": (["device.mode=op_by_op", "train.sink_size=7"], "op_by_op", 7),
}


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "mode", "size"), MODES.values(), ids=MODES.keys())
def test_launch_mode_follows_the_recipe(
    overrides: list[str], mode: str, size: int, tiny: Compose, tmp_path: Path
) -> None:
    modelled = run(tiny(*PRICED, *overrides), tmp_path / "run").modelled
    assert (modelled["mode"], modelled["sink_size"]) == (mode, size)
    assert modelled["step_ms"] == modelled["modes"][mode]["step_ms"]


@pytest.mark.slow
def test_priced_run_is_not_compiled_and_writes_its_files(
    tiny: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("pipeline.stages.runner.programs.compile_programs", never)
    summary = run(tiny(*PRICED, *eight_devices(16)), tmp_path / "run")
    modelled = outcome.read_summary(tmp_path / "run")["modelled"]
    assert (summary.status, "compile_s" in summary.time) == ("done", False)
    assert modelled["device"] == "8 x Ascend 910A"
    low, high = modelled["interval_ms"]
    assert max(low, modelled["step_ms"]) < high
    assert modelled["samples_per_s"] == pytest.approx(16e3 / modelled["step_ms"])
    assert (modelled["batch_size"], modelled["batch_per_device"]) == (16, 2)
    assert (modelled["steps"], modelled["steps_per_pass"]) == (45, 6)
    assert modelled["run_s"] == pytest.approx(45 * modelled["step_ms"] / 1e3)
    assert modelled["memory"]["verdict"] == "fits"

    price = json.loads((tmp_path / "run" / "price.json").read_text())
    assert price["modelled_step_ms"] == modelled["step_ms"]
    assert price["recipe"] == "lenet5_digits"
    assert price["question"]["devices"] == 8
    for key in ("batch_size", "batch_per_device", "steps", "steps_per_pass"):
        assert price[key] == modelled[key]
    assert price["modelled_samples_per_s"] == modelled["samples_per_s"]
    assert price["modelled_run_s"] == modelled["run_s"]
    assert price["modelled_communication"]["count"] == 1
    kinds = [change["kind"] for change in price["changes"]]
    assert sorted(kinds) == ["auto_tune", "batch", "buckets", "precision", "sink", "workers"]
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "run" / "timeline.html").read_text()
    output = capsys.readouterr().out
    assert "8 x Ascend 910A, batch 16 (2 a device), O2, loop_sink of 200 steps" in output
    assert "  train.batch_size=32  (4 samples a device instead of 2)" in output
    assert "modelled   price.json, trace.json, timeline.html in " in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "devices", "steps"),
    [
        ("train.epochs=90", 1, 90 * 1562),
        ("train.epochs=90", 8, 90 * 195),
        ("train.steps=45", 8, 45),
        ("train.epochs=90", 1024, 90),
    ],
)
def test_steps_count_batches_of_all_devices(length: str, devices: int, steps: int) -> None:
    """Of CIFAR-10, 8 devices with batches of 32 have 195 steps an epoch, as the documents say."""
    each = ["parallel.mode=data", "parallel.batch_per_device=32", f"parallel.devices={devices}"]
    recipe = load_recipe("resnet50_cifar10", [length, *each])
    steps_per_epoch = make_batching(recipe, 50_000).steps_per_epoch
    assert recipe.train.batch_size == 32 * devices
    assert count_total_steps(recipe.train, steps_per_epoch) == steps


@pytest.mark.slow
def test_advice_uses_batch_per_device_if_set(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny(*PRICED, *eight_devices(16), "parallel.batch_per_device=2"), tmp_path / "run")
    price = json.loads((tmp_path / "run" / "price.json").read_text())
    overrides = [one["override"] for one in price["changes"] if one["kind"] == "batch"]
    assert overrides == ["parallel.batch_per_device=4"]


@pytest.mark.slow
def test_parameter_shardings_are_priced_with_data_parallelism(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny(*PRICED, *eight_devices(16)), tmp_path / "data")
    assert "mode data" not in capsys.readouterr().out
    run(
        tiny(*PRICED, *eight_devices(16), "parallel.mode=auto", "parallel.reproducible=layout"),
        tmp_path / "auto",
    )
    said = capsys.readouterr().out
    assert "the estimate is that of mode data on 8 devices" in said
    assert "with these shardings on" in said
    assert "ms by the planner's rates" in said


@pytest.mark.slow
def test_devices_of_the_model_axis_do_not_share_a_batch(tiny: Compose, tmp_path: Path) -> None:
    """A batch of 30 fits a mesh 1x4, whose devices all have 30 samples."""
    specs = "parallel.specs=[{pattern: dense_0/kernel, axes: [null, model]}]"
    network = ("model=mlp", "model.hidden=[16]", specs)
    mode = (*PRICED, *network, "parallel.mode=semi_auto", "parallel.reproducible=layout")
    model = (*mode, "parallel.mesh={data: 1, model: 4}")
    assert run(tiny(*model, "train.batch_size=30"), tmp_path / "30").modelled["batch_size"] == 30
    assert proposal(tiny(*model, "train.batch_size=30")).devices == 1
    assert proposal(tiny(*model, "train.batch_size=32")).devices == 4
    both = (*mode, "parallel.mesh={data: 2, model: 2}")
    assert proposal(tiny(*both, "train.batch_size=30")).devices == 2


@pytest.mark.slow
def test_device_price_differs_only_by_its_all_reduces(tiny: Compose, tmp_path: Path) -> None:
    """Eight devices with 8 samples each compute what one does; the step is longer."""
    alone = run(tiny(*PRICED, "train.batch_size=8"), tmp_path / "alone").modelled
    shared = run(tiny(*PRICED, *eight_devices(64)), tmp_path / "shared").modelled
    one, eight = (each["shares"]["cube"] * each["step_ms"] for each in (alone, shared))
    assert eight == pytest.approx(one)
    assert shared["step_ms"] > alone["step_ms"]
    assert alone["memory"]["verdict"] == shared["memory"]["verdict"] == "fits"


@pytest.mark.slow
def test_sharded_state_takes_less_memory(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and momentum of an eighth on each of 8 devices, but for a few bytes."""
    used = {}
    wide = ("model=mlp", "model.hidden=[2048,2048]", "optimizer=momentum", *eight_devices(16))
    for mode in ("data", "fsdp"):
        run(tiny(*PRICED, *wide, f"parallel.mode={mode}"), tmp_path / mode)
        price = json.loads((tmp_path / mode / "price.json").read_text())
        used[mode] = price["memory"]["pools"]["parameters"]["used_bytes"]
    assert used["data"] / 8 < used["fsdp"] < used["data"] / 7.9
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"ms more to gather [\d.]+ MB of parameters in each step", text)


@pytest.mark.slow
def test_run_without_enough_memory_fails_before_training(tiny: Compose, tmp_path: Path) -> None:
    small = [f"device.{name}.value=1e-3" for name in ("hbm_gib", "feature_map_memory_gib")]
    with pytest.raises(RunError) as caught:
        run(tiny("device=ascend910", *small), tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("Device(id:0) memory isn't enough: kernel name: ")
    assert "The largest tensors:" in message
    assert "(requested: 16)" in message
    summary = outcome.read_summary(tmp_path / "run")
    assert (summary["status"], summary["exit_status"], summary["steps"]) == ("failed", 1, 0)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


REFUSED = {
    "queue": (
        ["device.data_queue_gib.value=5e-5"],
        "train.batch_size = 16: makes a batch of 6.11e-05 GiB, more than the 5e-05 GiB of the",
    ),
    "queue of several": (
        [
            *eight_devices(16),
            "device.data_queue_gib.value=5e-6",
        ],
        "train.batch_size = 16, 2 on each of 8 devices: makes a batch of 7.64e-06 GiB, more than",
    ),
    "microbatches": (
        [
            *eight_devices(16),
            "train.accumulate_steps=4",
            "parallel.reproducible=layout",
        ],
        "train.batch_size = 16: must be a multiple of the 8 devices times 4 microbatches",
    ),
    "split points": (
        [*eight_devices(16), "device.all_reduce_fusion=[4,99]"],
        "device.all_reduce_fusion = [4, 99]: must ascend and stay below 8,",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_device_setting_is_a_wrong_recipe(
    overrides: list[str], message: str, tiny: Compose, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        run(tiny(*PRICED, *overrides), tmp_path / "run")
    (problem,) = caught.value.problems
    assert problem.startswith(message)


def odd(kind: str) -> Callable[..., Any]:
    """A step that no model of the device knows what to do with."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        images = batch[0].reshape(len(batch[0]), -1)
        if kind == "loop":
            return state, jax.lax.while_loop(lambda x: (x > 1).any(), lambda x: x / 2, images)
        return state, jax.numpy.linalg.cholesky(images @ images.T)

    return step


ODD = {
    "loop": ([], "its number of iterations isn't constant; write it as jax.lax.scan"),
    "cholesky": (["device.strict=true"], "cholesky: not supported; strict = false estimates"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
def test_unpriceable_step_fails_the_run(
    kind: str, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, message = ODD[kind]
    monkeypatch.setattr("pipeline.stages.estimate.make_estimated_step", lambda *_: odd(kind))
    with pytest.raises(RunError, match=message):
        run(tiny(*PRICED, *overrides), tmp_path / "run")
    assert outcome.read_summary(tmp_path / "run")["exit_status"] == 1
