"""Suspicious labels of a run: their rank, their files, and samples that a run leaves out."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.cli.runs import report
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.data.columns import Split
from pipeline.data.inputs import Dataset
from pipeline.inspect.report.suspicious_labels import describe_unlearnt
from pipeline.inspect.report.write_report import write_report
from pipeline.training.features.ledger import SampleLedger, make_ledger
from tests.whole_run import run

WRONG = 40
COPIES = 3
FIRST_WRONG = 200


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 8, 8, 1) and labels (n,) of the digits that ship with the package."""
    split = load_recipe("lenet5_digits").dataset.read(Path()).train
    return split.columns["image"][:], split.columns["label"][:]


def save_digits(folder: Path) -> None:
    """Save digits, of which some training labels are wrong, and some samples are in both splits."""
    images, truth = read_digits()
    labels = truth.copy()
    wrong = np.arange(FIRST_WRONG, FIRST_WRONG + 20 * WRONG, 20)
    labels[wrong] = (labels[wrong] + 3) % 10
    shared = np.r_[0:COPIES, 1300:1400]
    arrays = {"x_train": images[:1200], "y_train": labels[:1200]}
    arrays |= {"x_test": images[shared], "y_test": truth[shared]}
    np.savez(folder / "digits.npz", **arrays)


def compose(cache: Path, root: Path, *overrides: str) -> Recipe:
    ops = "[{name: rescale, factor: 0.0625, shift: 0.0}]"
    data = ["dataset=numpy", f"dataset.root={root / 'digits.npz'}"]
    ops_keys = [f"dataset.{split}.ops={ops}" for split in ("train", "eval")]
    model = ["model=mlp", "model.hidden=[32]", "schedule=constant", "train.optimizer.lr=0.05"]
    quiet = ["monitor.tensorboard=false", "monitor.sample_images=0", f"cache.root={cache}"]
    settings = [*data, *ops_keys, *model, *quiet, "train.epochs=8", "train.ledger=true"]
    return load_recipe("lenet5_digits", [*settings, *overrides])


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    save_digits(folder)
    run(compose(cache, folder), folder / "run")
    assert write_report([folder / "run"], folder / "report").warning is None
    return folder


@pytest.mark.medium
def test_flipped_labels_rank_first(folder: Path) -> None:
    rows = read_rows(folder / "report" / "suspicious_labels.csv")
    assert sorted(int(row["index"]) for row in rows) == list(range(1200))
    scores = [float(row["suspicion"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert 0 <= scores[-1] < scores[0] <= 1
    wrong = {FIRST_WRONG + 20 * number for number in range(WRONG)}
    top = rows[:WRONG]
    assert sum(int(row["index"]) in wrong for row in top) >= 0.9 * WRONG
    _, truth = read_digits()
    suggested = [int(row["suggested_label"]) == truth[int(row["index"])] for row in top]
    assert np.mean(suggested) > 0.7
    assert sum(int(row["readings"]) for row in rows) == 8 * (1200 // 32) * 32


@pytest.mark.medium
def test_page_shows_the_worst_samples_and_duplicates(folder: Path) -> None:
    page = (folder / "report" / "index.html").read_text()
    worst = read_rows(folder / "report" / "suspicious_labels.csv")[:50]
    for row in worst:
        assert f"sample {row['index']}<" in page
    for heading in ("Suspicious labels", "Never learnt", "Equal samples"):
        assert heading in page
    assert "hardly learnt" not in page
    twins = read_rows(folder / "report" / "duplicates.csv")
    assert [(row["index"], row["split"], row["index_of_equal"]) for row in twins] == [
        (str(number), "eval", str(number)) for number in range(COPIES)
    ]


@pytest.mark.slow
def test_excluded_samples_keep_sample_indices(folder: Path, cache: Path) -> None:
    lines = (folder / "report" / "suspicious_labels.csv").read_text().splitlines()
    (folder / "wrong.csv").write_text("\n".join(lines[: WRONG + 1]) + "\n")
    excluded = {int(line.split(",")[0]) for line in lines[1 : WRONG + 1]}
    second = folder / "second"
    summary = run(compose(cache, folder, f"dataset.exclude={folder / 'wrong.csv'}"), second)
    assert summary.data["samples"]["train"] == 1200 - WRONG
    write_report([second], folder / "second_report")
    rows = read_rows(folder / "second_report" / "suspicious_labels.csv")
    assert {int(row["index"]) for row in rows} == set(range(1200)) - excluded


@pytest.mark.medium
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "names no sample"),
        ("index\n", "names no sample"),
        ("3,17,42\n", "line 1: has 3 values; must have the number of one training sample, or"),
        ("1\n1200\n", "1200: must be the number of a sample, 0 to 1199"),
        ("a,index\n1,2\n1\n", "line 3: ''|line 3: .*must be the number of a training sample"),
        ("label\nsix\n", "line 1: .*label.*: must be the number of a training sample"),
        ("-1\n", "line 1: .*-1.*: must be the number"),
        ("\n".join(map(str, range(1200))), "names all 1,200 samples"),
        (None, "can't be read"),
        ("1\0\n", "line contains NUL|must be the number"),
    ],
)
def test_invalid_exclude_file_is_refused(
    folder: Path, cache: Path, tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "list.csv"
    if content is not None:
        file.write_text(content)
    recipe = compose(cache, folder, f"dataset.exclude={file}", "stages=[data]")
    with pytest.raises(RecipeError, match=f"dataset.exclude = {file}.*({problem})"):
        run(recipe, tmp_path / "run")


@pytest.mark.medium
def test_numbers_are_of_the_split_as_it_was_read(folder: Path, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    keys = (f"dataset.exclude={file}", "dataset.train.select=[{name: skip, samples: 1000}]")
    file.write_text("999\n1100\n")
    summary = run(compose(cache, folder, *keys, "stages=[data]"), tmp_path / "run")
    assert summary.data["samples"]["train"] == 199
    file.write_text("1200\n")
    with pytest.raises(RecipeError, match="1200: must be the number of a sample, 0 to 1199"):
        run(compose(cache, folder, *keys, "stages=[data]"), tmp_path / "other")


@pytest.mark.medium
@pytest.mark.parametrize(
    "content",
    [
        "\ufeffindex,label\r\n3,a\r\n3,a\r\n7,b\r\n",
        "3\r\n\r\n7\r\n",
        'label,index\n"a\u2028\x0cb\nc",3\na\u2028b,7',
    ],
    ids=["table of a spreadsheet", "lines", "labels with ends of lines"],
)
def test_exclusions_written_by_other_programs_are_read(
    folder: Path, cache: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "list.csv").write_bytes(content.encode())
    (tmp_path / "link.csv").symlink_to("list.csv")
    exclude = f"dataset.exclude={tmp_path / 'link.csv'}"
    summary = run(compose(cache, folder, exclude, "stages=[data]"), tmp_path / "run")
    assert summary.data["samples"]["train"] == 1198


@pytest.mark.medium
def test_pipe_as_exclude_file_is_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    recipe = compose(cache, folder, f"dataset.exclude={tmp_path / 'pipe'}", "stages=[data]")
    with pytest.raises(RecipeError, match="isn't a regular file"):
        run(recipe, tmp_path / "run")


def read_half_right(fitted: int, labels: list[int]) -> tuple[SampleLedger, Dataset]:
    """A ledger with this many margins above 0, and the dataset of its labels."""
    samples = len(labels)
    margins = np.where(np.arange(samples) < fitted, 1, -1).astype(np.float32)
    ledger = replace(
        make_ledger(samples), margin_sum=jnp.asarray(margins), readings=jnp.ones(samples, int)
    )
    column = np.array(labels, np.int32)
    split = Split({"image": np.zeros((samples, 2, 2, 1), np.uint8), "label": column})
    return ledger, cast(Dataset, SimpleNamespace(train=split))


@pytest.mark.parametrize(
    ("fitted", "labels", "is_learnt"),
    [
        (20, [0, 1, 2, 3, 4] * 20, False),
        (27, [0, 1, 2, 3, 4] * 20, False),
        (29, [0, 1, 2, 3, 4] * 20, True),
        (100, [0, 1, 2, 3, 4] * 20, True),
        (90, [0] * 90 + [1] * 10, False),
        (92, [0] * 90 + [1] * 10, True),
        (0, [0, 1], False),
    ],
)
def test_network_has_learnt_if_more_labels_fit_than_of_the_most_frequent_class(
    fitted: int, labels: list[int], is_learnt: bool
) -> None:
    """A fifth are of a class, so a skill of 0.1 is 28 of 100 labels; of 90 it is 91."""
    warning = describe_unlearnt(*read_half_right(fitted, labels))
    assert (warning is None) == is_learnt
    if warning is not None:
        share = max(map(labels.count, labels)) / len(labels)
        assert f"{fitted / len(labels):.1%} of the training labels fit, and {share:.1%}" in warning


def test_unread_samples_say_nothing_about_what_was_learnt() -> None:
    ledger, dataset = read_half_right(50, [0, 1, 2, 3, 4] * 20)
    unread = replace(ledger, readings=ledger.readings.at[50:].set(0))
    assert describe_unlearnt(ledger, dataset) is None
    assert describe_unlearnt(unread, dataset) is None
    none_read = replace(ledger, readings=0 * ledger.readings)
    assert "No step has read" in str(describe_unlearnt(none_read, dataset))


@pytest.mark.medium
def test_report_of_an_unlearnt_network_says_so(
    folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "train.optimizer.lr=0.000001"
    run(compose(cache, folder, slow, "train.epochs=1"), tmp_path / "run")
    capsys.readouterr()
    result = report.main([tmp_path / "run"])
    printed = " ".join(capsys.readouterr().out.split())
    for text in (printed, (tmp_path / "run/report/index.html").read_text()):
        assert "The network has hardly learnt: " in text
        assert "near chance" in text
    assert str(result.facts["warning"]).startswith("The network has hardly learnt")


@pytest.mark.slow
def test_report_shows_table_rows(cache: Path, tmp_path: Path) -> None:
    keys = ["train.epochs=2", "train.ledger=true", "monitor.tensorboard=false"]
    run(load_recipe("breast_cancer_mlp", [*keys, f"cache.root={cache}"]), tmp_path / "run")
    written = write_report([tmp_path / "run"], tmp_path / "report")
    assert "(column)" in written.page.read_text()
    assert "margin below 0" in written.figures


@pytest.mark.slow
def test_report_with_changed_data_is_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    save_digits(tmp_path)
    run(compose(cache, tmp_path, "train.epochs=1"), tmp_path / "run")
    with np.load(tmp_path / "digits.npz") as saved:
        arrays = {name: saved[name] for name in saved}
    arrays["y_train"][0] = (arrays["y_train"][0] + 1) % 10
    np.savez(tmp_path / "digits.npz", **arrays)
    with pytest.raises(DataError, match="its ledger is of other training data: train label"):
        write_report([tmp_path / "run"], tmp_path / "report")
