"""Files of a dump: layout, names, limits, a full disk, damage."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.inspection_specs import Content, parse_steps
from pipeline.core.errors import DataError
from pipeline.inspect.dumps import dump_files
from pipeline.inspect.dumps.dump_files import (
    ABOUT,
    TENSORS,
    DumpHeader,
    DumpReport,
    TensorName,
    dump_folder,
    find_dump,
    parse_name,
    read_dump,
    write_dump,
)

ARRAYS = {
    TensorName("stage_0/conv", "input"): np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    TensorName("stage_0/conv", "output"): np.array([0.0, np.inf, -3.0], np.float32),
    TensorName("stage_0/conv", "gradient", "kernel"): np.float32(2.5) * np.ones((), np.float32),
}


def written(folder: Path, content: Content = "tensors", limit: int = 1 << 20) -> DumpReport:
    layers = [("stage_0/conv", "conv", "float32")]
    about = DumpHeader("mine", "resnet", "cpu", 500, content, 0.5, layers=layers)
    where = dump_folder(folder, "20261122101530", 0, "resnet", 500)
    return write_dump(where, about, ARRAYS.items(), limit)


def test_dump_has_the_documented_layout_and_names(tmp_path: Path) -> None:
    report = written(tmp_path)
    assert report.folder == tmp_path / "20261122101530" / "0" / "resnet" / "1" / "500"
    assert (report.num_tensors, report.stopped) == (3, None)
    graph = tmp_path / "20261122101530" / "0" / "resnet" / "ge_proto_00001_Build.txt"
    assert "stage_0/conv\tconv\tfloat32" in graph.read_text()
    files = sorted(path.name for path in report.folder.glob("*.npy"))
    assert [re.sub(r"\d{16}", "TIME", name) for name in files] == [
        "stage_0_conv.gradient.kernel.TIME.npy",
        "stage_0_conv.input.0.TIME.npy",
        "stage_0_conv.output.0.TIME.npy",
    ]


def test_written_dump_is_read_back(tmp_path: Path) -> None:
    folder = written(tmp_path).folder
    assert find_dump(tmp_path) == folder
    found = read_dump(folder)
    assert list(found.entries) == list(ARRAYS)
    assert found.layers == {"stage_0/conv": "conv"}
    for name, array in ARRAYS.items():
        read = found.read(name)
        assert read is not None
        np.testing.assert_array_equal(read, array)
    lines = [json.loads(line) for line in (folder / TENSORS).read_text().splitlines()]
    statistics = {line["name"]: line["statistics"] for line in lines}["stage_0/conv:output:0"]
    assert (statistics["min"], statistics["max"], statistics["not_finite"]) == (-3, 0, 1)


def test_statistics_dump_has_no_arrays(tmp_path: Path) -> None:
    folder = written(tmp_path, "statistics").folder
    assert not list(folder.glob("*.npy"))
    assert all(read_dump(folder).read(name) is None for name in ARRAYS)


def test_arrays_beyond_the_limit_are_reported(tmp_path: Path) -> None:
    report = written(tmp_path, limit=50)
    assert report.left_out == ("stage_0/conv:input:0",)
    assert "1 beyond the limit, first stage_0/conv:input:0" in str(report)
    assert read_dump(report.folder).read(TensorName("stage_0/conv", "input")) is None


def test_full_disk_ends_a_dump_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole = dump_files.write_whole

    def full(path: Path, content: str | bytes) -> None:
        if ".output." in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_whole(path, content)

    monkeypatch.setattr(dump_files, "write_whole", full)
    report = written(tmp_path)
    assert report.stopped == "stops at stage_0/conv:output:0: No space left on device"
    found = read_dump(report.folder)
    assert (found.stopped, len(found.entries)) == (report.stopped, 1)


def test_full_disk_leaves_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was there before stays."""
    (tmp_path / "out").mkdir()

    def full(path: Path, content: str | bytes) -> None:
        if path.name == ABOUT:
            (path.parent / TENSORS).touch()  # as if its first line couldn't be written
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(dump_files, "write_whole", full)
    report = written(tmp_path / "out" / "dump")
    assert report.stopped == "stops at its folder: No space left on device"
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def _truncated(folder: Path) -> None:
    file = next(folder.glob("*.input.*.npy"))
    file.write_bytes(file.read_bytes()[:-4])


def _changed(folder: Path) -> None:
    file = next(folder.glob("*.input.*.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def _removed(folder: Path) -> None:
    next(folder.glob("*.input.*.npy")).unlink()


@pytest.mark.parametrize("damage", [_truncated, _changed, _removed])
def test_damaged_array_is_reported(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = written(tmp_path).folder
    damage(folder)
    with pytest.raises(
        DataError, match=r"stage_0_conv\.input\.0\.\d+\.npy: damaged dump: (is|differs) "
    ):
        read_dump(folder).read(TensorName("stage_0/conv", "input"))


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (ABOUT, "{", "Expecting property name"),
        (ABOUT, "[]", "must be a JSON object"),
        (TENSORS, "", "has 0 tensors; must have 3, as in dump.json"),
        (TENSORS, "{}", "damaged dump"),
        (
            TENSORS,
            json.dumps({"name": "a:output:0", "file": "../x", "shape": []}),
            "must be the name",
        ),
        (TENSORS, json.dumps({"name": "a:b:0", "shape": [], "statistics": {}}), "isn't the name"),
    ],
)
def test_damaged_index_is_reported(tmp_path: Path, file: str, text: str, problem: str) -> None:
    folder = written(tmp_path).folder
    (folder / file).write_text(text)
    with pytest.raises(DataError, match=problem) as caught:
        read_dump(folder)
    assert str(caught.value).startswith(str(folder / file))


def test_ambiguous_dump_folder_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "one")
    written(tmp_path / "two")
    with pytest.raises(DataError, match="has 2 dumps; name one of one/2026"):
        find_dump(tmp_path)
    assert find_dump(tmp_path / "nothing") is None


def test_tensor_names_are_parsed_back() -> None:
    for name in ARRAYS:
        assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    ("text", "steps"),
    [("0|5|10", (0, 5, 10)), ("5-8", (5, 6, 7, 8)), ("7|5-6|6", (5, 6, 7)), ("500", (500,))],
)
def test_documented_step_ranges_are_parsed(text: str, steps: tuple[int, ...]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "a", "5-", "8-5", "1,2", "0-20000", "-3", "1e3"])
def test_invalid_step_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_steps(text)
