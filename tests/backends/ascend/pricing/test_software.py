"""Prices of a software stack, why a layer costs what it does, and where AutoTune's bank is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pipeline.backends.ascend import price
from pipeline.backends.ascend.chip.options import OptionError
from pipeline.backends.ascend.tune import autotune
from pipeline.backends.ascend.tune.autotune import find_custom_bank
from pipeline.core.files.knowledge_bank import read_bank
from tests.backends.ascend.made_up import HW

WEIGHTS = {"up": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((64, 50, 512), jnp.float32)
ALIGNED = jax.ShapeDtypeStruct((64, 48, 512), jnp.float32)


def step(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        with jax.named_scope("layer"):
            hidden = jax.nn.softmax(batch @ weights["up"], axis=-1)
        return jnp.mean((hidden @ weights["up"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value


def test_a_stack_has_its_own_launches() -> None:
    graph, mindspore, torch = (
        price(step, WEIGHTS, BATCH, software=software)
        for software in ("mindspore_graph", "mindspore_eager", "pytorch_eager")
    )
    assert (graph.config.mode, mindspore.config.mode) == ("loop_sink", "op_by_op")
    launches = [report.timeline.host_us - HW.host_step_us for report in (mindspore, torch)]
    assert launches[0] / launches[1] == pytest.approx(230 / 80, rel=0.15)
    assert graph.step_ms < torch.step_ms < mindspore.step_ms
    assert graph.step_ms == price(step, WEIGHTS, BATCH).step_ms


def test_eager_products_convert_matrices_that_graphs_keep_in_blocks() -> None:
    graph, eager = (
        price(step, WEIGHTS, ALIGNED, software=software)
        for software in ("mindspore_graph", "pytorch_eager")
    )
    converted = [
        sum(task.us for task in report.tasks if task.type == "TransData")
        for report in (graph, eager)
    ]
    assert converted[1] > 2.5 * converted[0]


def test_tokens_that_are_no_whole_sixteens_cost_more_than_more_of_them() -> None:
    odd, whole = (price(step, WEIGHTS, batch).device_ms for batch in (BATCH, ALIGNED))
    assert odd > 1.2 * whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"software": "caffe"},
            "software = 'caffe': must be None (MindSpore) or one of mindspore_graph, ",
        ),
        (
            {"software": "pytorch_eager", "mode": "loop_sink"},
            "mode = loop_sink: must be op_by_op for software = pytorch_eager",
        ),
        (
            {"software": "mindspore_graph", "mode": "op_by_op"},
            "mode = op_by_op: must be graph_sink or loop_sink for software = mindspore_graph",
        ),
    ],
)
def test_a_stack_that_is_not_known_or_has_no_such_mode(given: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        price(step, WEIGHTS, BATCH, **given)
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_a_layer_is_explained_by_formulas_figures_and_their_sources() -> None:
    report = price(step, WEIGHTS, BATCH)
    found = report.explain("layer")
    assert sum(task.us for task in found.tasks) == pytest.approx(found.us)
    assert any("16 x 16 x 16" in task.formula for task in found.tasks)
    figures = {each.name: each for task in found.tasks for each in task.figures}
    assert figures["ai_cores_count"].value == 32
    assert "INI-A" in figures["ai_cores_count"].source
    assert [each.name for each in found.interval_sources] == [
        "spread of the classes",
        "spread of whole steps",
        "scale",
    ]
    text = str(found)
    assert text.startswith("MODELLED: layer takes")
    assert max(map(len, text.splitlines())) <= 100


def test_every_class_of_kernels_has_a_formula_of_figures_that_exist() -> None:
    report = price(step, WEIGHTS, BATCH, precision=None)
    assert all(str(report.explain(cost.layer)) for cost in report.layers)


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(OptionError, match="layer: there is no such layer; did you mean layer"):
        price(step, WEIGHTS, BATCH).explain("layers")


def test_with_tuning_off_a_bank_gets_defaults_and_gives_what_it_has(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    plain = price(step, WEIGHTS, ALIGNED)
    stored = price(step, WEIGHTS, ALIGNED, tune_bank=bank)
    assert stored.tuning is not None
    assert stored.step_ms == plain.step_ms
    assert {task.status for task in stored.tuning.tasks} == {"bank_append"}
    assert read_bank(bank, dict)
    tuned = price(step, WEIGHTS, ALIGNED, tune_bank=bank, auto_tune="exhaustive", repeat_tune=True)
    again = price(step, WEIGHTS, ALIGNED, tune_bank=bank)
    assert again.tuning is not None
    assert {task.status for task in again.tuning.tasks} == {"bank_hit"}
    assert again.step_ms == tuned.step_ms <= plain.step_ms


def test_both_searches_together_are_no_worse_than_either() -> None:
    both = price(step, WEIGHTS, ALIGNED, auto_tune="RL,GA").tuning  # type: ignore[arg-type]
    alone = [price(step, WEIGHTS, ALIGNED, auto_tune=mode).tuning for mode in ("rl", "ga")]
    assert both is not None
    assert both.mode == "rl,ga"
    assert all(one is not None and both.after_us <= one.after_us + 1e-9 for one in alone[:1])


def test_the_environment_names_the_folder_of_the_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    tmp_path.chmod(0o700)
    assert find_custom_bank(None) == str(tmp_path / "custom_bank.json")
    assert find_custom_bank(tmp_path / "own.json") == str(tmp_path / "own.json")
    price(step, WEIGHTS, ALIGNED)
    assert (tmp_path / "custom_bank.json").is_file()


def test_a_bank_in_a_folder_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path / "missing"))
    with pytest.raises(OptionError, match=r"TUNE_BANK_PATH = .*missing: must be a folder that"):
        price(step, WEIGHTS, ALIGNED)
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(OptionError, match="must be writable by you alone; everybody can write it"):
        price(step, WEIGHTS, ALIGNED)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(autotune, "find_foreign_owner", lambda found: "user ann")
    with pytest.raises(OptionError, match="must belong to you, not to user ann"):
        price(step, WEIGHTS, ALIGNED)
    assert os.listdir(tmp_path) == []
