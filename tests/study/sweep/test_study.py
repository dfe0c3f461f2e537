from __future__ import annotations

import csv
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

optuna = pytest.importorskip("optuna", reason="pip install -e '.[dev]' brings Optuna")


from pipeline.__main__ import main  # noqa: E402
from pipeline.core.errors import RecipeError, RunError  # noqa: E402
from pipeline.core.files.paths import CONF  # noqa: E402
from pipeline.study.sweep.study import (  # noqa: E402  # noqa: E402
    FileLock,
    find_first_number,
    open_study,
    read_settings,
    send_heartbeats,
)
from pipeline.study.sweep.trials import StudySearch, requeue_dead_trials  # noqa: E402
from tests.conftest import MLP, STEPS, TINY  # noqa: E402

Sweeper = dict[str, Any]
SPACE = {"lr": optuna.distributions.FloatDistribution(0.0, 1.0)}


@pytest.fixture
def sweeper() -> Sweeper:
    """The settings of `hydra/sweeper=optuna` without further overrides."""
    folder = CONF / "hydra" / "sweeper"
    tree = OmegaConf.to_container(OmegaConf.load(folder / "optuna.yaml"))
    assert isinstance(tree, dict)
    parts = {"sampler": "tpe", "pruner": "median"}
    files = {part: folder / part / f"{name}.yaml" for part, name in parts.items()}
    return {**tree, **{part: OmegaConf.load(file) for part, file in files.items()}}


@pytest.fixture
def search(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Search a good and a bad learning rate; the draws are the same in every test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    fixed = [
        *(STEPS, "train.sink_size=15", "hydra/sweeper=optuna", "hydra/sweeper/sampler=random"),
        *("hydra.sweeper.sampler.seed=1", "hydra.sweep.dir=mine", f"cache.root={cache}"),
    ]

    def run(*overrides: str) -> int:
        network = () if any(key.startswith("model=") for key in overrides) else MLP
        return main(["-m", *TINY, *network, *fixed, *overrides])

    return run


RATES = "train.optimizer.lr=0.02,1e-6"
THRESHOLD = (
    "hydra/sweeper/pruner=threshold",
    "hydra.sweeper.pruner.lower=-2.25",
    "hydra.sweeper.pruner.n_warmup_steps=20",
)


def read_table(sweep_dir: Path) -> list[dict[str, str]]:
    with (sweep_dir / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_study_starts_from_earlier_runs(
    search: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they have shown is not counted as trials, and may be the best."""
    rates = "train.optimizer.lr=tag(log,interval(1e-6,0.02))"
    assert search(rates, "hydra.sweeper.n_trials=2") == 0
    earlier = {row["train.optimizer.lr"] for row in read_table(tmp_path / "mine")}
    begun = (rates, "hydra.sweeper.history=mine", "hydra.sweep.dir=more")
    assert search(*begun, "hydra.sweeper.n_trials=1", "hydra.sweeper.sampler.seed=2") == 0
    assert "2 of 2 runs in mine are used as trials" in capsys.readouterr().out
    (row,) = read_table(tmp_path / "more")
    assert row["train.optimizer.lr"] not in earlier
    assert search(*begun, "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=2") == 0
    assert len(read_table(tmp_path / "more")) == 2


@pytest.mark.slow
def test_poor_trials_are_pruned_and_the_same_command_continues(
    search: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (RATES, *THRESHOLD)
    assert search(*asked, "hydra.sweeper.n_trials=3") == 0
    first = read_table(tmp_path / "mine")
    found = {(row["train.optimizer.lr"], row["status"], row["steps"]) for row in first}
    assert found == {("0.02", "done", "45"), ("1e-06", "pruned", "30")}
    reasons = {row["reason"] for row in first if row["status"] == "pruned"}
    assert {reason.split(" 2.3")[0] for reason in reasons} == {"step 30: mean training loss"}
    assert "best: job " in capsys.readouterr().out

    assert search(*asked, "hydra.sweeper.n_trials=4") == 0
    again = read_table(tmp_path / "mine")
    assert again[:3] == first
    assert [row["job"] for row in again] == ["0", "1", "2", "3"]

    study = optuna.load_study(study_name="mine", storage=storage_of(tmp_path / "mine"))
    values = {trial.number: trial.value for trial in study.trials if trial.state.name == "COMPLETE"}
    assert values == {
        int(row["job"]): float(row["metrics.accuracy"]) for row in again if row["status"] == "done"
    }


def storage_of(sweep_dir: Path) -> Any:
    """The journal as Optuna alone reads it."""
    backend = optuna.storages.journal.JournalFileBackend(str(sweep_dir / "study.log"))
    return optuna.storages.JournalStorage(backend)


@pytest.mark.slow
def test_study_with_another_sweep_or_metric_is_refused(
    search: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("stages=[data]", "hydra.sweeper.n_trials=1")
    assert search(RATES, *data) == 1
    assert "accuracy: must be in the summary of mine/0" in capsys.readouterr().err
    assert search("train.optimizer.lr=0.02,0.03", *data) == 1
    said = capsys.readouterr().err
    assert "mine: has another sweep: only the directory has train.optimizer.lr=0.02,1e-6" in said
    assert search(RATES, *data, "hydra.sweeper.metric=loss") == 1
    assert "hydra.sweeper.metric = loss: the study is about accuracy" in capsys.readouterr().err


def test_invalid_settings_are_all_reported(sweeper: Sweeper, tmp_path: Path) -> None:
    wrong = {"metric": "acuracy", "reports": "never", "n_trials": 0, "heartbeat_s": 0.5}
    wrong |= {"warmup_share": 1}
    with pytest.raises(RecipeError) as caught:
        read_settings({**sweeper, **wrong}, tmp_path)
    said = str(caught.value)
    assert "hydra.sweeper.metric = acuracy: there is no such metric; did you mean accuracy?" in said
    assert "hydra.sweeper.reports = never: must be sinks or evaluations" in said
    assert "hydra.sweeper.n_trials = 0: must be a whole number of at least 1" in said
    assert "hydra.sweeper.heartbeat_s = 0.5: must be a whole number of at least 1" in said
    assert "hydra.sweeper.warmup_share = 1: must be a number of at least 0 and below 1" in said


@pytest.mark.parametrize(
    ("name", "is_warmed"), [("median", True), ("percentile", True), ("asha", False)]
)
def test_pruners_with_a_schedule_have_no_warmup(
    sweeper: Sweeper, tmp_path: Path, name: str, is_warmed: bool
) -> None:
    pruner = OmegaConf.load(CONF / "hydra" / "sweeper" / "pruner" / f"{name}.yaml")
    settings = read_settings({**sweeper, "pruner": pruner}, tmp_path)
    assert (settings.warmup_share, settings.is_warmed) == (0.25, is_warmed)


@pytest.mark.slow
def test_missing_database_is_reported(sweeper: Sweeper, tmp_path: Path) -> None:
    settings = read_settings({**sweeper, "storage": f"sqlite:///{tmp_path}/no/such.db"}, tmp_path)
    with pytest.raises(RunError, match=r"hydra.sweeper.storage = sqlite.*can't open the study"):
        open_study(settings, tmp_path)


@pytest.fixture(params=[None, "sqlite:///{}/study.db"], ids=["journal", "database"])
def study(request: pytest.FixtureRequest, sweeper: Sweeper, tmp_path: Path) -> Iterator[Any]:
    url = request.param and request.param.format(tmp_path)
    asked = {**sweeper, "storage": url, "heartbeat_s": 1, "max_retry": 1}
    study = open_study(read_settings(asked, tmp_path), tmp_path)
    yield study
    study._storage.remove_session()


@pytest.mark.slow
def test_trial_without_heartbeats_is_retried_a_limited_number(study: Any) -> None:
    """The one whose heart beats goes on; the last try is not followed by another."""
    alive, dead = study.ask(SPACE), study.ask(SPACE)
    study._storage.record_heartbeat(dead._trial_id)
    with send_heartbeats(study._storage, [alive]):
        await_states(study, {"RUNNING": 1, "FAIL": 1, "WAITING": 1})
        retry = study.ask(SPACE)
        assert retry.params == dead.params
        assert find_first_number(study.trials[retry.number]) == dead.number
        study._storage.record_heartbeat(retry._trial_id)
        await_states(study, {"RUNNING": 1, "FAIL": 2})


def await_states(study: Any, wanted: dict[str, int]) -> None:
    deadline = time.monotonic() + 20
    while True:
        optuna.storages.fail_stale_trials(study)
        states = [trial.state.name for trial in study.get_trials(deepcopy=False)]
        if {state: states.count(state) for state in states} == wanted:
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.2)


def test_lock_blocks_other_owners(tmp_path: Path) -> None:
    ours, theirs, order = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock"), []

    def wait() -> None:
        theirs.acquire()
        order.append("theirs")

    ours.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    order.append("ours")
    ours.release()
    thread.join(10)
    theirs.release()
    assert order == ["ours", "theirs"]


@pytest.mark.slow
def test_stopped_study_continues_its_trial_after_any_number_of_stops(
    search: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No retry is left to a trial that is given up; a stop is none. It ends as one trial."""
    asked = (RATES, "hydra.sweeper.n_trials=1", "hydra.sweeper.max_retry=0")

    def terminate(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.engine.monitors.observers.BackgroundMonitor.on_sink", terminate)
        assert [search(*asked), search(*asked)] == [75, 75]
    (row,) = read_table(tmp_path / "mine")
    assert (row["status"], row["steps"]) == ("stopped", "30")
    assert search(*asked) == 0
    (row,) = read_table(tmp_path / "mine")
    assert (row["status"], row["steps"]) == ("done", "45")
    study = optuna.load_study(study_name="mine", storage=storage_of(tmp_path / "mine"))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "COMPLETE"]


@pytest.mark.slow
def test_signal_stops_a_study_while_a_trial_is_pruned(
    search: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further trial begins; the same command finds this one pruned."""
    poor = ("train.optimizer.lr=1e-6,1e-7", *THRESHOLD)

    def terminate(_: object, report: Any) -> None:
        if report.step == 30:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.engine.monitors.observers.BackgroundMonitor.on_sink", terminate)
        assert search(*poor, "hydra.sweeper.n_trials=2") == 75
    (row,) = read_table(tmp_path / "mine")
    assert (row["status"], row["steps"]) == ("pruned", "30")
    assert search(*poor, "hydra.sweeper.n_trials=1") == 0
    study = optuna.load_study(study_name="mine", storage=storage_of(tmp_path / "mine"))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "PRUNED"]


@pytest.mark.slow
def test_auto_continues_a_study_of_the_same_space_and_sampler(
    search: Callable[..., int], tmp_path: Path
) -> None:
    """The space stands in `params`; how many trials there are to be is no part of the command."""
    space = "hydra.sweeper.params={train.optimizer.lr: '0.02,0.03'}"
    auto = (space, "train.resume=auto", "stages=[data]", "hydra.sweep.dir=")
    for trials, seed in ((1, 1), (2, 1), (1, 2)):
        asked = (f"hydra.sweeper.n_trials={trials}", f"hydra.sweeper.sampler.seed={seed}")
        assert search(*auto, *asked) == 1, "there is no accuracy without an evaluation"
    studies = [file.parent for file in tmp_path.glob("outputs/*/*/study.log")]
    assert sorted(len(read_table(folder)) for folder in studies) == [1, 2]


@pytest.mark.slow
def test_invalid_choice_is_reported_before_the_study_is_created(
    search: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(RATES, "model=lenet5,lenet6") == 2
    said = capsys.readouterr().err
    assert "model = lenet6: there is no such model; did you mean lenet5?" in said
    assert list(tmp_path.rglob("study.log")) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "must be a regular file"),
        (b"{}\n", "'op_code'"),
        (b"[[[\n{}\n", "Expecting value"),
        (b" " * 2000, "must have at most 1,000 bytes"),
    ],
)
def test_invalid_journal_is_reported(
    content: bytes | None,
    told: str,
    sweeper: Sweeper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.study.sweep.study.MAX_JOURNAL_BYTES", 1000)
    journal = tmp_path / "study.log"
    os.mkfifo(journal) if content is None else journal.write_bytes(content)
    with pytest.raises(RunError) as caught:
        open_study(read_settings(sweeper, tmp_path), tmp_path)
    assert str(caught.value).startswith(f"{journal}: can't open the study: ")
    assert told in str(caught.value)


@pytest.mark.slow
def test_half_requested_trial_is_not_lost(study: Any, tmp_path: Path) -> None:
    """Its process died before the first heart-beat, also when it was a retry."""
    study.ask()
    settings: Any = None
    search = StudySearch(study, study._storage, settings, SPACE, [], [], tmp_path)
    for _ in range(2):
        requeue_dead_trials(search)
        assert [trial.state.name for trial in study.trials][-2:] == ["FAIL", "WAITING"]
        retry = study.ask(SPACE)
        assert find_first_number(study.trials[retry.number]) == 0
