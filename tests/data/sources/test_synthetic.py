from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.columns import RawData
from pipeline.data.image_facts import ImageFacts
from pipeline.data.sources.digits import Digits
from pipeline.data.sources.synthetic import Synthetic, find_class_facts
from tests.data.section import section

TWINS = {
    "cifar10": ImageFacts((32, 32, 3), 10, 50_000, 10_000),
    "cifar100": ImageFacts((32, 32, 3), 100, 50_000, 10_000),
    "digits": ImageFacts((8, 8, 1), 10, 1_438, 359),
    "fashion_mnist": ImageFacts((28, 28, 1), 10, 60_000, 10_000),
    "mnist": ImageFacts((28, 28, 1), 10, 60_000, 10_000),
}


def small(like: str, tmp_path: Path, train: int = 300, evaluation: int = 100) -> RawData:
    sizes = {"train_size": train, "eval_size": evaluation}
    return Synthetic(**section(like=like, **sizes)).read(tmp_path)


@pytest.mark.parametrize(("like", "facts"), TWINS.items())
def test_synthetic_twin_has_the_sizes_of_its_source(like: str, facts: ImageFacts) -> None:
    assert Synthetic(**section(like=like)).facts() == facts


@pytest.mark.parametrize("like", TWINS)
def test_sizes_can_be_set(tmp_path: Path, like: str) -> None:
    data = small(like, tmp_path, train=7, evaluation=3)

    height, width, channels = TWINS[like].image
    assert data.train.columns["image"].shape == (7, height, width, channels)
    assert data.eval.columns["image"].shape == (3, height, width, channels)
    assert data.train.columns["image"].dtype == np.uint8
    assert data.train.columns["label"].dtype == np.int32
    assert len(data.classes) == TWINS[like].classes


def test_full_synthetic_twin_is_read(tmp_path: Path) -> None:
    data = Synthetic(**section(like="digits")).read(tmp_path)

    assert (len(data.train), len(data.eval)) == (1_438, 359)


def test_images_are_reproducible(tmp_path: Path) -> None:
    first, second = small("mnist", tmp_path), small("mnist", tmp_path)

    for name in ("image", "label"):
        np.testing.assert_array_equal(first.train.columns[name][:], second.train.columns[name][:])


def test_training_and_evaluation_images_are_disjoint(tmp_path: Path) -> None:
    data = small("mnist", tmp_path)

    seen = {image.tobytes() for image in data.train.columns["image"][:]}
    assert len(seen) == 300
    assert seen.isdisjoint(image.tobytes() for image in data.eval.columns["image"][:])


def test_misspelt_name_in_the_facts_of_a_source_is_raised() -> None:
    class Sized(Digits):
        width: int

        def facts(self) -> ImageFacts:
            return ImageFacts((8, self.width, 1), 10, 1, 1)

    class Misspelt(Digits):
        def facts(self) -> ImageFacts:
            return ImageFacts((8, self.widht, 1), 10, 1, 1)  # type: ignore[attr-defined]

    assert find_class_facts(Sized) is None
    with pytest.raises(AttributeError, match="widht"):
        find_class_facts(Misspelt)


def test_classes_are_balanced(tmp_path: Path) -> None:
    labels = small("mnist", tmp_path, train=305).train.columns["label"][:]

    assert sorted(np.bincount(labels, minlength=10).tolist()) == [30] * 5 + [31] * 5
    assert labels[:10].tolist() != sorted(labels[:10].tolist())


@pytest.mark.parametrize("like", ["digits", "mnist", "cifar10"])
def test_classes_can_be_distinguished(tmp_path: Path, like: str) -> None:
    data = small(like, tmp_path)
    images, labels = data.train.columns["image"][:].astype(float), data.train.columns["label"][:]
    means = np.stack([images[labels == label].mean(axis=0) for label in range(10)])

    distances = [
        ((means - image) ** 2).sum(axis=(1, 2, 3)) for image in data.eval.columns["image"][:]
    ]

    assert (np.argmin(distances, axis=1) == data.eval.columns["label"][:]).mean() > 0.95


def test_dataset_section_becomes_its_twin(tmp_path: Path) -> None:
    mnist = section(root=tmp_path / "nowhere", mirrors=["https://example.org"])

    source = Synthetic(**{**mnist, "name": "synthetic", "like": "mnist"})

    assert source.facts() == TWINS["mnist"]


@pytest.mark.parametrize("like", ["mnits", "numpy", "image_folder", "synthetic"])
def test_twin_of_unknown_sizes_is_refused(like: str) -> None:
    known = ", ".join(TWINS)

    with pytest.raises(ValidationError, match=f"{like}: must be a source .* known: {known}"):
        Synthetic(**section(like=like))


def test_like_is_required() -> None:
    with pytest.raises(ValidationError, match=r"like\n  Field required"):
        Synthetic(**section())
