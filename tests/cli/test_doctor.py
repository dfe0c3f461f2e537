from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from pipeline.__main__ import main
from pipeline.cli import doctor as module
from pipeline.cli.doctor import find_missing
from pipeline.core.host.limits import read_limits


class Said(NamedTuple):
    """The doctor's exit status, and its lines by subject."""

    status: int
    lines: dict[str, str]
    err: str


Say = Callable[..., Said]
LINE = re.compile(r"(ok|warn|fail) +(\S+(?: \S+)?) +(.*)")


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    idle = replace(read_limits(), load=0.0, open_files=4096, file_bytes=None, address_bytes=None)
    monkeypatch.setattr(module, "read_limits", lambda: replace(idle, memory_bytes=10**10))

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        status = main(["doctor", "--details", *arguments])
        out, err = capsys.readouterr()
        found = [match for line in out.splitlines() if (match := LINE.fullmatch(line))]
        lines = {match[2].strip(): f"{match[1]}: {match[3]}" for match in found}
        return Said(status, {**lines, "in all": out.splitlines()[-1] if out else ""}, err)

    return run


@pytest.mark.slow
def test_healthy_machine_is_reported_without_leftovers(say: Say, tmp_path: Path) -> None:
    said = say()
    assert (said.status, said.err) == (0, "")
    assert set(said.lines) >= {
        *(
            "software",
            "tested",
            "lock",
            "device",
            "cache",
            "disk",
            "data",
            "outputs",
            "locks",
            "clock",
        ),
        *("open files", "memory", "cores", "onednn", "extras"),
    }
    levels = {what: line.partition(":")[0] for what, line in said.lines.items()}
    # What else is installed here, and how full the disk is, depends on the machine.
    others = ("disk", "tested", "in all")
    assert {level for what, level in levels.items() if what not in others} == {"ok"}
    assert said.lines["data"].startswith("ok: digits: 1,438 training and 359 evaluation samples")
    assert re.search(r"^\d+ checks of lenet5_digits: 0 failed, ", said.lines["in all"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_only_problems_are_printed_without_details(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line counts the checks that are fine."""
    say()
    missing = ("dataset=mnist", "dataset.mirrors=[]")
    assert main(["doctor", *missing]) == 1
    *problems, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in problems if " data " in line] == ["fail"]
    assert not [line for line in problems if line.startswith("ok")]
    counts = r"(\d+) checks of \S+: 1 failed, (\d+) to look at, (\d+) fine \(--details"
    match = re.match(counts, last)
    assert match is not None
    assert int(match[1]) == 1 + int(match[2]) + int(match[3])
    assert int(match[2]) == len(problems) - 1


@pytest.mark.slow
def test_device_that_computes_wrongly_fails(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    assert say().lines["device"].startswith("ok: ")
    wrong = SimpleNamespace(arange=jnp.arange, sum=jnp.max)
    monkeypatch.setattr(module, "jnp", wrong)
    said = say()
    assert said.status == 1
    assert said.lines["device"].startswith("fail: ")
    assert "the sum of 0 to 7 is 7.0" in said.lines["device"]


@pytest.mark.slow
def test_recipe_is_checked_with_overrides(say: Say) -> None:
    """Nothing is downloaded for it."""
    said = say("dataset=mnist")
    assert said.status == 0
    assert re.match(
        r"warn: not in .*/cache/pipeline/mnist; a run downloads it from https?://",
        said.lines["data"],
    )
    said = say("dataset=mnist", "dataset.mirrors=[]")
    assert said.status == 1
    assert said.lines["data"].endswith("; name it: dataset.root=DIR")
    said = say("dataset=mnist", "dataset.root=nowhere")
    assert said.status == 1
    assert said.lines["data"].startswith("fail: nowhere lacks train-images-idx3-ubyte.gz")


@pytest.mark.slow
def test_missing_device_fails(say: Say) -> None:
    said = say("device=gpu")
    assert said.status == 1
    assert said.lines["device"].startswith("fail: device gpu:0: JAX sees cpu:0")
    assert said.lines["in all"].split(": ")[1].startswith("1 failed")


@pytest.mark.medium
def test_unwritable_folders_fail(say: Say, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "outputs").touch()
    said = say(f"cache.root={tmp_path / 'file' / 'cache'}")
    assert said.status == 1
    assert "can't be written: Not a directory; name another: cache.root=DIR" in said.lines["cache"]
    assert said.lines["outputs"] == "fail: outputs: File exists"


@pytest.mark.medium
def test_missing_file_locks_and_clock_skew_are_reported(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    now = module.time.time()
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(module.time, "time", lambda: now - 3600)
    said = say()
    assert said.status == 0
    assert "has no locks (No locks available)" in said.lines["locks"]
    assert re.match(r"warn: the file system's is \+3,[56]\d\d s off", said.lines["clock"])


@pytest.mark.medium
def test_nearly_full_disk_is_reported(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"f_bavail": 10, "f_frsize": 4096, "f_files": 1000, "f_favail": 7}
    nearly_full = type("Disk", (), fields)
    monkeypatch.setattr(module.os, "statvfs", lambda _: nearly_full)
    said = say()
    assert said.status == 0
    assert said.lines["disk"].startswith("warn: 0.0 GB free for outputs, 7 files; make room")


@pytest.mark.medium
def test_resource_limits_are_reported(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = replace(
        read_limits(),
        open_files=256,
        file_bytes=10**9,
        address_bytes=8 * 10**9,
        memory_bytes=10**9,
        machine_cores=4,
        load=3.5,
    )
    monkeypatch.setattr(module, "read_limits", lambda: tight)
    lines = say().lines
    assert lines["open files"] == "warn: 256 at most; ulimit -n 4096"
    assert lines["file size"].startswith("warn: limited to 1.0 GB; ")
    assert lines["addresses"].startswith("warn: limited to 8.0 GB; ")
    assert lines["memory"].startswith("warn: 1.0 GB available; ")
    assert "load 3.5; other programs use them" in lines["cores"]


@pytest.mark.medium
def test_untested_versions_are_reported(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pylock.toml").write_text("packages = 3")
    monkeypatch.setattr(module, "find_untested", lambda _: ["jax 9.0: tested are >=0.10,<0.13"])
    monkeypatch.setattr(module, "LOCK", tmp_path / "pylock.toml")
    said = say()
    assert said.lines["tested"] == (
        "warn: jax 9.0: tested are >=0.10,<0.13; "
        "pip install 'recipe-pipeline' picks tested versions"
    )
    assert "pylock.toml: isn't a lock file (PEP 751)" in said.lines["lock"]
    assert said.status == 1


def test_missing_requirements_of_an_extra_are_listed_transitively(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    required = {
        "ours": ["there", 'missing; extra == "sweep"', 'there[gpu]>=1; extra == "gpu"'],
        "there": ['plugin; extra == "gpu"', 'other; extra == "cpu"'],
    }

    monkeypatch.setattr(module, "requires", required.get)
    monkeypatch.setattr(module, "find_installed_version", {"there": "1.0"}.get)
    assert find_missing("ours", "sweep") == ["missing"]
    assert find_missing("ours", "gpu") == ["plugin"]
    assert find_missing("there", "cpu") == ["other"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fast"], "there is no such option. Choose from --details, --help, --json, --quiet"),
        (["model=lenet6"], "model = lenet6: there is no such model"),
    ],
)
def test_wrong_recipe_is_reported(args: list[str], message: str, say: Say) -> None:
    said = say(*args)
    assert said.status == 2
    assert message in said.err
    assert not os.listdir()


def test_error_of_jax_is_the_result_of_its_check() -> None:
    """Other checks follow it."""

    def check_device(recipe: Any) -> Any:
        raise RuntimeError("INTERNAL: the device is lost\nmore")

    (result,) = module._run_check(check_device, SimpleNamespace())  # type: ignore[arg-type]
    assert str(result) == "fail  device       INTERNAL: the device is lost"
