"""Metrics of training samples at evaluations, and pictures of predictions."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline import Trainer, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.stages.data import load_data
from pipeline.stages.sample_pictures import format_label, format_sample_labels, sample_images
from tests import outcome
from tests.conftest import compose_tiny
from tests.whole_run import run

Compose = Callable[..., Recipe]
MLP = ("model=mlp", "model.hidden=[8]", "eval.every_steps=15")


def quiet() -> Reporter:
    return Reporter(console=Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("on_train") / "run"
    board = ("monitor.tensorboard=true", "monitor.sample_predictions=6", "monitor.sample_images=4")
    run(compose_tiny(cache, *MLP, *board, "eval.on_train=true"), run_dir)
    return run_dir


@pytest.mark.slow
def test_training_samples_are_evaluated_by_the_eval_program(trained: Path) -> None:
    """40 of 96, spread evenly, by the program of the evaluation split."""
    trainer = Trainer.load(trained)
    rows = np.arange(40) * 96 // 40
    columns = trainer.dataset.train.columns
    answers = trainer.predict(np.asarray(columns["image"][rows])).argmax(axis=-1)
    accuracy = np.mean(answers == np.asarray(columns["label"][rows]))
    metrics = outcome.read_summary(trained)["metrics"]
    assert metrics["train_accuracy"] == pytest.approx(accuracy)
    lines = outcome.read_lines(trained / "evals.jsonl")
    assert lines[-1]["train_accuracy"] == metrics["train_accuracy"]


@pytest.mark.medium
def test_eval_on_train_does_not_change_other_metrics(
    trained: Path, cache: Path, tmp_path: Path
) -> None:
    run(compose_tiny(cache, *MLP), tmp_path / "run")
    assert outcome.metrics(tmp_path / "run") == outcome.metrics(trained)
    plain, more = (
        outcome.read_lines(folder / "evals.jsonl") for folder in (tmp_path / "run", trained)
    )
    kept = [{key: line[key] for key in line if not key.startswith("train_")} for line in more]
    assert kept == plain


@pytest.mark.medium
def test_tensorboard_has_pictures_classes_and_hparams(trained: Path) -> None:
    tags = EventAccumulator(str(trained)).Reload().Tags()
    assert {"train/images", "eval/predictions"} <= set(tags["images"])
    assert "classes/text_summary" in tags["tensors"]
    assert {"train/accuracy", "eval/accuracy"} <= set(tags["scalars"])


def test_balanced_epoch_labels_match_its_samples(cache: Path) -> None:
    """A sample that is drawn again has a key beyond the number of samples."""
    recipe = load_recipe("breast_cancer_mlp", ["dataset.train.balance=true", f"cache.root={cache}"])
    dataset = load_data(recipe, Reporter(console=Console(file=io.StringIO())))
    batches = dataset.train_order.batches(0, 1)
    shown = batches.rows[0][: recipe.monitor.sample_images]
    labels = [dataset.classes[int(dataset.train.columns["label"][row])] for row in shown]
    assert format_sample_labels(recipe, dataset) == tuple(labels)


@pytest.mark.medium
def test_fixed_shard_is_evaluated_on_its_training_samples(cache: Path) -> None:
    shards = ["dataset.train.num_shards=4", "dataset.train.shard_id=1"]
    recipe = compose_tiny(cache, *shards, "dataset.train.shuffle=false", "train.batch_size=8")
    dataset = load_data(recipe, Reporter(console=Console(file=io.StringIO())))
    images = np.asarray(dataset.train.columns["image"][np.arange(1, 96, 4)])
    own = {image.tobytes() for image in images}
    assert {image.tobytes() for image in dataset.select_train_sample().columns["image"]} <= own


def test_eval_on_train_with_buckets_is_refused(cache: Path) -> None:
    buckets = ("dataset.buckets=[[8,8],[16,16]]", "eval.on_train=true")
    with pytest.raises(RecipeError, match=r"eval\.on_train = true: needs samples of one size"):
        compose_tiny(cache, *buckets)


@pytest.mark.parametrize(
    ("label", "targets", "text"),
    [
        (np.int32(1), Targets(("cat", "dog")), "dog"),
        (np.int32(-100), Targets(("cat", "dog")), "ignored"),
        (np.array([0, 1.0]), Targets(("cat", "dog")), "dog"),
        (np.array([1.0]), Targets(("price",), "regression", (10.0,), (2.0,)), "12"),
        (np.array([1.0, 0, 1]), Targets(("a", "b", "c"), "multi_label"), "a, c"),
        (np.zeros(3), Targets(("a", "b", "c"), "multi_label"), "none"),
    ],
)
def test_label_is_formatted_as_text(label: np.ndarray, targets: Targets, text: str) -> None:
    assert format_label(label, targets) == text


@pytest.mark.slow
def test_sample_images_are_the_first_batch_after_its_ops(tiny: Compose) -> None:
    ops = "dataset.train.ops=[{name: rescale, factor: 0.5, shift: 1.0}]"
    same = "dataset.eval.ops=[{name: rescale, factor: 1.0, shift: 0.0}]"
    recipe = tiny("monitor.sample_images=5", ops, same)
    dataset = load_data(recipe, quiet())
    first = dataset.train_order.batches(0, 1).indices[0, :5]
    images = sample_images(recipe, dataset)
    assert (images.shape, images.dtype) == ((5, 8, 8, 1), np.float32)
    np.testing.assert_allclose(images, 0.5 * dataset.train.columns["image"][first] + 1)


@pytest.mark.slow
def test_sample_images_are_nhwc_in_any_layout(tiny: Compose) -> None:
    transposed = ["dataset.train.ops=[hwc2chw]", "dataset.eval.ops=[hwc2chw]"]
    recipe = tiny("monitor.sample_images=2", *transposed)
    dataset = load_data(recipe, quiet())
    first = dataset.train_order.batches(0, 1).indices[0, :2]
    assert dataset.inputs.image == ColumnSpec((1, 8, 8), "uint8", "chw")
    images = sample_images(recipe, dataset)
    assert np.array_equal(images, dataset.train.columns["image"][first].astype(np.float32))


def test_sample_images_are_optional(tiny: Compose) -> None:
    recipe = tiny()
    assert len(sample_images(recipe, load_data(recipe, quiet()))) == 0


@pytest.mark.slow
def test_sample_images_are_mixed_within_their_batch(tiny: Compose) -> None:
    ops = "{name: one_hot, classes: 10}, {name: mix_up}, {name: rescale, factor: 1.0, shift: 0.0}"
    given = (f"dataset.train.ops=[{ops}]", "dataset.eval.ops=[]")
    recipe = tiny(*given, "monitor.sample_images=2", "train.batch_size=8")
    whole = recipe.model_copy(
        update={"monitor": recipe.monitor.model_copy(update={"sample_images": 8})}
    )
    dataset = load_data(recipe, quiet())
    shown = sample_images(recipe, dataset)
    assert shown.shape[0] == 2
    np.testing.assert_array_equal(shown, sample_images(whole, dataset)[:2])
