from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.stages.record import provenance
from pipeline.stages.record.provenance import (
    Provenance,
    add_provenance,
    describe_code,
    describe_imported_code,
    describe_settings,
    read_provenance,
)
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]

PLAIN = Provenance("2026-11-21T12:00:00+00:00", "pipeline", "/", 1, {}, {}, {}, {}, {})


@pytest.mark.slow
def test_run_records_its_provenance(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny("stages=[data]", "seed=7")
    run(recipe, tmp_path)
    (process,) = read_provenance(tmp_path)
    assert process["seed"] == 7
    assert process["folder"] == os.getcwd()
    assert process["command"].split()[0] == sys.orig_argv[0]
    assert process["code"] == describe_code()
    assert process["versions"] == outcome.read_summary(tmp_path)["versions"]
    machine = process["machine"]
    assert (machine["host"], machine["device"]) == (platform.node(), "cpu:0 cpu")
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_bytes"] > 1e8
    assert machine["processor"]


@pytest.mark.medium
def test_data_is_identified_by_its_samples(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny("stages=[data]")
    run(recipe, tmp_path)
    data = read_provenance(tmp_path)[0]["data"]
    raw = recipe.dataset.read(tmp_path)
    for name, split in (("train", raw.train), ("eval", raw.eval)):
        for column in ("image", "label"):
            values = split.columns[column][:]
            assert data[name][column]["sha256"] == hashlib.sha256(values.tobytes()).hexdigest()
            assert data[name][column]["shape"] == list(values.shape)


def test_every_process_of_a_run_is_recorded(tmp_path: Path) -> None:
    add_provenance(tmp_path, PLAIN)
    add_provenance(tmp_path, PLAIN)
    assert len(read_provenance(tmp_path)) == 2


def test_damaged_file_is_reported_and_does_not_block_a_run(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"processes": 1}', '{"processes": [1]}'):
        (tmp_path / "provenance.json").write_text(text)
        with pytest.raises(
            DataError, match=r"provenance\.json: .*; delete it to continue without it"
        ):
            read_provenance(tmp_path)
        add_provenance(tmp_path, PLAIN)
        assert len(read_provenance(tmp_path)) == 1
    (tmp_path / "provenance.json").write_text("[]")
    with pytest.raises(
        DataError, match="must hold a list of processes; delete it to continue without it"
    ):
        read_provenance(tmp_path)


def test_old_run_has_no_provenance(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) == []


def test_only_relevant_environment_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secrets get into a run directory."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("MY_TOKEN", "secret")
    settings = describe_settings()
    assert settings["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"
    assert "secret" not in json.dumps(settings)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "code.py").write_text("one = 1\n")
    return folder


def git(root: Path, *args: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *args]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(package: Path) -> Path:
    for args in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        git(package.parent, *args)
    return package


def test_digest_covers_names_and_contents(package: Path) -> None:
    before = describe_code(package)["sha256"]
    copied = shutil.copytree(package, package.parent / "elsewhere")
    assert describe_code(copied)["sha256"] == before
    (copied / "inner" / "code.py").rename(copied / "inner" / "other.py")
    assert describe_code(copied)["sha256"] != before
    (package / "inner" / "code.py").write_text("one = 2\n")
    assert describe_code(package)["sha256"] != before


def test_digest_ignores_wheel_files_and_bytecode(package: Path) -> None:
    before = describe_code(package)["sha256"]
    for folder in ("conf", "examples", "recipes", "inner/__pycache__"):
        (package / folder).mkdir()
        (package / folder / "file").write_text("x")
    (package / "pylock.toml").write_text("x")
    assert describe_code(package)["sha256"] == before


def test_code_without_a_checkout_has_no_git_state(package: Path) -> None:
    assert set(describe_code(package)) == {"sha256"}


def test_checkout_has_its_commit(checkout: Path) -> None:
    commit = git(checkout.parent, "rev-parse", "HEAD").strip()
    assert describe_code(checkout)["git"] == {"commit": commit, "dirty": False, "changed": []}


def test_checkout_has_its_changed_files(checkout: Path) -> None:
    (checkout / "inner" / "code.py").write_text("one = 2\n")
    (checkout / "new.py").write_text("")
    state = describe_code(checkout)["git"]
    assert state["dirty"] is True
    assert state["changed"] == ["package/inner/code.py", "package/new.py"]


def test_changed_file_may_have_any_name(checkout: Path) -> None:
    """As with `core.quotePath = false`, git prints the bytes of names."""
    git(checkout.parent, "config", "core.quotePath", "false")
    (checkout / "new_\udcff.py").write_text("")
    assert describe_code(checkout)["git"]["changed"] == ["package/new_\ufffd.py"]


def test_checkout_around_an_installed_package_is_ignored(checkout: Path) -> None:
    """A virtual environment inside somebody's repository."""
    inner = shutil.copytree(checkout, checkout.parent / "venv" / "site" / "package")
    assert "git" not in describe_code(inner)


def test_git_failure_is_recorded_with_its_reason(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "GIT", ("git", "nonsense"))
    state = describe_code(checkout)["git"]
    assert state["commit"] is None
    assert "non-zero exit status" in state["why"]
    monkeypatch.setattr(provenance, "GIT", ("no-such-program",))
    assert "No such file" in describe_code(checkout)["git"]["why"]


def test_code_is_described_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run in the process was made from what the first one was."""
    first = describe_imported_code()
    assert set(first) >= {"sha256"}
    monkeypatch.setattr(provenance, "GIT", ("git", "nonsense"))
    assert describe_imported_code() == first
