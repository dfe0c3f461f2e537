"""The sections of a report about where a run came from and what was made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.core.pages.page import Page, render_page
from pipeline.inspect.report.origin import origin_sections
from pipeline.stages.record.run_directory import note_descendant, read_descendants
from pipeline.study.runs.page import Link, list_links
from pipeline.study.runs.recorded_run import read_runs
from tests.study.runs.made_up import make_run

HOSTILE = "<img src=x>"


def page_of(run_dir: Path) -> str:
    """The sections as a page."""
    return render_page(Page("report", "run", "", origin_sections(run_dir)))


def text_of(run_dir: Path) -> str:
    """The sections without their markup."""
    marked = re.sub(r"<[^>]*>", "|", page_of(run_dir).partition("</head>")[2])
    return re.sub(r"\s*\|\s*", "|", marked)


def test_lineage_goes_from_the_data_to_descendants(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", restore="../first")
    (make_checkpoint_path(run_dir / "checkpoints", 100) / "state").mkdir(parents=True)
    process = json.loads((run_dir / "provenance.json").read_text())["processes"][0]
    later = {**process, "begun": "2026-11-23T10:00:00+00:00"}
    (run_dir / "provenance.json").write_text(json.dumps({"processes": [process, later]}))
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["resumed_from"] = {"run": "run", "step": 60}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    note_descendant(run_dir, "exported", tmp_path / "network")
    note_descendant(run_dir, "reproduced", tmp_path / "again")
    note_descendant(run_dir, "exported", tmp_path / "network")
    said = text_of(run_dir)
    wanted = [
        "digits abababab",
        "resize, rescale",
        str(tmp_path.parent / "first"),
        "run, code 0123456789",
        "at step 60, code 0123456789",
        "step 100",
        str(tmp_path / "again"),
    ]
    places = [said.index(text) for text in wanted]
    assert places == sorted(places)
    assert said.count(str(tmp_path / "network")) == 1


def test_sections_without_files_are_omitted(tmp_path: Path) -> None:
    said = text_of(make_run(tmp_path / "run"))
    assert "Lineage" in said
    assert "Profile" not in said
    assert "Dumps" not in said


def test_profile_section_has_its_verdict_and_tables(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "profile").mkdir()
    layers = [{"layer": f"conv_{HOSTILE}", "ms": 1.25, "share": 0.5, "parts": [1]}]
    phases = [{"phase": "forward", "ms": 2.5, "share": 1.0, "busy_ms": 3}]
    profile = {"device": "cpu", "step_ms": 2.5, "phases": phases, "layers": layers}
    tree = {"verdict": {"text": "data-bound: waits 40 %"}, "profiles": [profile, 3, {"phases": 1}]}
    (run_dir / "profile" / "profile.json").write_text(json.dumps(tree))
    page, said = page_of(run_dir), text_of(run_dir)
    assert "data-bound: waits 40 %" in said
    assert "device cpu, step ms 2.5" in said
    assert "|forward||2.5||1||3|" in said
    assert HOSTILE not in page
    assert "conv_&lt;img" in page


def test_files_without_content_are_skipped(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    for content in ("", "[]", "{", '{"verdict": [], "profiles": {"a": 1}}', '{"profiles": [[]]}'):
        (run_dir / "profile.json").write_text(content)
        assert "Profile" not in text_of(run_dir)
    (run_dir / "descendants.jsonl").write_text('[]\n{"made": "stolen", "to": "x"}\n{"made"\n\xff\n')
    assert read_descendants(run_dir) == []


def test_dumps_are_listed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    folder = run_dir / "dump" / "20261122" / "0" / "mlp" / "1" / "10"
    folder.mkdir(parents=True)
    about = {"step": 10, "loss": 0.5, "content": "statistics", "stopped": None}
    (folder / "dump.json").write_text(json.dumps(about))
    said = text_of(run_dir)
    assert "dump/20261122/0/mlp/1/10||10||statistics||||0.5|" in said


def test_page_of_all_runs_links_descendants(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / "again_reproduced")
    note_descendant(tmp_path / "run", "reproduced", tmp_path / "again_reproduced")
    note_descendant(tmp_path / "run", "converted", Path("/elsewhere/w.npz"))
    assert list_links(read_runs(tmp_path, curves=False)) == [
        Link("run", "was reproduced as", "again_reproduced"),
        Link("run", "was converted as", "/elsewhere/w.npz"),
    ]
