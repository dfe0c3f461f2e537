"""`sink`: results, resume, stops, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.experimental import io_callback

from pipeline.backends.ascend import price
from pipeline.core.errors import DataError, RunError
from pipeline.engine.batches import open_source
from pipeline.engine.sink import sink
from pipeline.engine.sink_folder import SinkIdentity, SinkRecord, read_record, write_record
from pipeline.models.lowerings.tune.tuner import LoweringChoice
from pipeline.training.parallel.state_sharing import DevicePlacement
from tests.backends.loading.small_loader import wait_until
from tests.engine.steps import BATCH, STEPS, batches, make_data, make_state, step
from tests.slow_cases import mark_slow_except

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def train(data: Any = None, **settings: Any) -> tuple[dict[str, np.ndarray], Any, list[int]]:
    """Return every metric of a run, its last state and the steps of its reports."""
    settings = {"steps": STEPS, "size": 7, "batch_size": BATCH, **settings}
    reports = []
    state = None
    for report in sink(
        settings.pop("step", step),
        settings.pop("state", make_state()),
        make_data() if data is None else data,
        **settings,
    ):
        reports.append(report)
        state = report.state
    names = reports[0].metrics
    joined = {name: np.concatenate([r.metrics[name] for r in reports]) for name in names}
    return joined, state, [report.step for report in reports]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, np.ndarray], Any, list[int]]:
    """Return an unbroken run in sinks of 7."""
    return train()


@pytest.mark.medium
def test_sink_sizes_have_the_same_bits(expected: Any) -> None:
    for size in (1, "all", "auto"):
        metrics, state, steps = train(size=size)
        for name, values in expected[0].items():
            assert metrics[name].tobytes() == values.tobytes(), (size, name)
        assert np.array_equal(state["w"], expected[1]["w"])
        assert steps[-1] == STEPS
    assert expected[2] == [7, 14, 21, 28, 35, 42, 49, 56, 60]
    assert expected[1]["count"] == STEPS
    assert jax.dtypes.issubdtype(expected[1]["key"].dtype, jax.dtypes.prng_key)


@pytest.mark.medium
def test_losses_equal_a_jitted_loop(expected: Any) -> None:
    from pipeline.data.order import SampleOrder

    order = SampleOrder(
        samples=200, batch_size=BATCH, drop_remainder=True, repeat=1, seed=0, shuffle=True,
        buffer_size=None,
    )  # fmt: skip
    data, state, losses, jitted = make_data(), make_state(), [], jax.jit(step)
    for rows in order.batches(0, STEPS).indices:
        state, metrics = jitted(state, {name: column[rows] for name, column in data.items()})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(expected[0]["loss"], losses, rtol=1e-5)


@pytest.mark.medium
def test_log_has_every_metric_of_every_step(tmp_path: Path, expected: Any) -> None:
    train(save=tmp_path)
    lines = read_log(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for name, values in expected[0].items():
        assert np.array_equal(np.float32([line[name] for line in lines]), values)
    events = b"".join(file.read_bytes() for file in tmp_path.glob("events.*"))
    assert all(f"train/{name}".encode() in events for name in expected[0])


@pytest.mark.slow
def test_no_seed_reads_examples_in_file_order() -> None:
    data = {"x": np.zeros((50, 4), np.float32), "y": np.arange(50, dtype=np.float32)}
    metrics, _, _ = train(data, steps=4, seed=None)
    assert metrics["first"].tolist() == [0, 16, 32, 0]


@pytest.mark.medium
def test_structured_array_is_batched_by_field(expected: Any) -> None:
    data = make_data()
    table = np.empty(200, [("x", np.float32, 4), ("y", np.float32)])
    table["x"], table["y"] = data["x"], data["y"]
    assert np.array_equal(train(table)[0]["loss"], expected[0]["loss"])


@pytest.mark.medium
@pytest.mark.parametrize("size", mark_slow_except([7], [1, 7, "all"]))
def test_iterator_is_read_in_order_and_not_ahead(size: Any) -> None:
    source = batches()
    metrics, _, _ = train(source, batch_size=None, size=size)
    firsts = [batch["y"][0] for batch, _ in zip(batches(), range(STEPS), strict=False)]
    assert np.array_equal(metrics["first"], np.float32(firsts))
    assert (
        next(source)["y"][0] == [b["y"][0] for b, _ in zip(batches(), range(61), strict=False)][60]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "iterator"])
def test_killed_run_continues_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = run_process(kind, broken, 7, "wait")
    for _ in range(4):
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert (broken / "checkpoints" / "18").is_dir()
    assert not (broken / "checkpoints" / "36").exists()
    output, errors = run_process(kind, broken, 60, whole, 1).communicate()
    assert output.split() == ["60", *map(str, range(1, 61))], errors
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    newest = [read_arrays(folder / "checkpoints" / "60" / "state") for folder in (whole, broken)]
    assert all(np.array_equal(newest[0][name], newest[1][name]) for name in newest[0])


def read_arrays(folder: Path) -> Any:
    from pipeline.checkpoint.restore import read_arrays

    return read_arrays(folder)


def run_process(kind: str, *arguments: str | Path | int) -> Any:
    """Start runs in a process of its own: a folder and a size of sinks for each."""
    command = [sys.executable, "-m", "tests.engine.steps", kind, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.medium
def test_sigterm_saves_and_a_second_call_continues(tmp_path: Path, expected: Any) -> None:
    from pipeline.core.host.signals import Interrupted

    seen = []
    rule = "SIGTERM received; the state of step 21 is saved in .*; the same call continues"
    with pytest.raises(Interrupted, match=rule):  # noqa: PT012
        for report in sink(
            step, make_state(), make_data(), steps=STEPS, size=7, batch_size=BATCH, save=tmp_path
        ):
            seen.append(report.step)
            if report.step == 21:
                os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [7, 14, 21]
    metrics, _, steps = train(save=tmp_path, size="all")
    assert steps == [STEPS]
    assert metrics["loss"].tobytes() == expected[0]["loss"][21:].tobytes()


@pytest.mark.slow
def test_leaving_the_loop_saves_the_state(tmp_path: Path) -> None:
    for report in sink(
        step, make_state(), make_data(), steps=STEPS, size=10, batch_size=BATCH, save=tmp_path
    ):
        if report.step == 20:
            break
    assert (tmp_path / "checkpoints" / "20" / "manifest.json").is_file()
    assert train(save=tmp_path, size=10)[2] == [30, 40, 50, 60]


@pytest.mark.slow
def test_finished_run_yields_its_state(tmp_path: Path) -> None:
    metrics, before, _ = train(save=tmp_path)
    (report,) = sink(step, make_state(), make_data(), steps=STEPS, batch_size=BATCH, save=tmp_path)
    assert report.step == STEPS
    last = {name: values[-1:].tolist() for name, values in metrics.items()}
    assert {name: values.tolist() for name, values in report.metrics.items()} == last
    assert np.array_equal(report.state["w"], before["w"])
    assert train(save=tmp_path, steps=STEPS + 10, size="all")[2] == [STEPS + 10]
    with pytest.raises(ValueError, match="steps = 5: the run in save has done 70"):
        train(save=tmp_path, steps=5)


@pytest.mark.slow
def test_finished_run_yields_infinite_metrics(tmp_path: Path) -> None:
    def step_with_logarithm(state: Any, batch: Any) -> Any:
        low = jnp.log(jnp.float32(0) * batch["x"].sum())
        metrics = {"low": low, "high": -low, "neither": low - low, "one": jnp.exp(low) + 1}
        return {**state, "count": state["count"] + 1}, metrics

    options = {"step": step_with_logarithm, "steps": 3, "save": tmp_path}
    expected = {"low": [-np.inf], "high": [np.inf], "neither": [np.nan], "one": [1.0]}
    for _ in range(2):
        metrics, _, _ = train(**options)
        np.testing.assert_equal({k: v[-1:].tolist() for k, v in metrics.items()}, expected)


@pytest.mark.slow
def test_finished_run_yields_the_metrics_of_its_last_finite_step(tmp_path: Path) -> None:
    """The log has a line of the non-finite step too. The metrics' lines are long."""

    def diverge(state: Any, batch: Any) -> Any:
        count = state["count"]
        loss = jnp.where(count == 4, jnp.inf, count * 1.0)
        return {**state, "count": count + 1}, {"loss": loss, "m" * 5000: count, "neg": -loss}

    with pytest.raises(RunError, match="step 5 of 60: loss is inf"):
        train(step=diverge, save=tmp_path)
    metrics, _, _ = train(step=diverge, save=tmp_path, steps=4)
    assert {k[0]: v.tolist() for k, v in metrics.items()} == {"l": [3.0], "m": [3.0], "n": [-3.0]}


@pytest.mark.medium
def test_damaged_last_checkpoint_is_set_aside_and_saved_again(tmp_path: Path) -> None:
    expected = train(save=tmp_path, size=10, save_every=20)[1]
    folder = tmp_path / "checkpoints"
    (folder / "60" / "host" / "metadata").write_text("{}")
    _, state, steps = train(save=tmp_path, size=10, save_every=20)
    assert steps == [50, 60]
    assert np.array_equal(state["w"], expected["w"])
    assert {path.name for path in folder.iterdir()} == {"20", "40", "60", "damaged-60-1"}
    assert train(save=tmp_path, size=10)[2] == [60]


@pytest.mark.medium
def test_checkpoint_steps_do_not_depend_on_sink_size(tmp_path: Path) -> None:
    train(save=tmp_path, size="all", save_every=25)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"25", "50", "60"}


@pytest.mark.medium
def test_initial_state_is_not_donated_and_old_reports_expire() -> None:
    shared = jnp.ones(4)
    state = {**make_state(), "w": shared}
    reports = []
    for report in sink(step, state, make_data(), steps=4, size=1, batch_size=BATCH):
        reports.append(report)
        if report.step == 2:
            second = report.state
    assert shared.tolist() == [1, 1, 1, 1]
    assert second["count"] == 2
    assert reports[1].state is second
    assert reports[3].state["count"] == 4
    with pytest.raises(RunError, match=r"report\.state: the memory of step 1 is used again"):
        _ = reports[0].state


@pytest.mark.medium
def test_state_leaves_can_share_memory() -> None:
    w = jnp.ones(4)

    def two(state: Any, batch: Any) -> Any:
        return (state[0] * 2, state[1] * 3), {"a": state[0].sum(), "b": state[1].sum()}

    metrics, state, _ = train(step=two, state=(w, w), steps=3)
    assert (state[0][0], state[1][0]) == (8, 27)
    assert metrics["b"].tolist() == [4, 12, 36]


class Net(nn.Module):
    """A small convolutional network."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return logits."""
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(len(x), -1))


def flax_step(state: TrainState, batch: Any) -> Any:
    """Do a step of a flax network."""

    def loss_of(params: Any) -> Any:
        logits = state.apply_fn({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@pytest.mark.slow
def test_sink_sizes_have_the_same_bits_with_convolutions() -> None:
    draw = np.random.default_rng(0)
    data = draw.normal(size=(48, 8, 8, 1)).astype(np.float32), np.arange(48) % 3
    params = Net().init(jax.random.key(0), data[0])["params"]
    state = TrainState.create(apply_fn=Net().apply, params=params, tx=optax.adam(1e-2))
    settings = {"step": flax_step, "state": state, "steps": 15, "batch_size": 16}
    metrics, after, _ = train(data, size=1, **settings)
    for size in (7, "all"):
        others, state, _ = train(data, size=size, **settings)
        assert others["loss"].tobytes() == metrics["loss"].tobytes()
        jax.tree.map(np.testing.assert_array_equal, state.params, after.params)


@pytest.mark.slow
def test_flax_network_trains_as_in_a_jitted_loop(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = draw.normal(size=(32, 8, 8, 1)).astype(np.float32), np.arange(32) % 3
    net = Net()
    params = net.init(jax.random.key(0), data[0])["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-2))
    metrics, after, _ = train(
        data, step=flax_step, state=state, steps=12, batch_size=32, seed=None, save=tmp_path
    )
    losses, jitted = [], jax.jit(flax_step)
    for _ in range(12):
        state, result = jitted(state, data)
        losses.append(float(result["loss"]))
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4)
    assert isinstance(after, TrainState)
    assert int(after.step) == 12
    chosen = json.loads((tmp_path / "sink.json").read_text())["lowerings"]
    assert chosen["layout"] == "chwn"
    problems = {" ".join(problem.split()[:2]) for problem in chosen["computations"]}
    assert problems == {
        *("max_pool forward", "max_pool images_gradient"),
        *("dense forward", "dense kernel_gradient", "dense images_gradient"),
    }
    assert train(data, step=flax_step, state=state, steps=14, batch_size=32, seed=None,
                 save=tmp_path)[2] == [14]  # fmt: skip


def test_equinox_model_trains(tmp_path: Path) -> None:
    equinox = pytest.importorskip("equinox", reason="equinox is not installed")
    model = equinox.nn.MLP(4, "scalar", 8, 1, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_array)

    def equinox_step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            outputs = jax.vmap(equinox.combine(params, static))(batch["x"])
            return jnp.mean(jnp.square(outputs - batch["y"]))

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), {"loss": loss}

    metrics, after, _ = train(step=equinox_step, state=params, save=tmp_path)
    assert metrics["loss"][-1] < metrics["loss"][0] / 2
    assert isinstance(after, equinox.nn.MLP)
    with pytest.raises(ValueError, match=r"state\.activation.*must be an array.*partition"):
        train(step=equinox_step, state=model)


@pytest.mark.slow
def test_grain_dataset_continues_where_it_stopped(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain", reason="grain is not installed")
    data = make_data()

    class Examples:
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return {name: column[index] for name, column in data.items()}

    read: list[int] = []

    def dataset() -> Any:
        return grain.MapDataset.source(Examples()).shuffle(7).repeat().batch(BATCH)

    whole, _, _ = train(dataset(), batch_size=None)
    train(dataset(), batch_size=None, steps=25, save=tmp_path)
    rest, _, _ = train(dataset(), batch_size=None, save=tmp_path)
    assert rest["loss"].tobytes() == whole["loss"][25:].tobytes()


class Counter:
    """An iterator with a state."""

    def __init__(self) -> None:
        self.number, self.seeks = 0, list[Any]()

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> Any:
        self.number += 1
        return {"x": np.ones((2, 4), np.float32), "y": np.full(2, self.number, np.float32)}

    def get_state(self) -> bytes:
        """Return the state."""
        return str(self.number).encode()

    def set_state(self, state: bytes) -> None:
        """Go to a state."""
        self.number = int(state)
        self.seeks.append(self.number)


@pytest.mark.medium
@pytest.mark.parametrize(
    "stops", mark_slow_except([[1, 2, 5]], [[1, 2, 5], [128, 129, 140], [200, 256, 300]])
)
def test_stateful_iterator_continues_at_the_exact_batch(tmp_path: Path, stops: list[int]) -> None:
    seen: list[float] = []
    for stop in stops:
        counter = Counter()
        seen += train(counter, batch_size=None, steps=stop, save=tmp_path)[0]["first"].tolist()
        assert len(counter.seeks) == (stop != stops[0])
    assert seen == list(range(1, stops[-1] + 1))


@pytest.mark.slow
def test_data_that_end_early_save_the_state(tmp_path: Path) -> None:
    text = r"data: ended after 40 of 60 batches; the state of step 40 is saved in "
    with pytest.raises(DataError, match=text):
        train(batches(40), batch_size=None, save=tmp_path, size="all")
    assert len(read_log(tmp_path)) == 40
    assert train(batches(), batch_size=None, save=tmp_path)[2] == [42, 49, 56, 60]


@pytest.mark.medium
def test_iterator_error_is_raised_after_saving(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        train(batches(fail_at=33), batch_size=None, save=tmp_path)
    assert len(read_log(tmp_path)) == 33
    assert (tmp_path / "checkpoints" / "33").is_dir()


@pytest.mark.slow
def test_iterator_with_changed_batches_is_refused(tmp_path: Path) -> None:
    train(batches(), batch_size=None, steps=20, save=tmp_path)
    others = ({**batch, "y": batch["y"] + 1} for batch in batches())
    with pytest.raises(DataError, match="batch 20 differs from the saved run's"):
        train(others, batch_size=None, save=tmp_path)


@pytest.mark.slow
def test_non_finite_loss_ends_the_run_at_the_previous_step(tmp_path: Path) -> None:
    def diverge(state: Any, batch: Any) -> Any:
        after, metrics = step(state, batch)
        return after, {"loss": jnp.where(state["count"] == 25, jnp.nan, metrics["loss"])}

    with pytest.raises(RunError, match=r"^step 26 of 60: loss is nan; the state of step 25 is sav"):
        train(step=diverge, save=tmp_path, size="all")
    assert (tmp_path / "checkpoints" / "25").is_dir()
    with pytest.raises(RunError, match="step 26 of 60: loss is nan"):
        train(step=diverge, save=tmp_path)
    with pytest.raises(RunError, match="save=DIR would have kept the state before it"):
        train(step=diverge)


@pytest.mark.medium
@pytest.mark.parametrize("seed", [3, None])
def test_non_finite_step_names_the_row_of_the_data(seed: int | None) -> None:
    data = make_data()
    data["x"][117] = np.nan
    with pytest.raises(RunError, match=r" in 1 of \d+ examples: \d+ \(row 117 of the data\)"):
        train(data, seed=seed)


def test_step_of_a_sink_is_priced() -> None:
    shapes = jax.eval_shape(
        lambda: {name: jnp.asarray(a[:BATCH]) for name, a in make_data().items()}
    )
    report = price(step, make_state(), shapes, sink_size=100)
    assert report.step_ms > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"w": lambda w: w.astype(jnp.float16)}, r"state\['w'\] is float16\[4\], was float32\[4\]"),
        ({"w": lambda w: w[:2]}, r"state\['w'\] is float32\[2\], was float32\[4\]"),
        ({"w": lambda w: {"a": w}}, r"state\['w'\] is missing; state\['w'\]\['a'\] is new"),
    ],
)
def test_step_that_changes_state_dtypes_or_shapes_is_refused(
    change: dict[str, Callable[[Any], Any]], text: str
) -> None:
    def changing(state: Any, batch: Any) -> Any:
        return {**state, **{k: f(state[k]) for k, f in change.items()}}, {"loss": jnp.zeros(())}

    with pytest.raises(ValueError, match=f"step: returns another state than its argument: {text}"):
        train(step=changing)


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (lambda s: s, r"step: returns a dict; must return \(state, metrics\)"),
        (lambda s: (s, s["w"], 1), r"step: returns a tuple of 3; must return"),
        (lambda s: (s, s["w"][0]), "step: returns a .* as metrics; must be a dictionary"),
        (lambda s: (s, {"loss": s["w"]}), r"metric 'loss' is float32\[4\]; must be a real scalar"),
        (lambda s: (s, {"step": s["w"][0]}), "a metric is named 'step'"),
        (lambda s: (s, {}), "step: returns no metrics"),
    ],
)
def test_step_results_other_than_state_and_metrics_are_refused(
    results: Callable[[Any], Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        train(step=lambda state, batch: results(state))


def test_donated_state_is_refused() -> None:
    state = make_state()
    jax.jit(lambda w: w + 1, donate_argnums=0)(state["w"])
    with pytest.raises(ValueError, match=r"state\['w'\]: its memory was donated to another"):
        train(state=state)


@pytest.mark.slow
def test_step_with_its_own_donation_trains(expected: Any) -> None:
    metrics, _, _ = train(step=jax.jit(step, donate_argnums=0))
    assert np.array_equal(metrics["loss"], expected[0]["loss"])


@pytest.mark.parametrize("name", ["debug_callback", "io_callback", "pure_callback"])
def test_step_that_calls_the_host_is_refused(name: str) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "debug_callback": lambda x: jax.debug.callback(print, x),
        "io_callback": lambda x: io_callback(print, None, x),
        "pure_callback": lambda x: jax.pure_callback(np.sin, x, x),
    }

    def calling(state: Any, batch: Any) -> Any:
        jax.jit(calls[name])(batch["y"])
        return step(state, batch)

    with pytest.raises(ValueError, match=rf"step: calls the host \({name}, test_sink.py, line \d+"):
        train(step=calling)


@pytest.mark.parametrize(
    ("data", "settings", "kind", "text"),
    [
        ({"x": np.ones(3), "y": np.ones(2)}, {}, DataError, r"data\['y'\]: has shape \(2,\)"),
        (make_data(5), {}, DataError, "data: has 5 examples; must have a batch of 16"),
        ({"x": np.array(["a"] * 20)}, {}, DataError, r"data\['x'\]: has dtype <U1"),
        (7, {}, DataError, "data: is a int of int; must be arrays"),
        (iter([]), {"batch_size": None}, DataError, "data: the iterator has no batches"),
        (np.zeros(20, []), {}, DataError, "data: is a structured array without fields"),
        (repeat(()), {"batch_size": None}, DataError, "data: the first batch has no arrays"),
        (repeat(np.float32(3)), {"batch_size": None}, DataError, "batch: is a single number; must"),
        (
            repeat({"x": np.ones((16, 4)), "rate": 0.1}),
            {"batch_size": None},
            DataError,
            r"batch\['rate'\]: is a single number; must be an array of examples",
        ),
        (
            {"x": np.arange(20, dtype=np.int64) << 28},
            {},
            DataError,
            r"data\['x'\]: has 5100273664, and jax has int32; must be -2147483648 to 2147483647",
        ),
        (
            repeat({"x": np.full(16, 2**32, np.uint64)}),
            {"batch_size": None},
            DataError,
            r"batch\['x'\]: has 4294967296, and jax has uint32; must be 0 to 4294967295",
        ),
        (iter([]), {}, ValueError, "batch_size = 16: must be None, since data is an iterable"),
        (make_data(), {"batch_size": None}, ValueError, "batch_size: is missing; must be the"),
        (make_data(), {"batch_size": 0}, ValueError, "batch_size = 0: must be a whole number"),
        (make_data(), {"size": "some"}, ValueError, "size = 'some': must be .* or \"all\""),
        (make_data(), {"steps": 0}, ValueError, "steps = 0: must be a whole number of at least 1"),
        (make_data(), {"save": ""}, ValueError, "save = '': must be a directory, or None"),
        (make_data(), {"save_every": 3}, ValueError, "save_every = 3: needs save, a directory"),
    ],
)
def test_invalid_data_and_settings_are_refused(
    data: Any, settings: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        train(data, **settings)


def test_state_that_jax_would_wrap_is_refused() -> None:
    with pytest.raises(ValueError, match="state/count: has 1099511627776, and jax has int32"):
        train(state={**make_state(), "count": 2**40})


def test_ready_steps_are_those_of_the_next_window() -> None:
    source = open_source(batches(), None, None)
    loader = source.open_loader(DevicePlacement((jax.devices()[0],)), 0, 130)
    assert loader.get_window(0).stop == 128
    wait_until(lambda: loader._source.count_ready_steps(128) > 0)
    assert loader._source.count_ready_steps(128) == 2
    loader.close()


@pytest.mark.medium
def test_batches_of_another_shape_are_refused(tmp_path: Path) -> None:
    def short() -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            yield batch if number < 9 else {name: values[:3] for name, values in batch.items()}

    text = r"batch\['x'\] of batch 10 is float32\[3,4\], of the first float32\[16,4\]; must be"
    with pytest.raises(DataError, match=text):
        train(short(), batch_size=None, save=tmp_path)
    assert (tmp_path / "checkpoints" / "9").is_dir()


@pytest.mark.parametrize("damage", [{"size": -5}, {"size": 0}, {"size": "7"}, {"state": 5}])
def test_damaged_record_is_reported(tmp_path: Path, damage: dict[str, Any]) -> None:
    """A size below 1 would never reach the end."""
    identity = SinkIdentity("digest", {"w": "float32[4]"}, {}, {"seed": 0}, "0.9")
    write_record(tmp_path, SinkRecord(identity, LoweringChoice(), 7))
    assert read_record(tmp_path) == SinkRecord(identity, LoweringChoice(), 7)
    file = tmp_path / "sink.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(DataError, match=r"sink\.json: can't be read: ValueError: isn't a record"):
        read_record(tmp_path)


@pytest.mark.slow
def test_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    train(steps=5, save=tmp_path)

    def other(state: Any, batch: Any) -> Any:
        after, metrics = step(state, batch)
        return {**after, "w": after["w"] * 0.5}, metrics

    data = make_data()
    changed = {**data, "y": data["y"] + 1}
    for text, settings in (
        ("the step function computes something else", {"step": other}),
        ("data seed is 1, was 0", {"seed": 1}),
        (r"batch \['x'\] is float32\[8,4\], was float32\[16,4\]", {"batch_size": 8}),
        ("the examples have other values", {"data": changed}),
    ):
        with pytest.raises(DataError, match=f"holds another run: {text}"):
            train(save=tmp_path, **settings)
    assert len(read_log(tmp_path)) == 5
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds no run \(notes.txt\)"):
        train(save=foreign)
    assert [path.name for path in foreign.iterdir() if path.name != ".lock"] == ["notes.txt"]


@pytest.mark.medium
def test_import_loads_neither_hydra_nor_pydantic() -> None:
    code = (
        "import sys; import pipeline.engine.sink; "
        "print([m for m in ('hydra', 'omegaconf', 'pydantic', 'jax') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.stdout.strip() == "[]"


@pytest.mark.medium
@pytest.mark.parametrize(
    "key", ["..", "a/../b", "a\udcffb", ".", "", "/a", "a\nb", "x" * 300, "1:.."]
)
def test_state_with_any_key_is_resumed(key: str, tmp_path: Path) -> None:
    """No key leads out of a checkpoint, or has a name that its database can't take."""

    def count(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return jax.tree.map(lambda leaf: leaf + 1, state), {"loss": batch["x"].mean()}

    data = {"x": np.ones((8, 1), "f")}
    state = {key: np.float32(1), "other": np.float32(2)}
    for steps in (2, 4):
        reports = list(
            sink(count, state, data, steps=steps, size=1, batch_size=4, save=tmp_path / "run")
        )
    assert len(reports) == 2
    assert reports[-1].state == {key: 5, "other": 6}
