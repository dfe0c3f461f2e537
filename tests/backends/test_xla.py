"""One program for every sink: the speed may change, the numbers may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends.base import CompileInputs, Executable, Mechanism
from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading.loader import make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.backends.xla import XlaBackend
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.host.cuda import find_plugin
from pipeline.data.batch import Batch
from pipeline.data.columns import Split
from pipeline.data.order import SampleOrder
from pipeline.data.random import seed_words
from pipeline.data.sources.synthetic import Synthetic
from pipeline.training.metrics import EvalSums, zero_sums
from pipeline.training.parallel.devices import find_device
from pipeline.training.parallel.state_sharing import DevicePlacement
from pipeline.training.state import Record, TrainState
from pipeline.training.step import TrainStep
from tests import outcome
from tests.conftest import compose_tiny
from tests.whole_run import run

AUGMENTED = [
    "model=mlp",
    "model.hidden=[16]",
    "dataset.train.ops=[{name: random_crop, size: [8, 8], padding: [1, 1, 1, 1]},"
    "{name: random_horizontal_flip, prob: 0.5},"
    "{name: resize, size: [32, 32], interpolation: linear},"
    "{name: rescale, factor: 0.004, shift: 0.0}]",
    "checkpoint.keep=20",
]
EVENTS = ["eval.every_steps=10", "checkpoint.every_steps=12", "checkpoint.every_epochs=2"]

Compose = Callable[..., Recipe]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """45 steps that the host saw one by one, with evaluations and checkpoints between."""
    run_dir = tmp_path_factory.mktemp("reference")
    run(compose_tiny(cache, *AUGMENTED, *EVENTS, "train.sink=false"), run_dir)
    return run_dir


VARIANTS = {
    "sink of 1": ["train.sink_size=1"],
    "sink of 7": ["train.sink_size=7"],
    "sink of 20": ["train.sink_size=20"],
    "sink of an epoch": ["train.sink_size=-1"],
    "soft": ["train.sink_size=20", "train.mechanism=soft"],
    "a dispatch for every step": ["train.sink_size=20", "train.dispatch_seconds=1e-6"],
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_sinks_change_only_the_speed(
    overrides: list[str], reference: Path, tiny: Compose, tmp_path: Path
) -> None:
    """S-02..S-08: losses, weights, evaluations and checkpoints, bit for bit."""
    run(tiny(*AUGMENTED, *EVENTS, *overrides), tmp_path)
    assert len(outcome.metrics(reference)) == 45
    assert outcome.checkpoints(reference) == [12, 24, 36, 45]
    outcome.assert_same_run(reference, tmp_path)


@pytest.mark.slow
def test_streaming_with_windows_ending_in_a_sink_is_bit_equal(
    reference: Path, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 8)
    run(tiny(*AUGMENTED, *EVENTS, "train.sink_size=20", "train.feed=stream"), tmp_path)
    outcome.assert_same_run(reference, tmp_path)


@pytest.mark.slow
def test_events_do_not_change_training(reference: Path, tiny: Compose, tmp_path: Path) -> None:
    """An evaluation or a checkpoint in a sink leaves no trace in the steps around it."""
    run(tiny(*AUGMENTED, "train.sink_size=20"), tmp_path)
    assert outcome.metrics(tmp_path) == outcome.metrics(reference)
    assert outcome.checkpoints(tmp_path) == [45]
    outcome.assert_equal_arrays(outcome.arrays(tmp_path), outcome.arrays(reference))


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [True, False])
def test_evaluation_is_compiled_when_due_on_cpu(
    evaluates: bool, tiny: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the first steps it would slow them."""
    stages = ["data", "build", "compile", "train", *(["eval"] if evaluates else [])]
    # A network of no other test: a program on disk needs no compilation.
    network = ("model=mlp", "model.hidden=[9]")
    keys = ("train.steps=12", "train.sink_size=4", "monitor.log_level=info")
    run(tiny(*network, *keys, f"stages=[{','.join(stages)}]"))
    compiled = ("compile    evaluation: ", "train ")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(compiled)]
    assert [line.split()[0] for line in lines] == ["train"] * 3 + ["compile"] * evaluates


@pytest.mark.slow
def test_different_seed_changes_the_run(reference: Path, tiny: Compose, tmp_path: Path) -> None:
    """The results that the tests above compare do depend on the inputs."""
    run(tiny(*AUGMENTED, "train.sink_size=20", "seed=2"), tmp_path)
    first, other = outcome.metrics(reference), outcome.metrics(tmp_path)
    assert all(one["loss"] != two["loss"] for one, two in zip(first, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["train.sink=false", "train.sink_size=20"])
@pytest.mark.mlp
def test_divergence_saves_the_state_of_the_previous_step(
    sink: str, tiny: Compose, tmp_path: Path
) -> None:
    """C-02, in the documents' words; but every step of a sink is tested, not only the last."""
    with pytest.raises(RunError) as caught:
        run(tiny("train.optimizer.lr=1e30", sink), tmp_path)
    lines = outcome.metrics(tmp_path)
    last = len(lines)
    assert 1 < last < 6
    assert None in (lines[-1]["loss"], lines[-1]["grad_norm"])
    assert None not in [line[name] for line in lines[:-1] for name in ("loss", "grad_norm")]
    assert str(caught.value).startswith(
        f"epoch: 1 step: {last}. Invalid loss, terminating training. Step {last} of 45: loss is "
    )
    assert f"; the state of step {last - 1} is saved; " in str(caught.value)
    assert str(caught.value).endswith("likely cause: try a smaller train.optimizer.lr")
    assert caught.value.exit_status == 1
    assert outcome.checkpoints(tmp_path) == [last - 1]
    saved = outcome.arrays(tmp_path)
    assert saved["step"] == last - 1
    assert all(np.isfinite(array).all() for array in saved.values())


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["loop", "soft"])
@pytest.mark.mlp
def test_nan_image_stops_the_run_at_its_step(
    mechanism: str, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny("train.sink_size=12", f"train.mechanism={mechanism}")
    order = SampleOrder(
        seed=recipe.seed,
        samples=96,
        batch_size=16,
        shuffle=True,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    victim = order.batches(4, 1).indices[0, 3]
    read = Synthetic.read

    def read_with_a_hole(self: Synthetic, cache: Path) -> Any:
        raw = read(self, cache)
        images = np.asarray(raw.train.columns["image"], np.float32)
        images[victim, 2, 2] = np.nan
        evaluation = np.asarray(raw.eval.columns["image"], np.float32)
        return replace(
            raw,
            train=Split({**raw.train.columns, "image": images}),
            eval=Split({**raw.eval.columns, "image": evaluation}),
        )

    monkeypatch.setattr(Synthetic, "read", read_with_a_hole)
    with pytest.raises(RunError, match=r"epoch: 1 step: 5\..* Step 5 of 45: loss is nan"):
        run(recipe, tmp_path)
    assert [line["loss"] is None for line in outcome.metrics(tmp_path)] == 4 * [False] + [True]
    assert outcome.checkpoints(tmp_path) == [4]


@pytest.mark.slow
@pytest.mark.mlp
def test_run_without_the_checkpoint_stage_reports_no_saved_state(
    tiny: Compose, tmp_path: Path
) -> None:
    stages = "stages=[data,build,compile,train]"
    with pytest.raises(RunError) as caught:
        run(tiny("train.optimizer.lr=1e30", stages), tmp_path)
    assert "Invalid loss" in str(caught.value)
    assert "saved" not in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.mlp
def test_failed_run_has_its_failure_in_the_summary(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run(tiny("train.optimizer.lr=1e30"), tmp_path)
    summary = outcome.read_summary(tmp_path)
    assert (summary["status"], summary["reason"]) == ("failed", str(caught.value))
    assert summary["steps"] == max(outcome.checkpoints(tmp_path)) > 0
    assert summary["exit_status"] == 1


@pytest.mark.slow
@pytest.mark.skipif(
    any(device.platform == "gpu" for device in jax.devices()), reason="this machine has a GPU"
)
def test_missing_gpu_is_reported_with_available_devices(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run(tiny("device=gpu"), tmp_path)
    assert str(caught.value).startswith("device gpu:0: JAX sees cpu:0")
    if find_plugin() is None:
        assert "only; install the `gpu` extra, pip install 'recipe-pipeline[gpu]'" in str(
            caught.value
        )
    else:
        assert "this machine has no NVIDIA driver" in str(caught.value)


def test_unavailable_device_number_is_refused() -> None:
    with pytest.raises(RunError, match=r"^device cpu:99: JAX sees cpu:0, .* only$"):
        find_device("cpu", 99)


def test_mechanism_is_reported_with_its_reason() -> None:
    backend = XlaBackend(DevicePlacement((find_device("cpu", 0),)))
    assert backend.choose_mechanism("auto", sink=True)[0] == "loop"
    assert backend.choose_mechanism("loop", sink=True)[0] == "loop"
    assert backend.choose_mechanism("soft", sink=True) == (
        "soft",
        "requested: one asynchronous dispatch per step, no host read in a sink",
    )
    assert backend.choose_mechanism("soft", sink=False) == (
        "none",
        "sink is false: the host reads every step",
    )


LABELS = np.arange(1, 11, dtype=np.int32)


def counting_step(nan_step: int = -1) -> TrainStep:
    """A step without a network: its loss is the label of the batch, its state their sum."""

    def init(seed: jax.Array) -> TrainState:
        total = seed.astype(jnp.float32).sum()
        return TrainState(jnp.int32(0), {"total": total}, {}, (), {})

    def step(state: TrainState, batch: Batch, rates: jax.Array) -> tuple[TrainState, Record]:
        label = batch.columns["label"][0].astype(jnp.float32)
        loss = jnp.where(label == nan_step, jnp.nan, label)
        record = Record(loss, rates[state.step], 2 * label, jnp.float32(1))
        params = {"total": state.params["total"] + label}
        after = replace(state, step=state.step + 1, params=params)
        kept = jax.tree.map(lambda new, old: jnp.where(label == nan_step, old, new), after, state)
        return kept, record

    def evaluate(state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
        labels = sums.loss_sum + state.params["total"] * batch.columns["label"][0]
        return replace(sums, loss_sum=labels, count=sums.count + batch.count)

    return TrainStep(init, step, evaluate, lambda: zero_sums(2))


def compile_counting(step: TrainStep) -> Executable:
    """Compiled for windows of 4 steps over the labels 1 to 10, again and again."""
    placement = DevicePlacement((find_device("cpu", 0),))
    order = SampleOrder(
        seed=3,
        samples=len(LABELS),
        batch_size=1,
        shuffle=False,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    rates = np.arange(100, dtype=np.float32) / 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "WINDOW_STEPS", 4)
        loader = make_loader(LoaderSource(Split({"label": LABELS}), order, placement), "resident")
        return XlaBackend(placement).compile(
            CompileInputs(step, loader, loader, rates, seed_words(3)), watch
        )


@contextmanager
def watch(name: str) -> Iterator[None]:
    """The clock of a user who does not look."""
    yield


@pytest.fixture(scope="module")
def compiled() -> Executable:
    return compile_counting(counting_step())


@pytest.fixture
def counting(compiled: Executable, monkeypatch: pytest.MonkeyPatch) -> Executable:
    """Nothing of one run is left in the next, so one compilation serves all tests."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 4)
    return compiled


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["loop", "soft", "none"])
@pytest.mark.parametrize("stops", [(25,), (1, 2, 25), (3, 4, 5, 8, 12, 25)])
def test_every_step_runs_once_and_is_reported(
    mechanism: Mechanism, stops: tuple[int, ...], counting: Executable
) -> None:
    state, told = counting.init(), []
    start = 0
    for stop in stops:
        state, telemetry = counting.run(state, start, stop, mechanism)
        assert (telemetry.start, len(telemetry)) == (start, stop - start)
        told.append(telemetry)
        start = stop
    losses = np.concatenate([telemetry.loss for telemetry in told])
    rates = np.concatenate([telemetry.learning_rate for telemetry in told])
    assert losses.tolist() == [1 + step % 10 for step in range(25)]
    assert rates.tolist() == [step / 4 for step in range(25)]
    assert (int(state.step), float(state.params["total"])) == (25, 3 + 2 * 55 + 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nan_step", "mechanism"), [(1, "loop"), (4, "loop"), (7, "loop"), (7, "soft")]
)
def test_steps_after_a_non_finite_step_do_not_run(
    nan_step: int, mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 4)
    executable = compile_counting(counting_step(nan_step))
    state, telemetry = executable.run(executable.init(), 0, 10, mechanism)
    assert (len(telemetry), telemetry.non_finite_step) == (nan_step, nan_step)
    assert telemetry.loss[:-1].tolist() == list(range(1, nan_step))
    assert (int(state.step), float(state.params["total"])) == (
        nan_step - 1,
        3 + sum(range(1, nan_step)),
    )


@pytest.mark.medium
def test_steps_can_run_after_a_non_finite_dispatch() -> None:
    """Steps that are only timed may diverge; what counts comes after them."""
    executable = compile_counting(counting_step(nan_step=4))
    executable.run(executable.init(), 0, 10, "loop")
    state, telemetry = executable.run(executable.init(), 0, 3, "loop")
    assert telemetry.loss.tolist() == [1, 2, 3]
    assert int(state.step) == 3


@pytest.mark.medium
def test_telemetry_is_not_changed_by_later_steps(counting: Executable) -> None:
    state, first = counting.run(counting.init(), 0, 3, "loop")
    counting.run(state, 3, 6, "loop")
    assert first.loss.tolist() == [1, 2, 3]


def test_state_can_be_put_on_the_device_repeatedly(counting: Executable) -> None:
    """`run` consumes the state it is given; what was saved of it stays good."""
    saved = jax.tree.map(np.array, counting.init())
    for _ in range(2):
        state, _ = counting.run(counting.put(saved), 0, 3, "loop")
        assert float(state.params["total"]) == 3 + 6
    assert float(saved.params["total"]) == 3


@pytest.mark.parametrize("batches", [1, 4, 10])
def test_evaluation_sums_batches_and_does_not_change_the_state(
    batches: int, counting: Executable
) -> None:
    state = counting.init()
    for _ in range(2):
        sums = counting.evaluate(state, 0, batches)
        assert (int(sums.count), float(sums.loss_sum)) == (batches, 3 * LABELS[:batches].sum())


@pytest.mark.parametrize("middle", [1, 4, 7, 10])
def test_evaluation_continues_from_earlier_sums(middle: int, counting: Executable) -> None:
    state = counting.init()
    sums = counting.evaluate(state, middle, 10, counting.evaluate(state, 0, middle))
    assert (int(sums.count), float(sums.loss_sum)) == (10, 3 * LABELS.sum())


def test_compile_report_lists_every_program(counting: Executable) -> None:
    report = counting.report
    names = [program.name for program in report.programs]
    assert names == ["initialisation", "training step", "evaluation"]
    assert report.compile_s == sum(program.compile_s for program in report.programs) > 0
    assert all(program.temporary_bytes >= 0 for program in report.programs)
    # S-01: a sink runs the step's one program once.
    backend = XlaBackend(DevicePlacement((find_device("cpu", 0),)))
    assert backend.choose_mechanism("auto", sink=True)[0] == "loop"


def test_compile_error_has_the_program_name() -> None:
    def unknown(seed: jax.Array) -> TrainState:
        return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct((), jnp.float32))()

    with pytest.raises(RunError, match=r"^compiling initialisation: .*no_such_kernel"):
        compile_counting(replace(counting_step(), init=unknown))
