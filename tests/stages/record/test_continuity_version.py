from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import RecipeError
from pipeline.stages.record import continuity
from pipeline.stages.record.continuity import explain_other_version, require_readable_version
from pipeline.stages.record.provenance import PROVENANCE


def write(folder: Path, version: Any, **code: Any) -> Path:
    process = {"versions": {"recipe-pipeline": version}, "code": code}
    (folder / PROVENANCE).write_text(json.dumps({"processes": [process]}))
    return folder


@pytest.mark.parametrize(
    ("written", "current"),
    [
        ("1.0.0", "1.0.0"),
        ("1.0.0", "1.3.0"),
        ("1.0.2", "1.0.1"),
        ("1.0.0rc1", "1.0.0"),
        ("2.0.0.dev1", "2.0.0.dev1"),
    ],
)
def test_readable_version_has_no_problem(written: str, current: str, tmp_path: Path) -> None:
    assert explain_other_version(write(tmp_path, written), current) is None


@pytest.mark.parametrize(
    ("written", "current", "problem"),
    [
        ("1.2.0", "1.1.5", "a newer version, and versions from 1.2.0 to below 2.0 can resume it"),
        ("1.0.0rc2", "1.0.0rc1", "a newer version, and versions from 1.0.0rc2 to below 2.0"),
        ("1.0.0", "1.0.0rc1", "a newer version, and versions from 1.0.0 to below 2.0"),
        ("0.1.0", "1.0.0", "another major version, and versions from 0.1.0 to below 1.0"),
        ("2.1.0", "1.9.0", "another major version, and versions from 2.1.0 to below 3.0"),
        ("1.0.0.dev3", "1.0.0", "an unreleased state, and only that state can resume it"),
        ("1.0.0+mine", "1.0.0", "an unreleased state, and only that state can resume it"),
        ("9" * 5000, "1.0.0", "an unreleased state"),
        ("\x1b[31m", "1.0.0", "an unreleased state"),
    ],
)
def test_other_version_says_who_wrote_the_run_and_what_is_left(
    written: str, current: str, problem: str, tmp_path: Path
) -> None:
    text = explain_other_version(write(tmp_path, written), current)
    assert text is not None
    assert problem in text
    assert "\x1b" not in text
    assert len(text) < 1000
    assert f"this is {current}, which can still export its weights" in text
    assert f"python -m pipeline convert weights {tmp_path} weights.safetensors" in text


def test_unreleased_state_is_named_by_its_commit(tmp_path: Path) -> None:
    write(tmp_path, "1.1.0.dev1", git={"commit": "0123456789abcdef"})
    text = explain_other_version(tmp_path, "1.0.0")
    assert "only that state, commit 0123456789ab, can resume it" in str(text)


@pytest.mark.parametrize("content", ["", "[]", '{"processes": [{"versions": 3}]}'])
def test_unknown_version_has_no_problem(content: str, tmp_path: Path) -> None:
    (tmp_path / PROVENANCE).write_text(content)
    assert explain_other_version(tmp_path, "1.0.0") is None


def test_refusal_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuity, "find_version", lambda name: "1.0.0")
    with pytest.raises(RecipeError) as caught:
        require_readable_version(write(tmp_path, "2.0.0"))
    assert len(caught.value.problems) == 1
