"""Masked labels, of tokens and of pixels, from the recipe to the summary."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from rich.console import Console

from pipeline import load_recipe
from pipeline.config.checks import find_conflicts
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.columns import ColumnSpec
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import Samples, TrainedRun
from tests import outcome
from tests.command_line import convert_records
from tests.conftest import OPS
from tests.training.sampled_loss import SampledMse
from tests.whole_run import run

Compose = Callable[..., Recipe]
QUIETLY = Reporter(console=Console(file=io.StringIO()))

QUIET = [
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "schedule=constant",
    "dataset.train.ops=[]",
    "dataset.eval.ops=[]",
]
GPT = [
    "dataset=numpy",
    "dataset.buckets=[[4],[9]]",
    "dataset.padding_mask=true",
    "dataset.ignore_index=-100",
    "model=gpt2",
    "model.features=16",
    "model.hidden=16",
    "model.heads=2",
    "model.blocks=1",
    "model.dropout=0.0",
    "optimizer=adam",
    "train.optimizer.lr=0.02",
    "train.batch_size=6",
    "train.steps=40",
    "eval.every_steps=13",
]


def save_texts(file: Path) -> int:
    """Texts of 1 to 9 numbers that count on by 2; how many of their labels are evaluated.

    The data themselves leave the first label of each out.
    """
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 90), ("test", 14)):
        lengths = rng.integers(1, 10, count)
        first = rng.integers(0, 11, count)
        texts = [(a + 2 * np.arange(n + 1)) % 11 for a, n in zip(first, lengths, strict=True)]
        inputs = [text[:-1].astype(np.int32) for text in texts]
        labels = [np.where(np.arange(len(t) - 1) == 0, -100, t[1:]) for t in texts]
        arrays |= {f"x_{split}": np.concatenate(inputs), f"y_{split}": np.concatenate(labels)}
        arrays |= {f"{axis}_{split}_sizes": lengths[:, None] for axis in "xy"}
    np.savez(file, **arrays)
    return int((arrays["y_test"] != -100).sum())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A file of texts, and how many of its labels are evaluated."""
    file = tmp_path_factory.mktemp("texts") / "texts.npz"
    return file, save_texts(file)


@pytest.fixture
def gpt(texts: tuple[Path, int], cache: Path) -> Compose:
    """A recipe that trains a small decoder on the texts."""

    def compose(*overrides: str) -> Recipe:
        data = [*GPT, f"dataset.root={texts[0]}"]
        return load_recipe(overrides=[*QUIET, *data, f"cache.root={cache}", *overrides])

    return compose


@pytest.mark.slow
def test_decoder_learns_from_texts_of_several_lengths(
    gpt: Compose, texts: tuple[Path, int], tmp_path: Path
) -> None:
    """Padding and the label of none count nowhere, and a sink changes nothing."""
    for name, sink in (("off", "train.sink=false"), ("seven", "train.sink_size=7")):
        summary = run(gpt(sink), tmp_path / name)
        assert summary.metrics["count"] == texts[1]
    outcome.assert_same_run(tmp_path / "off", tmp_path / "seven")
    losses = [line["loss"] for line in outcome.metrics(tmp_path / "off")]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2
    assert summary.metrics["accuracy"] > 0.5


@pytest.mark.slow
def test_texts_are_unchanged_by_records(
    gpt: Compose, texts: tuple[Path, int], cache: Path, tmp_path: Path
) -> None:
    """D-13: labels of several sizes too."""
    out, data = tmp_path / "records", [f"dataset.root={texts[0]}", f"cache.root={cache}"]
    convert_records([str(out), "dataset=numpy", "dataset.ignore_index=-100", *data])
    records = ["dataset=records", f"dataset.root={out}"]
    found, source = (load_data(gpt(*keys), QUIETLY) for keys in (records, []))
    for one, other in ((found.train, source.train), (found.eval, source.eval)):
        assert one.columns.keys() == other.columns.keys() == {"tokens", "label", "size"}
        for name, column in one.columns.items():
            assert np.array_equal(column[:], other.columns[name][:])


def built(recipe: Recipe) -> None:
    build(recipe, load_data(recipe, QUIETLY), QUIETLY)


@pytest.mark.slow
def test_position_labels_without_ignore_index_are_refused(gpt: Compose, tmp_path: Path) -> None:
    with np.load(str(gpt().dataset.root)) as arrays:
        changed = {name: arrays[name] for name in arrays}
    changed |= {name: np.abs(changed[name]) % 11 for name in ("y_train", "y_test")}
    np.savez(tmp_path / "known.npz", **changed)
    recipe = gpt("dataset.ignore_index=null", f"dataset.root={tmp_path / 'known.npz'}")
    with pytest.raises(RecipeError, match=r"labels of shape .* need padding too; set dataset\.ign"):
        built(recipe)


@pytest.mark.slow
def test_labels_of_several_sizes_without_such_images_are_refused(
    gpt: Compose, tmp_path: Path
) -> None:
    """They would be padded with a class, without a word."""
    with np.load(str(gpt().dataset.root)) as arrays:
        kept = {name: arrays[name] for name in arrays if name.startswith("y_")}
    images = {f"x_{s}": np.zeros((len(kept[f"y_{s}_sizes"]), 9, 1)) for s in ("train", "test")}
    one_size = {name: values.astype(np.float32) for name, values in images.items()}
    np.savez(tmp_path / "mixed.npz", **kept, **one_size)
    for buckets, problem in (
        ("null", "labels have several sizes"),
        ("[[9]]", "have the sizes of the images"),
    ):
        masked = f"dataset.padding_mask={'false' if buckets == 'null' else 'true'}"
        with pytest.raises(RecipeError, match=problem):
            built(
                gpt(f"dataset.root={tmp_path / 'mixed.npz'}", f"dataset.buckets={buckets}", masked)
            )


UNET = [
    "dataset=numpy",
    "model=unet",
    "model.widths=[2,4]",
    "optimizer=adam",
    "train.optimizer.lr=0.02",
    "train.batch_size=8",
    "train.steps=60",
]


@pytest.fixture
def unet(cache: Path, tmp_path: Path) -> Compose:
    """A recipe that classifies the bright pixels of an image; its left third has no labels."""
    images = np.random.default_rng(0).random((60, 8, 12, 1), np.float32)
    labels = (images[..., 0] > 0.5).astype(np.int64)
    labels[:, :, :4] = 255
    file = tmp_path / "pixels.npz"
    np.savez(file, x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])

    def compose(*overrides: str) -> Recipe:
        data = [*UNET, f"dataset.root={file}", f"cache.root={cache}"]
        return load_recipe(overrides=[*QUIET, *data, *overrides])

    return compose


@pytest.mark.slow
def test_ignored_pixels_are_not_counted(unet: Compose, tmp_path: Path) -> None:
    """Labels move with their pixels, or there were nothing to be learned."""
    moves = (
        "[{name: random_horizontal_flip}, {name: random_vertical_flip},"
        "{name: random_crop, size: [8, 12], padding: [2, 2, 2, 2]}]"
    )
    recipe = unet("dataset.ignore_index=255", f"dataset.train.ops={moves}")
    summary = run(recipe, tmp_path / "run")
    assert summary.metrics["count"] == 9 * 8 * 8
    assert summary.metrics["accuracy"] > 0.9


@pytest.mark.slow
def test_invalid_label_is_refused_without_a_mask(unet: Compose) -> None:
    with pytest.raises(RecipeError, match=r"ops\.0 \(pad\): makes pixels that have no label"):
        built(unet("dataset.classes=256", "dataset.train.ops=[{name: pad, padding: [0,0,1,1]}]"))
    hot = "[{name: one_hot, classes: 2}]"
    with pytest.raises(RecipeError) as caught:
        built(unet("dataset.ignore_index=255", f"dataset.train.ops={hot}"))
    assert caught.value.problems == (
        "dataset.train.ops: return labels of float32, which can't hold dataset.ignore_index = 255; "
        "must return whole numbers that can, or it must be null",
    )


SMALL = ["train.batch_size=8", "train.steps=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["train.loss.hardest_share=0.7", "optimizer=thor"],
            "train.loss.hardest_share = 0.7: must be 1.0 with thor, which uses every sample",
        ),
        (
            ["dataset.ignore_index=3", "optimizer=thor"],
            "dataset.ignore_index = 3: must be null with thor, which uses every sample",
        ),
        (
            ["train.loss.hardest_share=0.0"],
            "train.loss.hardest_share = 0.0: must be greater than 0",
        ),
    ],
)
def test_conflicting_settings_are_refused(
    overrides: list[str], problem: str, tiny: Compose
) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny(*SMALL, *overrides)
    assert problem in caught.value.problems


@pytest.mark.slow
def test_loss_without_a_mask_is_refused_with_masked_labels(tiny: Compose) -> None:
    loss = SampledMse()
    recipe = tiny("dataset.ignore_index=3")
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"loss": loss})})
    assert find_conflicts(recipe, length_replaced=False) == [
        "dataset.ignore_index = 3: must be null with train.loss.name = sampled_mse, which accepts "
        "no mask of valid labels"
    ]


@pytest.mark.slow
def test_mixing_a_short_batch_with_its_padding_is_refused(tiny: Compose) -> None:
    """96 samples in batches of 20 leave 16."""
    raw_image = [
        f"dataset.train.ops={OPS[:-1]},{{name: one_hot, classes: 10}},cut_mix]",
        *SMALL[1:],
    ]
    short = "dataset.train.drop_remainder=false"
    with pytest.raises(RecipeError) as caught:
        built(tiny(*raw_image, short, "train.batch_size=20"))
    assert caught.value.problems == (
        "dataset.train.drop_remainder = false: a last batch would hold 16 of 20 samples, and "
        "dataset.train.ops.3 (cut_mix) would mix its padding with them; must be true with this op",
    )
    built(tiny(*raw_image, short, "train.batch_size=16"))


@pytest.mark.slow
def test_inference_of_a_text_uses_no_padding(gpt: Compose) -> None:
    """All of what is given counts; the export of a run is the same function."""
    recipe = gpt()
    dataset = load_data(recipe, QUIETLY)
    step_config = build(recipe, dataset, QUIETLY).step_config
    tokens = np.arange(9, dtype=np.int32).reshape(1, 9)
    whole = {"tokens": tokens, "mask": np.ones_like(tokens, bool)}
    samples = Samples(dataset.raw_inputs, dataset.targets)
    predict = make_predict(TrainedRun(recipe, {}, 0, samples))

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both() -> tuple[jax.Array, jax.Array]:
        expected, variables = step_config.network.init_with_output(
            jax.random.key(0), whole, train=False
        )
        return predict(flatten_dict(variables, sep="/"), jnp.asarray(tokens)), expected

    np.testing.assert_allclose(*both(), rtol=1e-5, atol=1e-6)
    assert dataset.raw_inputs == {"tokens": ColumnSpec((9,), "int32")}


@pytest.mark.slow
def test_gpt2_sized_vocabulary_trains(gpt: Compose, tmp_path: Path) -> None:
    """50,257 classes: no matrix of classes by classes, and no list of them in the summary."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_257, (8, 6))
    arrays = {
        f"{axis}_{split}": tokens[:, part, None].astype(np.float32)
        if axis == "x"
        else tokens[:, part]
        for split in ("train", "test")
        for axis, part in (("x", slice(0, 5)), ("y", slice(1, 6)))
    }
    np.savez(tmp_path / "tokens.npz", **arrays)
    recipe = gpt(
        f"dataset.root={tmp_path / 'tokens.npz'}",
        "dataset.classes=50257",
        "dataset.buckets=null",
        "dataset.padding_mask=false",
        "dataset.ignore_index=null",
        "train.batch_size=4",
        "train.steps=6",
        "eval.every_steps=null",
        "train.optimizer.lr=0.1",
    )
    summary = run(recipe, tmp_path / "run")
    losses = [line["loss"] for line in outcome.metrics(tmp_path / "run")]
    assert losses[0] == pytest.approx(np.log(50_257), rel=0.05)
    assert losses[-1] < losses[0] / 2
    metrics = summary.metrics
    assert (metrics["count"], metrics["recall"]["micro"]) == (40, metrics["accuracy"])
    assert set(metrics["recall"]) == {"macro", "micro"}
