"""The workflow of public CI: the rows of .ci/run, pinned actions and least permissions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release import WORKFLOWS, check_workflows

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
WORKFLOW: Any = yaml.safe_load(TEXT)


def test_jobs_are_the_rows_of_the_script() -> None:
    script = (ROOT / ".ci/run").read_text("utf-8")
    rows = dict(re.findall(r"^test_with (\w+) (\S+)", script, re.MULTILINE))
    jobs = WORKFLOW["jobs"]
    chosen = {row["row"]: row["python"] for row in jobs["test"]["strategy"]["matrix"]["include"]}
    assert chosen == {row: version for row, version in rows.items() if row != "complete"}
    assert jobs["complete"]["steps"][-1]["run"] == ".ci/run complete"
    assert "complete" in rows


def test_script_refuses_an_unknown_row() -> None:
    ended = subprocess.run([ROOT / ".ci/run", "fastest"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "fastest: must be lowest, newest, extras or complete\n"


def test_actions_are_pinned_by_their_digest() -> None:
    uses = re.findall(r"uses: (.+)", TEXT)
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", use)] == []


def test_jobs_have_the_permissions_that_they_need() -> None:
    assert WORKFLOW["permissions"] == {}
    granted = {name: job.get("permissions") for name, job in WORKFLOW["jobs"].items()}
    assert granted.pop("publish") == {"id-token": "write"}
    assert set(map(str, granted.values())) == {"{'contents': 'read'}"}


def test_nightly_run_is_complete_and_publishing_stores_no_token() -> None:
    triggers = WORKFLOW[True]  # YAML 1.1 reads `on` as true.
    assert re.fullmatch(r"\d+ \d+ \* \* \*", triggers["schedule"][0]["cron"])
    assert WORKFLOW["jobs"]["complete"]["if"] == "github.event_name != 'pull_request'"
    assert WORKFLOW["jobs"]["build"]["needs"] == ["test", "complete"]
    assert "secrets." not in TEXT
    assert "tests.bill_of_materials" in TEXT


def find_problems(folder: Path) -> list[str]:
    """Return the problems of the workflows in a folder, by zizmor and by GitHub's schema."""
    for program in ("zizmor", "check-jsonschema"):
        if shutil.which(program, path=str(Path(sys.executable).parent)) is None:
            pytest.skip("the extra `release` isn't installed")
    return list(check_workflows(folder, None))


def test_zizmor_and_the_schema_find_nothing(tmp_path: Path) -> None:
    assert find_problems(WORKFLOWS) == ["", ""]
    file = tmp_path / "ci.yml"
    file.write_text(re.sub("@[0-9a-f]{40} # ", "@", TEXT), "utf-8")
    audited, checked = find_problems(tmp_path)
    assert ("unpinned-uses" in audited, checked) == (True, "")
    file.write_text(TEXT.replace("runs-on:", "runs_on:", 1), "utf-8")
    assert "runs-on" in find_problems(tmp_path)[1]


def test_absent_program_is_a_problem_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert list(check_workflows(WORKFLOWS, tmp_path)) == [
        f"{tmp_path / 'zizmor'}: isn't installed",
        f"{tmp_path / 'check-jsonschema'}: isn't installed",
        f"{tmp_path / 'actionlint'}: isn't here",
    ]
