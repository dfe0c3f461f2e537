"""`infer` on folders, and its CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.core.errors import DataError, UsageError
from tests.command_line import infer
from tests.conftest import MLP, compose_tiny
from tests.whole_run import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("folders") / "run"
    run(compose_tiny(cache, *MLP), run_dir)
    return run_dir


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for name in ("b.png", "a.png", "inner/c.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(len(name)).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.mark.medium
def test_folder_images_are_inferred_in_path_order(
    trained: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert infer([str(trained), str(images)]) == 0
    said = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [str(images / name) for name in ("a.png", "b.png", "inner/c.jpg")]


@pytest.mark.medium
def test_csv_matches_the_printed_predictions(
    trained: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert infer([str(trained), str(images)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert infer([str(trained), str(images), f"--csv={tmp_path / 'out.csv'}", "--top=2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.csv'}: 3 lines\n"
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "class", "probability", "class_2", "probability_2"]
    for row, line in zip(rows, printed, strict=True):
        assert line == f"{row['file']}: {row['class']} {float(row['probability']):.4f}"
        assert float(row["probability"]) >= float(row["probability_2"])


@pytest.mark.medium
def test_folder_without_images_and_two_formats_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no images; names must end in one of \.png"):
        infer([str(trained), str(tmp_path)])
    for wrong, rule in (
        (["--csv="], "--csv '': must be a path"),
        (["--csv=a.csv", "--json"], "--json --csv: --csv writes a file instead of lines"),
    ):
        with pytest.raises(UsageError, match=rule):
            infer([str(trained), "x.png", *wrong])
