"""The examples in the documents run, and say what they promise."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import api, load_recipe
from pipeline.core.registry import list_components

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNS = re.findall(
    r"^    python -m pipeline( \+recipe=[^#\n]*)", (ROOT / "README.md").read_text(), re.MULTILINE
)
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "ascend910.md").read_text(),
    re.MULTILINE | re.DOTALL,
)

GOLDEN = ROOT / "tests" / "golden"
SCRIPTS = re.findall(
    r"^\| `(make_\w+\.py)` \| ([^|]+) \| \d+ \| ([^|]+) \|$",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE,
)
"""Of golden values: the script, what it needs and the files that it writes."""


EXCERPTS = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "bring-your-own.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
"""Parts of files under examples/, which other tests run."""


def test_documents_have_excerpts() -> None:
    assert len(EXCERPTS) >= 9


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda text: text.split("\n")[0].strip())
def test_excerpts_are_from_examples(excerpt: str) -> None:
    files = (ROOT / "examples").rglob("*.py")
    assert any(_without_indents(excerpt) in _without_indents(file.read_text()) for file in files)


def _without_indents(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_base_classes_of_the_document_are_those_of_the_kinds() -> None:
    text = (ROOT / "docs" / "bring-your-own.md").read_text()
    rows = re.findall(r'^\| (`"\w.*) \| (`.*) \|$', text, re.MULTILINE)
    kinds = [kind for row, _ in rows for kind in re.findall(r'"(\w+)"', row)]
    names = [name for _, row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(kinds) == len(set(kinds)) == 14
    for kind in kinds:
        bases = {base.__name__ for cls in list_components(kind).values() for base in cls.__mro__}
        # The package has no run feature under a name.
        assert bases & set(names) or kind == "run_feature", kind
    assert all(hasattr(api, name) for name in names)


def test_document_has_two_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=["flax", "by hand"])
def test_document_examples_run(number: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    said = subprocess.run(
        [sys.executable, "-W", "error", "example.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (said.returncode, said.stderr) == (0, "")
    match = re.match(r"modelled: ([\d.]+) ms a step", said.stdout)
    assert match is not None
    assert float(match[1]) > 0
    if "save_trace" in EXAMPLES[number]:
        assert (tmp_path / "net_trace.json").stat().st_size > 1000
        assert "<svg" in (tmp_path / "net_timeline.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
def test_first_readme_run_prints_the_shown_output(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"python -m pipeline\n\n((?:    .+\n)+)", readme)
    seen = re.search(r"([\d.]+) to ([\d.]+) were seen", readme)
    assert shown is not None
    assert seen is not None
    said = command([], timeout=400)
    assert (said.returncode, said.stderr) == (0, "")
    printed = "".join(f"{_without_results(line)}\n" for line in said.stdout.splitlines())
    for line in shown[1].splitlines():
        # A line that is too long for a page ends with dots.
        text = _without_results(line)
        assert (text.removesuffix("...") if text.endswith("...") else f"{text}\n") in printed
    *_, accuracy = map(float, re.findall(r"accuracy ([\d.]+)", said.stdout))
    digit = 1 / 359
    assert float(seen[1]) - digit < accuracy < float(seen[2]) + digit


NAMES = "step|epoch|loss|accuracy|top5|lr"
UNITS = "ms|s|MB|parameters|steps|epochs|samples"


def test_numbers_of_the_shown_output_have_a_name_or_a_unit() -> None:
    shown = re.search(r"python -m pipeline\n\n((?:    .+\n)+)", (ROOT / "README.md").read_text())
    assert shown is not None
    for line in shown[1].splitlines():
        rest = re.sub(r"outputs/\S+|lenet5|\d\d:\d\d:\d\d", "", line)
        rest = re.sub(rf"\b({NAMES}) [\d,.]+(/[\d,.]+)?", "", rest)
        rest = re.sub(rf"[\d,.]*\d ({UNITS})\b", "", rest)
        assert not re.search(r"\d", rest), line


def test_readme_needs_three_words() -> None:
    """Sink, epoch and step; other words of this project are explained where they are needed."""
    inner = r"\b(sink epochs?|soft|boundary|boundaries|segments?|windows?|dispatch\w*|lowerings?)\b"
    assert re.findall(inner, (ROOT / "README.md").read_text()) == []


def test_glossary_has_at_most_ten_words() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    table = re.search(r"^\| word \| meaning \|\n\|.+\n((?:\|.+\n)+)", text, re.MULTILINE)
    assert table is not None
    words = re.findall(r"^\| ([\w ]+) \|", table[1], re.MULTILINE)
    assert {"sink", "epoch", "step"} <= set(words)
    assert len(words) <= 10


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100] == []


def _without_results(line: str) -> str:
    """A line without what differs by version, machine and time: losses, times and the folder."""
    line = re.sub(r"outputs/[\d/-]+_", "outputs/", line.strip())
    in_all = r"[\d.]+ (?:s|min) in all; ends at about [\d:]+"
    line = re.sub(rf"about [\d.]+ ms a step, {in_all}", "about", line)
    line = re.sub(r"[\d.]+ ms a step", "ms a step", line)
    return re.sub(r"(loss|accuracy) [\d.e-]+", r"\1", line)


def test_readme_has_runs() -> None:
    assert len(RUNS) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS, ids=str.strip)
def test_readme_runs_are_valid_recipes(command: str) -> None:
    recipe, *overrides = shlex.split(command)
    name = recipe.removeprefix("+recipe=")
    assert load_recipe(name, overrides).name == name


ELSEWHERE = {
    "JOB/overrides.yaml", "arena.html", "contest.json", "results.json", "times.json",
    "amortisation.html", "args.yaml", "autopsy.json", "classes.csv",
    "compiled.json", "duplicates.csv", "estimate.json", "status.json",
    "confusion.csv",
    "dump.json", "explain.json", "index.html", "labels.csv", "lowerings.json", "manifest.json",
    "folds.csv", "out_of_fold.csv",
    "mine/sweep.csv", "model.json", "numbers.csv", "peaks.json", "predict.py",
    "predictions.csv", "price.json", "profile.json", "provenance.json", "recipe.yaml", "sink.json",
    "ckpt.json", "receipt.json", "recipe.schema.json", "records.json", "summary.json",
    "suspicious_labels.csv",
    "sweep.csv", "sweep.yaml",
    "tests/utils/resource/run_1/normal_run/profiler/timeline_display_1.json", "timeline.html",
    "tokenizer.json", "trace.json", "tune_result_pid..._....json",
}  # fmt: skip
"""Files that documents name and that runs write, or another project has."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_documents_exist(document: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|yaml|md|json|csv|html))`", document.read_text())
    assert [name for name in sorted(set(named) - ELSEWHERE) if not _is_there(name)] == []


def _is_there(name: str) -> bool:
    """Paths start anywhere; tables name the files of a folder that their heading names."""
    return (ROOT / name).exists() or any(ROOT.glob(f"[!.]*/**/{name}"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_documents_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)", text)
    links += re.findall(r"(?m)^\[[^\]]+\]: (?!https?:)([^\s#]*)(?:#(\S*))?$", text)
    targets = [((document.parent / path if path else document), anchor) for path, anchor in links]
    assert [path for path, _ in targets if not path.exists()] == []
    assert [
        f"{path}#{anchor}" for path, anchor in targets if anchor and anchor not in _anchors(path)
    ] == []


def _anchors(document: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_golden_scripts_are_in_the_table() -> None:
    assert [row[0] for row in SCRIPTS] == sorted(path.name for path in GOLDEN.glob("make_*.py"))


@pytest.mark.parametrize(("script", "needs", "files"), SCRIPTS, ids=[row[0] for row in SCRIPTS])
def test_script_of_golden_values_records_its_versions(script: str, needs: str, files: str) -> None:
    said = ast.get_docstring(ast.parse((GOLDEN / script).read_text())) or ""
    for package in re.findall(r"\w+ [\d.]+", needs):
        assert package in " ".join(said.split())
    for name in re.findall("`([^`]+)`", files):
        assert any(GOLDEN.rglob(name.rstrip("/")))
