"""Adversarial training and attacks in whole runs: the same bits however a run is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cli.runs import attack
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, UsageError
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.inspect.report.write_report import write_report
from pipeline.stages.feature_facts import require_attackable
from tests import outcome
from tests.conftest import compose_tiny
from tests.outcome import assert_equal_arrays, assert_same_run
from tests.whole_run import run

Compose = Callable[..., Recipe]
LAYERS = (
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 2, bias: true}, batch_norm, relu, "
    "flatten, {name: dropout, rate: 0.2}, {name: dense, features: $classes}]",
)
RUN = ("train.batch_size=32", "train.steps=14", "checkpoint.every_steps=7")
PGD = "++train.adversarial={attack: pgd, radius: 0.1, steps: 2, share: 0.7, warmup_steps: 5}"
TRADES = "++train.adversarial={attack: trades, norm: l2, radius: 0.5, steps: 2}"
MLP = ("model=mlp", "model.hidden=[8]")


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(
    ("adversarial", "mode"), [(PGD, "none"), (TRADES, "data")], ids=["pgd", "trades"]
)
def test_run_does_not_depend_on_sinks_resume_and_devices(
    adversarial: str, mode: str, tiny: Compose, tmp_path: Path
) -> None:
    fixed = (*LAYERS, *RUN, adversarial)
    alone, data = f"parallel.mode={mode}", "parallel.mode=data"
    for name, *overrides in (
        ("1", alone, "train.sink_size=1"),
        ("7", alone, "train.sink_size=7"),
        ("14", alone, "train.sink_size=14"),
        ("one", data, "parallel.devices=1"),
        ("four", data, "parallel.devices=4"),
    ):
        run(tiny(*fixed, *overrides), tmp_path / name)
    assert_same_run(tmp_path / "1", tmp_path / "7")
    assert_same_run(tmp_path / "1", tmp_path / "14")
    assert_same_run(tmp_path / "one", tmp_path / "four")
    half = tmp_path / "half"
    run(tiny(*fixed, alone, "train.end_step=7"), half)
    run(tiny(*fixed, alone, f"train.resume={half}"))
    assert outcome.metrics(half) == outcome.metrics(tmp_path / "7")
    assert_equal_arrays(outcome.arrays(half), outcome.arrays(tmp_path / "7"))


@pytest.mark.slow
def test_trades_without_devices_adds_beta_times_a_divergence(tiny: Compose, tmp_path: Path) -> None:
    """At step 1, before `beta` changes the weights; and the sinks don't change a bit."""
    training = "stages=[data,build,compile,train,checkpoint]"
    losses = {}
    for name, *overrides in (
        ("plain", "train.steps=2"),
        ("3", "train.steps=2", f"{TRADES[:-1]}, beta: 3.0}}"),
        ("6", "train.steps=14", TRADES, "train.sink_size=7"),
        ("soft", "train.steps=14", TRADES, "train.mechanism=soft"),
    ):
        run(tiny(*MLP, training, "train.batch_size=32", *overrides), tmp_path / name)
        losses[name] = float(outcome.metrics(tmp_path / name)[0]["loss"])
    assert_same_run(tmp_path / "6", tmp_path / "soft")
    divergence = (losses["6"] - losses["plain"]) / 6
    assert divergence > 1e-3
    assert losses["3"] - losses["plain"] == pytest.approx(3 * divergence, rel=1e-3)


@pytest.mark.slow
def test_attack_raises_the_loss_also_in_microbatches(tiny: Compose, tmp_path: Path) -> None:
    first_losses = {}
    for name, *overrides in (
        ("clean", "train.steps=2"),
        ("fgsm", "train.steps=2", "++train.adversarial={attack: fgsm, radius: 0.1}"),
        ("halves", "train.steps=2", "++train.adversarial={attack: fgsm, radius: 0.1}"),
    ):
        halves = ["train.accumulate_steps=2"] if name == "halves" else []
        run(tiny(*MLP, "train.batch_size=32", *overrides, *halves), tmp_path / name)
        first_losses[name] = outcome.metrics(tmp_path / name)[0]["loss"]
    assert first_losses["fgsm"] > first_losses["clean"]
    assert float(first_losses["halves"]) == pytest.approx(float(first_losses["fgsm"]), rel=1e-5)


@pytest.fixture(scope="module")
def attacked_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("attacked") / "run"
    attacks = "{attack: fgsm, radius: 0.1}, {attack: pgd, radius: 0.1, steps: 3, restarts: 2}"
    robustness = f"++eval.robustness=[{attacks}, {{attack: corruptions, severities: [2]}}]"
    length = ("train.batch_size=32", "train.steps=60", "checkpoint.every_steps=60")
    run(compose_tiny(cache, *MLP, *length, robustness), run_dir)
    return run_dir


@pytest.mark.medium
def test_run_writes_its_robustness(attacked_run: Path) -> None:
    document = json.loads((attacked_run / "robustness.json").read_text())
    metrics = outcome.read_summary(attacked_run)["metrics"]
    assert document["clean"] == pytest.approx(metrics["accuracy"], abs=1e-6)
    accuracies = {row["attack"]: row["accuracy"] for row in document["attacks"]}
    assert list(accuracies) == ["fgsm", "pgd", "pgd, unbounded"]
    assert accuracies["pgd, unbounded"] <= accuracies["pgd"] <= accuracies["fgsm"] + 0.01
    assert accuracies["fgsm"] < document["clean"]
    assert metrics["robust_accuracy"] == document["robust_accuracy"] == accuracies["pgd"]
    assert len(document["corruptions"]) == 8


@pytest.mark.slow
def test_attack_command_and_report(attacked_run: Path, tmp_path: Path) -> None:
    result = attack.main(attacked_run, "l2", 0.5, 3, attacks=["noise", "pgd"], samples=30)
    assert json.loads((attacked_run / "robustness.json").read_text()) == result.facts
    assert result.facts["samples"] == 30
    assert [row["norm"] for row in result.facts["attacks"]] == ["l2"] * 3
    page = write_report([attacked_run], tmp_path / "report").page
    text = page.read_text()
    assert "Robustness" in text
    assert "pgd, unbounded" in text
    for arguments, problem in (
        ({"radius": None}, "--radius: must be set for a run without train.adversarial"),
        ({"radius": 2.0}, "--radius 2.0: must be at most 1"),
        ({"radius": 0.1, "attacks": ["jsma"]}, "--attacks jsma: there is no such attack"),
        ({"norm": "l2", "radius": 0.1, "attacks": ["square"]}, "needs --norm linf"),
    ):
        with pytest.raises(UsageError, match=problem):
            attack.main(attacked_run, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"raw_image": None, "inputs": "tokens 8"}, "has tokens 8, which have no pixels to change"),
        ({"raw_image": ColumnSpec((8, 8, 1), "int32")}, "has image 8x8x1, which have no pixels"),
        ({"table": "columns"}, "has the columns of a table"),
        ({"targets": Targets(("a", "b"), "multi_label")}, "not one class for each image"),
        ({"label_positions": (8, 8)}, "not one class for each image"),
    ],
    ids=["text", "ids", "table", "labels", "positions"],
)
def test_unattackable_data_are_refused(
    changed: dict[str, Any], problem: str, tiny: Compose
) -> None:
    facts = {"text": None, "table": None, "targets": Targets(("a", "b")), "label_positions": ()}
    facts |= {"raw_image": ColumnSpec((8, 8, 1), "uint8"), "inputs": "image 8x8x1", **changed}
    with pytest.raises(RecipeError, match=f"dataset = synthetic: .*{problem}"):
        require_attackable(tiny(), SimpleNamespace(**facts))  # type: ignore[arg-type]


@pytest.mark.slow
def test_run_with_buckets_is_not_attacked(tiny: Compose, tmp_path: Path) -> None:
    """Padding has no pixels to change."""
    rescale = "[{name: rescale, factor: 0.004, shift: 0.0}]"
    ops = [f"dataset.{split}.ops={rescale}" for split in ("train", "eval")]
    network = "model.layers=[relu, global_avg_pool, {name: dense, features: $classes}]"
    padded = ("dataset.buckets=[[12, 12]]", "dataset.padding_mask=true", *ops)
    run(tiny("model=layers", network, "train.steps=2", *padded), tmp_path)
    with pytest.raises(RecipeError, match=r"images of several sizes, by dataset\.buckets; attacks"):
        attack.main(tmp_path, radius=0.1, attacks=["fgsm"])
