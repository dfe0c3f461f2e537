"""`train.on_nan`: what becomes of a step whose loss or gradient is not finite."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.data.columns import Split
from pipeline.data.sources.synthetic import Synthetic
from tests import outcome
from tests.conftest import MLP, compose_tiny
from tests.whole_run import run

pytestmark = pytest.mark.slow

Compose = Callable[..., Recipe]

VICTIM = 17
"""A training sample that is no number; it comes once an epoch, of 6 steps."""
COURSE = [
    *MLP,
    "schedule=cosine",
    "train.sink_size=7",
    "eval.every_steps=10",
    "checkpoint.every_steps=5",
    "checkpoint.keep=99",
    "train.steps=30",
]
SKIP = ["train.on_nan=skip", *COURSE]
ROLLBACK = ["train.on_nan={name: rollback, most: 9}", *COURSE]
SINKS = {
    "skip, no sink": (SKIP, ["train.sink=false"]),
    "skip, one sink": (SKIP, ["train.sink_size=1000"]),
    "rollback, sinks of 1": (ROLLBACK, ["train.sink_size=1"]),
    "rollback, one sink": (ROLLBACK, ["train.sink_size=1000"]),
    "rollback, soft": (ROLLBACK, ["train.mechanism=soft"]),
}


@contextmanager
def poisoned_data() -> Iterator[None]:
    """The tiny dataset as floats, with one training sample that is no number."""
    read = Synthetic.read

    def read_with_a_hole(self: Synthetic, cache: Path) -> Any:
        raw = read(self, cache)
        images = np.asarray(raw.train.columns["image"], np.float32)
        images[VICTIM, 2, 2] = np.nan
        evaluated = np.asarray(raw.eval.columns["image"], np.float32)
        return replace(
            raw,
            train=Split({**raw.train.columns, "image": images}),
            eval=Split({**raw.eval.columns, "image": evaluated}),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Synthetic, "read", read_with_a_hole)
        yield


@pytest.fixture
def poisoned() -> Iterator[None]:
    with poisoned_data():
        yield


@pytest.fixture(scope="module")
def skipping(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("skipping")
    with poisoned_data():
        run(compose_tiny(cache, *SKIP), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def rolling(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("rolling")
    with poisoned_data():
        run(compose_tiny(cache, *ROLLBACK), run_dir)
    return run_dir


def non_finite_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in outcome.metrics(run_dir) if line["loss"] is None]


def test_skip_omits_the_update_and_continues(skipping: Path) -> None:
    lines, summary = outcome.metrics(skipping), outcome.read_summary(skipping)
    steps = non_finite_steps(skipping)
    assert [(step - 1) // 6 for step in steps] == list(range(5))
    assert [line["step"] for line in lines if line.get("skipped")] == steps
    assert (len(lines), summary["status"]) == (30, "done")
    assert summary["bad_steps"] == {"policy": "skip", "left_out": 5, "rollbacks": []}
    assert all(np.isfinite(array).all() for array in outcome.arrays(skipping).values())
    assert f"step {steps[0]}: not finite, no update was made" in (skipping / "run.log").read_text()


def test_skip_policy_advances_the_schedule_by_updates(skipping: Path) -> None:
    """As an overflow does (P-01 (7)): the step after a non-finite one has the rate of that one."""
    lines = outcome.metrics(skipping)
    skipped = np.cumsum([0, *(line["loss"] is None for line in lines)])[:-1]
    rates = {
        line["step"] - n: line["learning_rate"] for line, n in zip(lines, skipped, strict=True)
    }
    assert [line["learning_rate"] for line in lines] == [
        rates[line["step"] - n] for line, n in zip(lines, skipped, strict=True)
    ]
    assert len(set(rates.values())) == 25


def gone_back(run_dir: Path) -> list[tuple[int, int]]:
    rollbacks = outcome.read_summary(run_dir)["bad_steps"]["rollbacks"]
    return [(rollback["step"], rollback["to"]) for rollback in rollbacks]


def test_rollback_returns_to_the_previous_checkpoint(rolling: Path) -> None:
    """The newest of those at every fifth step that no rollback has used yet."""
    expected: list[tuple[int, int]] = []
    for step in non_finite_steps(rolling):
        used = {to for _, to in expected}
        expected.append((step, max(to for to in range(0, step, 5) if to not in used)))
    assert gone_back(rolling) == expected
    assert {step - to for step, to in expected} > {2, 3}
    counting = set(range(1, 31))
    for step, to in expected:
        counting -= set(range(to + 1, step + 1))
    summary = outcome.read_summary(rolling)["bad_steps"]
    assert (summary["policy"], summary["left_out"]) == ("rollback", 30 - len(counting))
    assert outcome.arrays(rolling)["features/non_finite_steps/left_out"] == 30 - len(counting)
    assert len(outcome.metrics(rolling)) == 30
    step, to = gone_back(rolling)[0]
    assert (
        f"step {step}: not finite; back to the weights of step {to}"
        in (rolling / "run.log").read_text()
    )


def test_rollback_continues_from_the_weights_of_the_checkpoint(
    rolling: Path, skipping: Path
) -> None:
    """The step after the non-finite one has the loss of the checkpoint's weights on that batch,
    and the rate of the update after the checkpoint."""
    (step, to), *_ = gone_back(rolling)
    rolled, skipped = outcome.metrics(rolling), outcome.metrics(skipping)
    assert rolled[: step - 1] == skipped[: step - 1]
    assert rolled[step]["learning_rate"] == rolled[to]["learning_rate"]
    assert rolled[step]["loss"] != skipped[step]["loss"]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("policy", "how"), SINKS.values(), ids=SINKS.keys())
def test_non_finite_steps_are_the_same_at_every_sink_size(
    policy: list[str], how: list[str], request: Any, tiny: Compose, tmp_path: Path
) -> None:
    run(tiny(*policy, *how), tmp_path)
    reference = request.getfixturevalue("skipping" if policy is SKIP else "rolling")
    outcome.assert_same_run(tmp_path, reference)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("policy", "name"), [(SKIP, "skipping"), (ROLLBACK, "rolling")])
def test_resumed_run_continues_as_the_unbroken_one(
    policy: list[str], name: str, request: Any, tiny: Compose, tmp_path: Path
) -> None:
    reference, run_dir = request.getfixturevalue(name), tmp_path / "run"
    shutil.copytree(reference, run_dir)
    (run_dir / "summary.json").unlink()
    for step in outcome.checkpoints(run_dir):
        if step > 15:
            shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))
    run(tiny(*policy, f"train.resume={run_dir}"))
    outcome.assert_same_run(run_dir, reference)
    assert gone_back(run_dir) == gone_back(reference)


DIVERGES = "train.optimizer.lr=1e30"


def ended(recipe: Recipe, run_dir: Path) -> tuple[str, dict[str, Any]]:
    with pytest.raises(RunError) as caught:
        run(recipe, run_dir)
    return str(caught.value), outcome.read_summary(run_dir)["bad_steps"]


@pytest.mark.usefixtures("poisoned")
def test_too_many_consecutive_non_finite_steps_end_the_run(tiny: Compose, tmp_path: Path) -> None:
    message, summary = ended(tiny(*SKIP, DIVERGES), tmp_path)
    last = len(outcome.metrics(tmp_path))
    assert non_finite_steps(tmp_path) == list(range(last - 10, last + 1))
    assert f"Step {last} of 30: loss is" in message
    assert summary["left_out"] == 10
    assert outcome.checkpoints(tmp_path)[-1] == last - 1


@pytest.mark.usefixtures("poisoned")
def test_run_ends_without_a_checkpoint_to_roll_back_to(tiny: Compose, tmp_path: Path) -> None:
    message, summary = ended(tiny(*ROLLBACK, DIVERGES), tmp_path)
    assert "; train.on_nan: there is no checkpoint left to go back to; the state" in message
    assert [rollback["to"] for rollback in summary["rollbacks"]] == [0]


REFUSED = {
    "no checkpoints": (["checkpoint.every_steps=null"], "needs checkpoints to go back to"),
    "no stage": (["stages=[data,build,compile,train]"], "needs the stage checkpoint"),
    "no such policy": (["train.on_nan=ignore"], "train.on_nan"),
    "no bound": (["train.on_nan={name: rollback, most: 0}"], "train.on_nan.most"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_rollback_settings_are_refused(
    overrides: list[str], message: str, tiny: Compose
) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny(*ROLLBACK, *overrides)
    assert message in str(caught.value)
