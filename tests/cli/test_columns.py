from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError, RecipeError, UsageError
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


@pytest.fixture
def image_and_number(tmp_path: Path) -> list[str]:
    """A recipe of images with a number each, which its network reads by other names."""
    generator = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 8), ("test", 4)):
        arrays[f"x_{split}"] = generator.integers(0, 255, (count, 4, 6, 1)).astype(np.uint8)
        arrays[f"y_{split}"] = np.arange(count, dtype=np.int32) % 2
        arrays[f"age_{split}"] = generator.normal(size=(count, 1)).astype(np.float32)
    np.savez(tmp_path / "data.npz", **arrays)
    ops = "[{name: rescale, factor: 0.0039, shift: 0.0}]"
    return [
        *("dataset=numpy", f"dataset.root={tmp_path / 'data.npz'}", "dataset.classes=2"),
        *("dataset.columns=[age]", f"dataset.train.ops={ops}", f"dataset.eval.ops={ops}"),
        *("train.batch_size=4", "train.epochs=1", "model.inputs={photo: image, years: age}"),
    ]


def test_columns_of_a_dataset_are_listed_before_and_after_its_ops(
    image_and_number: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(image_and_number) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["image", *["uint8", "4x6x1", "float32", "4x6x1"] * 2] in lines
    assert ["age", *["float32", "1"] * 4] in lines
    assert ["label", *["int32", "number"] * 4] in lines
    assert lines[-2:] == [
        ["photo", "image", "float32", "4x6x1"],
        ["years", "age", "float32", "1"],
    ]


def test_override_may_be_longer_than_a_file_name(
    image_and_number: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ops = ", ".join("{name: rescale, factor: 1.0, shift: 0.0}" for _ in range(10))
    args = [f"dataset.{split}.ops=[{ops}]" for split in ("train", "eval")]
    assert main([*image_and_number, *args]) == 0
    assert "image" in capsys.readouterr().out


def test_json_of_a_dataset_has_columns_and_inputs(
    image_and_number: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*image_and_number, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == {"train": 8, "eval": 4}
    assert facts["columns"]["image"]["train"] == {
        "raw": {"shape": [4, 6, 1], "dtype": "uint8"},
        "mapped": {"shape": [4, 6, 1], "dtype": "float32"},
    }
    assert facts["inputs"] == {
        "photo": {"column": "image", "shape": [4, 6, 1], "dtype": "float32"},
        "years": {"column": "age", "shape": [1], "dtype": "float32"},
    }


def test_column_that_is_not_there_is_refused(image_and_number: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"no column 'weight'.*the columns are age, image"):
        main([*image_and_number, "model.inputs.years=weight"])


@pytest.mark.parametrize(
    "args", [["+recipe=lenet5_digits", "a.csv"], ["+recipe=lenet5_digits", "--delimiter=;"]]
)
def test_recipe_with_a_file_or_its_options_is_refused(args: list[str]) -> None:
    with pytest.raises(UsageError):
        main(args)
