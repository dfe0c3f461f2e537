"""Files `.ts`: series, channels, labels, and damaged lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.data.series.series_files import LongForm, RawSeries, read_series

FORM = LongForm("series", "time", "label", None, None)
HEADER = "#about\n% more\n@problemName a\n@timeStamps false\n@classLabel true x y\n@data\n"


def read(file: Path, text: str) -> RawSeries:
    file.write_text(text)
    return read_series(file, FORM)


def test_channels_are_separated_by_colons(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.ts", HEADER + "1,2,3:4,5,6:x\n\n7, 8,9:1,1,1: y\n")
    assert [values.tolist() for values in raw.values] == [
        [[1, 4], [2, 5], [3, 6]],
        [[7, 1], [8, 1], [9, 1]],
    ]
    assert (raw.labels, raw.places) == (("x", "y"), ("line 7", "line 9"))


def test_target_labels_are_numbers(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.ts", "@targetLabel true\n@data\n1,2:0.5\n")
    assert raw.parse_numbers().tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "1,?,3:x\n", "line 7: step 1 has no value; fill it before"),
        (HEADER + "1,2,:x\n", "line 7: step 2 has no value"),
        (HEADER + "1,b:x\n", "line 7: step 1 is 'b'; must be a number"),
        (HEADER + "1,2:3:x\n", "line 7: has channels of 1 to 2 steps; must be equal"),
        (HEADER + "1,2:z\n", "line 7: ends with 'z'; must be a label, one of x, y"),
        (HEADER + "1,2\n", "line 7: must have values and a label, separated by a colon"),
        (HEADER + "1,2:x\n3,4:5,6:y\n", "line 8: has 2 channels, and line 7 has 1"),
        (HEADER + "1,inf:x\n", "line 7: step 1 has a missing value, or one that is not finite"),
        (HEADER, "has no series; must have at least one"),
        ("1,2:x\n", "isn't a .ts file: it must have a header, which ends with a line @data"),
        ("@classLabel false\n@data\n1,2\n", "has series without labels: @classLabel"),
        (
            "@timeStamps True\n@classLabel true x\n@data\n",
            "has @timeStamps true: values with times can't be read",
        ),
    ],
)
def test_wrong_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/a.ts: {message}"):
        read(tmp_path / "a.ts", text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_series(tmp_path / "a.ts", FORM)
