"""What was made of a run: each path once, and lines of strangers are passed over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from pipeline.backends.ascend.estimate import PICTURE, PRICE, TRACE
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.restore import FOLDER as CHECKPOINTS
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.engine.monitors.log_lines import EVALS, METRICS
from pipeline.stages.record.provenance import PROVENANCE
from pipeline.stages.record.recorded_recipe import write_recipe
from pipeline.stages.record.run_directory import (
    APPENDED,
    DESCENDANTS,
    FOLDERS,
    PRICES,
    RECIPE,
    REPLACED,
    SUMMARY,
    Descendant,
    create_run_dir,
    find_run_dir,
    lock_run,
    make_run_dir,
    make_unique,
    note_descendant,
    read_descendants,
    require_run_dir,
)
from tests.conftest import ROOT

Compose = Callable[..., Recipe]


def test_path_is_listed_once_at_its_last_time(tmp_path: Path) -> None:
    assert read_descendants(tmp_path) == []
    note_descendant(tmp_path, "exported", tmp_path / "export")
    note_descendant(tmp_path, "converted", tmp_path / "weights.npz")
    note_descendant(tmp_path, "exported", tmp_path / "export")
    made = [(entry.made, entry.to) for entry in read_descendants(tmp_path)]
    assert made == [
        ("exported", str(tmp_path / "export")),
        ("converted", str(tmp_path / "weights.npz")),
    ]


def test_path_that_is_not_utf8_is_listed(tmp_path: Path) -> None:
    target = os.fsdecode(b"/exports/caf\xe9")
    note_descendant(tmp_path, "exported", Path(target))
    assert [entry.to for entry in read_descendants(tmp_path)] == [target]


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    entries = [
        {"made": "sold", "to": "/a"},
        {"made": "exported", "to": 1},
        ["exported"],
        {"made": "exported", "to": "/b", "at": 5},
    ]
    lines = [json.dumps(entry) for entry in entries]
    text = "\n".join([*lines, "{", "[" * 100_000])
    (tmp_path / DESCENDANTS).write_bytes(text.encode() + b"\n\xff\xfe")
    assert read_descendants(tmp_path) == [Descendant("exported", "/b")]


def test_removed_directory_is_not_an_error(tmp_path: Path) -> None:
    note_descendant(tmp_path / "gone", "exported", tmp_path)
    assert not (tmp_path / "gone").exists()


def test_link_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "other.jsonl"
    target.write_text("")
    (tmp_path / DESCENDANTS).symlink_to(target)
    note_descendant(tmp_path, "exported", tmp_path)
    assert target.read_text() == ""


def test_run_directory_name_has_day_time_and_recipe(tmp_path: Path) -> None:
    made = create_run_dir("lenet5_mnist", tmp_path)
    assert made.is_dir()
    day, clock = made.relative_to(tmp_path).parts
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
    assert re.fullmatch(r"\d\d-\d\d-\d\d_lenet5_mnist", clock)


def test_link_to_nothing_is_named(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "absent")
    with pytest.raises(
        RunError, match=f"^{link}: is a link to {tmp_path}/absent, which isn't there$"
    ):
        make_run_dir(link)
    (tmp_path / "absent").mkdir()
    assert make_run_dir(link) == link


def test_used_name_gets_a_number(tmp_path: Path) -> None:
    made = [make_unique(tmp_path / "run") for _ in range(3)]
    assert [path.name for path in made] == ["run", "run_1", "run_2"]


def test_threads_never_share_a_directory(tmp_path: Path) -> None:
    start = Barrier(8)

    def make_run_dir(_: int) -> list[Path]:
        start.wait()
        return [make_unique(tmp_path / "day" / "run") for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        made = [path for paths in pool.map(make_run_dir, range(8)) for path in paths]
    assert len(set(made)) == 80
    assert all(path.is_dir() for path in made)


@pytest.mark.slow
def test_processes_never_share_a_directory(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from pipeline.stages.record.run_directory import make_unique;"
        "print('ready', flush=True); sys.stdin.readline();"
        "print(*[make_unique(Path('day/run')) for _ in range(50)])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    processes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    made = [path for process in processes for path in process.communicate()[0].split()]
    assert len(made) == len(set(made)) == 100


@pytest.mark.medium
def test_name_used_a_thousand_times_is_refused(tmp_path: Path) -> None:
    for attempt in range(1000):
        (tmp_path / (f"run_{attempt}" if attempt else "run")).mkdir()
    with pytest.raises(RunError, match="run: a thousand directories of that name exist"):
        make_unique(tmp_path / "run")


def test_uncreatable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file")
    with pytest.raises(RunError, match="can't make the run directory: Not a directory") as caught:
        create_run_dir("lenet5", tmp_path / "outputs")
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(RunError, match="can't make the run directory: Not a directory"):
        make_run_dir(tmp_path / "outputs" / "run")


def test_named_directory_is_created_or_used_if_empty(tmp_path: Path) -> None:
    for _ in range(2):
        assert make_run_dir(tmp_path / "deep" / "run") == tmp_path / "deep" / "run"
        assert (tmp_path / "deep" / "run").is_dir()


def leave(run_dir: Path, recipe: Recipe, status: str | None = None, age_s: int = 0) -> Path:
    """Write the files of a run that matter to one that resumes it."""
    run_dir.mkdir(parents=True)
    write_recipe(run_dir, recipe)
    if status is not None:
        (run_dir / "summary.json").write_text(json.dumps({"status": status}))
    os.utime(run_dir / "recipe.yaml", (2e9 - age_s, 2e9 - age_s))
    return run_dir


def test_existing_run_is_not_overwritten(tiny: Compose, tmp_path: Path) -> None:
    run_dir = leave(tmp_path / "run", tiny())
    with pytest.raises(RunError) as caught:
        make_run_dir(run_dir)
    assert str(caught.value) == (
        f"{run_dir}: holds a run already; name another directory, or resume that run: "
        f"train.resume={run_dir}"
    )


def test_outputs_are_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_run_dir("x").relative_to("outputs").parts
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


def test_directory_named_by_two_new_runs_is_used_by_one(tiny: Compose, tmp_path: Path) -> None:
    """Both found it empty; the second is at its lock when the first is done."""
    first, second = make_run_dir(tmp_path / "run"), make_run_dir(tmp_path / "run")
    with lock_run(first, new=True):
        write_recipe(first, tiny())
    with pytest.raises(RunError, match="holds a run already"), lock_run(second, new=True):
        pass
    with lock_run(first):
        pass


def test_run_directory_is_derived_from_a_path(tiny: Compose, tmp_path: Path) -> None:
    run_dir = leave(tmp_path / "run", tiny())
    for path in (
        run_dir,
        run_dir / "checkpoints",
        make_checkpoint_path(run_dir / "checkpoints", 40),
    ):
        assert find_run_dir(path) == run_dir
    assert find_run_dir(tmp_path) is None


@pytest.mark.parametrize("name", [".", "..", "checkpoints/.."])
def test_run_around_a_relative_path_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of "." is "." in a relative path."""
    folder = tmp_path / "run" / "checkpoints" / "5"
    folder.mkdir(parents=True)
    (tmp_path / "run" / RECIPE).touch()
    monkeypatch.chdir(folder)
    found = find_run_dir(Path(name))
    assert found is not None
    assert found.resolve() == tmp_path / "run"


def test_date_and_time_of_a_run_are_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at the clock, a day may end."""
    moments = iter([1_800_000_000.0, 1_800_090_000.0])
    strftime = time.strftime
    monkeypatch.setattr(time, "strftime", lambda form: strftime(form, time.gmtime(next(moments))))
    assert create_run_dir("mlp", tmp_path) == tmp_path / "2027-01-15" / "08-00-00_mlp"


def test_missing_run_and_folder_without_a_recipe_have_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    advice = "`python -m pipeline runs outputs` lists runs"
    with pytest.raises(DataError) as missing:
        require_run_dir(Path("nosuch"))
    assert str(missing.value) == (f"nosuch: there is no such run, looked in {tmp_path}; {advice}")
    Path("other").mkdir()
    with pytest.raises(DataError) as other:
        require_run_dir(Path("other"))
    assert str(other.value) == (f"other: isn't a run directory; it holds no recipe.yaml; {advice}")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["notes.txt"], "other files than a run's: notes.txt"),
        (["a", "b", "c", "d", "e"], "other files than a run's: a, b, c and 2 more"),
        (["metrics.jsonl"], "a run without its recipe.yaml: metrics.jsonl"),
        (["price.json"], "a run without its recipe.yaml: price.json"),
        (["checkpoints/"], "a run without its recipe.yaml: checkpoints"),
        (["8.orbax-checkpoint-tmp/"], "other files than a run's: 8.orbax-checkpoint-tmp"),
        ([".lock", "run.log", "x"], "a run without its recipe.yaml: run.log, x"),
        (["2019/", "2020/"], "other files than a run's: 2019, 2020"),
        (["x\ny"], r"other files than a run's: x\\ny"),
    ],
)
def test_directory_with_other_files_is_refused_unchanged(
    names: list[str], text: str, tmp_path: Path
) -> None:
    for name in names:
        path = tmp_path / name
        path.mkdir() if name.endswith("/") else path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError) as caught:
        make_run_dir(tmp_path)
    advice = "name a new or an empty directory"
    assert str(caught.value) == f"{tmp_path}: holds {text}; {advice}".replace(r"\\n", r"\n")
    assert caught.value.exit_status == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_directory_can_have_preparation_files(tmp_path: Path) -> None:
    """The notes of a sweep and of Hydra, lowerings to be used again, what a killed run has left."""
    own = [".lock", ".claim", "overrides.yaml", "lowerings.json", "recipe.yaml.host.7.part"]
    for name in own:
        (tmp_path / name).touch()
    (tmp_path / ".hydra").mkdir()
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        (tmp_path / ".hydra" / name).touch()
    assert make_run_dir(tmp_path) == tmp_path
    (tmp_path / ".hydra" / "notes").touch()
    with pytest.raises(DataError, match=r"other files than a run's: \.hydra;"):
        make_run_dir(tmp_path)


FILES = (*APPENDED, *REPLACED, *PRICES, ".lock", ".claim")
DEEP = ("checkpoints/40/host", "embeddings/x", "reproducer/step.json", "earlier_autopsy/x")


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, *DEEP])
def test_links_at_written_paths_are_refused(name: str, tiny: Compose, tmp_path: Path) -> None:
    """Run directories are strangers' files too."""
    run_dir = leave(tmp_path / "run", tiny())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir() if name in FOLDERS else elsewhere.write_text("mine")
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)
    before = sorted(run_dir.rglob("*"))
    text = re.escape(f"{path}: is a link to {elsewhere}; ")
    with pytest.raises(DataError, match=text), lock_run(run_dir):
        pass
    assert {path.name for path in {*run_dir.rglob("*")} - set(before)} <= {".lock"}
    assert elsewhere.is_dir() or elsewhere.read_text() == "mine"


@pytest.mark.parametrize("name", APPENDED)
def test_hard_linked_log_is_refused(name: str, tiny: Compose, tmp_path: Path) -> None:
    """`cp -al run backup`: what is appended to the run would be in the backup."""
    run_dir = leave(tmp_path / "run", tiny())
    (tmp_path / "backup").touch()
    (run_dir / name).hardlink_to(tmp_path / "backup")
    with pytest.raises(DataError, match=f"{name}: is a hard link: the file has 2 names"):
        lock_run(run_dir).__enter__()


def test_unrelated_links_are_accepted(tiny: Compose, tmp_path: Path) -> None:
    """And so is one that leads to the run."""
    run_dir = leave(tmp_path / "run", tiny())
    (run_dir / "notes").symlink_to("/etc")
    (tmp_path / "latest").symlink_to(run_dir)
    with lock_run(tmp_path / "latest") as lock:
        assert lock.keep()
    assert (run_dir / "notes").is_symlink()


def test_written_names_are_checked_for_links() -> None:
    """They are made in modules that this one may not import."""
    assert {METRICS, EVALS} < {*APPENDED}
    assert {PROVENANCE, SUMMARY} < {*REPLACED}
    assert {CHECKPOINTS} < {*FOLDERS}
    assert {PRICE, TRACE, PICTURE} == {*PRICES}
