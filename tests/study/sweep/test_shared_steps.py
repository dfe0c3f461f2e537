"""Sweeps that train what their jobs share once: the plan, the same files, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.forks import list_differing_files
from pipeline.__main__ import main
from pipeline.core.errors import RecipeError
from pipeline.stages.fork import RateTable
from pipeline.study.sweep.shared_steps import SharingJob, Trunk, plan_trunks
from tests.conftest import MLP, TINY, compose_tiny

SHARE = "hydra.sweeper.share=true"
STABLE = ("schedule=warmup_stable_decay", "train.schedule.cooldown_share=0.5")


def make_jobs(
    cache: Path, *totals: int, digests: str = "", every: int = 0
) -> dict[str, SharingJob]:
    """Jobs whose rate is 1 until the second half, as with a long cooldown."""
    saves = f"checkpoint.every_steps={every or 'null'}"
    recipe = compose_tiny(cache, *MLP, saves)
    jobs = {}
    for number, total in enumerate(totals):
        rates = np.ones(total, np.float32)
        rates[total // 2 :] = 0.5
        digest = digests[number : number + 1]
        jobs[str(number)] = SharingJob(recipe, RateTable(rates, total), 6, digest)
    return jobs


def read_stretches(trunks: list[Trunk]) -> list[tuple[int, int, tuple[str, ...]]]:
    return [(trunk.start, trunk.stop, trunk.jobs) for trunk in trunks]


def test_trunks_split_where_the_first_job_leaves(cache: Path) -> None:
    trunks = plan_trunks(make_jobs(cache, 10, 40, 20))
    assert read_stretches(trunks) == [(0, 5, ("0", "1", "2")), (5, 10, ("1", "2"))]
    assert trunks[1].parent == trunks[0].name
    assert trunks[0].name == plan_trunks(make_jobs(cache, 10, 40, 20))[0].name


def test_jobs_of_other_recipes_share_nothing(cache: Path) -> None:
    trunks = plan_trunks(make_jobs(cache, 10, 20, 10, 30, digests="abab"))
    assert read_stretches(trunks) == [(0, 9, ("0", "2")), (0, 10, ("1", "3"))]
    assert plan_trunks(make_jobs(cache, 10, 20, digests="ab")) == []


def test_equal_jobs_have_a_step_of_their_own(cache: Path) -> None:
    assert read_stretches(plan_trunks(make_jobs(cache, 10, 10))) == [(0, 9, ("0", "1"))]


def test_trunk_ends_at_a_checkpoint_that_jobs_have_alone(cache: Path) -> None:
    """Otherwise its checkpoint could take the place of an older one."""
    assert read_stretches(plan_trunks(make_jobs(cache, 20, 40, every=4))) == [(0, 8, ("0", "1"))]
    assert read_stretches(plan_trunks(make_jobs(cache, 20, 40, every=15))) == [(0, 10, ("0", "1"))]


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["null", "3"])
def test_sharing_jobs_have_the_files_of_jobs_alone(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    saves: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    keys = [*TINY, "+recipe=lenet5_digits", *MLP, f"cache.root={cache}", *STABLE]
    keys += [f"checkpoint.every_steps={saves}", "eval.every_steps=4", "train.steps=8,16,24"]
    assert main(["-m", *keys, "hydra.sweep.dir=shared", SHARE]) == 0
    printed = capsys.readouterr().out
    stops = (5, 9) if saves == "null" else (3, 9)
    saved = 2 * stops[0] + stops[1] - stops[0]
    plan = rf"share      3 jobs of 48 steps in all: {48 - saved} are trained, {saved} saved\n"
    assert re.search(plan, printed)
    assert f"steps 1 to {stops[0]} once for jobs 0, 1, 2" in printed
    assert printed.index("are trained") < printed.index(f"shared steps 1 to {stops[0]}\n")
    assert main(["-m", *keys, "hydra.sweep.dir=alone"]) == 0
    for job in "012":
        assert list_differing_files(Path("shared", job), Path("alone", job)) == []
    assert not Path("shared/.shared").exists()
    # Finished jobs aren't run again, and no trunk is trained for them.
    capsys.readouterr()
    assert main(["-m", *keys, "hydra.sweep.dir=shared", SHARE]) == 0
    assert "shared steps" not in capsys.readouterr().out


@pytest.mark.slow
def test_steps_in_microbatches_share_as_many(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each step has an update, so the second one has another rate already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    keys = [*TINY, "+recipe=lenet5_digits", *MLP, f"cache.root={cache}", "schedule=cosine"]
    keys += ["train.accumulate_steps=2", "train.steps=8,16"]
    assert main(["-m", *keys, "hydra.sweep.dir=shared", SHARE]) == 0
    assert "steps 1 to 1 once for jobs 0, 1" in capsys.readouterr().out
    assert main(["-m", *keys, "hydra.sweep.dir=alone"]) == 0
    for job in "01":
        assert list_differing_files(Path("shared", job), Path("alone", job)) == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["train.steps=8,16", "hydra.sweeper.share=often"], r"share = often: must be true or fal"),
        (["seed=1,2", "train.steps=8", SHARE], r"share: no two of 2 jobs share a step: jobs share"),
        (
            [
                "train.steps=8,16",
                SHARE,
                "train.callbacks=[{name: stop_at, metric: loss, value: 0}]",
            ],
            r"share: job 0: train\.callbacks: must be \[\]",
        ),
        (["train.steps=8,16", SHARE, "hydra.sweeper.vectorize=true"], r"share = true: must be fal"),
    ],
)
def test_sweep_that_cannot_share_is_refused(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keys: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    words = [*TINY, "+recipe=lenet5_digits", *MLP, f"cache.root={cache}", *keys]
    assert main(["-m", *words]) == RecipeError.exit_status
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("outputs/*/*/[0-9]*"))
