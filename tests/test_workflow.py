"""The workflow of public CI: the rows of .ci/run, pinned actions and least permissions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

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
