"""Reports of runs: their figures, their files, and runs of strangers."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, UsageError
from pipeline.data.mask_colours import IGNORED_COLOUR, draw_masks
from tests.command_line import infer, report
from tests.conftest import compose_tiny
from tests.outcome import read_summary
from tests.whole_run import run

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
OPS = [
    f"dataset.{split}.ops=[{{name: rescale, factor: 0.004, shift: 0.0}}]"
    for split in ("train", "eval")
]
MLP = ("model=mlp", "model.hidden=[8]", "eval.every_steps=15")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("report") / "run"
    run(compose_tiny(cache, *MLP), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def written(trained: Path) -> Path:
    assert report([str(trained)]) == 0
    return trained / "report"


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def of_numpy(cache: Path, folder: Path, labels: np.ndarray, task: str) -> Recipe:
    """A recipe whose images are noise, with a corner as bright as the first label."""
    images = np.random.default_rng(0).integers(0, 200, (96, 8, 8, 1), dtype=np.uint8)
    first = labels.reshape(96, -1)[:, 0].astype(float)
    images[:, :4, :4, 0] = (255 * (first - first.min()) / np.ptp(first))[:, None, None]
    arrays = {"x_train": images[:64], "y_train": labels[:64]}
    arrays |= {"x_test": images[64:], "y_test": labels[64:]}
    np.savez(folder / "data.npz", **arrays)
    loss = {"regression": "mse", "multi_label": "binary_cross_entropy"}[task]
    data = ["dataset=numpy", f"dataset.root={folder / 'data.npz'}", f"dataset.task={task}"]
    rest = [
        f"cache.root={cache}",
        "train.steps=30",
        "train.batch_size=16",
        "train.optimizer.lr=0.01",
    ]
    quiet = ["monitor.tensorboard=false", "monitor.sample_images=0", "schedule=constant"]
    return load_recipe("lenet5_digits", [*data, f"loss={loss}", *MLP, *OPS, *rest, *quiet])


@pytest.mark.medium
def test_figures_equal_the_evaluation_of_the_run(written: Path, trained: Path) -> None:
    metrics = read_summary(trained)["metrics"]
    predictions = rows(written / "predictions.csv")
    right = np.mean([row["label"] == row["prediction"] for row in predictions])
    assert right == pytest.approx(metrics["accuracy"])
    assert [int(row["index"]) for row in predictions] == list(range(40))
    for name in ("precision", "recall", "f1"):
        by_class = {row["class"]: float(row[name]) for row in rows(written / "classes.csv")}
        assert by_class == pytest.approx(metrics[name]["per_class"])
    confusion = rows(written / "confusion.csv")
    assert sum(int(row[f"predicted {row['true']}"]) for row in confusion) == round(40 * right)
    page = (written / "index.html").read_text()
    assert f"<dt>accuracy</dt><dd>{metrics['accuracy']:.4f}</dd>" in page
    assert f"<dt>cross-entropy</dt><dd>{metrics['loss']:.4f}</dd>" in page


@pytest.mark.medium
def test_folder_with_other_files_is_not_overwritten(trained: Path, tmp_path: Path) -> None:
    """Names of a report's files are names that a user has, too."""
    (tmp_path / "labels.csv").write_text("mine")
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(DataError, match="must be an empty folder or an earlier report"):
        report([str(trained), f"--out={tmp_path}"])
    assert {file.read_text() for file in tmp_path.iterdir()} == {"mine"}


class Reader(HTMLParser):
    """Notes the tags of a page, those left open, and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        given = dict(attrs)
        links = [given.get(name) for name in ("src", "href", "action", "srcset")]
        self.fetched += [link for link in links if link and not link.startswith("data:image/png")]
        assert not any(name.startswith("on") for name in given)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read_page(file: Path) -> Reader:
    reader = Reader()
    reader.feed(file.read_text())
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.medium
def test_page_is_self_contained_without_scripts(written: Path) -> None:
    page = read_page(written / "index.html")
    assert "script" not in page.tags
    assert page.fetched == []
    text = (written / "index.html").read_text()
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"url\(|@import|https?://", text)


def test_curves_and_mistakes_are_written_as_files(written: Path) -> None:
    for name in ("loss.svg", "metric.svg", "learning_rate.svg"):
        text = (written / name).read_text()
        assert text.startswith("<svg ")
        assert 'xmlns="http://www.w3.org/2000/svg"' in text
    with Image.open(written / "mistakes.png") as sheet:
        assert sheet.width > 500


@pytest.mark.slow
def test_second_report_is_identical_and_removes_stale_files(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for out in ("one", "other"):
        assert report([str(trained), f"--out={tmp_path / out}", "--json"]) == 0
        page = json.loads(capsys.readouterr().out)["page"]
        assert page == str(tmp_path / out / "index.html")
    one, other = (
        {file.name: file.read_bytes() for file in (tmp_path / out).iterdir()}
        for out in ("one", "other")
    )
    assert one == other
    (tmp_path / "one" / "scatter.svg").write_text("of another task")
    assert report([str(trained), f"--out={tmp_path / 'one'}"]) == 0
    assert not (tmp_path / "one" / "scatter.svg").exists()


@pytest.mark.slow
def test_untrusted_names_are_escaped(cache: Path, tmp_path: Path) -> None:
    no_utf8 = os.fsdecode(b"\xff")
    names = [HOSTILE, "=1+1", "a,b", no_utf8]
    random = np.random.default_rng(0)
    for split in ("train", "eval"):
        for name in names:
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "data" / "eval" / "a,b" / "0.png").rename(tmp_path / f"{no_utf8}.png")
    data = ["dataset=image_folder", f"dataset.root={tmp_path / 'data'}", "dataset.image_size=[8,8]"]
    rest = [
        f"cache.root={cache}",
        "train.steps=4",
        "train.batch_size=8",
        "monitor.tensorboard=false",
    ]
    run(load_recipe("lenet5_digits", [*data, *MLP, *OPS, *rest]), tmp_path / "run")
    assert report([str(tmp_path / "run")]) == 0
    page = read_page(tmp_path / "run" / "report" / "index.html")
    assert page.fetched == []
    assert HOSTILE not in (tmp_path / "run/report/index.html").read_text()
    shown = {HOSTILE, "'=1+1", "a,b", "\\udcff"}
    assert {row["label"] for row in rows(tmp_path / "run/report/predictions.csv")} == shown
    arguments = [str(tmp_path / "run"), str(tmp_path / f"{no_utf8}.png")]
    assert infer([*arguments, f"--csv={tmp_path / 'new.csv'}"]) == 0
    assert [row["file"] for row in rows(tmp_path / "new.csv")] == [str(tmp_path / "\\udcff.png")]


@pytest.mark.slow
def test_regression_report_has_a_scatter_plot_and_units(cache: Path, tmp_path: Path) -> None:
    labels = np.random.default_rng(1).normal(50, 10, (96, 2)).astype(np.float32)
    run(of_numpy(cache, tmp_path, labels, "regression"), tmp_path / "run")
    assert report([str(tmp_path / "run")]) == 0
    folder = tmp_path / "run" / "report"
    metrics = read_summary(tmp_path / "run")["metrics"]
    table = rows(folder / "numbers.csv")
    for name in ("mae", "rmse", "r2"):
        mean = np.mean([float(row[name]) for row in table])
        assert mean == pytest.approx(metrics[name], rel=1e-4)
    predictions = rows(folder / "predictions.csv")
    first = next(name for name in predictions[0] if name != "index")
    assert float(predictions[0][first]) == pytest.approx(labels[64, 0], rel=1e-5)
    assert (folder / "scatter.svg").exists()
    assert (folder / "residuals.svg").exists()


@pytest.mark.slow
def test_multi_label_report_has_a_row_per_label(cache: Path, tmp_path: Path) -> None:
    labels = (np.random.default_rng(2).random((96, 2)) > 0.5).astype(np.float32)
    run(of_numpy(cache, tmp_path, labels, "multi_label"), tmp_path / "run")
    assert report([str(tmp_path / "run")]) == 0
    folder = tmp_path / "run" / "report"
    metrics = read_summary(tmp_path / "run")["metrics"]
    f1 = [float(row["f1"]) for row in rows(folder / "labels.csv")]
    assert np.mean(f1) == pytest.approx(metrics["macro_f1"], rel=1e-5)


@pytest.mark.slow
def test_position_labels_count_only_if_valid(cache: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, (96, 8, 8)).astype(np.int32)
    images = (255 * labels[..., None]).astype(np.uint8)
    labels[:, 0] = 255
    labels[64 + 5, 4:] = 1 - labels[64 + 5, 4:]  # wrongly labelled
    arrays = {"x_train": images[:64], "y_train": labels[:64]}
    arrays |= {"x_test": images[64:], "y_test": labels[64:]}
    np.savez(tmp_path / "data.npz", **arrays)
    data = ["dataset=numpy", f"dataset.root={tmp_path / 'data.npz'}", "dataset.ignore_index=255"]
    net = ["model=layers", "model.layers=[{name: conv, features: $classes, kernel: 1, bias: true}]"]
    rest = ["dataset.classes=2", f"cache.root={cache}", "train.steps=60", "train.batch_size=16"]
    quiet = ["monitor.tensorboard=false", "monitor.sample_images=0"]
    fast = ["schedule=constant", "train.optimizer.lr=1.0"]
    run(load_recipe("lenet5_digits", [*data, *net, *rest, *OPS, *quiet, *fast]), tmp_path / "run")
    assert report([str(tmp_path / "run")]) == 0
    folder, metrics = tmp_path / "run" / "report", read_summary(tmp_path / "run")["metrics"]
    table = rows(folder / "classes.csv")
    assert sum(int(row["count"]) for row in table) == 32 * 7 * 8
    f1 = np.mean([float(row["f1"]) for row in table])
    assert f1 == pytest.approx(metrics["f1"]["macro"], rel=1e-5)
    shares = [float(row["right"]) for row in rows(folder / "predictions.csv")]
    assert np.mean(shares) == pytest.approx(metrics["accuracy"], abs=1e-5)
    read_page(folder / "index.html")
    assert "over 1,792 pixels" in (tmp_path / "run" / "run.log").read_text()
    page = (folder / "index.html").read_text()
    assert "<b>57.1% wrong</b>" in page
    assert "sample 5<" in page
    first_picture = re.search(r'alt="sample 5" src="data:image/png;base64,([^"]*)', page)
    assert first_picture is not None
    strip = np.asarray(Image.open(io.BytesIO(base64.b64decode(first_picture[1]))))
    assert strip.shape == (8, 28, 3)
    image, true, predicted = strip[:, :8], strip[:, 10:18], strip[:, 20:]
    np.testing.assert_array_equal(image, np.repeat(images[64 + 5], 3, axis=-1))
    np.testing.assert_array_equal(true, draw_masks(labels[64 + 5], 2))
    assert (true[0] == IGNORED_COLOUR).all()
    np.testing.assert_array_equal(predicted, draw_masks(images[64 + 5, ..., 0] // 255, 2))
    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    colours = re.findall(r"background:(#[0-9a-f]{6})\"></i>([^<]*)<", legend)
    shown = draw_masks(np.array([[0, 1, -1]]), 2)[0]
    names = ["0", "1", "not counted"]
    assert colours == [(f"#{bytes(shown[place]).hex()}", name) for place, name in enumerate(names)]
    assert "<span>image</span><span>true mask</span><span>predicted mask</span>" in page
    with Image.open(folder / "mistakes.png") as mistakes:
        assert mistakes.width > 3 * 128
        assert {(0, 0, 0), tuple(shown[1]), IGNORED_COLOUR} < {
            colour for _, colour in mistakes.crop((8, 178, 20, 300)).getcolors()
        }


@pytest.mark.slow
@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_ensemble_predictions_are_averaged(task: str, cache: Path, tmp_path: Path) -> None:
    """Of runs with other weights, batch sizes and numbers of steps."""
    labels = np.random.default_rng(1).integers(0, 2, (96, 2)).astype(np.float32)
    if task == "regression":
        labels = labels * [3, 50] + np.random.default_rng(2).normal(size=(96, 2))
    recipe = of_numpy(cache, tmp_path, labels.astype(np.float32), task)
    other = recipe.train.model_copy(update={"batch_size": 24, "steps": 9})
    recipes = [recipe, recipe.model_copy(update={"seed": 2, "train": other})]
    folders = [tmp_path / "one", tmp_path / "two"]
    for one, folder in zip(recipes, folders, strict=True):
        run(one, folder)
        assert report([str(folder)]) == 0
    assert report([*map(str, folders), "--out", str(tmp_path / "both")]) == 0
    found = rows(tmp_path / "both" / "predictions.csv")
    parts = [rows(folder / "report" / "predictions.csv") for folder in folders]
    prefix = "predicted" if task == "regression" else "probability of"
    names = [name for name in found[0] if name.startswith(prefix)]
    assert len(found) == 32
    assert len(names) == 2
    for row, *members in zip(found, *parts, strict=True):
        for name in names:
            expected = np.mean([float(member[name]) for member in members])
            assert float(row[name]) == pytest.approx(expected, rel=1e-5, abs=2e-6)


@pytest.mark.slow
def test_ensemble_of_runs_with_other_labels_is_refused(cache: Path, tmp_path: Path) -> None:
    folders = []
    for name, seed in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        labels = np.random.default_rng(seed).integers(0, 2, (96, 2)).astype(np.float32)
        folders.append(tmp_path / name / "run")
        run(of_numpy(cache, tmp_path / name, labels, "multi_label"), folders[-1])
    with pytest.raises(DataError, match="have other evaluation splits or labels; must be equal"):
        report([*map(str, folders), "--out", str(tmp_path / "both")])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "report takes RUN_DIR"),
        (["one", "two"], "several runs need --out FOLDER"),
        (["one", "--out="], "--out '': must be a path"),
        (["one", "--html"], "--html: there is no such option"),
    ],
)
def test_invalid_arguments_are_refused(args: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        report(args)


@pytest.mark.medium
def test_non_run_folders_and_links_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="isn't a run directory"):
        report([str(tmp_path)])
    outside = tmp_path / "outside"
    outside.mkdir()
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy, ignore=shutil.ignore_patterns("report"))
    (copy / "report").symlink_to(outside)
    with pytest.raises(DataError, match="is a link to") as caught:
        report([str(copy)])
    assert "\n" not in str(caught.value)
    assert list(outside.iterdir()) == []


@pytest.mark.slow
def test_damaged_run_is_reported(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy, ignore=shutil.ignore_patterns("report"))
    (copy / "metrics.jsonl").write_text('{"step": "x"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: isn't a step"):
        report([str(copy)])
    (copy / "metrics.jsonl").write_text('{"step": 1, "loss": "<b>", "learning_rate": 1e999}\n')
    assert report([str(copy)]) == 0
    read_page(copy / "report" / "index.html")
    about = json.loads((copy / "summary.json").read_text())
    about["data"]["classes"][0] = "another"
    (copy / "summary.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match="on which the run was"):
        report([str(copy)])
