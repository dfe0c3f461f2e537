"""Images and masks of the same names: pairs, classes, sizes, and what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData, name_sample
from pipeline.data.sources.image_masks import ImageMasks
from tests.data.section import section

RNG = np.random.default_rng(3)
PIXELS = RNG.integers(0, 256, (10, 6, 5, 3), np.uint8)
MASKS = RNG.integers(0, 3, (10, 6, 5), np.uint8)
MASKS[:, 0] = 255


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write(folder: Path, numbers: range = range(10)) -> Path:
    for number in numbers:
        save(folder / "images" / f"{number}.png", PIXELS[number])
        save(folder / "masks" / f"{number}.png", MASKS[number])
    return folder


def read(root: Path, **fields: Any) -> RawData:
    wanted = {"ignore_index": 255, **fields}
    return ImageMasks(**section(root=root, **wanted)).read(root / "cache")


def test_folders_of_images_and_masks_become_splits(tmp_path: Path) -> None:
    write(tmp_path / "train", range(7))
    write(tmp_path / "val", range(7, 10))
    data = read(tmp_path)
    assert data.classes == ("0", "1", "2")
    for split, rows in ((data.train, slice(0, 7)), (data.eval, slice(7, 10))):
        np.testing.assert_array_equal(split.columns["image"][:], PIXELS[rows])
        np.testing.assert_array_equal(split.columns["label"][:], MASKS[rows])
        assert split.columns["label"].dtype == np.uint8


def test_class_of_evaluation_masks_alone_is_refused_or_noted(tmp_path: Path) -> None:
    write(tmp_path / "train", range(7))
    write(tmp_path / "val", range(7, 10))
    save(tmp_path / "val" / "masks" / "8.png", np.full_like(MASKS[8], 5))
    with pytest.raises(DataError, match=rf"^{tmp_path}: the evaluation split has the label 5, and"):
        read(tmp_path)
    assert len(read(tmp_path, classes=6).classes) == 6

    folder = write(tmp_path / "one")
    evaluated = Path(name_sample(read(folder, split=0.1).eval.columns["label"], 0))
    save(evaluated, np.full_like(MASKS[8], 5))
    data = read(folder, split=0.1)
    assert len(data.classes) == 6
    assert data.notes == ("only evaluation masks have the classes 5, which can't be learned",)


def test_split_holds_out_a_share(tmp_path: Path) -> None:
    data = read(write(tmp_path), split=0.3)
    assert (len(data.train), len(data.eval)) == (7, 3)
    for split in (data.train, data.eval):
        for image, mask in zip(split.columns["image"][:], split.columns["label"][:], strict=True):
            (number,) = np.flatnonzero((image == PIXELS).all(axis=(1, 2, 3)))
            np.testing.assert_array_equal(mask, MASKS[number])


def test_jpeg_images_palette_and_bit_masks_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "images" / "0.png").unlink()
    save(tmp_path / "images" / "0.jpg", PIXELS[0])
    indexed = Image.fromarray(MASKS[0] % 3)
    indexed.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    indexed.save(tmp_path / "masks" / "0.png")
    Image.fromarray(MASKS[1] == 1).save(tmp_path / "masks" / "1.png")
    data = read(tmp_path, split=0.1, classes=["sky", "sea", "land"])
    found = [np.asarray(m) for s in (data.train, data.eval) for m in s.columns["label"][:]]
    assert data.classes == ("sky", "sea", "land")
    assert any(np.array_equal(mask, MASKS[0] % 3) for mask in found)
    assert any(np.array_equal(mask, MASKS[1] == 1) for mask in found)


def test_masks_are_scaled_to_the_nearest_pixels(tmp_path: Path) -> None:
    data = read(write(tmp_path), split=0.3, image_size=[12, 10])
    assert data.train.columns["image"].shape[1:] == (12, 10, 3)
    assert set(np.unique(data.train.columns["label"][:])) == {0, 1, 2, 255}
    doubled = {mask.repeat(2, axis=0).repeat(2, axis=1).tobytes() for mask in MASKS}
    assert {mask.tobytes() for mask in data.train.columns["label"][:]} <= doubled


def test_images_of_several_sizes_are_ragged(tmp_path: Path) -> None:
    write(tmp_path)
    save(tmp_path / "images" / "big.png", np.zeros((9, 8, 3), np.uint8))
    save(tmp_path / "masks" / "big.png", np.ones((9, 8), np.uint8))
    data = read(tmp_path, split=0.3, buckets=[[9, 8]])
    columns = [split.columns["label"] for split in (data.train, data.eval)]
    sizes = {tuple(size) for column in columns for size in column.sizes.tolist()}  # type: ignore[attr-defined]
    assert sizes == {(6, 5), (9, 8)}
    assert {column.shape[1:] for column in columns} == sizes


def spoil(folder: Path, what: str) -> None:
    """Make a folder of images and masks wrong."""
    match what:
        case "no mask":
            (folder / "masks" / "4.png").unlink()
            (folder / "masks" / "7.png").unlink()
        case "mask in JPEG":
            (folder / "masks" / "4.png").unlink()
            save(folder / "masks" / "4.jpg", MASKS[4])
        case "one image":
            for file in folder.rglob("*.png"):
                if file.stem != "4":
                    file.unlink()
        case "masks in JPEG":
            for number in range(10):
                (folder / "masks" / f"{number}.png").unlink()
                save(folder / "masks" / f"{number}.jpg", MASKS[number])
        case "no image":
            (folder / "images" / "4.png").unlink()
        case "sizes":
            save(folder / "masks" / "4.png", MASKS[4, :5])
            save(folder / "masks" / "8.png", MASKS[8, :5])
        case "colours":
            save(folder / "masks" / "4.png", PIXELS[4])
        case "16 bits":
            save(folder / "masks" / "4.png", MASKS[4].astype(np.uint16) * 300)
        case "twice":
            save(folder / "images" / "4.bmp", PIXELS[4])
        case "no folder":
            (folder / "masks").rename(folder / "labels")
        case "empty":
            for file in (folder / "masks").iterdir():
                save(file, np.full((6, 5), 255, np.uint8))
        case "image sizes":
            save(folder / "images" / "4.png", PIXELS[4, :5])
            save(folder / "masks" / "4.png", MASKS[4, :5])
        case "link":
            (folder / "masks" / "4.png").rename(folder.parent / "out.png")
            os.symlink(folder.parent / "out.png", folder / "masks" / "4.png")
        case "damaged":
            (folder / "masks" / "4.png").write_bytes(b"not a mask")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no mask", r"images/4.png: has no mask of its name in .*masks; nor have 1 others"),
        (
            "mask in JPEG",
            r"images/4.png: has no mask of its name in .*masks; 4.jpg there isn't read, since "
            r"only PNG, BMP and TIFF keep the classes$",
        ),
        ("masks in JPEG", r"masks: holds no mask \(\.png, \.bmp, \.tif, \.tiff\)$"),
        ("one image", r"data/images: has 1 image; dataset.split needs at least 2"),
        ("no image", r"masks/4.png: has no image of its name in .*images$"),
        (
            "sizes",
            r"masks/4.png: is 5x5, and its image .*images/4.png 6x5; masks must have the size of "
            r"their images, but 2 of 10 don't",
        ),
        ("colours", r"masks/4.png: .* its pixels are RGB; pixels of a mask must be classes, one 8"),
        ("16 bits", r"masks/4.png: .* its pixels are I;16; pixels of a mask must be classes"),
        (
            "twice",
            r"images/4.(png|bmp): has the same name as .*images/4.(bmp|png) but for the suffix",
        ),
        ("no folder", r"data: has no folder masks; must hold images and their masks"),
        ("empty", r"masks/\d.png: this and all other training masks have only the value 255"),
        ("image sizes", r"4.png: is 5x5, but .*png is 6x5; set dataset.image_size=\[H,W\]"),
        ("link", r"masks/4.png: leads out of .*data, to .*out.png"),
        ("damaged", r"masks/4.png: can't be read as an image"),
    ],
)
def test_unfit_files_are_named(what: str, message: str, tmp_path: Path) -> None:
    spoil(write(tmp_path / "data"), what)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "data", split=0.001)


@pytest.mark.parametrize("what", ["colours", "16 bits", "damaged"])
def test_masks_are_checked_before_any_is_used(what: str, tmp_path: Path) -> None:
    spoil(write(tmp_path), what)
    with pytest.raises(DataError, match=r"masks/4.png: can't be read as an image"):
        read(tmp_path, split=0.001, classes=3)


def test_nested_masks_are_matched_to_nested_images(tmp_path: Path) -> None:
    write(tmp_path)
    for kind, values in (("images", PIXELS), ("masks", MASKS)):
        (tmp_path / kind / "deep").mkdir()
        save(tmp_path / kind / "deep" / "4.png", values[5])
    (tmp_path / "images" / "notes.txt").write_text("x")

    data = read(tmp_path, split=0.001)

    assert len(data.train) + len(data.eval) == len(PIXELS) + 1
    pairs = zip(*(data.train.columns[name].paths for name in ("image", "label")), strict=True)  # type: ignore[attr-defined]
    assert all(image.replace("images", "masks") == mask for image, mask in pairs)
    assert data.notes[0].startswith("left out: 1 file (1 of .txt), such as ")


def test_formats_of_images_and_masks_are_listed_apart(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "images" / "notes.txt").write_text("x")
    save(tmp_path / "masks" / "old.jpg", MASKS[0])
    image_note, mask_note = read(tmp_path, split=0.001).notes
    assert image_note.endswith("PNG, JPEG, BMP, GIF, WebP and TIFF in images are read")
    assert mask_note.endswith("masks/old.jpg; PNG, BMP and TIFF in masks are read")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"classes": 2},
            "masks/0.png: has pixels of the value 2; the values of 2 classes are 0 to 1, or 255, "
            "which is ignored",
        ),
        (
            {"classes": ["a", "b", "c"], "ignore_index": None},
            "masks/0.png: has pixels of the value 255; the values of 3 classes are 0 to 2",
        ),
    ],
)
def test_mask_values_without_class_are_named(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = read(write(tmp_path), split=0.001, split_seed=5, **fields)
    with pytest.raises(DataError, match=re.escape(message)):
        data.train.columns["label"][:]


def test_folder_without_splits_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must have the folders train .* dataset.split=0.2 holds"):
        read(write(tmp_path))
