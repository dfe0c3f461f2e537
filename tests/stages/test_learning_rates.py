"""Learning rates of whole runs: by parameter group, and from files that resume holds them to."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.checkpoint.host_state import RateChange
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import schedule_run
from pipeline.core.errors import DataError, RecipeError
from pipeline.engine.callback_calls import change_rates
from pipeline.stages.build import make_learning_rates
from pipeline.stages.record.provenance import read_provenance
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]

COSINE = "{pattern: conv_*, schedule: {name: cosine}}"
SLOW = "{pattern: dense_2, factor: 0.1, schedule: {name: polynomial, power: 2.0}}"
STEPS, STEPS_PER_EPOCH = 45, 6
NETWORK = (
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 4}, relu, global_avg_pool,"
    "{name: dense, features: 8}, {name: dense, features: 8}, {name: dense, features: $classes}]",
)
"""Few layers, with the names that the rules have."""


def table_of(recipe: Recipe) -> np.ndarray:
    return make_learning_rates(recipe.train, schedule_run(recipe.train, STEPS_PER_EPOCH))


def test_rate_table_has_a_column_per_rule(tiny: Compose) -> None:
    recipe = tiny(f"train.lr_rules=[{COSINE}, {SLOW}, {{pattern: dense_1, factor: 3.0}}]")
    share = np.arange(STEPS) / STEPS
    expected = 0.01 * np.stack(
        [
            np.ones(STEPS),
            (1 + np.cos(np.pi * share)) / 2,
            0.1 * (1 - share) ** 2,
            np.full(STEPS, 3.0),
        ],
        axis=1,
    )
    table = table_of(recipe)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, expected, rtol=3e-7)
    assert table_of(tiny()).shape == (STEPS,)


ADAM = (
    "{name: adam, lr: 0.002, b1: 0.9, b2: 0.999, eps: 1.0e-8, weight_decay: 0.0, decay_rules: []}"
)
OPTIMIZERS = (
    f"train.optimizers=[{{pattern: conv_*, optimizer: {ADAM}}},"
    f"{{pattern: dense_2, optimizer: {ADAM}, schedule: {{name: polynomial, power: 2.0}}}}]"
)


def test_optimizer_rate_columns_precede_rules(tiny: Compose) -> None:
    recipe = tiny(OPTIMIZERS, "train.lr_rules=[{pattern: dense_1, factor: 3.0}]")
    share = np.arange(STEPS) / STEPS
    ones = np.ones(STEPS)
    columns = [0.01 * ones, 0.002 * ones, 0.002 * (1 - share) ** 2, 0.03 * ones]
    np.testing.assert_allclose(table_of(recipe), np.stack(columns, axis=1), rtol=3e-7)
    scaled = change_rates(table_of(recipe), [RateChange(rate=0.5)], recipe.train.rate_columns)
    np.testing.assert_allclose(scaled[0], [0.5, 0.002, 0.002, 1.5], rtol=3e-7)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["train.lr_rules=[{pattern: conv_0, schedule: {name: cosine, warmup_steps: 9999}}]"],
            "train.lr_rules.0.schedule: warmup of 9999 steps must be shorter than the 1760 steps",
        ),
        (
            ["train.lr_rules=[{pattern: conv_0}]"],
            "train.lr_rules.0: set factor, schedule or both",
        ),
        (
            ["train.lr_rules=[{pattern: conv_0, schedule: {name: cosinus}}]"],
            "train.lr_rules.0.schedule.name = cosinus: there is no such schedule; did you mean cos",
        ),
        (
            [
                f"train.optimizers=[{{pattern: conv_0, optimizer: {ADAM}}}]",
                "train.freeze=[conv_0]",
                "train.unfreeze=[{pattern: conv_0, after_epochs: 1}]",
            ],
            "train.optimizers: must be [] with train.unfreeze",
        ),
        (
            ["schedule=table"],
            "train.schedule: file = null: must be a file that ends in .npy, .csv, .txt",
        ),
    ],
)
def test_rules_and_schedules_without_effect_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", overrides)
    assert problem in str(caught.value)


@pytest.mark.slow
def test_changed_group_rates_reuse_the_program(tiny: Compose, tmp_path: Path) -> None:
    """Another factor, schedule or file compiles nothing, and the main rate is what is logged."""
    np.savetxt(tmp_path / "lr.csv", np.geomspace(0.1, 1e-3, STEPS))
    rules = (
        f"[{COSINE}, {SLOW}]",
        "[{pattern: conv_*, factor: 0.0}, {pattern: dense_2, factor: 1.0}]",
        f"[{{pattern: conv_*, schedule: {{name: table, file: {tmp_path}/lr.csv}}}}, "
        "{pattern: dense_2, factor: 0.5}]",
    )
    for number, given in enumerate(rules):
        run_dir = tmp_path / str(number)
        assert run(tiny(*NETWORK, f"train.lr_rules={given}"), run_dir).status == "done"
        log = (run_dir / "run.log").read_text()
        (found,) = re.findall(r"training step: .* cache (\w+)", log)
        assert found == "hit" or number == 0
        lines = outcome.metrics(run_dir)
        assert {np.float32(line["learning_rate"]) for line in lines} == {np.float32(0.01)}
    still, shifted = outcome.arrays(tmp_path / "1"), outcome.arrays(tmp_path / "2")
    kernel = "params/conv_0/kernel"
    assert not np.array_equal(still[kernel], shifted[kernel])


def losses_of_groups(how: str, tiny: Compose, folder: Path) -> list[list[float]]:
    """Losses of six steps with rates by group, in a sink and in another way."""
    rules, length = f"train.lr_rules=[{COSINE}, {SLOW}]", "train.steps=6"
    run(tiny(*NETWORK, rules, length), folder / "whole")
    run(tiny(*NETWORK, rules, length, how), folder / "other")
    return [
        [line["loss"] for line in outcome.metrics(folder / name)] for name in ("whole", "other")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train.sink=false", "train.mechanism=soft"])
def test_groups_do_not_depend_on_the_sinks(how: str, tiny: Compose, tmp_path: Path) -> None:
    one, other = losses_of_groups(how, tiny, tmp_path)
    assert one == other


@pytest.mark.slow
def test_groups_are_the_same_in_eager_mode(tiny: Compose, tmp_path: Path) -> None:
    np.testing.assert_allclose(*losses_of_groups("train.mode=eager", tiny, tmp_path), rtol=2e-5)


@pytest.mark.slow
@pytest.mark.mlp
def test_resume_with_a_changed_rate_file_is_refused(tiny: Compose, tmp_path: Path) -> None:
    file = tmp_path / "lr.npy"
    np.save(file, np.linspace(0.1, 0.01, STEPS))
    given = ["schedule=table", f"train.schedule.file={file}"]
    assert run(tiny(*given, "train.steps=20"), tmp_path / "run").status == "done"
    rates = [line["learning_rate"] for line in outcome.metrics(tmp_path / "run")]
    np.testing.assert_allclose(rates, np.linspace(0.1, 0.01, STEPS)[:20], rtol=1e-6)
    (process,) = read_provenance(tmp_path / "run")
    kept = process["data"]["learning rates"]["train.schedule"]
    assert (kept["shape"], kept["dtype"]) == ([STEPS], "float64")
    resume = [*given, "train.steps=40", f"train.resume={tmp_path / 'run'}"]
    np.save(file, np.linspace(0.1, 0.02, STEPS))
    with pytest.raises(DataError, match=r"learning rates train\.schedule: was float64 45 \(SHA-2"):
        run(tiny(*resume))
    assert run(tiny(*resume, "train.resume_changed=allow")).status == "done"


@pytest.mark.slow
def test_rate_files_are_read_first(tiny: Compose, tmp_path: Path) -> None:
    """All that is wrong with them in one message."""
    rules = "train.lr_rules=[{pattern: conv_0, schedule: {name: table, file: none.csv}}]"
    recipe = tiny("schedule=table", f"train.schedule.file={tmp_path}/none.npy", rules)
    with pytest.raises(RecipeError) as caught:
        run(recipe, tmp_path / "run")
    assert str(caught.value).splitlines()[1:] == [
        f"  train.schedule.file = {tmp_path}/none.npy: can't be read: No such file or directory",
        "  train.lr_rules.0.schedule.file = none.csv: can't be read: No such file or directory",
    ]
