"""Image files: turn_upright pixels, masks with a palette, and files that are cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from pipeline.data.image_file import (
    FORMATS,
    UNREADABLE_IMAGE,
    make_mask_image,
    open_image,
    read_pixels,
    read_upright_size,
    require_bytes,
    require_complete,
)

PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
UPRIGHT = {
    1: PIXELS,
    2: PIXELS[:, ::-1],
    3: PIXELS[::-1, ::-1],
    4: PIXELS[::-1],
    5: PIXELS.transpose(1, 0, 2),
    6: np.rot90(PIXELS, -1),
    7: PIXELS[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(PIXELS),
}
"""The image as EXIF 2.32 defines each orientation."""


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_are_rotated_by_exif_orientation(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(PIXELS).save(tmp_path / "image.png", exif=exif)
    with open_image(tmp_path / "image.png", FORMATS) as image:
        height, width = read_upright_size(image)
        np.testing.assert_array_equal(read_pixels(image, height, width), UPRIGHT[orientation])


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_of_more_than_16_bits_are_refused(mode: str) -> None:
    require_bytes(Image.new("L", (2, 2)))
    require_bytes(Image.new("I;16", (2, 2)))
    with pytest.raises(ValueError, match=f"its pixels are {mode}, not 8 or 16 bits per channel"):
        require_bytes(Image.new(mode, (2, 2)))


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("is_big_endian", [False, True])
def test_upper_8_of_16_bits_are_read(tmp_path: Path, suffix: str, is_big_endian: bool) -> None:
    values = np.array([[0, 255, 256, 4095, 32768, 65535]], np.uint16)
    path = tmp_path / f"image.{suffix}"
    content = values.astype(">u2" if is_big_endian else "<u2").tobytes()
    mode = "I;16B" if is_big_endian and suffix == "tif" else "I;16"
    content = content if mode == "I;16B" else values.tobytes()
    Image.frombytes(mode, (6, 1), content).save(path)
    with open_image(path, FORMATS) as image:
        assert read_pixels(image, 1, 6, "L").tolist() == [[0, 0, 1, 15, 128, 255]]


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_tiff_is_turned_once(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(PIXELS).save(tmp_path / "image.tif", exif=exif)
    with open_image(tmp_path / "image.tif", FORMATS) as image:
        height, width = read_upright_size(image)
        np.testing.assert_array_equal(read_pixels(image, height, width), UPRIGHT[orientation])


@pytest.mark.medium
def test_image_with_too_many_pixels_is_refused(tmp_path: Path) -> None:
    Image.new("1", (2**13 + 1, 2**13)).save(tmp_path / "wide.png")
    with (
        pytest.raises(ValueError, match="it has 8,193 x 8,192 pixels; at most 67,108,864"),
        open_image(tmp_path / "wide.png", FORMATS),
    ):
        pass


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "webp", "tif"])
def test_truncated_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"image.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(path)
    checked: list[object] = []
    require_complete(path, FORMATS, checked.append)
    assert len(checked) == 1
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UNREADABLE_IMAGE):
        require_complete(path, FORMATS, checked.append)


def test_mask_is_stored_by_class() -> None:
    mask = np.array([[0, 1, 2], [255, 1, 0]])
    image = make_mask_image(mask, 3, (6, 4))
    assert image.size == (6, 4)
    np.testing.assert_array_equal(np.asarray(image), mask.repeat(2, axis=0).repeat(2, axis=1))
