"""Runs on images as people have them: balanced epochs, drawn sizes, masks; any sink, resumed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline import load_recipe
from pipeline.backends.loading import loader as loader_module
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, PipelineError, RecipeError, UsageError
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.data.ops.resize import ProgressiveSize
from pipeline.data.random import draw_choice, seed_words
from pipeline.data.transform import apply_ops, select_variants
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from tests import outcome
from tests.command_line import infer
from tests.whole_run import run

Compose = Callable[..., Recipe]

POOLED = (
    "model.layers=[{name: conv, features: 4, kernel: 3, stride: 1, padding: same},"
    "{name: relu}, {name: global_avg_pool}, {name: dense, features: $classes}]"
)
PIXELWISE = (
    "model.layers=[{name: conv, features: 4, kernel: 3, stride: 1, padding: same},"
    "{name: relu}, {name: conv, features: $classes, kernel: 1, stride: 1, padding: same}]"
)
SIZES = "{name: random_size, sizes: [[8, 8], [6, 10], [4, 4]]}"
TWO_SIZES = "{name: random_size, sizes: [[8, 8], [6, 10]]}"
GROWING = "{name: progressive_size, sizes: [[4, 4], [8, 8]], after_epochs: [1]}"
RESCALE = "{name: rescale, factor: 0.004, shift: 0.0}"
FLIP = "{name: random_horizontal_flip}"
SINKS = {
    "off": ["train.sink=false"],
    "seven": ["train.sink_size=7", "train.feed=stream"],
    "epoch": ["train.sink_size=-1"],
}


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flat/: 40 ants, which are dark, and 6 owls. masked/: 24 images whose bright pixels are
    class 1, with a row that is not counted."""
    root, rng = tmp_path_factory.mktemp("folders"), np.random.default_rng(6)
    for name, count, level in (("ant", 40, 60), ("owl", 6, 180)):
        for number in range(count):
            pixels = rng.integers(0, 70, (8, 8, 3)) + level
            save(root / "flat" / name / f"{number:02}.png", pixels.astype(np.uint8))
    for number in range(24):
        bright = rng.random((8, 8)) < 0.3
        pixels = rng.integers(0, 90, (8, 8, 3)) + 160 * bright[..., None]
        mask = bright.astype(np.uint8)
        mask[0] = 255
        save(root / "masked" / "images" / f"{number:02}.png", pixels.astype(np.uint8))
        save(root / "masked" / "masks" / f"{number:02}.png", mask)
    return root


@pytest.fixture
def compose(cache: Path, folders: Path) -> Compose:
    def compose(kind: str, *overrides: str) -> Recipe:
        flat = kind == "flat"
        settings = [
            f"dataset={'image_folder' if flat else 'image_masks'}",
            f"dataset.root={folders / kind}",
            "dataset.split=0.25",
            f"dataset.train.ops=[{FLIP},{RESCALE}]",
            f"dataset.eval.ops=[{RESCALE}]",
            "model=layers",
            POOLED if flat else PIXELWISE,
            "schedule=constant",
            "train.batch_size=4",
            "train.optimizer.lr=0.05",
            "train.steps=24",
            "monitor.tensorboard=false",
            "monitor.sample_images=0",
            "eval.every_steps=11",
            f"cache.root={cache}",
        ]
        return load_recipe("lenet5_digits", [*settings, *overrides])

    return compose


def quiet() -> Reporter:
    return Reporter(console=Console(file=io.StringIO()))


def loaded(recipe: Recipe) -> Dataset:
    return load_data(recipe, quiet())


RUNS = {
    "balanced": ("flat", ["dataset.train.balance=true"]),
    "sizes": (
        "flat",
        [f"dataset.train.ops=[{FLIP},{TWO_SIZES},{RESCALE}]", "train.loss.class_weights=balanced"],
    ),
    "progressive": ("flat", [f"dataset.train.ops=[{FLIP},{GROWING},{RESCALE}]"]),
    "masks": (
        "masked",
        [
            f"dataset.train.ops=[{FLIP},{TWO_SIZES},{RESCALE}]",
            "eval.metrics=[mean_iou,pixel_accuracy]",
            "train.loss.class_weights=balanced",
        ],
    ),
    "focal": ("flat", ["loss=focal", "train.loss.class_weights=balanced"]),
    "ordinal": ("flat", ["loss=ordinal", "train.loss.hardest_share=0.7"]),
    "dice": ("masked", ["loss=dice_cross_entropy", "train.loss.z_loss=0.001"]),
    "lovasz": ("masked", ["loss=lovasz_softmax"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_run_is_the_same_in_any_sink_and_after_a_resume(
    name: str, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 8)
    kind, overrides = RUNS[name]
    for variant, sink in SINKS.items():
        run(compose(kind, *overrides, *sink), tmp_path / variant)
        outcome.assert_same_run(tmp_path / "off", tmp_path / variant)
    run(compose(kind, *overrides, "train.end_step=10"), tmp_path / "broken")
    run(compose(kind, *overrides, f"train.resume={tmp_path / 'broken'}"))
    assert outcome.metrics(tmp_path / "broken") == outcome.metrics(tmp_path / "off")
    outcome.assert_equal_arrays(
        outcome.arrays(tmp_path / "broken", 24), outcome.arrays(tmp_path / "off", 24)
    )


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["balanced", "masks", "focal", "dice", "lovasz"])
def test_run_is_the_same_on_any_number_of_devices(
    name: str, compose: Compose, tmp_path: Path
) -> None:
    kind, overrides = RUNS[name]
    for devices in (1, 2):
        shared = ["parallel.mode=data", f"parallel.devices={devices}", "parallel.shards=2"]
        run(compose(kind, *overrides, *shared), tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "1", tmp_path / "2")


@pytest.mark.medium
def test_image_size_depends_only_on_seed_and_step() -> None:
    seed = seed_words(3)
    drawn = [int(draw_choice(np, 3, seed, step)) for step in range(300)]
    compiled = jax.jit(lambda step: draw_choice(jnp, 3, seed, step))
    assert drawn == [int(compiled(jnp.int32(step))) for step in range(300)]
    assert np.bincount(drawn).min() > 70
    assert drawn != [int(draw_choice(np, 3, seed_words(4), step)) for step in range(300)]


@pytest.mark.medium
def test_progressive_size_depends_only_on_the_epoch() -> None:
    op = ProgressiveSize(sizes=((2, 2), (4, 4), (8, 8)), after_epochs=(2, 5))
    compiled = jax.jit(lambda epoch: op.choose_variant(jnp, seed_words(3), epoch, 0))
    for epoch, number in enumerate((0, 0, 1, 1, 1, 2, 2)):
        assert int(op.choose_variant(np, seed_words(3), np.int32(epoch), 0)) == number
        assert int(compiled(jnp.int32(epoch))) == number
    assert op.select_variant(2).size == (8, 8)


@pytest.mark.parametrize("after_epochs", [(), (1,), (1, 2, 3), (2, 2), (3, 1)])
def test_each_size_but_the_first_has_an_epoch(after_epochs: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="after_epochs"):
        ProgressiveSize(sizes=((2, 2), (4, 4), (8, 8)), after_epochs=after_epochs)


@pytest.mark.slow
def test_images_grow_after_the_first_epoch(compose: Compose, tmp_path: Path) -> None:
    """The first 8 steps are those of a run at the small size, and the ninth is not."""
    small = "{name: resize, size: [4, 4]}"
    growing, fixed = (
        [f"dataset.train.ops=[{FLIP},{size},{RESCALE}]", f"dataset.eval.ops=[{eval_ops}]"]
        for size, eval_ops in ((GROWING, RESCALE), (small, f"{small},{RESCALE}"))
    )
    losses = []
    for name, ops in (("growing", growing), ("fixed", fixed)):
        run(compose("flat", *ops, "train.steps=9"), tmp_path / name)
        losses.append([line["loss"] for line in outcome.metrics(tmp_path / name)])
    assert losses[0][:8] == pytest.approx(losses[1][:8], rel=1e-5)
    assert losses[0][8] != pytest.approx(losses[1][8], rel=1e-5)


@pytest.mark.slow
def test_step_loss_is_computed_at_its_image_size(compose: Compose, tmp_path: Path) -> None:
    """The first step, by hand: resize, convolution, ReLU, mean, dense."""
    recipe = compose("flat", f"dataset.train.ops=[{FLIP},{SIZES},{RESCALE}]", "train.steps=1")
    dataset = loaded(recipe)
    run(recipe, tmp_path)
    seed = seed_words(recipe.seed)
    number = int(draw_choice(np, 3, seed, 0))
    ops = select_variants(dataset.train_ops, number)
    batches = dataset.train_order.batches(0, 1)
    rows = batches.indices[0]
    columns = {name: column[rows] for name, column in dataset.train.columns.items()}
    images = apply_ops(np, ops, columns, seed, batches.epochs[0], rows)["image"]
    assert images.shape[1:3] == ((8, 8), (6, 10), (4, 4))[number]
    built = build(recipe, dataset, quiet())
    state = built.step.init(jnp.asarray(seed))
    logits = built.step_config.network.apply(
        {"params": state.params}, jnp.asarray(images), train=True
    )
    losses = np.asarray(built.step_config.objective.loss(logits, jnp.asarray(columns["label"])))
    assert outcome.metrics(tmp_path)[0]["loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.slow
def test_masks_are_learned_displayed_and_written(
    compose: Compose, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["monitor.tensorboard=true", "monitor.sample_images=3", "train.steps=120"]
    overrides += [
        "optimizer=adam",
        "train.optimizer.lr=0.05",
        "eval.metrics=[mean_iou]",
        "eval.every_steps=60",
        "eval.every_epochs=null",
    ]
    summary = run(compose("masked", *overrides), tmp_path / "run")
    assert summary.metrics["mean_iou"] > 0.8
    assert summary.metrics["count"] == 6 * 56  # a row of each image is not counted
    events = EventAccumulator(str(tmp_path / "run"), {"images": 0}).Reload()
    tags = [tag for tag in events.Tags()["images"] if tag.startswith("eval/masks")]
    assert tags == [f"eval/masks/{number}" for number in range(3)]
    shown = events.Images(tags[0])
    assert [event.step for event in shown] == [60, 120]
    assert (shown[0].width, shown[0].height) == (3 * 8 + 4, 8)

    file = folders / "masked" / "images" / "03.png"
    capsys.readouterr()
    assert infer([str(tmp_path / "run"), str(file), "--json", f"--masks={tmp_path / 'm'}"]) == 0
    said = json.loads(capsys.readouterr().out)
    written = np.asarray(Image.open(tmp_path / "m" / "03.png"))
    truth = np.asarray(Image.open(folders / "masked" / "masks" / "03.png"))
    assert said["mask"] == str(tmp_path / "m" / "03.png")
    assert sum(said["pixels"].values()) == pytest.approx(1)
    assert said["pixels"]["1"] == pytest.approx((written == 1).mean(), abs=1e-6)
    assert (written == truth)[1:].mean() > 0.85
    before = file.read_bytes()
    with pytest.raises(DataError, match="would replace an image"):
        infer([str(tmp_path / "run"), str(file.parent), f"--masks={file.parent}"])
    assert file.read_bytes() == before

    save(tmp_path / "wide.png", np.full((20, 31, 3), 10, np.uint8))
    assert infer([str(tmp_path / "run"), str(tmp_path / "wide.png"), f"--masks={tmp_path}/m"]) == 0
    with Image.open(tmp_path / "m" / "wide.png") as wide:
        assert wide.size == (31, 20)
    assert infer([str(tmp_path / "run"), str(file)]) == 0
    assert "of the pixels" in capsys.readouterr().out
    with pytest.raises(DataError, match="would replace an image; name another"):
        infer([str(tmp_path / "run"), str(tmp_path / "wide.png"), f"--masks={tmp_path}"])
    with pytest.raises(DataError, match=r"its mask and that of .* would both be"):
        infer([str(tmp_path / "run"), str(file), str(tmp_path / "03.png"), f"--masks={tmp_path}/m"])


@pytest.mark.slow
def test_masks_of_an_image_classifier_are_refused(
    compose: Compose, folders: Path, tmp_path: Path
) -> None:
    run(compose("flat", "train.steps=2"), tmp_path / "run")
    file = folders / "flat" / "owl" / "00.png"
    with pytest.raises(UsageError, match="the network has one class for an image"):
        infer([str(tmp_path / "run"), str(file), f"--masks={tmp_path / 'm'}"])


@pytest.mark.slow
def test_table_labels_are_regressed(compose: Compose, folders: Path, tmp_path: Path) -> None:
    """The brightness of an image, from its pixels."""
    files = sorted((folders / "flat").rglob("*.png"))
    values = [np.asarray(Image.open(file)).mean() / 7 for file in files]
    rows = [
        f"{f.relative_to(folders / 'flat')},{v:.5f}" for f, v in zip(files, values, strict=True)
    ]
    (tmp_path / "light.csv").write_text("\n".join(["file,light", *rows]))
    table = [f"dataset.labels_csv={tmp_path / 'light.csv'}", "loss=mse", "train.steps=300"]
    table += ["optimizer=adam", "train.optimizer.lr=0.02"]
    summary = run(compose("flat", *table, "train.sink_size=100"), tmp_path / "run")
    assert summary.metrics["r2"] > 0.85
    assert summary.metrics["mae"] < np.std(values) / 3


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (
            "flat",
            ["train.loss.class_weights=[1.0,2.0,3.0]"],
            "train.loss = cross_entropy: class_weights has 3 values for 2 classes",
        ),
        (
            "masked",
            ["dataset.train.balance=true"],
            "dataset.train.balance = true: must be false unless each sample has one class",
        ),
        (
            "flat",
            [
                f"dataset.train.ops=[{SIZES},{RESCALE}]",
                "model.layers=[{name: flatten}, {name: dense, features: $classes}]",
            ],
            r"dataset.train.ops.0 \(random_size\): the network can't read all sizes: ",
        ),
        (
            "flat",
            [f"dataset.eval.ops=[{SIZES},{RESCALE}]"],
            r"ops.0 \(random_size\): changes the size between steps of training; eval",
        ),
        (
            "flat",
            [f"dataset.train.ops=[{SIZES},{SIZES},{RESCALE}]"],
            "ops.1: changes the size between steps, as ops.0 does; only one op can",
        ),
        (
            "flat",
            [f"dataset.train.ops=[{SIZES},{{name: random_crop, size: [5, 5]}},{RESCALE}]"],
            r"dataset.train.ops.1 \(random_crop\): ",
        ),
        (
            "flat",
            [f"dataset.train.ops=[{SIZES},{RESCALE}]", "dataset.buckets=[[8,8]]"],
            "buckets: can't be combined with random_size, which changes the sizes",
        ),
        (
            "flat",
            ["dataset.train.balance=true", "dataset.buckets=[[8,8]]"],
            "buckets: can't be combined with train.balance",
        ),
        (
            "masked",
            [POOLED],
            "model layers: .*|dataset.train.ops: ",
        ),
    ],
)
def test_conflicting_image_settings_are_refused(
    kind: str, overrides: list[str], message: str, compose: Compose
) -> None:
    def built() -> None:
        recipe = compose(kind, *overrides)
        build(recipe, loaded(recipe), quiet())

    with pytest.raises(RecipeError, match=message):
        built()


@pytest.mark.medium
def test_balanced_epoch_has_the_usual_number_of_steps(compose: Compose) -> None:
    dataset = loaded(compose("flat", "dataset.train.balance=true"))
    samples = len(dataset.train)
    assert dataset.train_order.steps_per_epoch == math.floor(samples / 4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [("csv", "2 of 3 images are not in"), ("climb", "leads out of"), ("mask", "has no mask")],
)
def test_invalid_data_has_exit_status_2(
    spoil: str, message: str, compose: Compose, folders: Path, tmp_path: Path
) -> None:
    table = tmp_path / "t.csv"
    rows = {"csv": "ant/00.png,1\na.png,1\nb.png,0", "climb": "../up.png,1\nant/00.png,1"}
    table.write_text(f"file,kind\n{rows.get(spoil, '')}\n")
    if spoil == "mask":
        save(tmp_path / "data" / "images" / "1.png", np.zeros((4, 4, 3), np.uint8))
        save(tmp_path / "data" / "masks" / "2.png", np.zeros((4, 4), np.uint8))
        recipe = compose("masked", f"dataset.root={tmp_path / 'data'}")
    else:
        recipe = compose("flat", f"dataset.labels_csv={table}")
    with pytest.raises(PipelineError, match=message) as caught:
        loaded(recipe)
    assert caught.value.exit_status == 2
