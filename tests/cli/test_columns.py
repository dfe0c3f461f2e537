from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import DataError, UsageError
from tests.command_line import columns as main


def test_columns_are_listed_with_their_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("age;town;note;code\n30;Bonn;;1\n;Ulm;;x\n31,5;Bonn;;3\n")
    assert main([str(file), "--delimiter=;", "--decimal=,"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: 3 rows, 4 columns",
        "  age   numeric   30 to 31.5, mean 30.75, 2 different, 1 missing",
        "  town  category  2 different: Bonn 2, Ulm 1",
        "  note  empty     no values",
        "  code  mixed     66.7% numbers; line 3: 'x'",
    ]


def test_dates_are_listed_from_the_first_to_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("day,n\n02.11.2024,1\n,2\n30.03.2024,3\n")
    main([str(file)])
    line = capsys.readouterr().out.splitlines()[1]
    assert line == "  day  date      30.03.2024 to 02.11.2024, 2 different, 1 missing"


def test_control_characters_in_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("a\x1b[2J,b\nx\x1b[2J,1\n")
    main([str(tmp_path / "a.csv")])
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    "args",
    [[], ["a.csv", "b.csv"], ["a.csv", "colour=red"], ["a.csv", "--delimiter=ab"], ["--all"]],
)
def test_wrong_arguments_are_refused(args: list[str]) -> None:
    with pytest.raises(UsageError):
        main(args)


def test_wrong_encoding_error_suggests_the_option(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("a,b\n\xe9,2\n".encode("latin-1"))
    with pytest.raises(DataError, match="isn't utf-8; set --encoding, such as latin-1"):
        main([str(tmp_path / "a.csv")])


def test_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"a.csv: has no rows"):
        main([str(tmp_path / "a.csv")])
