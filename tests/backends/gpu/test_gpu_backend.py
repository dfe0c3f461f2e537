"""The programs of a GPU, run by the processor: other programs, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from pipeline.backends.base import CompileInputs, Mechanism
from pipeline.backends.gpu.gpu_backend import (
    LOOP_REASON,
    LOOP_REASONS,
    SOFT_REASON,
    GpuBackend,
    GpuExecutable,
)
from pipeline.backends.gpu.step_programs import Graphs, make_compiler_options
from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading.loader import make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.data.columns import Split
from pipeline.data.order import SampleOrder
from pipeline.data.random import seed_words
from pipeline.training.parallel.devices import find_device
from pipeline.training.parallel.state_sharing import DevicePlacement
from tests.backends.test_xla import LABELS, counting_step, watch


def compile_counting(
    graphs: Graphs = "auto", dispatch_steps: int | None = 3, nan_step: int = -1
) -> GpuExecutable:
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
    backend = GpuBackend(placement, graphs)
    backend.options = {}
    loader = make_loader(LoaderSource(Split({"label": LABELS}), order, placement), "resident")
    work = CompileInputs(
        counting_step(nan_step), loader, loader, rates, seed_words(3), dispatch_steps=dispatch_steps
    )
    made = backend.compile(work, watch)
    assert isinstance(made, GpuExecutable)
    return made


@pytest.fixture(scope="module", autouse=True)
def short_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "WINDOW_STEPS", 4)
        yield


@pytest.fixture(scope="module")
def by_threes() -> GpuExecutable:
    return compile_counting()


@pytest.fixture(scope="module")
def in_a_graph() -> GpuExecutable:
    return compile_counting("loop")


@pytest.mark.slow
def test_sink_consists_of_programs_of_fixed_length(
    by_threes: GpuExecutable, in_a_graph: GpuExecutable
) -> None:
    assert list(by_threes.programs.train) == [3, 1]
    assert list(in_a_graph.programs.train) == [0, 1]
    assert [program.name for program in by_threes.report.programs] == [
        "initialisation",
        "3 training steps",
        "training step",
        "evaluation",
    ]
    assert "jit_train_steps" in by_threes.program_text


@pytest.mark.parametrize("mechanism", ["loop", "soft", "none"])
@pytest.mark.parametrize("stops", [(25,), (1, 2, 25), (3, 4, 5, 8, 12, 25)])
@pytest.mark.parametrize("made", ["by_threes", "in_a_graph"])
def test_every_step_runs_once_and_is_reported(
    made: str, mechanism: Mechanism, stops: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    executable: GpuExecutable = request.getfixturevalue(made)
    state, told, start = executable.init(), [], 0
    for stop in stops:
        state, telemetry = executable.run(state, start, stop, mechanism)
        assert (telemetry.start, len(telemetry)) == (start, stop - start)
        told.append(telemetry)
        start = stop
    losses = np.concatenate([telemetry.loss for telemetry in told])
    rates = np.concatenate([telemetry.learning_rate for telemetry in told])
    assert losses.tolist() == [1 + step % 10 for step in range(25)]
    assert rates.tolist() == [step / 4 for step in range(25)]
    assert (int(state.step), float(state.params["total"])) == (25, 3 + 2 * 55 + 15)


@pytest.mark.medium
@pytest.mark.parametrize("graphs", ["auto", "loop"])
def test_state_is_unchanged_after_a_non_finite_step(graphs: Graphs) -> None:
    executable = compile_counting(graphs, nan_step=2)
    state, telemetry = executable.run(executable.init(), 0, 10, "loop")
    assert (len(telemetry), telemetry.non_finite_step) == (2, 2)
    assert (int(state.step), float(state.params["total"])) == (1, 3 + 1)
    again, telemetry = executable.run(executable.init(), 0, 1, "loop")
    assert (telemetry.loss.tolist(), int(again.step)) == ([1], 1)


def test_state_can_be_put_repeatedly_and_is_not_changed(by_threes: GpuExecutable) -> None:
    saved = jax.tree.map(np.array, by_threes.init())
    for _ in range(2):
        state, _ = by_threes.run(by_threes.put(saved), 0, 3, "loop")
        assert float(state.params["total"]) == 3 + 6
    assert float(saved.params["total"]) == 3


@pytest.mark.parametrize("middle", [0, 4, 7])
def test_evaluation_sums_batches_across_calls(middle: int, by_threes: GpuExecutable) -> None:
    state = by_threes.put(by_threes.init())
    before = by_threes.evaluate(state, 0, middle) if middle else None
    sums = by_threes.evaluate(state, middle, 10, before)
    assert (int(sums.count), float(sums.loss_sum)) == (10, 3 * LABELS.sum())


@pytest.mark.medium
def test_learning_rates_can_be_replaced() -> None:
    executable = compile_counting(dispatch_steps=1)
    assert list(executable.programs.train) == [1]
    executable.set_learning_rates(np.ones(100, np.float32))
    _, telemetry = executable.run(executable.init(), 0, 3, "loop")
    assert telemetry.learning_rate.tolist() == [1, 1, 1]


def test_compiler_options_depend_on_graphs_and_determinism() -> None:
    assert make_compiler_options("auto", deterministic=False) == {}
    exact = make_compiler_options("off", deterministic=True)
    assert exact == {
        "xla_gpu_enable_command_buffer": "",
        "xla_gpu_exclude_nondeterministic_ops": True,
    }
    step, loop = (make_compiler_options(graphs, deterministic=False) for graphs in ("step", "loop"))
    captured = str(step["xla_gpu_enable_command_buffer"])
    assert "CONVOLUTION" in captured
    assert loop["xla_gpu_enable_command_buffer"] == f"{captured},WHILE"


def test_mechanism_is_reported_with_its_reason() -> None:
    placement = DevicePlacement((find_device("cpu", 0),))
    assert GpuBackend(placement).choose_mechanism("auto", sink=True) == ("loop", LOOP_REASON)
    assert GpuBackend(placement, "loop").choose_mechanism("loop", sink=True) == (
        "loop",
        LOOP_REASONS["loop"],
    )
    assert GpuBackend(placement).choose_mechanism("soft", sink=True) == ("soft", SOFT_REASON)
    assert GpuBackend(placement).choose_mechanism("auto", sink=False)[0] == "none"
