"""The public API: any step can be priced, or an error says in one sentence why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

from pipeline.backends.ascend import chipset, price
from pipeline.backends.ascend.chip.chip_files import ChipError
from pipeline.backends.ascend.chip.options import MODES, ExecutionConfig, OptionError
from pipeline.backends.ascend.compiler.tasks_from_kernels import UnsupportedError
from pipeline.backends.ascend.pricing.pricing import Pricing
from pipeline.backends.ascend.pricing.traced_step import trace_step
from pipeline.backends.graph.graph import UnboundedLoopError
from pipeline.core.errors import PipelineError, RunError


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def linear_loss(weights: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((x @ weights["w"] - y) ** 2)


def linear_step(weights: Any, batch: Any) -> tuple[Any, Any]:
    loss, gradients = jax.value_and_grad(linear_loss)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


WEIGHTS, BATCH = {"w": float32(1024, 512)}, (float32(2048, 1024), float32(2048, 512))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(32, (3, 3), name="first")(x))
        return nn.Dense(10, name="last")(x.mean((1, 2)))


def flax_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    images, labels = batch

    def loss(params: Any) -> Any:
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def flax_state(images: Any) -> Any:
    net, optimizer = Net(), optax.sgd(0.1, momentum=0.9)

    def start(key: Any, images: Any) -> TrainState:
        variables = net.init(key, images)
        return TrainState.create(apply_fn=net.apply, params=variables, tx=optimizer)

    return jax.eval_shape(start, jax.random.key(0), images)


def test_hand_written_step_is_priced() -> None:
    """One linear layer: a product forward, one for the kernel's gradient; x is no parameter."""
    report = price(linear_step, WEIGHTS, BATCH, sink_size=100)
    products = [cost for cost in report.tasks if cost.task.engine == "cube"]
    assert [cost.task.phase for cost in products] == ["forward", "backward"]
    macs = 2 * 2048 * 1024 * 512
    hardware = chipset("ascend910").hardware
    assert sum(cost.us for cost in products) >= macs / hardware.peak_fp16_macs_per_us
    assert report.step_ms > report.device_ms > 0
    assert not report.coverage["unsupported"]


@pytest.mark.medium
def test_flax_model_is_priced() -> None:
    images, labels = float32(64, 32, 32, 3), jax.ShapeDtypeStruct((64,), jnp.int32)
    state = flax_state(images)
    report = price(
        flax_step, state, (images, labels), parameters=lambda s: s.params, devices=8, precision="O2"
    )
    assert {"first", "last"} <= {layer.layer for layer in report.layers}
    assert {"forward", "backward", "optimizer", "communication"} <= set(report.phases)
    made = {name.rpartition("params/")[2]: nbytes for name, nbytes, _ in report.graph.gradients}
    assert made.keys() == {"first/bias", "first/kernel", "last/bias", "last/kernel"}
    assert made["first/kernel"] >= 4 * 3 * 3 * 3 * 32
    assert report.batch_pixels == 32 * 32
    same = price(flax_step, state, (images, labels), devices=8)
    assert same.step_ms == report.step_ms


def test_arrays_are_accepted_for_shapes() -> None:
    def real(shape: Any) -> Any:
        return jnp.zeros(shape.shape, shape.dtype)

    by_shape = price(linear_step, WEIGHTS, BATCH)
    by_array = price(linear_step, jax.tree.map(real, WEIGHTS), jax.tree.map(real, BATCH))
    assert by_array.step_ms == by_shape.step_ms


def test_chip_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(
        "defaults: [ascend910, _self_]\nchip: Slow\n"
        "hbm_sustained_gb_per_s: {value: 100, source: a guess, confidence: assumed}\n"
    )
    slow = price(linear_step, WEIGHTS, BATCH, hardware=file)
    assert slow.chip == "Slow"
    assert slow.device_ms > price(linear_step, WEIGHTS, BATCH).device_ms
    file.write_text(file.read_text().replace("Slow", "Slow and renamed"))
    again = price(linear_step, WEIGHTS, BATCH, hardware=file)
    assert again.chip == "Slow and renamed"


@pytest.mark.slow
def test_package_names_are_imported_lazily() -> None:
    """`price` is the function, whatever of the package was imported before; jax is not."""
    script = (
        "import sys; from pipeline.backends.ascend.chip import hardware;"
        "assert 'jax' not in sys.modules;"
        "import pipeline.backends.ascend.pricing.pricing, pipeline.backends.ascend.report.report;"
        "from pipeline.backends.ascend import price, Report, chipset, PricedChip;"
        "print(price.__name__)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (said.stdout, said.stderr) == ("price\n", "")
    assert isinstance(price, FunctionType)


def unbounded(weights: Any, batch: Any) -> tuple[Any, Any]:
    halved = jax.lax.while_loop(lambda w: (w > 1).any(), lambda w: w / 2, weights["w"])
    return {"w": halved}, batch[0].sum()


def factorised(weights: Any, batch: Any) -> tuple[Any, Any]:
    square = weights["w"].T @ weights["w"]
    return weights, jnp.linalg.cholesky(square).sum() + batch[0].sum()


def no_pair(weights: Any, batch: Any) -> Any:
    return linear_loss(weights, batch)


def in_bfloat16(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16)


BAD: dict[str, tuple[Callable[[], Any], type[PipelineError], int, str]] = {
    "an unbounded loop": (
        lambda: price(unbounded, WEIGHTS, BATCH),
        UnboundedLoopError,
        1,
        "its number of iterations isn't constant; write it as jax.lax.scan",
    ),
    "an unknown primitive": (
        lambda: price(factorised, WEIGHTS, BATCH, strict=True),
        UnsupportedError,
        1,
        "cholesky: not supported; strict = false estimates such operations by their bytes",
    ),
    "a type that the chip lacks": (
        lambda: price(
            linear_step,
            jax.tree.map(in_bfloat16, WEIGHTS),
            jax.tree.map(in_bfloat16, BATCH),
            precision=None,
        ),
        OptionError,
        2,
        "bfloat16 is not a type of Ascend 910A, which has float16,",
    ),
    "no device": (
        lambda: price(linear_step, WEIGHTS, BATCH, devices=0),
        OptionError,
        2,
        "devices = 0: must be at least 1",
    ),
    "no whole server": (
        lambda: price(linear_step, WEIGHTS, BATCH, devices=12),
        OptionError,
        2,
        "devices = 12: must fill whole servers of 8 devices, as 8 or 16 would",
    ),
    "no such mode": (
        lambda: price(linear_step, WEIGHTS, BATCH, mode="eager"),  # type: ignore[arg-type]
        OptionError,
        2,
        "mode = 'eager': must be one of op_by_op, graph_sink, loop_sink",
    ),
    "no mode": (
        lambda: price(linear_step, WEIGHTS, BATCH, mode=""),  # type: ignore[arg-type]
        OptionError,
        2,
        "mode = '': must be one of op_by_op, graph_sink, loop_sink",
    ),
    "no such precision": (
        lambda: price(linear_step, WEIGHTS, BATCH, precision="O4"),  # type: ignore[arg-type]
        OptionError,
        2,
        "precision = 'O4': must be one of O0, O1, O2, O3",
    ),
    "no such chip": (
        lambda: price(linear_step, WEIGHTS, BATCH, hardware="ascend911"),
        ChipError,
        2,
        "there is no such chip; did you mean ascend910?",
    ),
    "a step that gives no pair": (
        lambda: price(no_pair, WEIGHTS, BATCH),
        RunError,
        1,
        "it must return (state, result)",
    ),
    "a step that returns its state alone, a pair": (
        lambda: price(lambda pair, batch: pair, (WEIGHTS, WEIGHTS), BATCH, devices=8),
        RunError,
        1,
        "step returns its state alone; it must return (state, result)",
    ),
    "a state that lacks an array": (
        lambda: price(lambda w, batch: ({}, linear_loss(w, batch)), WEIGHTS, BATCH),
        RunError,
        1,
        "step returns its state with nothing as w, which was float32[1024, 512]; it must return "
        "(state, result) with a new state of the structure, shapes and types of the old one",
    ),
    "a state of another type": (
        lambda: price(
            lambda w, batch: (jax.tree.map(lambda a: a.astype(jnp.float16), w), 0), WEIGHTS, BATCH
        ),
        RunError,
        1,
        "step returns its state with float16[1024, 512] as w, which was float32[1024, 512]; it",
    ),
    "a state with one array more": (
        lambda: price(lambda w, batch: ({**w, "step": 1.0}, 0), WEIGHTS, BATCH),
        RunError,
        1,
        "step returns its state with float32[] as step, which was nothing; it must return",
    ),
    "parameters from elsewhere": (
        lambda: price(linear_step, WEIGHTS, BATCH, parameters=lambda w: ()),
        RunError,
        1,
        "parameters picks no leaf of the state",
    ),
    "no function": (
        lambda: price("train", WEIGHTS, BATCH),  # type: ignore[arg-type]
        OptionError,
        2,
        "step = 'train': must be a function",
    ),
    "parameters that are none": (
        lambda: price(linear_step, WEIGHTS, BATCH, parameters=WEIGHTS),  # type: ignore[arg-type]
        OptionError,
        2,
        "parameters = {'w': ShapeDtypeStruct(shape=(1024, 512), dtype=float32)}: must be a",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_pricing_error_has_one_line(what: str) -> None:
    action, kind, status, message = BAD[what]
    with pytest.raises(PipelineError) as caught:
        action()
    assert type(caught.value) is kind
    assert caught.value.exit_status == status
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_primitive_is_priced_by_its_bytes_and_listed() -> None:
    report = price(factorised, WEIGHTS, BATCH)
    assert report.coverage["unsupported"] == {"cholesky": 1}
    assert report.coverage["equations"]["unsupported"] == 1


def test_task_times_are_shared_across_launch_modes() -> None:
    """A launch mode of the same graph does not lower or price it again."""
    pricing = Pricing(trace_step(linear_step, WEIGHTS, BATCH, None), chipset("ascend910"))
    config = ExecutionConfig(mode="graph_sink")
    assert (
        pricing.price_step(config).times
        is pricing.price_modes(replace(config, mode="loop_sink")).times
    )


def test_default_config_equals_execution_config() -> None:
    assert price(linear_step, WEIGHTS, BATCH).config == ExecutionConfig()


def test_report_is_frozen_and_independent() -> None:
    """It holds its figures, so that none is priced when it is read."""
    report = price(linear_step, WEIGHTS, BATCH)
    with pytest.raises(FrozenInstanceError):
        report.chip = "another"  # type: ignore[misc]
    assert [*report.modes] == [*MODES]
    assert report.modes["loop_sink"].timeline is report.timeline
    assert report.memory.verdict == "fits"


def test_unsupported_mode_is_not_in_the_report() -> None:
    """A sink takes its batches from the queue on the device, op by op takes none."""
    pricing = Pricing(trace_step(linear_step, WEIGHTS, BATCH, None), chipset("ascend910"))
    small = pricing.with_figures(data_queue_gib=1e-6)
    report = small.price_modes(ExecutionConfig(mode="op_by_op"))
    assert [*report.modes] == ["op_by_op"]
    assert "loop_sink" not in str(report)
    with pytest.raises(OptionError, match="the queue on the device"):
        small.price_modes(ExecutionConfig(mode="loop_sink"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": ["O2"]}, "precision = ['O2']: must be one of O0, O1, O2, O3"),
        ({"sink_size": float("nan")}, "sink_size = nan: must be a whole number"),
        ({"sink_size": float("inf")}, "sink_size = inf: must be a whole number"),
        ({"sink_size": "10"}, "sink_size = '10': must be a whole number"),
        ({"sink_size": True}, "sink_size = True: must be a whole number"),
        ({"devices": None}, "devices = None: must be a whole number"),
        ({"devices": 1.5}, "devices = 1.5: must be a whole number"),
        ({"devices": 1032}, "devices = 1032: must be at most 1024"),
        ({"host_workers": 0}, "host_workers = 0: must be at least 1"),
        ({"host_workers": "8"}, "host_workers = '8': must be a whole number"),
        ({"all_reduce_fusion": "abc"}, "all_reduce_fusion = 'abc': must be a list"),
        ({"all_reduce_fusion": 5}, "all_reduce_fusion = 5: must be a list"),
        ({"all_reduce_fusion": [1.5]}, "all_reduce_fusion = 1.5: must be a whole number"),
        ({"data_sink": "no"}, "data_sink = 'no': must be True or False"),
        ({"auto_tune": 1}, "auto_tune = 1: must be None or one of exhaustive, ga, rl"),
    ],
)
def test_options_of_wrong_type_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        price(linear_step, WEIGHTS, BATCH, **options)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"op_launch_us": float("nan")}, "op_launch_us = nan: must be at least 0, and finite"),
        ({"host_images_per_s": 0.0}, "host_images_per_s = 0.0: must be above 0, and finite"),
    ],
)
def test_figures_of_a_chip_made_by_hand_are_checked(
    figures: dict[str, float], message: str
) -> None:
    chip = chipset("ascend910")
    chip = replace(chip, hardware=replace(chip.hardware, **figures))
    images = jax.ShapeDtypeStruct((8, 16, 16, 3), jnp.float32)

    def step(weight: jax.Array, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: ((images @ w) ** 2).mean())(weight)
        return weight - gradient, loss

    with pytest.raises(OptionError, match=re.escape(message)):
        price(step, jnp.ones((3, 4)), images, hardware=chip, host_workers=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sink"}, "mode = 'sink': must be one of op_by_op, graph_sink, loop_sink"),
        ({"sink_size": 0}, "sink_size = 0: must be at least 1"),
    ],
)
def test_options_made_by_hand_are_checked(options: dict[str, Any], message: str) -> None:
    pricing = Pricing(trace_step(linear_step, WEIGHTS, BATCH, None), chipset("ascend910"))
    with pytest.raises(OptionError, match=re.escape(message)):
        pricing.price_step(ExecutionConfig(**options))


def test_numpy_numbers_are_accepted() -> None:
    report = price(linear_step, WEIGHTS, BATCH, sink_size=np.int64(10), devices=np.int32(8))
    json.dumps(report.to_dict(), allow_nan=False)
    same = price(linear_step, WEIGHTS, BATCH, sink_size=10, devices=8)
    assert report.step_ms == same.step_ms


@pytest.mark.medium
def test_auto_tune_results_are_stored_in_the_bank(tmp_path: Path) -> None:
    """Without a search everything is found there and priced the same."""
    bank = tmp_path / "bank.json"
    first = price(linear_step, WEIGHTS, BATCH, auto_tune="ga", tune_bank=bank)
    second = price(linear_step, WEIGHTS, BATCH, tune_bank=bank)
    assert first.tuning is not None
    assert second.tuning is not None
    assert {task.status for task in first.tuning.tasks} == {"bank_append"}
    assert {task.status for task in second.tuning.tasks} == {"bank_hit"}
    assert first.step_ms == second.step_ms


def test_products_with_vectors_are_priced() -> None:
    """They have one axis, where a matrix product has two."""

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.square(batch @ w).mean())(weights)
        return weights - gradient, loss

    for length in (4, 64):
        report = price(step, jnp.ones(length), jnp.ones((16, length)), precision="O2")
        assert report.step_ms > 0
