from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.stages.record.continuity import (
    describe_changed_software,
    find_changed_data,
    find_changed_plugins,
    require_same_origin,
)
from pipeline.stages.record.provenance import Provenance, add_provenance, read_provenance
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]
pytestmark = pytest.mark.mlp

IMAGE = {"shape": (9, 8, 8, 1), "dtype": "uint8", "sha256": "a" * 64, "of": "all"}
NOW = Provenance(
    begun="2026-11-21T12:00:00+00:00",
    command="pipeline",
    folder="/",
    seed=1,
    code={"sha256": "c" * 64},
    versions={"jax": "0.10.2", "numpy": "2.4.6"},
    machine={},
    settings={},
    data={"train": {"image": IMAGE}},
)


def kept(**sections: Any) -> Mapping[str, Any]:
    return {"data": NOW.data, "versions": NOW.versions, "code": NOW.code, **sections}


def train_image(**changed: Any) -> Mapping[str, Any]:
    return kept(data={"train": {"image": {**IMAGE, "shape": [9, 8, 8, 1], **changed}}})


def test_equal_data_and_software_are_not_a_change() -> None:
    assert find_changed_data([train_image()], NOW.data) == []
    assert describe_changed_software([kept()], NOW) is None


def test_changed_columns_are_reported_with_old_and_new_values() -> None:
    old = kept(data={"train": {"image": {**IMAGE, "sha256": "b" * 64}, "mask": IMAGE}})
    now = replace(NOW, data={**NOW.data, "eval": {"image": {**IMAGE, "of": "32 of 1,000"}}})
    words = "uint8 9x8x8x1 (SHA-256"
    assert find_changed_data([old], now.data) == [
        f"train image: was {words} bbbbbbbbbbbb of all), is {words} aaaaaaaaaaaa of all)",
        f"train mask: was {words} aaaaaaaaaaaa of all), is missing",
        f"eval image: was missing, is {words} aaaaaaaaaaaa of 32 of 1,000)",
    ]


@pytest.mark.parametrize("changed", [{"shape": [8, 8, 8, 1]}, {"dtype": "int8"}])
def test_shape_and_dtype_are_compared_if_other_samples_were_hashed(
    changed: Mapping[str, Any],
) -> None:
    sampled = {"of": "32 of 9", "sha256": "b" * 64}
    assert find_changed_data([train_image(**sampled)], NOW.data) == []
    assert len(find_changed_data([train_image(**sampled, **changed)], NOW.data)) == 1


def test_newest_recorded_section_is_compared() -> None:
    other = train_image(sha256="b" * 64)
    assert find_changed_data([other, train_image()], NOW.data) == []
    processes = [train_image(), other, {}, {"data": None}, {"data": {}}]
    assert len(find_changed_data(processes, NOW.data)) == 1
    assert find_changed_data([{}], NOW.data) == find_changed_data([], NOW.data) == []


def test_changed_versions_and_code_are_summarised() -> None:
    before = kept(versions={"jax": "0.9", "scipy": "1.17"}, code={"sha256": "d" * 64})
    assert describe_changed_software([before], NOW) == (
        "jax 0.9 -> 0.10.2, scipy 1.17 -> none, numpy none -> 2.4.6, "
        "code dddddddddddd -> cccccccccccc"
    )
    many = kept(versions={f"part-{number}": "1" for number in range(100)})
    assert str(describe_changed_software([many], NOW)).endswith(" and 98 more")
    assert len(str(describe_changed_software([many], NOW))) < 200


def plugins(**files: str) -> Mapping[str, Any]:
    return {"own": {"version": None, "sha256": files}}


def test_same_or_new_plugins_are_not_a_change() -> None:
    now = replace(NOW, plugins={**plugins(a="1" * 64), "other": {"version": "1", "sha256": {}}})
    assert find_changed_plugins([kept(plugins=plugins(a="1" * 64))], now) == []
    assert find_changed_plugins([kept()], now) == find_changed_plugins([], now) == []


def test_changed_plugin_files_are_reported() -> None:
    before = {
        **plugins(**{"own.py": "1" * 64, "gone.py": "2" * 64}),
        "left": {"version": "1.0", "sha256": {}},
        "installed": {"version": "1.0", "sha256": {"__init__.py": "3" * 64}},
    }
    installed = {"version": "1.1", "sha256": {"__init__.py": "4" * 64}}
    own = plugins(**{"own.py": "5" * 64, "new.py": "6" * 64})
    assert find_changed_plugins(
        [kept(plugins=before)], replace(NOW, plugins={**own, "installed": installed})
    ) == [
        "own: own.py 111111111111 -> 555555555555",
        "own: gone.py 222222222222 -> null",
        "own: new.py null -> 666666666666",
        "--plugin left: is missing",
        "installed: version 1.0 -> 1.1",
        "installed: __init__.py 333333333333 -> 444444444444",
    ]


def test_long_list_of_changed_files_is_truncated() -> None:
    before = plugins(**{f"{number}.py": "1" * 64 for number in range(100)})
    lines = find_changed_plugins([kept(plugins=before)], replace(NOW, plugins=plugins()))
    assert (len(lines), lines[-1]) == (9, "92 more")


@pytest.mark.parametrize(
    "entry", ["x\x1b[2J", 7, None, ["own.py"], {"version": ["\n"]}, {"sha256": "\x1b" * 1000}]
)
def test_untrusted_plugin_record_is_printed_safely(entry: Any, tmp_path: Path) -> None:
    write(tmp_path, {"plugins": {"own": entry, "\x1b[31m\n" * 99: entry}})
    now = replace(NOW, plugins=plugins(**{"own.py": "1" * 64}))
    lines: list[str] = []
    require_same_origin(tmp_path, now, "allow", lines.append)
    assert lines[0].startswith(f"{tmp_path}: the plug-ins have changed since the run was trained")
    assert "".join(lines).isprintable()
    assert all(len(line) < 2000 for line in lines)


def test_changed_plugins_are_refused_unless_allowed(tmp_path: Path) -> None:
    write(tmp_path, kept(plugins=plugins(**{"own.py": "1" * 64})))
    now = replace(NOW, plugins=plugins(**{"own.py": "2" * 64}))
    with pytest.raises(DataError) as caught:
        require_same_origin(tmp_path, now, "refuse", pytest.fail)
    changed = "own: own.py 111111111111 -> 222222222222"
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: the plug-ins have changed since the run was trained:",
        f"  {changed}",
        "Restore them, or continue with these: train.resume_changed=allow",
    ]
    warned: list[str] = []
    require_same_origin(tmp_path, now, "allow", warned.append)
    what = "the plug-ins have changed since the run was trained"
    assert warned == [f"{tmp_path}: {what}, and train.resume_changed=allow: {changed}"]


def write(run_dir: Path, *processes: Any) -> None:
    (run_dir / "provenance.json").write_text(json.dumps({"processes": processes}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        "x",
        [1],
        {"train": "x\x1b[31m\n"},
        {"train": {"image": {"shape": {"a": 1}, "dtype": 1}}},
        {"train": {"image": {**IMAGE, "shape": [10**400, "\x1b"], "of": ["\n"] * 1000}}},
        {"\x1b[2J" * 1000: {"\n" * 1000: [[[[]]]]}},
        {"train": {f"column {number}": IMAGE for number in range(100_000)}},
    ],
)
def test_untrusted_provenance_is_printed_safely(data: Any, tmp_path: Path) -> None:
    write(tmp_path, {"data": data, "versions": data, "code": data})
    lines: list[str] = []
    require_same_origin(tmp_path, NOW, "allow", lines.append)
    assert "".join(lines).isprintable()
    assert all(len(line) < 2000 for line in lines)
    add_provenance(tmp_path, NOW)


def test_incomparable_provenance_is_a_warning(tmp_path: Path) -> None:
    unknown = "whether data, versions and code are the same as before is unknown"
    lines: list[str] = []
    file = tmp_path / "provenance.json"
    require_same_origin(tmp_path, NOW, "refuse", lines.append)
    file.write_text('{"processes":' + 70 * "[" + 70 * "]" + "}")
    require_same_origin(tmp_path, NOW, "refuse", lines.append)
    file.write_bytes(b" " * (2**24 + 1))
    require_same_origin(tmp_path, NOW, "refuse", lines.append)
    assert lines == [
        f"{file}: is missing; {unknown}",
        f"{file}: can't be read: is nested too deeply; {unknown}",
        f"{file}: can't be read: has more than 16,777,216 bytes; {unknown}",
    ]


@pytest.fixture
def half(tiny: Compose, tmp_path: Path) -> Path:
    """A run that has saved a checkpoint, on images that are not those of the recipe any more."""
    run(tiny("train.steps=20"), tmp_path / "run")
    (process,) = read_provenance(tmp_path / "run")
    process["data"]["eval"]["image"]["sha256"] = "b" * 64
    write(tmp_path / "run", process)
    return tmp_path / "run"


@pytest.mark.slow
def test_run_continues_with_other_data_only_if_allowed(half: Path, tiny: Compose) -> None:
    resume = f"train.resume={half}"
    with pytest.raises(DataError) as caught:
        run(tiny("train.steps=40", resume))
    message = str(caught.value)
    assert f"{half}: the data have changed since the run was trained:" in message
    assert "eval image: was uint8 40x8x8x1 (SHA-256 bbbbbbbbbbbb of all), is uint8" in message
    assert message.endswith("continue with these: train.resume_changed=allow")
    assert outcome.read_summary(half)["status"] == "done"
    assert len(read_provenance(half)) == 1
    allowed = tiny("train.steps=40", resume, "train.resume_changed=allow")
    assert run(allowed).status == "done"
    assert "warning    " + message.partition(":\n")[0] in (half / "run.log").read_text()
    assert len(read_provenance(half)) == 2
    # From here on these are the data of the run.
    assert run(tiny("train.steps=45", resume)).status == "done"


def warnings(run_dir: Path) -> list[str]:
    """The warnings in run.log, without that of classes which a few steps did not learn."""
    lines = (run_dir / "run.log").read_text().splitlines()
    return [line for line in lines if "warning" in line and "never predicted" not in line]


@pytest.mark.slow
def test_run_without_checkpoints_can_have_changed_data(half: Path, tiny: Compose) -> None:
    for step in (half / "checkpoints").iterdir():
        step.rename(half / f"gone-{step.name}")
    assert run(tiny("train.steps=20", f"train.resume={half}")).status == "done"
    assert warnings(half) == []


@pytest.mark.slow
def test_eval_samples_can_change_at_a_resume(tiny: Compose, tmp_path: Path) -> None:
    """`eval.samples` takes a part of the split; the data are what they were."""
    run(tiny("train.steps=20"), tmp_path)
    run(tiny("train.steps=20", f"train.resume={tmp_path}", "eval.samples=16"))
    assert warnings(tmp_path) == []


def test_resume_changed_in_a_file_is_refused(tmp_path: Path) -> None:
    from pipeline import load_recipe

    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ntrain: {resume_changed: allow}\n")
    with pytest.raises(RecipeError, match=r"train\.resume_changed = allow: must not be in a file"):
        load_recipe(str(file))
