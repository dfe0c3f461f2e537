"""`python -m pipeline runs`: a table, JSON lines, or a page."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import pytest

from pipeline.checkpoint.checkpoint_folder import MANIFEST
from pipeline.core.errors import DataError, UsageError
from pipeline.core.files.atomic_write import LOCK, Lock
from tests.command_line import runs as main
from tests.study.runs.made_up import make_run


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    make_run(tmp_path / "outputs" / "low", lr=0.1, accuracy=0.5)
    make_run(tmp_path / "outputs" / "high", lr=0.2, accuracy=0.9)
    make_run(tmp_path / "outputs" / "killed", status=None)
    return tmp_path / "outputs"


def test_table_is_sorted_by_best_metric(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(outputs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    order = [line.split()[0] for line in lines if line.split()[:1] and "done" in line]
    assert order == ["high", "low"]
    assert any(line.split()[:2] == ["killed", "unfinished"] for line in lines)


def test_runs_without_accuracy_are_ranked_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, accuracy in {"a_priced": None, "b": 0.5, "c": 0.9, "d_priced": None}.items():
        folder = make_run(tmp_path / name, accuracy=accuracy)
        summary = json.loads((folder / "summary.json").read_text())
        summary["metrics"]["train_loss"] = 0.1
        (folder / "summary.json").write_text(json.dumps(summary))
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    order = [line.split()[0] for line in shown.splitlines() if " done " in line]
    assert order == ["c", "b", "a_priced", "d_priced"]
    assert "ranked by accuracy, which 2 of 4 runs don't have\n" in shown
    assert main([str(tmp_path), "--html"]) == 0
    page = (tmp_path / "runs.html").read_text()
    assert "<p>4 done; ranked by accuracy, which 2 don't have</p>" in unescape(page)


@pytest.mark.parametrize("columns", ["40", "60", "80", None])
def test_table_has_one_line_a_run_with_the_end_of_its_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
) -> None:
    """Names differ in the middle of their second half; keys that don't fit are left out."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    sweeps = ("2026-11-28/23-31-42_sweep", "2026-11-28/23-32-42_sweep")
    names = [f"{sweep}_lenet5_digits/{job}" for sweep in sweeps for job in (0, 1)]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        make_run(tmp_path / name, lr=0.1 * number, hidden=16 + number, accuracy=0.5 + 0.1 * number)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if " done " in line]
    assert len(shown) == 4
    assert len(set(shown)) == (2 if columns == "40" else 4)
    for name, text in zip(reversed(names), shown, strict=True):
        assert name.endswith(text.removeprefix("…"))
    if columns is None:
        assert shown == names[::-1]
    else:
        assert all(len(line) <= int(columns) for line in lines if " done " in line)
    has_keys = columns not in ("40", "60")
    assert any(line.split()[-1:] == ["lr"] for line in lines) == has_keys
    assert "2 more keys differ" in " ".join(lines) or has_keys


def test_names_that_are_shown_alike_have_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a\x1bb", r"a\x1bb"):
        make_run(tmp_path / name)
    assert main([str(tmp_path)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if r"a\x1bb done" in line]


def test_ties_are_of_runs_that_are_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(6):
        for lr, accuracy, status in ((0.1, 0.9, "done"), (0.2, 0.8, "done"), (0.2, 0.95, "pruned")):
            folder = tmp_path / f"{lr}_{status}_{seed}"
            make_run(folder, lr=lr, accuracy=accuracy + 0.001 * seed, status=status)
            recipe = (folder / "recipe.yaml").read_text().replace("seed: 1", f"seed: {seed}")
            (folder / "recipe.yaml").write_text(recipe)
    assert main([str(tmp_path)]) == 0
    best = "best mean over 6 seeds: train.optimizer.lr=0.1, 0.9025; all others are worse"
    assert best in capsys.readouterr().out


def test_folder_defaults_to_outputs(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(outputs.parent)
    assert main(["--json"]) == 0
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["run"] for run in runs] == ["high", "killed", "low"]
    assert runs[0]["keys"]["train.optimizer.lr"] == 0.2


def test_page_is_written_to_the_requested_place(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(outputs), "--html"]) == 0
    assert (outputs / "runs.html").is_file()
    assert (
        main([str(outputs), "--html", f"--out={tmp_path / 'page.html'}", "--metric=step_ms"]) == 0
    )
    assert "3 runs in" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"3 runs: {tmp_path / 'page.html'}"


@pytest.mark.parametrize(
    "args",
    [
        ["a", "b"],
        ["--html=x"],
        ["--out=x"],
        ["--metric"],
        ["--sort=x"],
        ["--watch", "--html"],
        ["--watch", "--json"],
        ["--watch", "--out=x"],
    ],
)
def test_wrong_arguments_are_refused(args: list[str]) -> None:
    with pytest.raises(UsageError):
        main(args)


def test_unknown_metric_suggests_the_nearest(outputs: Path) -> None:
    with pytest.raises(DataError, match="did you mean accuracy"):
        main([str(outputs), "--metric=accuracies"])


def test_running_runs_are_printed_with_their_status(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--watch prints them until it is interrupted."""
    status = {"step": 3, "steps": 9, "loss": 0.5, "step_ms": 2.0, "left_s": 61.0}
    written = {"evaluation": None, "written": datetime.now(UTC).isoformat()}
    (outputs / "killed/status.json").write_text(json.dumps({**status, **written}))
    line = "killed: step 3 of 9, 2 ms a step, loss 0.5, 61 s left"
    lock = Lock(outputs / "killed" / LOCK)
    assert lock.acquire(wait=False)
    estimate = {"step": 3, "text": "accuracy 0.97 at the end (80 %: 0.9 to 0.99)"}
    (outputs / "killed/estimate.json").write_text(json.dumps(estimate))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.runs.runs.time.sleep", interrupt)
    assert main([str(outputs), "--watch"]) == 0
    printed = capsys.readouterr().out
    assert line in printed
    assert f"killed: {estimate['text']}\n" in printed
    assert main([str(outputs), "--json"]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["live"] and row["live"]["step"] for row in rows].count(3) == 1
    assert [row["estimate"] for row in rows if row["live"]] == [estimate["text"]]
    (outputs / "killed/status.json").write_text("[")
    assert main([str(outputs)]) == 0
    assert "killed: status.json: " in capsys.readouterr().out
    lock.release()


def test_killed_run_is_not_running_and_says_what_continues_it(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is fresh, but no process holds its lock."""
    status = {"step": 3, "steps": 9, "loss": 0.5, "step_ms": 2.0, "left_s": 61.0}
    written = {"evaluation": None, "written": datetime.now(UTC).isoformat()}
    killed = outputs / "killed"
    (killed / "status.json").write_text(json.dumps({**status, **written}))
    (killed / "estimate.json").write_text('{"text": "accuracy 0.97 at the end"}')
    assert main([str(outputs)]) == 0
    printed = capsys.readouterr().out
    assert "killed: not running, and no step is saved\n" in printed
    assert "at the end" not in printed
    for step in (2, 1000):
        checkpoint = killed / "checkpoints" / str(step)
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST).touch()
    monkeypatch.chdir(outputs.parent)
    assert main(["outputs"]) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "killed: not running; train.resume=outputs/killed continues from step 1,000" in shown
    assert main([str(outputs), "--json"]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["live"] for row in rows] == [None] * len(rows)
