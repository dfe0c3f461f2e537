from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from pipeline.core.files.paths import CONF
from pipeline.core.registry import list_components
from pipeline.data.dataset_spec import DatasetSpec

FILES = sorted((CONF / "dataset").glob("*.yaml"))
NEEDS_ROOT = {
    *("tfrecord", "mindrecord", "numpy", "image_folder", "image_masks", "records", "csv"),
    *("parquet", "webdataset", "series", "forecast"),
}
NEEDS_TARGET = {"csv", "parquet"}
NEEDS_OTHERS = {
    "audio_folder": {"seconds": 1.0},
    "concat": {"sources": ["digits"]},
    "mixture": {"sources": ["digits"], "weights": [1]},
    "zip": {"images": "digits", "labels": "digits"},
}


def load(name: str) -> dict[str, Any]:
    tree = OmegaConf.to_container(OmegaConf.load(CONF / "dataset" / f"{name}.yaml"))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def source(name: str) -> DatasetSpec:
    required: dict[str, Any] = dict(NEEDS_OTHERS.get(name, {}))
    if name in NEEDS_ROOT:
        required["root"] = "somewhere"
    if name in NEEDS_TARGET:
        required["target"] = "price"
    built = list_components("dataset")[name].model_validate({**load(name), **required})
    assert isinstance(built, DatasetSpec)
    return built


def test_every_dataset_has_a_config_file() -> None:
    assert {file.stem for file in FILES} == set(list_components("dataset"))
    assert len(FILES) == 27


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_file_sets_every_key(file: Path) -> None:
    assert set(load(file.stem)) == set(list_components("dataset")[file.stem].model_fields)
    assert source(file.stem).name == file.stem


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_file_starts_with_schema_and_description(file: Path) -> None:
    schema, description, first_key = file.read_text(encoding="utf-8").splitlines()[:3]

    assert schema.startswith("# yaml-language-server: $schema=../../recipe.schema.json")
    assert description.startswith("# ")
    assert first_key == f"name: {file.stem}"


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_downloads_have_mirrors(name: str) -> None:
    mirrors = source(name).mirrors

    assert mirrors
    assert all(mirror.startswith(("https://", "http://")) for mirror in mirrors)


def applied(name: str, pixels: list[float], split: str = "eval") -> np.ndarray:
    """One pixel after the ops that change values, by the formulas of D-05."""
    values = np.array(pixels, np.float64)
    for op in load(name)[split]["ops"]:
        if op["name"] == "rescale":
            values = values * op["factor"] + op["shift"]
        elif op["name"] == "normalize":
            values = (values - op["mean"]) / op["std"]
    return values


def test_mnist_constants_match_the_documents() -> None:
    """D-06: two rescales, (1/255, 0) and (1/0.3081, -0.1307/0.3081)."""
    for pixel in (0.0, 100.0, 255.0):
        expected = (pixel / 255 - 0.1307) / 0.3081
        for split in ("train", "eval"):
            np.testing.assert_allclose(applied("mnist", [pixel], split), [expected], rtol=1e-14)


def test_cifar10_constants_match_the_documents() -> None:
    """D-06, D-07: mean and deviation per channel; crop and flip are for training only."""
    expected = [(0.2 - 0.4914) / 0.2023, (0.4 - 0.4822) / 0.1994, (1.0 - 0.4465) / 0.2010]
    np.testing.assert_allclose(applied("cifar10", [51.0, 102.0, 255.0]), expected, rtol=1e-12)

    train, evaluation = (load("cifar10")[split]["ops"] for split in ("train", "eval"))
    assert train[:2] == [
        {"name": "random_crop", "size": [32, 32], "padding": [4, 4, 4, 4]},
        {"name": "random_horizontal_flip", "prob": 0.5},
    ]
    assert train[2:] == evaluation


def test_digits_are_scaled_to_one() -> None:
    np.testing.assert_array_equal(applied("digits", [0.0, 16.0]), [0.0, 1.0])
