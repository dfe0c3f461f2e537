"""Images padded to buckets (D-18): one branch a bucket, the same numbers in any sink, and masks."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from pipeline import load_recipe
from pipeline.backends.loading import loader as loader_module
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.data.columns import ColumnSpec, RawData, Split, Targets
from pipeline.data.inputs import Dataset
from pipeline.data.padding.buckets import SIZE, Padding, RaggedArray
from pipeline.stages.build import Built, build
from pipeline.stages.data import load_data
from pipeline.stages.export.network import trace_network_arrays
from pipeline.stages.sample_sizes import fit_specs_to_bucket, pad_samples
from pipeline.training.step import make_train_step
from tests import outcome
from tests.command_line import convert_records
from tests.whole_run import run

Compose = Callable[..., Recipe]

NETWORK = (
    "model.layers=[{name: conv, features: 4, kernel: 3, stride: 1, padding: same},"
    "{name: relu}, {name: global_avg_pool}, {name: dense, features: $classes}]"
)
SIZES = [(6, 5), (8, 8), (3, 12), (4, 9), (7, 7), (2, 2), (8, 3), (5, 12)]
BUCKETS = "dataset.buckets=[[8,8],[6,12]]"


def save(file: Path, train: int = 61, test: int = 9, **changed: Any) -> Path:
    """Images of several sizes, one after the other."""
    rng = np.random.default_rng(8)
    arrays: dict[str, Any] = {}
    for split, count in (("train", train), ("test", test)):
        sizes = np.array([SIZES[n % len(SIZES)] for n in range(count)])
        arrays[f"x_{split}"] = rng.integers(0, 256, sizes.prod(axis=1).sum(), np.uint8)
        arrays[f"x_{split}_sizes"] = sizes
        arrays[f"y_{split}"] = np.arange(count) % 3
    np.savez(file, **{**arrays, **changed})
    return file


@pytest.fixture
def ragged(cache: Path, tmp_path: Path) -> Compose:
    """A recipe that trains on images of several sizes, 13 or 16 steps an epoch."""
    file = save(tmp_path / "ragged.npz")

    def compose(*overrides: str) -> Recipe:
        settings = [
            "dataset=numpy",
            f"dataset.root={file}",
            BUCKETS,
            "model=layers",
            NETWORK,
            "schedule=constant",
            "train.batch_size=4",
            "train.optimizer.lr=0.01",
            "train.steps=30",
            "monitor.tensorboard=false",
            "monitor.sample_images=0",
            "eval.every_steps=11",
            f"cache.root={cache}",
        ]
        return load_recipe("lenet5_digits", [*settings, *overrides])

    return compose


def loaded(recipe: Recipe) -> Dataset:
    return load_data(recipe, Reporter(console=Console(file=io.StringIO())))


@pytest.mark.slow
def test_images_are_padded_and_their_sizes_stored(ragged: Compose) -> None:
    dataset = loaded(ragged())
    images = dataset.train.columns["image"]
    assert images.shape == (61, 8, 12, 1)
    assert dataset.inputs.shape == (6, 12, 1)
    with np.load(str(ragged().dataset.root)) as arrays:
        flat, sizes = arrays["x_train"], arrays["x_train_sizes"]
    assert np.array_equal(dataset.train.columns[SIZE][:], sizes)
    start = 0
    for padded, (height, width) in zip(images[:], sizes.tolist(), strict=True):
        value = flat[start : start + height * width].reshape(height, width)
        start += height * width
        assert np.array_equal(padded[:height, :width, 0], value)
        assert padded.sum() == value.sum()


@pytest.mark.medium
def test_buckets_are_reported(ragged: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    load_data(ragged(), Reporter())
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "data       training images padded to 8x8 (38 samples), 6x12 (23 samples)"


@pytest.mark.slow
def test_batch_has_one_bucket(ragged: Compose) -> None:
    dataset = loaded(ragged())
    order = dataset.train_order
    sizes = dataset.train.columns[SIZE][:][order.batches(0, 3 * order.steps_per_epoch).indices]
    small = (sizes <= [8, 8]).all(axis=(1, 2))
    large = (sizes <= [6, 12]).all(axis=(1, 2))
    assert (small | large).all()
    assert 0 < small.sum() < len(small)


@pytest.mark.slow
@pytest.mark.parametrize("drop_remainder", ["true", "false"])
def test_run_does_not_depend_on_sinks_and_loaders(
    drop_remainder: str, ragged: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, evaluations and weights bit for bit, with buckets changing within a sink."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 8)
    variants = {
        "off": ["train.sink=false"],
        "one": ["train.sink_size=1"],
        "seven": ["train.sink_size=7", "train.feed=stream"],
        "soft": ["train.sink_size=30", "train.mechanism=soft"],
        "epoch": ["train.sink_size=-1"],
    }
    same = f"dataset.train.drop_remainder={drop_remainder}"
    # A batch that is filled up is filled by the loader, whatever mechanism runs its step.
    names = variants if drop_remainder == "true" else ("off", "seven", "epoch")
    for name in names:
        overrides = variants[name]
        run(ragged(same, *overrides), tmp_path / name)
        outcome.assert_same_run(tmp_path / "off", tmp_path / name)
    losses = [line["loss"] for line in outcome.metrics(tmp_path / "off")]
    assert (len(losses), len(set(losses)) > 20) == (30, True)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_shards_of_buckets_do_not_depend_on_devices(ragged: Compose, tmp_path: Path) -> None:
    for devices in ("1", "2"):
        keys = ["parallel.mode=data", "parallel.shards=2", f"parallel.devices={devices}"]
        run(ragged(*keys), tmp_path / devices)
    outcome.assert_same_run(tmp_path / "1", tmp_path / "2")


def small_batch(dataset: Dataset, rows: list[int]) -> Batch:
    columns = {
        name: jnp.asarray(column[np.array(rows)]) for name, column in dataset.train.columns.items()
    }
    sample = jnp.array(rows, jnp.int32)
    seed = jnp.array([1, 0], jnp.uint32)
    return Batch(columns, seed, jnp.int32(0), sample, jnp.int32(len(rows)))


@pytest.mark.slow
def test_loss_is_computed_at_the_bucket_size(ragged: Compose) -> None:
    """By hand: convolution, ReLU, mean over the bucket (and no more), dense, in float64."""
    recipe = ragged()
    dataset = loaded(recipe)
    built = build(recipe, dataset, Reporter(console=Console(file=io.StringIO())))
    step = make_train_step(built.step_config)
    state = step.init(jnp.array([1, 0], jnp.uint32))
    for rows, (height, width) in (([0, 1, 5], (8, 8)), ([2, 3, 7], (6, 12)), ([0, 2], (6, 12))):
        batch = small_batch(dataset, rows)
        _, record = step.step(state, batch, jnp.array([0.1], jnp.float32))
        weights = {path: np.float64(leaf) for path, leaf in _leaves(state.params)}
        images = np.float64(batch.columns["image"])[:, :height, :width] / 255
        logits = _by_hand(weights, images)
        labels = np.asarray(batch.columns["label"])
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(rows)), labels]
        assert float(record.loss) == pytest.approx(losses.mean(), rel=1e-5)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [("/".join(path), tree)]
    return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))]


def _by_hand(weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    kernels = sorted((w for w in weights.values() if w.ndim > 1), key=lambda w: -w.ndim)
    biases = [w for w in weights.values() if w.ndim == 1]
    around = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = images.shape[1:3]
    features = sum(
        around[:, i : i + height, j : j + width] @ kernels[0][i, j]
        for i in range(3)
        for j in range(3)
    )
    features += next((b for b in biases if len(b) == 4), 0)
    means = np.maximum(features, 0).mean(axis=(1, 2))
    return means @ kernels[1] + next(b for b in biases if len(b) == 3)


@pytest.mark.slow
def test_padding_mask_is_an_input_channel(ragged: Compose) -> None:
    """1 where the image is; after the ops, so that nothing is normalised or rescaled in it."""
    plain, masked = (
        build_quietly(ragged(f"dataset.padding_mask={on}")) for on in ("false", "true")
    )
    assert masked.parameters == plain.parameters + 3 * 3 * 4
    dataset = loaded(ragged())
    batch = small_batch(dataset, [0, 1, 5])
    seen = dataset.inputs.read(jnp, batch.columns, batch.columns[SIZE])
    assert seen.shape == (3, 8, 12, 2)
    for image, (height, width) in zip(np.asarray(seen), [(6, 5), (8, 8), (2, 2)], strict=True):
        assert image[:height, :width, 1].all()
        assert image[..., 1].sum() == height * width


FLAT = "model.layers=[flatten, {name: dense, features: $classes}]"
ON_MNIST = ("dataset=mnist", "dataset.train.ops=[]", "dataset.eval.ops=[]")


@pytest.mark.parametrize(
    ("overrides", "name", "shape"),
    [
        ((), "params/conv_0/kernel", (3, 3, 1, 4)),
        (("dataset.padding_mask=true",), "params/conv_0/kernel", (3, 3, 2, 4)),
        (("dataset.buckets=[[9,14]]", FLAT), "params/dense_0/kernel", (9 * 14, 3)),
        (
            ("dataset.buckets=[[9,14]]", FLAT, "dataset.padding_mask=true"),
            "params/dense_0/kernel",
            (9 * 14 * 2, 3),
        ),
        (
            (*ON_MNIST, "dataset.buckets=[[30,30]]", FLAT, "dataset.padding_mask=true"),
            "params/dense_0/kernel",
            (30 * 30 * 2, 10),
        ),
    ],
    ids=["buckets", "mask", "flat", "flat mask", "sizes without files"],
)
def test_weights_are_converted_for_padded_images(
    overrides: tuple[str, ...], name: str, shape: tuple[int, ...], ragged: Compose
) -> None:
    """`convert weights` finds the arrays that training makes."""
    recipe = ragged(*overrides)
    found = trace_network_arrays(recipe).shapes
    assert found[name] == shape
    if recipe.dataset.name != "mnist":
        params = flatten_by_path({"params": build_quietly(recipe).state.params})
        assert found == {path: leaf.shape for path, leaf in params.items()}


def build_quietly(recipe: Recipe) -> Built:
    return build(recipe, loaded(recipe), Reporter(console=Console(file=io.StringIO())))


@pytest.mark.slow
def test_training_with_a_padding_mask_runs(ragged: Compose, tmp_path: Path) -> None:
    summary = run(ragged("dataset.padding_mask=true", "train.steps=5"), tmp_path / "run")
    assert (summary.status, summary.metrics["count"]) == ("done", 9)


@pytest.mark.slow
def test_only_labels_of_positions_have_the_size_of_a_bucket() -> None:
    image = ColumnSpec((9, 9, 1), "uint8")
    for label, expected in (
        (ColumnSpec((9, 9), "int32"), (4, 6)),
        (ColumnSpec((2,), "float32"), (2,)),
        (ColumnSpec((), "int32"), ()),
    ):
        specs = fit_specs_to_bucket((4, 6), {"image": image, "label": label}, "image")
        assert (specs["image"].shape, specs["label"].shape) == ((4, 6, 1), expected)


def test_single_bucket_is_a_fixed_size(ragged: Compose) -> None:
    dataset = loaded(ragged("dataset.buckets=[[8,12]]"))
    assert dataset.inputs.shape == (8, 12, 1)
    assert dataset.train_order.steps_per_epoch == 61 // 4


@pytest.mark.parametrize("ragged_split", ["train", "eval"])
def test_suggested_bucket_holds_a_split_of_one_size(ragged_split: str) -> None:
    rows = RaggedArray(np.zeros(46, np.uint8), np.array([0, 6]), np.array([[2, 3], [5, 8]]), (1,))
    columns = {"train": np.zeros((2, 6, 4, 1)), "eval": np.zeros((2, 6, 4, 1)), ragged_split: rows}
    splits = [Split({"image": columns[key], "label": np.zeros(2)}) for key in ("train", "eval")]
    raw = RawData(splits[0], splits[1], Targets(("a", "b")))
    with pytest.raises(RecipeError, match=r"give sizes to pad them to, such as \[\[6, 8\]\]"):
        pad_samples(raw, Padding((), "image"), load_recipe("lenet5_digits").dataset, 2)


@pytest.mark.slow
def test_evaluation_counts_every_sample_once(ragged: Compose, tmp_path: Path) -> None:
    """D-17: whatever bucket a sample is in; 9 samples, batches of 4, one of them short or more."""
    summary = run(ragged("train.steps=1"), tmp_path / "run")
    assert summary.metrics["count"] == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["dataset.buckets=null"],
            "dataset.buckets = null: the images have several sizes; give sizes to pad them to, "
            "such as [[8, 12]]",
        ),
        (
            ["dataset.buckets=[[8,8]]"],
            "dataset.buckets: training images: 23 of 61 samples are larger than every bucket; a "
            "bucket of [5, 12] would hold them; dataset.oversized=crop uses a part of each",
        ),
        (
            ["dataset.buckets=[[8,8],[6,12],[8,12]]"],
            "dataset.buckets: [8, 12] covers no sample that a smaller one does not cover",
        ),
        (
            ["train.batch_size=40"],
            "dataset.buckets: [8, 8] has 38 samples, too few for a batch of 40, so that "
            "drop_remainder would drop all of them",
        ),
        (
            ["dataset.buckets=[[40]]"],
            "dataset.buckets: training images: [[40]]: must have 2 numbers each for these images",
        ),
        (
            [
                "dataset.padding_mask=true",
                "dataset.train.ops=[{name: resize, size: [4, 4]}]",
                "dataset.eval.ops=[{name: resize, size: [4, 4]}]",
            ],
            "dataset.padding_mask = true: the map ops change the size [8, 8] to [4, 4]; they must "
            "keep it",
        ),
        (
            [
                "dataset.train.ops=[{name: center_crop, size: [7, 7]}]",
                "dataset.eval.ops=[{name: center_crop, size: [7, 7]}]",
            ],
            None,
        ),
        (["model.layers=[flatten, {name: dense, features: $classes}]"], None),
    ],
    ids=["no buckets", "skipped", "empty", "no batch", "dimensions", "mask", "crop", "dense"],
)
def test_unsuitable_buckets_are_refused_before_compiling(
    overrides: list[str], problem: str | None, ragged: Compose
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_quietly(ragged(*overrides))
    (found,) = caught.value.problems
    assert found.startswith("dataset.") if problem is None else found == problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["dataset.buckets=[[8,8],[8]]"],
            "dataset: buckets = [[8, 8], [8]]: must be all [height, width] or all [tokens]",
        ),
        (
            ["dataset.buckets=[[8,8],[8,8]]"],
            "dataset: buckets = [[8, 8], [8, 8]]: must be different",
        ),
        (["dataset.buckets=[[0,8]]"], "dataset.buckets.0.0 = 0: must be greater than 0"),
        (
            ["dataset.buckets=[]"],
            "dataset: buckets = []: must be all [height, width] or all [tokens]",
        ),
        (
            ["dataset.buckets=null", "dataset.padding_mask=true"],
            "dataset: padding_mask = true: needs buckets, else nothing is padded",
        ),
        (
            ["dataset.train.num_shards=2", "dataset.train.shard_id=0"],
            "dataset: buckets: can't be combined with train.num_shards; shards would differ in "
            "their number of batches",
        ),
    ],
)
def test_invalid_bucket_keys_are_refused(
    overrides: list[str], problem: str, ragged: Compose
) -> None:
    with pytest.raises(RecipeError) as caught:
        ragged(*overrides)
    assert caught.value.problems == (problem,)


@pytest.mark.slow
def test_images_of_several_sizes_are_unchanged_by_records(
    ragged: Compose, cache: Path, tmp_path: Path
) -> None:
    """D-13: sizes and all; the same losses, bit for bit."""
    source, out = str(ragged().dataset.root), tmp_path / "records"
    convert_records([str(out), "dataset=numpy", f"dataset.root={source}", f"cache.root={cache}"])
    run(ragged("train.feed=resident"), tmp_path / "source")
    run(
        ragged("dataset=records", f"dataset.root={out}"),
        tmp_path / "same",
    )
    outcome.assert_same_run(tmp_path / "source", tmp_path / "same")


@pytest.mark.slow
def test_image_files_of_several_sizes_are_padded(ragged: Compose, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(1, 256, (*size, 3), np.uint8) for size in SIZES]
    for split in ("train", "eval"):
        for number, image in enumerate(pixels):
            file = tmp_path / "images" / split / f"class{number % 2}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    files = ["dataset=image_folder", f"dataset.root={tmp_path / 'images'}", "train.batch_size=2"]
    columns = loaded(ragged(*files)).train.columns
    order = [*range(0, 8, 2), *range(1, 8, 2)]
    assert columns[SIZE][:].tolist() == [list(SIZES[number]) for number in order]
    for padded, number in zip(columns["image"][:], order, strict=True):
        height, width = SIZES[number]
        assert np.array_equal(padded[:height, :width], pixels[number])
        assert padded.sum() == pixels[number].sum()


@pytest.mark.slow
def test_resumed_run_continues_its_buckets(ragged: Compose, tmp_path: Path) -> None:
    """The batches of a step are a function of its number: stopped at 12, then on to 30."""
    run(ragged(), tmp_path / "whole")
    run(ragged("train.end_step=12"), tmp_path / "broken")
    run(ragged(f"train.resume={tmp_path / 'broken'}"))
    assert outcome.metrics(tmp_path / "broken") == outcome.metrics(tmp_path / "whole")


CROPPED = ("dataset.buckets=[[5,5],[4,8]]", "dataset.oversized=crop")


@pytest.mark.slow
def test_samples_larger_than_every_bucket_are_cropped(
    ragged: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal numbers in any sink and loader, all samples evaluated, and other parts each epoch."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 8)
    variants = {
        "off": ["train.sink=false"],
        "seven": ["train.sink_size=7", "train.feed=stream"],
    }
    for name, overrides in variants.items():
        summary = run(ragged(*CROPPED, "dataset.padding_mask=true", *overrides), tmp_path / name)
        assert summary.metrics["count"] == 9
        outcome.assert_same_run(tmp_path / "off", tmp_path / name)
    dataset = loaded(ragged(*CROPPED))
    images = dataset.train.columns["image"]
    assert images.shape == (61, 8, 12, 1)
    assert dataset.inputs.shape == (4, 8, 1)


def test_cropping_without_buckets_is_refused(ragged: Compose) -> None:
    with pytest.raises(RecipeError) as caught:
        ragged("dataset.buckets=null", "dataset.oversized=crop")
    expected = "dataset: oversized = crop: needs buckets, the sizes to crop to"
    assert caught.value.problems == (expected,)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "eval"])
def test_padding_mask_with_moving_ops_is_refused(split: str, ragged: Compose) -> None:
    flip = f"dataset.{split}.ops=[{{name: random_horizontal_flip}}]"
    with pytest.raises(RecipeError) as caught:
        loaded(ragged("dataset.padding_mask=true", flip))
    assert caught.value.problems == (
        f"dataset.padding_mask = true: dataset.{split}.ops.0 (random_horizontal_flip) moves "
        "pixels, and the mask fits only the original pixels; leave out the op or the mask",
    )
