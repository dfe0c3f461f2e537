"""The sinks of a run are the recipe's, or found here; never a bit of a loss depends on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.backends.sink_choice import SinkChoice
from pipeline.checkpoint.restore import parse_host_state
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import RunSchedule
from pipeline.stages.autosink import choose_sink as choose_sink_module
from pipeline.stages.autosink.choose_sink import SinkSearch, choose_sink, resume_sink
from pipeline.stages.autosink.sink_plan import SinkPlan, make_sink_plan
from tests import outcome
from tests.stages.clockwork import Clockwork
from tests.whole_run import run

Compose = Callable[..., Recipe]
AUTO = "train.sink_size=auto"


@pytest.fixture
def chosen(tiny: Compose, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SinkPlan]:
    """Choose the sinks of a run on a simulated clock, of 10,000 steps by default."""

    def go(
        clockwork: Clockwork,
        *overrides: str,
        total: int = 10_000,
        host: dict[str, Any] | None = None,
    ) -> SinkPlan:
        clockwork.rule(monkeypatch)
        recipe = tiny(AUTO, "eval.every_epochs=null", *overrides)
        run_schedule = RunSchedule(total, 6, 6)
        backend = recipe.device.open(recipe.parallel)
        before = parse_host_state(host or {}).sink
        if before is not None:
            return resume_sink(before, Reporter())
        return choose_sink(
            recipe,
            run_schedule,
            clockwork,  # type: ignore[arg-type]
            backend,
            None,
            Reporter(),
        )

    return go


ChooseSink = Callable[..., SinkPlan]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "size", "mechanism"),
    [("train.sink_size=-1", 6, "loop"), ("train.sink=false", None, "none")],
)
def test_recipe_sink_size_is_not_measured(
    override: str, size: int | None, mechanism: str, tiny: Compose
) -> None:
    recipe = tiny(override)
    clockwork: Any = Clockwork()
    backend = recipe.device.open(recipe.parallel)
    plan = make_sink_plan(recipe.train, RunSchedule(10_000, 6, size), clockwork, backend)
    assert (plan.size, plan.mechanism, plan.host_entry) == (size, mechanism, {})
    assert clockwork.ran == []


@pytest.mark.slow
def test_auto_is_the_fastest_by_the_clock(
    chosen: ChooseSink, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 ms a dispatch and 0.1 a step: 500 steps spread it to 2 % of a step, 1000 to 1 %."""
    found = chosen(Clockwork(dispatch_s=1e-3, step_s=1e-4))
    assert (found.size, found.mechanism) == (1000, "loop")
    assert found.choice is not None
    assert found.choice.gain == pytest.approx(1.1 / (0.1 + 1.0 / 1000))
    assert found.summary()["predicted"]["off_ms"] == pytest.approx(1.1)
    said = capsys.readouterr().out
    assert said.startswith("sink       1,000 steps as one program; 0.101 ms a step in")


@pytest.mark.slow
def test_events_shorten_sinks(chosen: ChooseSink) -> None:
    found = chosen(Clockwork(), "eval.every_epochs=10")
    assert found.size == 60
    assert found.reason.endswith("; an event is due every 60 steps")


@pytest.mark.medium
def test_auto_selects_the_faster_mechanism(chosen: ChooseSink) -> None:
    assert chosen(Clockwork(soft_s=-5e-5)).mechanism == "soft"


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["loop", "soft"])
def test_auto_uses_the_requested_mechanism(asked: str, chosen: ChooseSink) -> None:
    clockwork = Clockwork()
    assert chosen(clockwork, f"train.mechanism={asked}").mechanism == asked
    assert {mechanism for _, mechanism in clockwork.ran} == {"none", asked}


OFF = {
    "nothing to gain": (Clockwork(dispatch_s=0.0), 10_000, "no sink is sure to be faster"),
    "a short run": (Clockwork(), 45, "not measured: that takes 100 steps, and the run has 45"),
    "slow steps": (
        Clockwork(step_s=2.0),
        10_000,
        "since a step takes 2 s and the host looks for",
    ),
    "little memory": (Clockwork(window_steps=1), 10_000, "the device holds 1 batch at once"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("clockwork", "total", "why"), OFF.values(), ids=OFF.keys())
def test_auto_is_off_if_no_sink_is_faster(
    clockwork: Clockwork, total: int, why: str, chosen: ChooseSink
) -> None:
    found = chosen(clockwork, total=total)
    assert (found.size, found.mechanism) == (None, "none")
    assert why in found.reason
    assert found.summary()["predicted"]["gain"] == 1


@pytest.mark.medium
def test_measuring_takes_a_small_share_of_the_run(chosen: ChooseSink) -> None:
    """A share of what the run takes, of 10 s here."""
    clockwork = Clockwork(dispatch_s=2e-4, step_s=8e-4)
    chosen(clockwork)
    assert 0.2 < clockwork.now < 1.0


def test_steps_that_diverge_are_not_measured(chosen: ChooseSink) -> None:
    clockwork = Clockwork()
    clockwork.nan_step = 3
    found = chosen(clockwork)
    assert (found.size, found.choice) == (None, None)
    assert found.reason.startswith(
        "not measured: a step that was run only to time it failed: epoch: 1 step: 3"
    )


def test_signal_stops_a_measurement(chosen: ChooseSink) -> None:
    clockwork = Clockwork()
    clockwork.signal_at = 4
    with pytest.raises(KeyboardInterrupt):
        chosen(clockwork)


@pytest.mark.slow
def test_resumed_run_continues_with_its_sinks(chosen: ChooseSink) -> None:
    clockwork = Clockwork()
    kept = chosen(clockwork).host_entry
    ran = len(clockwork.ran)
    again = chosen(clockwork, host={**kept, "early_stop": {}})
    assert (again.size, again.mechanism, again.host_entry) == (1000, "loop", kept)
    assert len(clockwork.ran) == ran
    assert chosen(clockwork, "train.sink_size=7", host=kept).mechanism == "loop"


@pytest.mark.parametrize(
    ("asked", "single_steps", "mechanism"),
    [
        ("auto", False, "loop"),
        ("loop", False, "loop"),
        ("soft", False, "soft"),
        ("auto", True, "soft"),
    ],
)
def test_several_processes_have_the_requested_mechanism(
    asked: str,
    single_steps: bool,
    mechanism: str,
    tiny: Compose,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They don't measure, and say so."""
    recipe = tiny(AUTO, f"train.mechanism={asked}")
    executable = SimpleNamespace(report=SimpleNamespace(single_steps=single_steps))
    context = SimpleNamespace(recipe=recipe, ranks=SimpleNamespace(size=2), reporter=Reporter())
    built = SimpleNamespace(run_schedule=RunSchedule(45, 6, 6))
    backend = recipe.device.open(recipe.parallel)
    run: Any = SimpleNamespace(context=context, built=built, executable=executable, backend=backend)
    plan = SinkSearch(recipe).choose_sinks(run, None, parse_host_state({}))
    assert (plan.size, plan.mechanism, plan.host_entry) == (6, mechanism, {})
    assert capsys.readouterr().out.startswith(f"sink       {plan}; not measured by several proc")


# Whole runs.

EVENTS = ["eval.every_steps=10", "checkpoint.every_steps=12", "checkpoint.keep=20"]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure short runs too, though it takes longer than they do."""
    monkeypatch.setattr(choose_sink_module, "MOST_STEPS_SHARE", 1e6)
    monkeypatch.setattr(choose_sink_module, "LEAST_BUDGET_S", 0.1)
    monkeypatch.setattr(choose_sink_module, "MOST_BUDGET_S", 0.1)


def choosing(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Have every measurement end in the same choice, whatever this machine is."""
    monkeypatch.setattr(
        choose_sink_module, "choose", lambda costs, bounds: SinkChoice(size, "loop", "x", 2, 1)
    )


@pytest.mark.slow
@pytest.mark.mlp
def test_measuring_does_not_change_the_run(eager: None, tiny: Compose, tmp_path: Path) -> None:
    """S-05: auto, a sink per epoch and no sinks, bit for bit."""
    for name, how in (("auto", AUTO), ("epoch", "train.sink_size=-1"), ("off", "train.sink=false")):
        run(tiny(*EVENTS, how), tmp_path / name)
    outcome.assert_same_run(tmp_path / "auto", tmp_path / "off")
    outcome.assert_same_run(tmp_path / "auto", tmp_path / "epoch")
    summary = outcome.read_summary(tmp_path / "auto")["sink"]
    assert set(summary) == {"size", "mechanism", "why", "predicted"}
    assert summary["predicted"]["off_ms"] > 0


@pytest.mark.slow
@pytest.mark.mlp
def test_run_uses_the_chosen_sink_size(
    eager: None, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(monkeypatch, 7)
    run(tiny(AUTO), tmp_path / "auto")
    run(tiny("train.sink_size=7"), tmp_path / "seven")
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("auto", "seven")]
    assert lines[0] == lines[1]
    assert outcome.read_summary(tmp_path / "auto")["sinks"] == 7


@pytest.mark.slow
@pytest.mark.mlp
def test_run_continues_with_its_chosen_sinks(
    eager: None, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log counts sinks on, whatever a measurement would say by now."""
    choosing(monkeypatch, 7)
    run(tiny(AUTO, "schedule=constant", "train.steps=20"), tmp_path / "run")
    choosing(monkeypatch, 11)
    run(tiny(AUTO, f"train.resume={tmp_path / 'run'}"), tmp_path / "run")
    summary = outcome.read_summary(tmp_path / "run")["sink"]
    assert summary == {"size": 7, "mechanism": "loop", "why": "as chosen when the run began"}
    sinks = [line["sink"] for line in outcome.read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert sinks == [step // 7 + 1 for step in range(45)]


@pytest.mark.slow
@pytest.mark.mlp
def test_diverging_run_ends_at_its_step_with_auto(
    eager: None, tiny: Compose, tmp_path: Path
) -> None:
    for name, how in (("auto", AUTO), ("off", "train.sink=false")):
        with pytest.raises(RunError, match=r"Invalid loss, terminating training\. Step "):
            run(tiny("train.optimizer.lr=1e30", how), tmp_path / name)
    outcome.assert_same_run(tmp_path / "auto", tmp_path / "off")
    why = outcome.read_summary(tmp_path / "auto")["sink"]["why"]
    assert why.startswith("not measured: a step that was run only to time it failed: ")


@pytest.mark.slow
@pytest.mark.mlp
def test_sink_epoch_is_an_epoch_with_auto(tiny: Compose, tmp_path: Path) -> None:
    """How long a run is does not hang on a measurement."""
    assert run(tiny(AUTO, "train.epochs=2"), tmp_path / "run").steps == 12


@pytest.mark.slow
@pytest.mark.mlp
def test_auto_without_sinks_is_ignored_with_a_warning(tiny: Compose, tmp_path: Path) -> None:
    summary = run(tiny(AUTO, "train.sink=false", "train.steps=6"), tmp_path / "run")
    assert (summary.sink["size"], summary.sink["mechanism"]) == (None, "none")
    log = (tmp_path / "run" / "run.log").read_text()
    assert "warning    train.sink_size = auto: ignored, sink is false" in log


@pytest.mark.slow
@pytest.mark.mlp
def test_emulated_device_has_the_best_sinks_of_its_model(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = ["device=ascend910", "stages=[data,build,compile]", "train.steps=5000"]
    priced += ["eval.every_epochs=null"]
    modelled = {
        size: run(tiny(*priced, f"train.sink_size={size}"), tmp_path / str(size)).modelled
        for size in ("auto", 1000)
    }
    chosen = modelled["auto"]["sink_size"]
    assert modelled["auto"]["mode"] == "loop_sink"
    assert 1 < chosen <= 1000
    assert modelled["auto"]["step_ms"] <= modelled[1000]["step_ms"] * 1.005
    assert f"loop_sink of {chosen:,} steps" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.mlp
def test_run_on_an_emulated_device_uses_modelled_sinks(tiny: Compose, tmp_path: Path) -> None:
    summary = run(tiny("device=ascend910", AUTO), tmp_path / "run")
    assert summary.sink["size"] == summary.modelled["sink_size"]
    assert summary.sink["why"].startswith("modelled for Ascend 910A: ")
    assert "predicted" not in summary.sink
