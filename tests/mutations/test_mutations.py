"""Each row of docs/requirements.md has a mutation that applies, and the script notices failures."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.mutations.__main__ import judge
from tests.mutations.mutations import Mutation, read_mutations
from tests.mutations.sandbox import Outcome
from tests.requirement_rows import ROOT, ROWS

TEST = "tests/test_a.py::test_a"


def test_every_row_has_a_mutation_that_applies() -> None:
    mutations = read_mutations()
    assert list(mutations) == [row.code for row in ROWS]
    for mutation in mutations.values():
        text = (ROOT / mutation.file).read_text()
        assert mutation.apply_to(text) != text, mutation.code


@pytest.mark.medium
def test_mutated_files_can_be_parsed() -> None:
    parsers = {".py": ast.parse, ".yaml": yaml.safe_load, ".md": str, "": str}
    for mutation in read_mutations().values():
        text = mutation.apply_to((ROOT / mutation.file).read_text())
        parsers[Path(mutation.file).suffix](text)


@pytest.mark.parametrize("text", ["none", "old and old"])
def test_text_that_does_not_occur_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"a.py has 'old' {text.count('old')} times, not once"):
        Mutation("D-09", "a.py", "old", "new", "it breaks").apply_to(text)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome(failed=frozenset([TEST])), "caught"),
        (Outcome(frozenset([TEST]), frozenset([TEST])), "caught"),
        (Outcome(frozenset([TEST])), "survived"),
        (Outcome(), "not run"),
        (Outcome(frozenset([TEST]), is_timed_out=True), "hangs"),
    ],
)
def test_verdict_is_by_the_test_of_the_row(outcome: Outcome, verdict: str) -> None:
    assert judge(TEST, outcome) == verdict


@pytest.mark.slow
def test_mutation_is_caught_in_a_copy() -> None:
    mutation = read_mutations()["D-09"]
    before = (ROOT / mutation.file).stat().st_mtime_ns
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutations", "D-09"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    first, verdict, last = done.stdout.splitlines()
    assert "1 of 1 tests pass" in first, done.stderr
    assert verdict.startswith("D-09  caught")
    assert verdict.endswith(mutation.breaks)
    assert (last, done.returncode) == ("1 of 1 caught", 0)
    assert (ROOT / mutation.file).stat().st_mtime_ns == before
