"""`python -m pipeline recommend`: the next values, by what earlier runs have shown."""

from __future__ import annotations

import math
import random
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, UsageError
from pipeline.core.files.yaml_text import format_yaml
from tests.command_line import recommend as main
from tests.study.runs.made_up import make_run

optuna = pytest.importorskip("optuna", reason="optuna is not installed: the extra `sweep`")

LR = "train.optimizer.lr=tag(log,interval(0.0001,1))"
BATCH = "train.batch_size=16,32"
DIGITS = ["+recipe=lenet5_digits", LR, BATCH]
WITHOUT_OPTUNA = """
import sys
from pathlib import Path
sys.modules["optuna"] = None
from pipeline.cli.recommend import main
main(Path(), [], "loss", count=1, sampler="tpe", seed=0)
"""


def accuracy_of(lr: float, batch: int) -> float:
    """A made-up accuracy: best at 0.02 and batches of 32."""
    return 0.98 - 0.1 * abs(math.log10(lr / 0.02)) - (0.02 if batch == 16 else 0.0)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 runs of the digits' recipe, one of them of another length, and one of another recipe."""
    root, generator = tmp_path_factory.mktemp("history") / "outputs", random.Random(0)
    trees = [
        recipe_with(keys).model_dump(mode="json")
        for keys in (["seed=0"], ["seed=1"], ["seed=1", "train.epochs=3"])
    ]
    for number in range(32):
        lr, batch = 10 ** generator.uniform(-4, 0), generator.choice([16, 32])
        folder = make_run(root / f"{number}", accuracy=accuracy_of(lr, batch))
        tree = trees[2] if number == 31 else trees[number % 2]
        tree["train"]["optimizer"]["lr"], tree["train"]["batch_size"] = lr, batch
        (folder / "recipe.yaml").write_text(format_yaml(tree))
    make_run(root / "of_another_recipe")
    return root


def recipe_with(keys: list[str]) -> Recipe:
    return load_recipe("lenet5_digits", keys)


@pytest.mark.medium
def test_proposals_are_near_the_best_runs(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Hydra would read the comma as a sweep's.
    folder = tmp_path / "a,b"
    folder.symlink_to(history)
    assert main([str(folder), *DIGITS, "--count=5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"31 of 33 runs in {folder} are of this recipe and search space"
    assert lines[1].startswith("best so far: accuracy 0.9")
    proposed = [float(found[1]) for line in lines if (found := re.search(r"lr=([\d.e-]+) ", line))]
    assert len(proposed) == 6
    assert statistics.median(abs(math.log10(lr / 0.02)) for lr in proposed) < 0.7
    assert f"hydra.sweeper.history='{folder}'" in shlex.split(lines[-1])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("checkpoint", {"restore": "w.npz"}),
        pytest.param(
            *("train", {"lr_rules": [{"pattern": "conv_0", "factor": 0.0}]}),
            marks=pytest.mark.slow,
        ),
        pytest.param("dataset", {"train": {"ops": []}}, marks=pytest.mark.slow),
    ],
)
def test_run_of_another_recipe_is_not_a_trial(
    section: str,
    value: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, changed in (("same", {}), ("other", value)):
        folder = make_run(tmp_path / name / "run", accuracy=0.9)
        tree = recipe_with(["train.optimizer.lr=0.01", "train.batch_size=16"]).model_dump(
            mode="json"
        )
        part = {**tree[section], **changed}
        if "train" in changed:
            part["train"] = {**tree[section]["train"], **changed["train"]}
        (folder / "recipe.yaml").write_text(format_yaml({**tree, section: part}))
    assert main([str(tmp_path / "same"), *DIGITS]) == 0
    assert capsys.readouterr().out.startswith("1 of 1 runs")
    assert main([str(tmp_path / "other"), *DIGITS]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 runs")


@pytest.mark.medium
@pytest.mark.parametrize("lr", [LR, "train.optimizer.lr=0.03"])
def test_rate_for_a_batch_size_is_read_as_it_was_typed(
    lr: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recorded rate is the scaled one, which the proposed command would scale again."""
    base = "train.optimizer.lr_for_batch=112"
    for batch in (16, 32):
        keys = [f"train.batch_size={batch}", "train.optimizer.lr=0.03", base]
        folder = make_run(tmp_path / f"{batch}", accuracy=batch / 100)
        (folder / "recipe.yaml").write_text(format_yaml(recipe_with(keys).model_dump(mode="json")))
    assert main([str(tmp_path), "+recipe=lenet5_digits", lr, BATCH, base]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 of 2 runs")
    typed = "train.optimizer.lr=0.03 " if lr == LR else ""
    assert lines[1] == f"best so far: accuracy 0.32 with {typed}train.batch_size=32"


def needed(next_value: Callable[[optuna.Study], float], seed: int, known: int) -> int:
    """The number of trials until the made-up accuracy is within 0.01 of its best."""
    generator = random.Random(seed)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=10)
    )
    space = {"lr": optuna.distributions.FloatDistribution(1e-4, 1, log=True)}
    for _ in range(known):
        lr = 10 ** generator.uniform(-4, 0)
        if accuracy_of(lr, 32) < 0.95:
            value = accuracy_of(lr, 32)
            study.add_trial(
                optuna.create_trial(params={"lr": lr}, distributions=space, value=value)
            )
    for trial in range(1, 200):
        asked = study.ask(space)
        lr = next_value(study) if next_value is not from_history else asked.params["lr"]
        study.tell(asked, accuracy_of(lr, 32))
        if accuracy_of(lr, 32) > 0.97:
            return trial
    return 200


def from_history(study: optuna.Study) -> float:
    raise NotImplementedError


@pytest.mark.slow
def test_history_saves_two_fifths_of_random_search_trials() -> None:
    """Twenty earlier runs, none of them good; the median of ten seeds."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    drawn = random.Random(0)
    told = statistics.median(needed(from_history, seed, 20) for seed in range(10))
    at_random = statistics.median(
        needed(lambda study: 10 ** drawn.uniform(-4, 0), seed, 0) for seed in range(10)
    )
    assert told <= 0.6 * at_random


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["one", "two", *DIGITS],
        ["outputs", *DIGITS, "--count=0"],
        ["outputs", *DIGITS, "--sampler=ucb"],
        ["outputs", *DIGITS, "--seed=x"],
        ["outputs", *DIGITS, "--what"],
        ["outputs", *DIGITS, "--metric=accurate"],
    ],
)
def test_wrong_arguments_are_refused(args: list[str]) -> None:
    with pytest.raises(UsageError):
        main(args)


@pytest.mark.medium
def test_recipe_without_search_keys_is_refused(history: Path) -> None:
    with pytest.raises(RecipeError, match="must have a key to search"):
        main([str(history), "+recipe=lenet5_digits"])


@pytest.mark.medium
def test_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no run"):
        main([str(tmp_path), *DIGITS])


def test_missing_optuna_is_named_with_its_extra() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTUNA], capture_output=True, text=True, check=False
    )
    assert "optuna isn't installed; pip install 'recipe-pipeline[sweep]'" in result.stderr
