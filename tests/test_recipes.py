"""Every shipped recipe: what it resolves to, and that it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from pipeline import load_recipe
from pipeline.config.files import read_description
from pipeline.config.hydra_options import DEFAULT_RECIPE
from pipeline.core.files.paths import RECIPES
from pipeline.data.sources import audio_folder
from tests import outcome
from tests.conftest import ROOT
from tests.image_folders import save_images, save_masks
from tests.stages.export.text_runs import DECODER, SMALL
from tests.whole_run import run

GOLDEN = ROOT / "tests" / "golden"

TRAINED = {
    "lenet5_digits": "digits",
    "lenet5_digits_finetune": "digits",
    "lenet5_mnist": "mnist",
    "lenet5_mnist_robust": "mnist",
    "lenet5_mnist_thor": "mnist",
    "mlp_mnist": "mnist",
    "mlp_quickstart": "mnist",
    "resnet20_cifar10": "cifar10",
}
"""Recipes of networks small enough to train here, and the source whose twin stands in."""

MADE_SMALL = {
    "resnet20_cifar10": ["model.blocks=[1,1]", "model.widths=[4,8]"],
    "unet_digit_masks": ["model.widths=[2,4]"],
}
"""What makes small the networks that take long to compile; others are trained as they are."""

OF_FILES: dict[str, Callable[[Path], Path]] = {
    "lenet5_unbalanced": lambda folder: save_images(folder, {"train": 22, "eval": 6}),
    "unet_digit_masks": lambda folder: save_masks(folder, 56),
}
"""Recipes of image files that a script makes, and what stands in for these."""

BUILT = {
    "cnn6_cifar10_speedrun": "cifar10",
    "resnet9_cifar10_speedrun": "cifar10",
    "resnet18_cifar10": "cifar10",
    "resnet18_cifar10_thor": "cifar10",
    "resnet50_cifar10": "cifar10",
}

TEXTS = {
    "decoder_text": [DECODER, "dataset.length=16"],
    "decoder_text_lora": [
        DECODER,
        "dataset.length=16",
        "train.features=[{name: lora, rank: 2, targets: ['*/self_attention_0', '*/gated_mlp_0']}]",
    ],
    "gpt_text": [*SMALL, "dataset.length=16"],
    "bert_docstrings": [*SMALL, "dataset.buckets=[[16]]"],
}
"""Recipes of texts that ship, and what makes them small."""


ADVERSARIAL = ("gan_mnist",)
"""Recipes without classes: `stages/test_adversarial_runs.py` trains them."""

PRIVATE = ("lenet5_mnist_private",)
"""Recipes whose batches don't fit few samples: `stages/test_private_run.py` trains such runs."""

SOUNDS = ("audio_vowels",)
"""Recipes of sound that a formula makes."""

PAIRS = ("pair_docstrings", "two_towers_docstrings")
"""Recipes of pairs of texts that ship."""

TABLES = ("breast_cancer_mlp", "diabetes_mlp", "digit_halves")
"""Recipes that train on a table of the package, or images with numbers, in a second or two."""

OWN_TABLES = {"table": ["dataset.shipped=diabetes", "dataset.target=progression"]}
"""Recipes of the user's tables, and what names a table of the package."""

SERIES = ("fcn_series", "forecast_linear", "mnist1d_cnn")
"""Recipes of series: `stages/test_series_runs.py` trains them."""

SHIPPED = (
    *TRAINED,
    *BUILT,
    *TABLES,
    *TEXTS,
    *PAIRS,
    *SOUNDS,
    *OF_FILES,
    *ADVERSARIAL,
    *PRIVATE,
    *SERIES,
    *OWN_TABLES,
)


def twin(source: str) -> list[str]:
    """Made-up images of a source's sizes, 4 steps of 8 in sinks of 2."""
    return [
        "dataset.name=synthetic",
        f"+dataset.like={source}",
        "+dataset.train_size=44",
        "+dataset.eval_size=12",
        "dataset.train.num_shards=null",
        "dataset.train.shard_id=null",
        "train.batch_size=8",
        "train.steps=4",
        "train.sink_size=2",
    ]


CONDITIONS = (
    " on the 10,000 test images",
    " on 2 busy CPU cores",
    " on 2 CPU cores in heavy use",
    " on 2 CPU cores",
    " on 2 idle ones",
)
"""Conditions of results, which the document states once for all recipes."""


def header_of(name: str) -> list[str]:
    """The comments that a recipe begins with."""
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    return list(takewhile(lambda line: line.startswith("#"), lines))


def test_recipes_are_all_tested() -> None:
    shipped = {file.stem for file in RECIPES.glob("*.yaml")}
    assert shipped == set(SHIPPED)
    assert len(shipped) == 31


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_recipe_matches_its_golden_resolution(
    name: str, golden: Callable[[Path, str], str]
) -> None:
    """Rewritten with `pytest --update-golden`, to be read in the diff."""
    tree = load_recipe(name, OWN_TABLES.get(name, [])).model_dump(mode="json")
    text = yaml.safe_dump(tree, sort_keys=False)
    assert text == golden(GOLDEN / f"recipe_{name}.yaml", text)


@pytest.mark.parametrize("name", SHIPPED)
def test_header_has_the_command_and_a_description(name: str) -> None:
    header = header_of(name)
    recipe = "" if name == DEFAULT_RECIPE else f" +recipe={name}"
    assert "# @package _global_" in header
    assert [line for line in header if line.startswith(f"# python -m pipeline{recipe}")]
    assert len(read_description(RECIPES / f"{name}.yaml")) > 20


def test_recipe_document_matches_recipe_headers() -> None:
    document = (ROOT / "docs" / "recipes.md").read_text()
    shipped = document.partition("## Shipped recipes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", shipped, re.MULTILINE)
    assert {name for name, *_ in rows} == set(SHIPPED)
    for name, what, measured in rows:
        header = header_of(name)
        command = next(index for index, line in enumerate(header) if "python -m pipeline" in line)
        said = " ".join(line.removeprefix("# ") for line in header[command + 1 :])
        for condition in CONDITIONS:
            said = said.replace(condition, "")
        result = measured.replace("not run", "Not run", 1)
        assert said.replace("Measured: ", "") == f"{what} {result}", name


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_small_recipe_trains_end_to_end(name: str, cache: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        name, [*twin(TRAINED[name]), *MADE_SMALL.get(name, []), f"cache.root={cache}"]
    )
    summary = run(recipe, tmp_path)
    assert (summary.status, summary.steps, summary.sinks) == ("done", 4, 2)
    assert [line["step"] for line in outcome.metrics(tmp_path)] == [1, 2, 3, 4]
    assert 4 in outcome.checkpoints(tmp_path)
    assert summary.metrics["count"] == 12
    assert list(tmp_path.glob("events.*"))
    assert "precision  recall      f1    samples" in (tmp_path / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_text_recipe_trains_end_to_end(name: str, cache: Path, tmp_path: Path) -> None:
    length = ["train.batch_size=8", "train.steps=4", "train.sink_size=2", "eval.samples=12"]
    keys = [*TEXTS[name], *length, "train.schedule.warmup_epochs=0.0"]
    keys += ["train.schedule.warmup_steps=0", f"cache.root={cache}"]
    summary = run(load_recipe(name, keys), tmp_path)
    assert (summary.status, summary.steps, summary.sinks) == ("done", 4, 2)
    assert summary.metrics["count"] == (12 if name == "bert_docstrings" else 12 * 16)
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUNDS)
def test_sound_recipe_trains_end_to_end(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio_folder, "COUNTS", {"train": 4, "eval": 2})
    keys = ["train.batch_size=8", "++train.epochs=null", "train.steps=4", "train.sink_size=2"]
    recipe = load_recipe(name, [*keys, "++eval.every_epochs=null", f"cache.root={tmp_path}"])
    summary = run(recipe, tmp_path / "run")
    assert (summary.status, summary.steps, summary.sinks) == ("done", 4, 2)
    assert summary.metrics["count"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_recipe_of_pairs_trains_end_to_end(name: str, cache: Path, tmp_path: Path) -> None:
    short = ["train.batch_size=8", "train.epochs=null", "train.steps=4", "train.sink_size=2"]
    keys = [*short, "eval.samples=12", "eval.every_epochs=null", f"cache.root={cache}"]
    summary = run(load_recipe(name, [*keys, "train.schedule.warmup_epochs=0.0"]), tmp_path)
    assert (summary.status, summary.steps, summary.sinks) == ("done", 4, 2)
    assert summary.metrics["count"] == 12
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FILES)
def test_image_file_recipe_trains_end_to_end(name: str, cache: Path, tmp_path: Path) -> None:
    root = OF_FILES[name](tmp_path / "files")
    short = ["train.batch_size=8", "++train.epochs=null", "train.steps=4", "train.sink_size=2"]
    overrides = [f"dataset.root={root}", *short, *MADE_SMALL.get(name, []), f"cache.root={cache}"]
    summary = run(load_recipe(name, overrides), tmp_path / "run")
    assert (summary.status, summary.steps, summary.sinks) == ("done", 4, 2)
    assert [line["step"] for line in outcome.metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert list((tmp_path / "run").glob("events.*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_large_recipe_builds(name: str, cache: Path, tmp_path: Path) -> None:
    stages = "stages=[data,build]"
    summary = run(load_recipe(name, [*twin(BUILT[name]), stages, f"cache.root={cache}"]), tmp_path)
    parameters = {
        "cnn6_cifar10_speedrun": 1_972_792,
        "resnet9_cifar10_speedrun": 6_573_120,
        "resnet18_cifar10": 11_173_962,
        "resnet18_cifar10_thor": 11_173_962,
        "resnet50_cifar10": 23_528_522,
    }
    assert (summary.status, summary.parameters) == ("done", parameters[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*TRAINED, *BUILT) if "cifar10" in name])
def test_crop_and_flip_are_for_training_only(name: str) -> None:
    """D-07."""
    dataset = load_recipe(name).dataset
    random_ops = [op.name for op in dataset.train.ops if op.draws]
    assert random_ops[:2] == ["random_crop", "random_horizontal_flip"]
    assert [op.name for op in dataset.eval.ops if op.draws] == []
