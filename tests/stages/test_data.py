from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.columns import ColumnSpec, SplitKey
from pipeline.stages.data import declare_data, load_data
from pipeline.stages.record.provenance import read_provenance
from tests.image_folders import save_images
from tests.whole_run import run

Compose = Callable[..., Recipe]


def quiet() -> Reporter:
    return Reporter(console=Console(file=io.StringIO()))


@pytest.fixture
def npz(tmp_path: Path) -> Callable[..., list[str]]:
    """Overrides for a dataset of one's own, whose sizes only its file holds."""

    def make(train: tuple[int, ...] = (5, 8, 8), test: tuple[int, ...] = (3, 8, 8)) -> list[str]:
        rng = np.random.default_rng(0)
        np.savez(
            tmp_path / "own.npz",
            x_train=rng.integers(0, 256, train, np.uint8),
            y_train=np.arange(train[0]) % 2,
            x_test=rng.integers(0, 256, test, np.uint8),
            y_test=np.arange(test[0]) % 2,
        )
        return [
            "dataset=numpy",
            f"dataset.root={tmp_path / 'own.npz'}",
            "~dataset.like",
            "~dataset.train_size",
            "~dataset.eval_size",
            "dataset.name=numpy",
            "train.batch_size=2",
        ]

    return make


def test_data_report_has_one_line(tiny: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    load_data(tiny(), Reporter())
    assert capsys.readouterr().out == (
        "data       synthetic: 96 training and 40 evaluation images 8x8x1, read as 32x32x1, "
        "10 classes, 0.0 MB; 6 steps an epoch\n"
    )
    load_data(tiny("dataset.train.ops=[]", "dataset.eval.ops=[]"), Reporter())
    assert "evaluation images 8x8x1, 10 classes, " in capsys.readouterr().out


def test_left_out_tenth_of_the_samples_is_printed_with_cures(
    tiny: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    """96 samples make 2 batches of 40 and leave 16; 6 of 15 leave 6, less than a tenth."""

    def report(*overrides: str) -> list[str]:
        load_data(tiny(*overrides), Reporter())
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]]

    shuffled, plain = (
        f"data each epoch leaves out 16 of 96 training images{text} that fill no batch of 40, and "
        "has 2 steps; a smaller train.batch_size reads more, "
        "dataset.train.drop_remainder=false all (not with batch norm)"
        for text in (", others each time,", "")
    )
    assert report("train.batch_size=40", "dataset.train.shuffle=true") == [shuffled]
    assert report("train.batch_size=40", "dataset.train.shuffle=false") == [plain]
    assert report("train.batch_size=15") == []
    assert report("train.batch_size=40", "dataset.train.drop_remainder=false") == []
    assert report("train.batch_size=40", "stages=[data,build]") == []


def test_class_of_the_evaluation_alone_is_a_warning(
    tiny: Compose, npz: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    only_zeros = "dataset.train.select=[{name: classes, keep: [0]}]"
    load_data(tiny(*npz(), only_zeros), Reporter())
    assert (
        "warning    dataset: no training label is of class 1, which can't be learned; 1 of 3 "
        "evaluation labels are\n"
    ) in capsys.readouterr().out
    load_data(tiny(*npz()), Reporter())
    load_data(tiny(*npz(), only_zeros, only_zeros.replace("train", "eval")), Reporter())
    assert "warning" not in capsys.readouterr().out


def test_skipped_files_report_has_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = save_images(tmp_path, {"train": 2, "eval": 1})
    (root / "train" / "ant" / "a.heic").write_text("x")
    settings = ["dataset=image_folder", f"dataset.root={root}", "dataset.train.ops=[]"]
    settings += ["dataset.eval.ops=[]", "model=mlp", "train.batch_size=2"]
    load_data(load_recipe("lenet5_digits", settings), Reporter())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("data       left out: 1 file (1 of .heic), such as ")


@pytest.mark.slow
def test_dataset_has_its_image_spec_and_orders(tiny: Compose) -> None:
    dataset = load_data(tiny("seed=9"), quiet())
    assert (len(dataset.train), len(dataset.eval), len(dataset.classes)) == (96, 40, 10)
    assert dataset.inputs.image == ColumnSpec((32, 32, 1), "float32")
    assert (dataset.train_order.seed, dataset.train_order.steps_per_epoch) == (9, 6)
    assert dataset.train_order.shuffle


def test_evaluation_is_read_in_order_and_completely(tiny: Compose) -> None:
    """D-17: the batch that is not full is padded, not dropped."""
    order = load_data(tiny(), quiet()).eval_order
    assert order.steps_per_epoch == 3
    batches = order.batches(0, 3)
    assert batches.counts.tolist() == [16, 16, 8]
    rows = np.concatenate([row[:n] for row, n in zip(batches.indices, batches.counts, strict=True)])
    assert rows.tolist() == list(range(40))


@pytest.mark.slow
def test_evaluation_may_have_another_batch_size(tiny: Compose) -> None:
    order = load_data(tiny("dataset.eval.batch_size=10"), quiet()).eval_order
    assert (order.batch_size, order.steps_per_epoch) == (10, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "samples"),
    [
        (["eval.samples=all"], 40),
        (["eval.samples=10"], 10),
        (["eval.samples=400"], 40),
        (["eval.samples=trained", "train.steps=2"], 32),
        (["eval.samples=trained", "train.steps=3"], 40),
    ],
)
def test_evaluation_can_use_part_of_the_split(
    overrides: list[str], samples: int, tiny: Compose
) -> None:
    recipe = tiny(*overrides)
    dataset, everything = load_data(recipe, quiet()), load_data(tiny(), quiet())
    assert len(dataset.eval) == samples
    chosen = np.floor(np.arange(samples) * 40 / samples).astype(int)
    for name, column in dataset.eval.columns.items():
        assert np.array_equal(column, everything.eval.columns[name][chosen])


@pytest.mark.slow
def test_eval_only_run_uses_all_samples(tiny: Compose) -> None:
    alone = "stages=[data,build,compile,eval]"
    recipe = tiny(alone, "eval.samples=trained", "train.steps=1", "checkpoint.restore=somewhere")
    assert len(load_data(recipe, quiet()).eval) == 40


NO_OPS = ["dataset.train.ops=[]", "dataset.eval.ops=[]"]


@pytest.mark.slow
def test_unsuitable_ops_are_refused(tiny: Compose, npz: Callable[..., list[str]]) -> None:
    crop = "dataset.train.ops=[{name: random_crop, size: [9, 9]}]"
    recipe = tiny(*npz(), crop, "dataset.eval.ops=[]")
    with pytest.raises(RecipeError, match=r"dataset\.train\.ops\.0 \(random_crop\): .*9"):
        load_data(recipe, quiet())


@pytest.mark.slow
def test_splits_of_different_shapes_are_refused(
    tiny: Compose, npz: Callable[..., list[str]]
) -> None:
    resize = "dataset.eval.ops=[{name: resize, size: [4, 4]}]"
    recipe = tiny(*npz(), "dataset.train.ops=[]", resize)
    with pytest.raises(RecipeError) as caught:
        load_data(recipe, quiet())
    (problem,) = caught.value.problems
    assert problem.startswith("dataset.eval.ops: must return images of the same shape as")
    assert problem.endswith(" in training and (4, 4, 1) in evaluation")
    assert re.search(r"dataset\.train\.ops; \(8, 8, 1\) in training", problem)


@pytest.mark.slow
def test_batch_larger_than_the_data_is_refused(
    tiny: Compose, npz: Callable[..., list[str]]
) -> None:
    recipe = tiny(*npz(), *NO_OPS, "train.batch_size=6")
    with pytest.raises(RecipeError, match=r"train\.batch_size: a batch of 6 .*from 5 samples"):
        load_data(recipe, quiet())


ONLY_COMPILED = "stages=[data,build,compile]"


def known_set(name: str, cache: Path, *overrides: str) -> Recipe:
    return load_recipe(
        "lenet5_digits",
        [f"dataset={name}", "model=mlp", "train.steps=1", f"cache.root={cache}", *overrides],
    )


@pytest.mark.parametrize(
    ("name", "samples", "image", "classes"),
    [
        ("mnist", 60_000, (28, 28, 1), 10),
        ("fashion_mnist", 60_000, (28, 28, 1), 10),
        ("cifar10", 50_000, (32, 32, 3), 10),
        ("cifar100", 50_000, (32, 32, 3), 100),
    ],
)
def test_published_dataset_is_needed_only_by_stages_that_read_it(
    name: str,
    samples: int,
    image: tuple[int, ...],
    classes: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = known_set(name, tmp_path, ONLY_COMPILED)
    dataset = declare_data(recipe, Reporter())
    assert dataset is not None
    assert (dataset.raw_image, len(dataset.classes)) == (ColumnSpec(image, "uint8"), classes)
    assert (len(dataset.train), len(dataset.eval)) == (samples, 10_000)
    assert dataset.train_order.steps_per_epoch == samples // recipe.train.batch_size
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"data       {name}: {samples:,} training and 10,000 evaluation ")
    assert lines[1].startswith("data       not downloaded: no stage reads samples")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages=[data,build,compile,train]"],
        ["stages=[data]"],
        [ONLY_COMPILED, "dataset.train.balance=true"],
        [ONLY_COMPILED, "train.loss.class_weights=balanced"],
        [ONLY_COMPILED, "dataset.buckets=[[40,40]]"],
        [ONLY_COMPILED, "dataset.root=nowhere"],
    ],
    ids=["trains", "data alone", "balance", "class weights", "buckets", "root"],
)
def test_data_is_read_if_samples_or_files_are_needed(overrides: list[str], tmp_path: Path) -> None:
    assert declare_data(known_set("cifar10", tmp_path, *overrides), quiet()) is None


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("cifar10", ["cifar-10-binary.tar.gz"]),
        (
            "mnist",
            [
                "train-images-idx3-ubyte.gz",
                "train-labels-idx1-ubyte.gz",
                "t10k-images-idx3-ubyte",
                "t10k-labels-idx1-ubyte.gz",
            ],
        ),
    ],
)
def test_cached_files_are_read(name: str, files: list[str], tmp_path: Path) -> None:
    recipe = known_set(name, tmp_path, ONLY_COMPILED)
    (tmp_path / name).mkdir()
    for file in files:
        assert declare_data(recipe, quiet()) is not None
        (tmp_path / name / file).touch()
    assert declare_data(recipe, quiet()) is None


@pytest.mark.slow
def test_published_dataset_is_priced_and_compiled_offline_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be read or downloaded")

    monkeypatch.setattr("pipeline.data.copies.mirror_transfer.transfer", refuse)
    empty = tmp_path / "empty"
    priced = run(known_set("mnist", empty, ONLY_COMPILED, "device=ascend910"), tmp_path / "one")
    assert priced.modelled["step_ms"] > 0
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.data.columns.BlankColumn.__getitem__", refuse)
        again = run(known_set("mnist", empty, ONLY_COMPILED, "device=ascend910"), tmp_path / "two")
    assert again.modelled == priced.modelled
    compiled = run(known_set("mnist", empty, ONLY_COMPILED), tmp_path / "three")
    assert (compiled.status, compiled.data["columns"]["image"]["shape"]) == ("done", [28, 28, 1])
    (process,) = read_provenance(tmp_path / "three")
    assert {column["of"] for column in process["data"]["train"].values()} == {"none"}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "model.inputs=text",
            "model.inputs: there is no column 'text'; the columns are age, features",
        ),
        (
            "model.inputs={query: text, passage: age}",
            "model.inputs: there is no column 'text' for the network's input query; the columns "
            "are age, features",
        ),
        (
            "dataset.train.ops=[random_horizontal_flip]",
            "dataset.train.ops.0 (random_horizontal_flip): there is no column 'image'; the columns "
            "are age, features, label",
        ),
        (
            "dataset.train.ops=[{name: random_horizontal_flip, column: features}]",
            "dataset.train.ops.0 (random_horizontal_flip): needs images of shape (height, width, "
            "channels), not values of shape (4,)",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named(
    override: str, problem: str, tiny: Compose, npz: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = npz()
    rows = np.zeros((6, 4), np.float32)
    arrays = {"x_train": rows, "x_test": rows, "age_train": rows, "age_test": rows}
    labels = np.arange(6) % 2
    np.savez(tmp_path / "own.npz", y_train=labels, y_test=labels, **arrays)
    ops = ["dataset.train.ops=[]", "dataset.eval.ops=[]", "dataset.columns=[age]"]
    with pytest.raises(RecipeError) as caught:
        load_data(tiny(*settings, *ops, override), quiet())
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize("number", [np.uint32(2**31), np.int64(-(2**31) - 1)])
def test_numbers_that_int32_lacks_are_refused(
    key: SplitKey,
    number: np.integer[Any],
    tiny: Compose,
    npz: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network reads them as int32, in which they would be others."""
    settings = npz()
    ids, labels = np.zeros((6, 4), np.int32), np.arange(6) % 2
    np.savez(tmp_path / "own.npz", x_train=ids, x_test=ids, y_train=labels, y_test=labels)
    recipe = tiny(*settings, "dataset.train.ops=[]", "dataset.eval.ops=[]", "model=mlp")
    raw = recipe.dataset.load(tmp_path)
    (name,) = raw.inputs
    for which in ("train", "eval"):
        split = getattr(raw, which)
        wide = np.full((6, 4), number if which == key else 0, number.dtype)
        raw = raw.with_split(which, replace(split, columns={**split.columns, name: wide}))
    monkeypatch.setattr(type(recipe.dataset), "read", lambda *_: raw)
    with pytest.raises(RecipeError, match=f"dataset: {name} has numbers that int32 can't hold"):
        load_data(recipe, quiet())


def test_network_reads_documents_of_a_window_and_a_prediction_one() -> None:
    dataset = load_data(load_recipe("decoder_text", ["dataset=documents"]))
    assert [(array.name, array.column) for array in dataset.inputs.arrays] == [
        ("tokens", "tokens"),
        ("mask", "document"),
    ]
    assert list(dataset.raw_inputs) == ["tokens"]
