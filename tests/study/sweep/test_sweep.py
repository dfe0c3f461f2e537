from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pipeline import load_recipe
from pipeline.__main__ import main
from pipeline.core.errors import RecipeError, RunError
from pipeline.study.population.groups import require_members
from pipeline.study.sweep.directory import (
    Command,
    Sweeper,
    claim_job,
    write_command,
    write_overrides,
)
from pipeline.study.sweep.jobs import train_in_one_process
from pipeline.study.sweep.table import conclude_sweep, read_jobs, update_table, write_table
from tests import outcome
from tests.conftest import MLP, STEPS, TINY
from tests.forked import start_forked
from tests.stages.launch.engines import ENGINES

Main = Callable[..., int]
SMALL = ("+recipe=lenet5_digits", *MLP)
"""Without the recipe, a network that is named would have no length."""


@pytest.fixture
def pipeline(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """The command line in the test's own folder, in this process, with an MLP by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])

    def run(flag: str, *overrides: str) -> int:
        network = () if any(key.startswith("model=") for key in overrides) else SMALL
        return main([flag, *TINY, *network, f"cache.root={cache}", *overrides])

    return run


def sweeps(folder: Path) -> list[Path]:
    return list(folder.glob("outputs/*/*"))


def read_table(sweep_dir: Path) -> list[dict[str, str]]:
    with (sweep_dir / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_invalid_job_does_not_affect_valid_jobs(
    pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four jobs, one of which can't be: three are done, the table has all, the status is 2."""
    board = "monitor.tensorboard=true"
    assert pipeline("-m", STEPS, "train.sink_size=1,0,2,4", "seed=3", board) == 2
    (sweep_dir,) = sweeps(tmp_path)
    assert sweep_dir.name.endswith("_sweep_lenet5_digits")

    rows = read_table(sweep_dir)
    assert [row["job"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["train.sink_size"] for row in rows] == ["1", "0", "2", "4"]
    assert [row["status"] for row in rows] == ["done", "failed", "done", "done"]
    assert [row["exit_status"] for row in rows] == ["0", "2", "0", "0"]
    assert "train.sink_size = 0: must be a number" in rows[1]["reason"]
    assert [row["steps"] for row in rows] == ["45", "", "45", "45"]

    summary = outcome.read_summary(sweep_dir / "2")
    assert float(rows[2]["metrics.accuracy"]) == summary["metrics"]["accuracy"]
    assert float(rows[2]["metrics.loss"]) == summary["metrics"]["loss"]
    assert float(rows[2]["train_s"]) == summary["time"]["train_s"]
    losses = [outcome.metrics(sweep_dir / job) for job in "023"]
    assert losses[0] == losses[1] == losses[2]

    captured = capsys.readouterr()
    assert (
        "train.sink_size = 0: must be a number of steps, -1 (a sink an epoch) or auto"
        in captured.err
    )
    assert "Traceback" not in captured.err
    assert [
        line for line in captured.out.splitlines() if line.startswith("job ") and line[4].isdigit()
    ] == [f"job {number:<6} train.sink_size={size}" for number, size in enumerate((1, 0, 2, 4))]
    assert hparams(sweep_dir / "2") == {"train.sink_size": 2.0}


def hparams(run_dir: Path) -> dict[str, float]:
    """A job's row in TensorBoard's table of hparams."""
    accumulated = EventAccumulator(str(run_dir)).Reload()
    content = accumulated.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    row = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: value.number_value for name, value in row.items()}


BUILD = "stages=[data,build]"


@pytest.mark.slow
def test_grid_has_a_job_per_combination(pipeline: Main, tmp_path: Path) -> None:
    assert pipeline("-m", BUILD, "seed=1,2", "train.steps=8,16") == 0
    (sweep_dir,) = sweeps(tmp_path)
    rows = read_table(sweep_dir)
    assert [(row["seed"], row["train.steps"]) for row in rows] == [
        ("1", "8"),
        ("1", "16"),
        ("2", "8"),
        ("2", "16"),
    ]
    kept = yaml.safe_load((sweep_dir / "3" / "overrides.yaml").read_text())
    assert kept == {"seed": 2, "train.steps": 16}
    assert outcome.read_summary(sweep_dir / "3")["seed"] == 2


@pytest.mark.slow
def test_groups_can_be_swept(pipeline: Main, tmp_path: Path) -> None:
    assert pipeline("-m", BUILD, "loss=cross_entropy,mse") == 0
    (sweep_dir,) = sweeps(tmp_path)
    assert [row["loss"] for row in read_table(sweep_dir)] == ["cross_entropy", "mse"]
    kept = yaml.safe_load((sweep_dir / "1" / "recipe.yaml").read_text())
    assert kept["train"]["loss"]["name"] == "mse"


@pytest.mark.slow
def test_directory_of_a_run_is_refused_for_a_sweep(
    pipeline: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipeline(BUILD, "hydra.run.dir=mine") == 0
    assert pipeline("-m", BUILD, "seed=1,2", "hydra.sweep.dir=mine") == 2
    assert "hydra.sweep.dir = mine: holds a single run" in capsys.readouterr().err


@pytest.mark.slow
def test_sweep_directory_can_be_named(pipeline: Main, tmp_path: Path) -> None:
    assert pipeline("-m", BUILD, "seed=1,2", "hydra.sweep.dir=mine") == 0
    assert len(read_table(tmp_path / "mine")) == 2
    assert sweeps(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("'two words'", "two words"),
        (r"'it\'s \\'", "it's \\"),
        ("${name}/${now:%Y}/${train.optimizer.name}", r"lenet5_digits/20\d\d/momentum"),
    ],
)
def test_sweep_directory_is_parsed_as_by_hydra(
    written: str, meant: str, pipeline: Main, tmp_path: Path
) -> None:
    assert pipeline("-m", "stages=[data]", f"hydra.sweep.dir={written}") == 0
    (table,) = tmp_path.rglob("sweep.csv")
    folder = str(table.parent.relative_to(tmp_path))
    assert folder == meant or re.fullmatch(meant, folder)
    assert [row["status"] for row in read_table(table.parent)] == ["done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("one,two", "hydra.sweep.dir = one,two: must be one directory"),
        ("${nope}", "hydra.sweep.dir: Interpolation key 'nope' not found"),
    ],
)
def test_invalid_sweep_directory_is_refused(
    written: str, told: str, pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipeline("-m", "stages=[data]", "seed=1,2", f"hydra.sweep.dir={written}") == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sweep_without_jobs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no job of a sweep"):
        conclude_sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_recipe_refused_while_building_has_exit_status_2(pipeline: Main, tmp_path: Path) -> None:
    """The status that the job alone would have had."""
    small = ["+recipe=lenet5_digits", "model=lenet5", "dataset.train.ops=[]", "dataset.eval.ops=[]"]
    assert main([*TINY, *small, BUILD]) == 2
    assert pipeline("-m", BUILD, "seed=1,2", *small) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=lenet5,lenet6", "model = lenet6: there is no such model; did you mean lenet5?"),
        ("train.sink_sise=1,2", "train.sink_sise = 1: there is no such key"),
        ("+seed=1,2", "+seed: the key exists already"),
        ("hydra.sweeper.params=3", "hydra.sweeper.params = 3: must be a section of keys"),
    ],
)
def test_invalid_composition_is_refused_before_any_job(
    override: str,
    message: str,
    pipeline: Main,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert pipeline("-m", override, "train.steps=3") == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "job 0" not in captured.out
    assert sweeps(tmp_path) == []


DONE = {"status": "done", "exit_status": 0}


def leave(folder: Path, summary: dict[str, Any] | None, **changed: Any) -> None:
    """A job's files that the table reads."""
    folder.mkdir()
    write_overrides(folder, changed)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))


def test_jobs_are_read_in_numeric_order(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        leave(tmp_path / str(number), DONE, seed=number)
    assert [row.job for row in read_jobs(tmp_path)] == ["0", "2", "10"]


def test_job_without_a_summary_is_waiting_interrupted_or_running(tmp_path: Path) -> None:
    for number, summary in enumerate((None, None, None, DONE)):
        leave(tmp_path / str(number), summary, seed=number)
    (tmp_path / "1" / "recipe.yaml").touch()
    with claim_job(tmp_path / "2"):
        write_table(tmp_path)
    states = ["waiting", "interrupted", "running", "done"]
    assert [row["status"] for row in read_table(tmp_path)] == states
    assert [file.name for file in tmp_path.glob("*.part")] == []


def test_large_table_is_updated_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one job a second, all tables of a sweep read a small multiple of its jobs."""
    file, read, done = tmp_path / "sweep.csv", list[int](), list[int]()

    def write(_: Path) -> None:
        file.write_text("x" * 130 * len(done))
        read.append(len(done))

    monkeypatch.setattr("pipeline.study.sweep.table.write_table", write)
    for job in range(1000):
        done.append(job)
        if read:
            then = file.stat().st_mtime - 1
            os.utime(file, (then, then))
        update_table(tmp_path)
    assert read[:5] == [1, 2, 3, 4, 5]
    assert sum(read) < 8 * 1000
    assert 1000 - read[-1] < 200


@pytest.mark.parametrize(
    ("summaries", "status"),
    [
        ([DONE, DONE], 0),
        ([DONE, {"status": "failed", "exit_status": 1}], 1),
        ([{"status": "stopped", "exit_status": 1}], 1),
        ([{"status": "failed", "exit_status": n} for n in (1, 2, 1)], 2),
        ([DONE, {"status": "pruned", "exit_status": 0}], 0),
        ([DONE, {"status": "failed"}], 1),
        ([{"status": "pruned"}], 0),
        ([DONE, None], 1),
    ],
)
def test_exit_status_is_set_by_the_worst_job(
    summaries: list[dict[str, Any] | None],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, summary in enumerate(summaries):
        leave(tmp_path / str(number), summary, seed=number)
    assert conclude_sweep(tmp_path) == status
    shown = capsys.readouterr().out
    assert all((summary or {"status": "waiting"})["status"] in shown for summary in summaries)


def test_unfinished_jobs_of_others_do_not_fail_a_shared_sweep(tmp_path: Path) -> None:
    for number, summary in enumerate((DONE, None, None)):
        leave(tmp_path / str(number), summary, seed=number)
    with claim_job(tmp_path / "1"):
        assert conclude_sweep(tmp_path, is_shared=True) == 1
        with claim_job(tmp_path / "2"):
            assert (conclude_sweep(tmp_path, is_shared=True), conclude_sweep(tmp_path)) == (0, 1)


@pytest.mark.slow
def test_launched_processes_share_the_jobs(cache: Path, tmp_path: Path) -> None:
    """The first one has no job left when the second one still trains."""
    lines = [tmp_path / f"{rank}.txt" for rank in range(2)]
    lengths = "train.steps=20,21,6000"
    arguments = ["-m", *TINY, *MLP, "train.sink_size=10", lengths, "hydra.sweep.dir=mine"]
    processes = []
    for rank, said in enumerate(lines):
        place = ENGINES["torchrun"](rank, 2, 29_500)
        environment = {**os.environ, **place, "XDG_CACHE_HOME": str(cache.parent)}
        processes.append(start_forked(arguments, tmp_path, environment, [said] * 2))
    for process in processes:
        process.join(240)
    texts = [said.read_text() for said in lines]
    assert [process.exitcode for process in processes] == [0, 0], texts
    assert [row["status"] for row in read_table(tmp_path / "mine")] == ["done"] * 3
    assert all("of rank_size 2" not in text for text in texts)


def test_launched_processes_without_a_sweep_directory_are_refused(
    pipeline: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in ENGINES["torchrun"](0, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    assert pipeline("-m", "stages=[data]", "seed=1,2") == 2
    problem = "hydra.sweep.dir = null: must be set: torchrun has started 2 processes, which share"
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_launch_env_is_refused_in_a_sweep(
    pipeline: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in ENGINES["torchrun"](0, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    launch = ("launch=env", "parallel.mode=data")
    assert pipeline("-m", "stages=[data]", "seed=1,2", "hydra.sweep.dir=mine", *launch) == 2
    assert "launch = env: must be auto, local or none in a sweep" in capsys.readouterr().err


def test_printed_table_is_abbreviated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    metrics = {"accuracy": 0.123456, "loss": 1.5}
    leave(tmp_path / "0", {**DONE, "metrics": metrics, "steps": 10}, seed=1)
    reason = "two\n  lines " + 100 * "x"
    leave(tmp_path / "1", {"status": "failed", "exit_status": 1, "reason": reason}, seed=2)
    conclude_sweep(tmp_path)
    shown = capsys.readouterr().out
    assert "0.1235" in shown
    assert "two lines xxx" in shown
    assert "xxx..." in shown
    assert "step ms" not in shown


def test_emulated_device_table_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    modelled = {"sink_size": 10, "step_ms": 2.336, "samples_per_s": 13697.5, "bound": "host launch"}
    metrics, times = {"accuracy": 0.5794, "loss": 1.442}, {"step_ms": 5.453, "train_s": 0.3663}
    summary = {**DONE, "steps": 50, "metrics": metrics, "time": times, "modelled": modelled}
    for number in range(2):
        leave(tmp_path / str(number), summary, seed=number)
    conclude_sweep(tmp_path)
    shown = capsys.readouterr().out
    for words in ("accuracy", "modelled", "samples/s", "0.5794", "5.453", "2.336", "13,698"):
        assert words in shown
    assert "…" not in shown


def test_grid_reports_its_best_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [{"train_loss": 0.01}, {"accuracy": 0.7, "loss": 0.1}, {"accuracy": 0.9, "loss": 0.2}]
    for number, metrics in enumerate(results):
        leave(tmp_path / str(number), {**DONE, "metrics": metrics}, seed=number, **{"a.lr": 0.5})
    leave(tmp_path / "3", {"status": "stopped", "metrics": {"accuracy": 1.0}}, seed=3)
    conclude_sweep(tmp_path)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "best: job 2, accuracy 0.9: seed=2, a.lr=0.5"


def test_best_job_without_evaluations_has_the_smallest_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, loss in enumerate((0.3, 0.1, float("nan"))):
        leave(tmp_path / str(number), {**DONE, "metrics": {"train_loss": loss}}, seed=number)
    conclude_sweep(tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == "best: job 1, train_loss 0.1: seed=1"


def test_study_does_not_report_a_best_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path / "0", {**DONE, "metrics": {"accuracy": 0.9}}, seed=1)
    write_command(tmp_path, Command(overrides=("seed=1",), sweeper=Sweeper(name="optuna")))
    conclude_sweep(tmp_path)
    assert "best:" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=1,3", "its job 1 has seed=2, this one's seed=3"),
        ("seed=1", "only the directory has job 1 (seed=2)"),
        (
            "train.steps=8,16",
            "its job 0 has seed=1, this one's train.steps=8; its job 1 has seed=2",
        ),
        ("train.batch_size=8", "job 0: train.batch_size = 8: was 16 in the run to resume"),
    ],
)
def test_directory_of_another_sweep_is_refused(
    override: str,
    told: str,
    two_jobs: Path,
    pipeline: Main,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seeds = [] if override.startswith(("seed", "train.steps")) else ["seed=1,2"]
    before = {file: file.stat().st_mtime_ns for file in two_jobs.rglob("*") if file.is_file()}
    assert pipeline("-m", "stages=[data]", *seeds, override, f"hydra.sweep.dir={two_jobs}") == 1
    said = capsys.readouterr().err
    assert f"{two_jobs}: has another sweep: " in said
    assert told in said
    assert "name another directory" in said
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())


@pytest.fixture(scope="module")
def two_jobs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a sweep over two seeds that is done."""
    folder = tmp_path_factory.mktemp("two") / "jobs"
    sweep = ("stages=[data]", "seed=1,2", f"hydra.sweep.dir={folder}")
    assert main(["-m", *TINY, *SMALL, f"cache.root={cache}", *sweep]) == 0
    return folder


@pytest.mark.slow
def test_finished_jobs_are_not_repeated(
    two_jobs: Path, pipeline: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor what a sweep has more than before: job 2 alone is run."""
    written = [(two_jobs / job / "summary.json").stat().st_mtime_ns for job in "01"]
    grown = two_jobs.parent / "grown"
    shutil.copytree(two_jobs, grown)
    for folder, seeds, ran in ((two_jobs, "1,2", []), (grown, "1,2,3", ["job 2      seed=3"])):
        assert pipeline("-m", "stages=[data]", f"seed={seeds}", f"hydra.sweep.dir={folder}") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith("job ") and line[4].isdigit()] == ran
    assert written == [(two_jobs / job / "summary.json").stat().st_mtime_ns for job in "01"]
    assert [row["status"] for row in read_table(grown)] == ["done"] * 3


@pytest.mark.slow
def test_failed_job_is_retried_once_per_command(pipeline: Main, tmp_path: Path) -> None:
    sweep = ("-m", "stages=[data]", "train.sink_size=1,0", "hydra.sweep.dir=mine")
    assert pipeline(*sweep) == 2
    first = (tmp_path / "mine" / "1" / "summary.json").stat().st_mtime_ns
    assert pipeline(*sweep) == 2
    assert (tmp_path / "mine" / "1" / "summary.json").stat().st_mtime_ns > first
    assert [row["status"] for row in read_table(tmp_path / "mine")] == ["done", "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [".lock", "study.log", ".beats", "1"])
def test_sweep_with_links_is_refused(
    name: str, pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep's directory may be somebody else's, as that of a run may be."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "mine" / name).symlink_to(tmp_path / "outside")
    assert pipeline("-m", "stages=[data]", "seed=1,2", "hydra.sweep.dir=mine") == 2
    assert f"mine/{name}: is a link to {tmp_path / 'outside'}; " in capsys.readouterr().err
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.slow
def test_job_folder_with_other_files_is_refused(
    pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine" / "1").mkdir(parents=True)
    (tmp_path / "mine" / "1" / "notes").touch()
    assert pipeline("-m", "stages=[data]", "seed=1,2", "hydra.sweep.dir=mine") == 2
    assert "mine/1: holds other files than a run's: notes; name" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").glob("*/*")] == ["notes"]


@pytest.mark.slow
def test_job_folders_can_be_named_by_overrides(pipeline: Main, tmp_path: Path) -> None:
    named = "hydra.sweep.subdir='seed ${seed}'"
    assert pipeline("-m", "stages=[data]", "seed=1,2", "hydra.sweep.dir=mine", named) == 0
    assert [row["job"] for row in read_table(tmp_path / "mine")] == ["seed 1", "seed 2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["same", "deep/${hydra.job.num}", ".."])
def test_shared_job_directory_is_refused(
    name: str, pipeline: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    subdir = f"hydra.sweep.subdir={name}"
    assert pipeline("-m", "stages=[data]", "seed=1,2", "hydra.sweep.dir=mine", subdir) == 2
    assert "must be another folder for each job" in capsys.readouterr().err


@pytest.mark.slow
def test_stopped_sweep_continues(
    pipeline: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted job from its checkpoint, in its directory; then those that never began."""
    asked = ("-m", STEPS, "seed=1,2", "train.sink_size=7")
    assert pipeline(*asked, "hydra.sweep.dir=whole") == 0

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.engine.monitors.observers.BackgroundMonitor.on_sink", terminate)
        assert pipeline(*asked, "hydra.sweep.dir=mine") == 75
    sweep_dir = tmp_path / "mine"
    assert pipeline(*asked, "hydra.sweep.dir=mine") == 0
    assert [row["status"] for row in read_table(sweep_dir)] == ["done", "done"]
    assert outcome.read_summary(sweep_dir / "0")["resumed_from"]["step"] == 7
    for job in "01":
        goes_on, unbroken = sweep_dir / job, tmp_path / "whole" / job
        assert outcome.metrics(goes_on) == outcome.metrics(unbroken)
        outcome.assert_equal_arrays(outcome.arrays(goes_on), outcome.arrays(unbroken))


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_auto_continues_the_newest_sweep_of_the_same_command(
    pipeline: Main, tmp_path: Path
) -> None:
    for seeds in ("1,2", "1,3", "1,2"):
        assert pipeline("-m", "stages=[data]", f"seed={seeds}", "train.resume=auto") == 0
    assert len(sweeps(tmp_path)) == 2


@pytest.mark.slow
def test_sweep_continues_with_other_data_only_if_allowed(
    pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key that allows it concerns resuming only, and makes no other sweep."""
    asked = ["-m", STEPS, "seed=1", "train.resume=auto"]
    assert pipeline(*asked) == 0
    (job,) = (sweep / "0" for sweep in sweeps(tmp_path))
    for name, was, now in (("summary", '"done"', '"stopped"'), ("provenance", "uint8", "int8")):
        file = job / f"{name}.json"
        file.write_text(file.read_text().replace(was, now))
    assert pipeline(*asked) == 2
    assert "the data have changed since the run was trained" in capsys.readouterr().err
    assert pipeline(*asked, "train.resume_changed=yes") == 2
    assert "train.resume_changed = yes: must be 'refuse' or" in capsys.readouterr().err
    assert pipeline(*asked, "train.resume_changed=allow") == 0
    assert len(sweeps(tmp_path)) == 1


@pytest.mark.slow
def test_repeated_sweep_names_the_existing_sweep(
    pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for seeds in ("1,2", "1,3", "1,2"):
        assert pipeline("-m", "stages=[data]", f"seed={seeds}") == 0
        told.append("is a sweep of the same command; train.resume=auto" in capsys.readouterr().out)
    assert told == [False, False, True]


@pytest.mark.slow
def test_auto_compares_the_settings_of_the_sweeper(pipeline: Main, tmp_path: Path) -> None:
    """Its `params` are part of the command; how many jobs it runs at a time is not."""
    for seed, size in ((1, 1), (2, 1), (1, 2)):
        asked = (f"hydra.sweeper.params={{seed: {seed}}}", f"hydra.sweeper.max_batch_size={size}")
        assert pipeline("-m", "stages=[data]", "train.resume=auto", *asked) == 0
    seeds = [outcome.read_summary(sweep_dir / "0")["seed"] for sweep_dir in sweeps(tmp_path)]
    assert sorted(seeds) == [1, 2]


@pytest.mark.slow
def test_joblib_runs_concurrent_jobs(pipeline: Main, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install -e '.[dev]'")
    at_once = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=mine")
    assert pipeline("-m", "stages=[data]", "seed=1,2", *at_once) == 0
    assert [row["status"] for row in read_table(tmp_path / "mine")] == ["done", "done"]


def test_sweep_never_continues_a_single_run(
    pipeline: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipeline("-m", "stages=[data]", "seed=1,2", "train.resume=outputs/some") == 2
    said = capsys.readouterr().err
    assert "train.resume = outputs/some: a sweep can go on with one of the same command" in said


@pytest.mark.slow
def test_signal_stops_all_jobs(
    pipeline: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.monitors.observers.BackgroundMonitor.on_sink", terminate)
    assert pipeline("-m", STEPS, "seed=1,2,3", "train.sink_size=7") == 75
    (sweep_dir,) = sweeps(tmp_path)
    rows = read_table(sweep_dir)
    assert [(row["job"], row["status"], row["steps"]) for row in rows] == [
        ("0", "stopped", "7"),
        ("1", "waiting", ""),
        ("2", "waiting", ""),
    ]


@pytest.mark.slow
def test_late_signal_stops_the_sweep_after_its_job(
    pipeline: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last dispatch of a job that has no further stage: it is done, no other begins."""
    monkeypatch.setattr("pipeline.engine.monitors.observers.BackgroundMonitor.on_sink", terminate)
    trained = "stages=[data,build,compile,train]"
    assert pipeline("-m", STEPS, "seed=1,2", "train.sink_size=45", trained) == 75
    (sweep_dir,) = sweeps(tmp_path)
    rows = [(row["status"], row["steps"]) for row in read_table(sweep_dir)]
    assert rows == [("done", "45"), ("waiting", "")]


@pytest.mark.slow
def test_recipes_can_be_swept(pipeline: Main, tmp_path: Path) -> None:
    assert main(["-m", "+recipe=lenet5_digits,mlp_mnist", *TINY, "stages=[data]"]) in (0, 2)
    (sweep_dir,) = sweeps(tmp_path)
    assert sweep_dir.name.endswith("_sweep")
    assert len(read_table(sweep_dir)) == 2


@pytest.mark.slow
def test_swept_sink_sizes_have_an_amortisation_curve(
    pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Priced, not trained; the processor that is there has nothing modelled to show."""
    priced = ("device=cpu,ascend910", "stages=[data,build,compile]", STEPS)
    assert pipeline("-m", *priced, "train.sink_size=1,10,-1", "train.optimizer.lr=0.1") == 0
    (sweep_dir,) = sweeps(tmp_path)
    rows = read_table(sweep_dir)
    emulated = [row for row in rows if row["device"] == "ascend910"]
    assert [row["modelled_sink_size"] for row in emulated] == ["1", "10", "6"]
    assert {row["modelled_step_ms"] for row in rows if row["device"] == "cpu"} == {""}
    steps = {row["train.sink_size"]: float(row["modelled_step_ms"]) for row in emulated}
    assert steps["1"] > steps["-1"] > steps["10"]
    assert [file.name for file in sweep_dir.glob("*.html")] == ["amortisation.html"]
    html = (sweep_dir / "amortisation.html").read_text()
    assert "Gain of longer sinks: device=ascend910" in html
    assert html.count("<circle") == 3
    assert "modelled gain of longer sinks: outputs" in capsys.readouterr().out


def test_amortisation_curve_per_combination_of_other_keys(
    pipeline: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for job, (size, devices) in enumerate([(1, 1), (1, 8), (9, 1), (9, 8), (1, 64)]):
        modelled = {"sink_size": size, "step_ms": 3.0 / size, "samples_per_s": 1.0, "bound": "cube"}
        keys = {"train.sink_size": size, "parallel.devices": devices}
        leave(tmp_path / str(job), {**DONE, "modelled": modelled}, **keys)
    assert conclude_sweep(tmp_path) == 0
    curves = sorted(tmp_path.glob("*.html"))
    assert [file.name for file in curves] == ["amortisation.html", "amortisation_1.html"]
    titles = ["parallel.devices=1<", "parallel.devices=8<"]
    assert all(title in file.read_text() for title, file in zip(titles, curves, strict=True))
    capsys.readouterr()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("place", "devices", "gpus"),
    [({"LOCAL_RANK": "1"}, 1, "1"), ({"LOCAL_RANK": "1"}, 2, "2,3"), ({}, 1, None)],
)
def test_local_rank_selects_the_gpus_of_a_shared_sweep(
    place: dict[str, str], devices: int, gpus: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", **place}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "29500")
    mode = [] if devices == 1 else ["parallel.mode=data", f"parallel.devices={devices}"]
    recipe = load_recipe("lenet5_digits", ["device=gpu", *mode])
    assert train_in_one_process(recipe).launch.name == "none"
    assert settings.get("jax_cuda_visible_devices") == gpus
    settings.clear()
    assert train_in_one_process(load_recipe("lenet5_digits", mode)).launch.name == "none"
    assert settings == {}


@pytest.mark.medium
def test_train_until_is_refused_in_a_sweep() -> None:
    with pytest.raises(RecipeError, match=r"until = 18:00: must be train\.minutes in a"):
        train_in_one_process(load_recipe("lenet5_digits", ["train.until=18:00"]))
    recipe = load_recipe("lenet5_digits", ["train.minutes=2"])
    assert train_in_one_process(recipe) == recipe
    with pytest.raises(RecipeError, match=r"train\.minutes = 2: must be a length in steps with"):
        require_members([recipe])
