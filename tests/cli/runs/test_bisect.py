"""Searches for the keys and rows by which two runs differ, with planted differences."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import combinations
from math import ceil, log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe, run
from pipeline.core.errors import DataError, PipelineError, RecipeError, RunError, UsageError
from pipeline.inspect.bisect import (
    Outcome,
    PairedMetric,
    _shorten,
    find_smallest,
    list_changes,
    mix_recipes,
)
from pipeline.inspect.dumps.opened_recipe import open_run_recipe
from pipeline.inspect.replay import list_changed_causes, list_changed_environment
from tests.command_line import bisect, fork
from tests.conftest import MLP, compose_tiny

KEYS = (*MLP, "train.steps=6")
HARMLESS = ("train.clip.norm=1e9", "train.ledger=true", "train.ema.decay=0.9")
"""Keys that change no number of a step here."""
FREE = ("train.sink_size=2", "eval.every_steps=3", "name=other")
"""Keys that never change a step, so that they aren't searched."""


@pytest.mark.parametrize("part", ["other", "good"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 40])
def test_search_finds_each_planted_set(size: int, part: Outcome) -> None:
    """The outcome is bad with all of the set, and good with none of it. Some changes act only
    together, so that a part of them is as good as none."""
    for count in (1, 2, 3):
        for planted in combinations(range(size), count):
            if size == 40 and sum(planted) % 7:
                continue
            calls = 0

            def probe(changes: Sequence[int], planted: tuple[int, ...] = planted) -> Outcome:
                nonlocal calls
                calls += 1
                has = len({*changes} & {*planted})
                return "bad" if has == len(planted) else part if has else "good"

            assert find_smallest(list(range(size)), probe) == list(planted)
            bits = ceil(log2(size))
            assert calls <= count * (bits + 1)


def test_components_lists_and_lengths_change_as_one(cache: Path) -> None:
    good = compose_tiny(cache, *KEYS)
    bad = compose_tiny(
        cache,
        *MLP,
        "train.epochs=2",
        "optimizer=adam",
        "train.optimizer.lr=0.1",
        "train.unfreeze=[]",
        "model.hidden=[8,8]",
        *FREE,
    )
    changes = list_changes(good, bad)
    assert sorted(change.text for change in changes) == [
        "model.hidden = [8, 8]: was [16]",
        "train.epochs = 2: was null; train.steps = null: was 6",
        "train.optimizer.name = adam: was momentum",
    ]
    whole = mix_recipes(good, bad, changes)
    assert list_changes(whole, bad) == []
    assert list_changes(good, mix_recipes(good, bad, ())) == []


@pytest.fixture
def read_facts(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*words: str) -> Any:
        capsys.readouterr()
        assert bisect([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="module")
def good(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    run(compose_tiny(cache, *KEYS), folder)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize(
    ("planted", "step", "named"),
    [
        (("train.loss.smoothing=0.1",), 1, [r"train\.loss\.smoothing = 0\.1: was 0\.0"]),
        (("train.optimizer.momentum=0.5",), 3, [r"train\.optimizer\.momentum = 0\.5: was 0\.9"]),
        (("seed=5", "train.loss.smoothing=0.1"), 1, [r"seed = 5: was 1", r"train\.loss\.smoothin"]),
    ],
)
def test_planted_keys_are_the_smallest_set(
    good: Path,
    cache: Path,
    tmp_path: Path,
    read_facts: Callable[..., Any],
    planted: tuple[str, ...],
    step: int,
    named: list[str],
) -> None:
    bad = tmp_path / "bad"
    run(compose_tiny(cache, *KEYS, *HARMLESS, *FREE, *planted), bad)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    facts = read_facts(str(good), str(bad))
    assert facts["step"] == step
    assert facts["changes"] == len(HARMLESS) + len(planted)
    assert len(facts["keys"]) == len(named)
    for text, pattern in zip(sorted(facts["keys"]), named, strict=True):
        assert re.match(pattern, text)
    assert facts["runs"] <= 2 * ceil(log2(facts["changes"])) + 6
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_mixture_has_checkpoints_of_its_own_for_rollbacks(cache: Path) -> None:
    keys = (*KEYS, "checkpoint.every_steps=2", "checkpoint.directory=mine", "train.sink_size=2")
    plain = _shorten(compose_tiny(cache, *keys), 4)
    assert "checkpoint" not in plain.stages
    shortened = _shorten(compose_tiny(cache, *keys, "train.on_nan=rollback"), 4)
    assert "checkpoint" in shortened.stages
    assert (shortened.checkpoint.directory, shortened.checkpoint.mirror) == (None, None)


def move_elsewhere(run_dir: Path) -> None:
    """Let a run be trained with another version of jax."""
    file = run_dir / "provenance.json"
    document = json.loads(file.read_text())
    for process in document["processes"]:
        process["versions"]["jax"] = "0.0.1"
    file.write_text(json.dumps(document))


@pytest.mark.medium
def test_versions_of_the_run_from_elsewhere_are_named(
    good: Path, cache: Path, tmp_path: Path, read_facts: Callable[..., Any]
) -> None:
    """If its recipe, trained here, has the numbers of the other run."""
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    with pytest.raises(DataError, match="the same, bit for bit"):
        bisect([str(good), str(bad), "--over=versions"])
    log = bad / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[2] = re.sub(r'"loss": [\d.]+', '"loss": 1.25', lines[2])
    log.write_text("".join(lines))
    with pytest.raises(DataError, match="both runs were trained with the versions, code and mach"):
        bisect([str(good), str(bad), "--over=versions"])
    move_elsewhere(bad)
    for words in ((good, bad), (bad, good)):
        facts = read_facts(*map(str, words), "--over=versions")
        assert (facts["step"], facts["elsewhere"]) == (3, str(bad))
        assert facts["outcome"] == ("good" if words[0] == good else "bad")
        assert len(facts["causes"]) == 1
        assert "jax 0.0.1 -> " in facts["causes"][0]
    other = tmp_path / "other"
    run(compose_tiny(cache, *KEYS, "train.loss.smoothing=0.1"), other)
    move_elsewhere(other)
    facts = read_facts(str(good), str(other), "--over=versions")
    assert (facts["outcome"], facts["causes"]) == ("bad", [])
    with pytest.raises(DataError, match="neither run was trained"):
        bisect([str(bad), str(other), "--over=versions"])


@pytest.mark.medium
def test_callbacks_and_resumes_are_not_another_environment(good: Path, tmp_path: Path) -> None:
    """Both runs were trained here. A resumed run from elsewhere isn't trained again."""
    opened = open_run_recipe(good)
    train = opened.recipe.train.model_copy(update={"callbacks": (object(),)})
    recipe = opened.recipe.model_copy(update={"train": train})
    with_callbacks: Any = SimpleNamespace(recipe=recipe, backend=opened.backend)
    assert list_changed_environment(with_callbacks, good) == []
    assert list_changed_causes(with_callbacks, good) == ["its callbacks aren't called"]
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    log = bad / "metrics.jsonl"
    log.write_text(re.sub(r'"loss": [^,]*', '"loss": 1.25', log.read_text()))
    file = bad / "provenance.json"
    document = json.loads(file.read_text())
    document["processes"] *= 2
    file.write_text(json.dumps(document))
    with pytest.raises(DataError, match="both runs were trained with the versions, code and mach"):
        bisect([str(good), str(bad), "--over=versions"])
    move_elsewhere(bad)
    with pytest.raises(DataError, match=r"bad: its first steps .* again: the run was resumed"):
        bisect([str(good), str(bad), "--over=versions"])


@pytest.mark.medium
def test_rows_of_other_data_are_named(
    tmp_path: Path, cache: Path, read_facts: Callable[..., Any]
) -> None:
    """Two images of an array file are changed, which different steps read."""
    draws = np.random.default_rng(0)
    arrays: Any = {
        "x_train": draws.integers(0, 255, (48, 8, 8, 1), np.uint8),
        "y_train": draws.integers(0, 3, 48, np.int32),
    }
    arrays |= {name.replace("train", "test"): array[:9] for name, array in arrays.items()}
    runs = []
    for name in ("good", "bad"):
        if name == "bad":
            arrays["x_train"][[17, 30]] ^= 255
        file = tmp_path / f"{name}.npz"
        np.savez(file, **arrays)
        keys = ("dataset=numpy", f"dataset.root={file}", *MLP, "train.epochs=1")
        words = [*keys, "train.batch_size=8", f"cache.root={cache}"]
        run(load_recipe("lenet5_digits", words), tmp_path / name)
        runs.append(str(tmp_path / name))
    facts = read_facts(*runs, "--over=rows")
    assert len(facts["rows"]) in (1, 2)
    assert {row["row"] for row in facts["rows"]} <= {17, 30}


def copy_run(run_dir: Path, folder: Path) -> None:
    shutil.copytree(run_dir, folder)


@pytest.mark.medium
def test_runs_that_cannot_be_searched_are_refused(
    good: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_run(good, tmp_path / "same")
    copy_run(good, tmp_path / "edited")
    log = tmp_path / "edited" / "metrics.jsonl"
    log.write_text(re.sub(r'"loss": [^,]*', '"loss": 1.25', log.read_text()))
    run(compose_tiny(cache, *KEYS, "seed=5"), tmp_path / "seed")
    edited = tmp_path / "seed" / "metrics.jsonl"
    cases: list[tuple[list[str], type[PipelineError], str]] = [
        (["same"], DataError, "all steps that both have are the same, bit for bit; nothing to se"),
        (["edited"], DataError, "no key that decides steps differs; since edited was trained"),
        (["edited", "--over=rows"], DataError, "the rows of step 1 are equal in both; --over ke"),
        (["seed", "--over=rows"], DataError, "batches have other samples or columns"),
        (["nothing"], DataError, "nothing: there is no such run"),
        (["seed", "--metric=speed"], UsageError, "--metric speed: "),
        (["seed", "--metric=loss", "--over=rows"], UsageError, "is about keys, not rows"),
        (["seed", "--metric=loss"], DataError, "no key that decides steps differs, but for the s"),
    ]
    for words, error, message in cases:
        with pytest.raises(error, match=message):
            bisect([str(good), *words])
    edited.write_text(re.sub(r'"loss": [^,]*', '"loss": 1.25', edited.read_text()))
    with pytest.raises(RunError, match="seed: doesn't repeat its own first steps here, so mixtu"):
        bisect([str(good), "seed"])
    for run_dir in ("same", "edited"):
        (tmp_path / run_dir / "summary.json").write_text('{"status": "failed"}')
    with pytest.raises(DataError, match="both failed, so neither is the good one"):
        bisect(["same", "edited"])


@pytest.mark.slow
def test_metric_names_the_key_by_which_it_is_worse(
    good: Path, cache: Path, tmp_path: Path, read_facts: Callable[..., Any]
) -> None:
    """The seed differs, too, and smoothing changes bits, but the tiny rate is what costs."""
    bad = tmp_path / "bad"
    keys = ("seed=9", "train.optimizer.lr=1e-9", "train.loss.smoothing=0.001", *HARMLESS)
    run(compose_tiny(cache, *KEYS, *keys), bad)
    facts = read_facts(str(good), str(bad), "--metric=loss", "--pairs=6")
    assert facts["keys"] == ["train.optimizer.lr = 1e-09: was 0.01"]
    assert facts["worse_by"][0] > 0
    with pytest.raises(DataError, match="so there is nothing to search"):
        bisect([str(bad), str(good), "--metric=loss", "--pairs=6"])


def test_fork_is_refused(good: Path, tmp_path: Path) -> None:
    """Mixtures begin at step 1, with other keys than the fork's first steps had."""
    changed = tmp_path / "changed"
    fork([f"{good}@3", "train.optimizer.lr=0.005", f"--out={changed}"])
    with pytest.raises(DataError, match="is a fork, whose first steps had the keys of another run"):
        bisect([str(good), str(changed)])


@pytest.mark.slow
def test_key_that_makes_runs_fail_is_named(
    good: Path, cache: Path, tmp_path: Path, read_facts: Callable[..., Any]
) -> None:
    """Every run with the rate has a step that isn't finite, and no metric."""
    bad = tmp_path / "bad"
    with pytest.raises(PipelineError, match="Invalid loss"):
        run(compose_tiny(cache, *KEYS, "train.optimizer.lr=1e30", *HARMLESS), bad)
    facts = read_facts(str(good), str(bad), "--metric=loss", "--pairs=6")
    assert facts["keys"] == ["train.optimizer.lr = 1e+30: was 0.01"]
    assert facts["worse_by"] is None
    assert facts["undecided"] == 0


def test_mixture_that_is_no_recipe_is_neither(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RecipeError("no")

    monkeypatch.setattr("pipeline.inspect.bisect.mix_recipes", refuse)
    recipe = compose_tiny(cache, *KEYS)
    assert PairedMetric(recipe, recipe, "loss", 6, 0.1).probe(()) == "other"
