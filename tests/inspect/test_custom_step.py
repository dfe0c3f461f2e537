"""The profile and the forecast of a custom step: what the commands print of a recipe's step."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipeline.inspect
from pipeline.core.errors import DataError, RunError
from pipeline.inspect import custom_step, forecast_step, profile_step
from tests.engine.steps import BATCH, batches, make_data, make_state, step

ROOT = Path(__file__).parents[2]
READ_MS = 5.0


def read_slowly() -> Iterator[Any]:
    """Yield batches, each after `READ_MS`."""
    for batch in batches():
        time.sleep(READ_MS / 1000)
        yield batch


class Net(nn.Module):
    """A convolution and a dense layer."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def test_public_names_of_inspect() -> None:
    assert pipeline.inspect.__all__ == ["forecast_step", "profile_step"]
    with pytest.raises(AttributeError, match="has no attribute 'profile'"):
        _ = pipeline.inspect.profile  # type: ignore[attr-defined]


@pytest.mark.slow
def test_profile_names_the_layers_of_a_flax_network(tmp_path: Path) -> None:
    net = Net()
    x = np.random.default_rng(0).normal(size=(64, 8, 8, 1)).astype(np.float32)
    state = net.init(jax.random.key(0), x[:1])

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        def loss_of(parameters: Any) -> Any:
            return jnp.square(net.apply(parameters, batch)).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, gradients), {"loss": loss}

    report = profile_step(train_step, state, x, batch_size=16, output=tmp_path / "profile")
    (profile,) = report.profiles
    assert (profile.recipe, profile.batch_size) == ("train_step", 16)
    assert {"Conv_0", "Dense_0"} <= {layer.layer for layer in profile.layers}
    assert profile.steps >= 20
    assert profile.step_ms > 0
    assert f"Verdict: {report.verdict}" in str(report).splitlines()[-1]
    saved = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert saved["verdict"]["name"] == report.verdict.name
    assert saved["profiles"][0]["memory"]["state"] == sum(
        leaf.nbytes for leaf in jax.tree.leaves(state)
    )
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == [
        *("picture.svg", "profile.json", "table.txt", "trace.json")
    ]


@pytest.mark.slow
def test_slow_iterator_is_data_bound() -> None:
    verdict = profile_step(step, make_state(), read_slowly()).verdict
    assert verdict.name == "data-bound, severely"
    assert "slowest is iterator" in verdict.why
    assert verdict.change is not None
    assert verdict.change.what.startswith("read batches faster")


@pytest.mark.slow
def test_sinks_of_one_step_are_dispatch_bound() -> None:
    state = make_state()
    verdict = profile_step(step, state, make_data(), batch_size=BATCH, size=1).verdict
    assert verdict.name == "dispatch-bound"
    assert "dispatching sinks of 1" in verdict.why
    assert verdict.change is not None
    assert re.fullmatch(r"size=\d+", verdict.change.what)
    assert float(state["w"].sum()) == 0


@pytest.mark.slow
def test_data_that_end_early_are_refused() -> None:
    with pytest.raises(DataError, match=r"ended after 30 of .*; a profile of this step needs \d+"):
        profile_step(step, make_state(), batches(30), size=7)


@pytest.mark.medium
def test_non_finite_loss_is_refused_by_the_profile() -> None:
    def diverge(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return state + 1, {"loss": jnp.where(state > 3, jnp.nan, batch.mean())}

    x = np.ones((64, 4), np.float32)
    with pytest.raises(RunError, match="step 5: loss isn't finite, so its steps can't be timed"):
        profile_step(diverge, jnp.float32(0), x, batch_size=4, size=2)


def test_folder_that_cannot_be_written_is_refused_before_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(custom_step, "_trace_and_decide", lambda opened: pytest.fail("measured"))
    with pytest.raises(RunError, match="file"):
        profile_step(step, make_state(), make_data(), batch_size=BATCH, output=tmp_path / "file/p")


def test_step_refused_by_a_sink_has_no_profile_or_forecast() -> None:
    def print_loss(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        jax.debug.print("{}", batch.mean())
        return state, {"loss": batch.mean()}

    x = np.ones((8, 4), np.float32)
    with pytest.raises(ValueError, match="calls the host"):
        profile_step(print_loss, jnp.zeros(4), x, batch_size=4)
    with pytest.raises(ValueError, match="calls the host"):
        forecast_step(print_loss, jnp.zeros(4), x)
    with pytest.raises(ValueError, match="batch_size: is missing"):
        profile_step(step, make_state(), make_data())


@pytest.mark.slow
def test_forecast_adds_up_the_parts_of_a_step() -> None:
    batch = next(batches())
    forecast = forecast_step(step, make_state(), batch)
    assert (forecast.recipe, forecast.precision) == ("step", "float32")
    assert 0 < forecast.measured <= forecast.parts
    assert 0 < forecast.measured_share <= 1
    assert forecast.step_ms == pytest.approx(
        forecast.products_ms + forecast.rest_ms + forecast.host_ms
    )
    assert str(forecast).startswith("FORECAST, not measured: step on ")


@pytest.mark.slow
def test_documented_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "sink.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"step": step, "state": make_state(), "data": make_data(), "batch": next(batches())}
    exec(code, names)
    printed = capsys.readouterr().out
    assert "Verdict: " in printed
    assert "FORECAST, not measured" in printed
    assert (tmp_path / "profile" / "table.txt").is_file()
