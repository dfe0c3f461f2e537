from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.sources import digits
from pipeline.data.sources.digits import DigitHalves, Digits
from tests.data.section import section

# The first sample of the UCI test file, a zero, as its documentation prints it.
FIRST_DIGIT = """
    0  0  5 13  9  1  0  0
    0  0 13 15 10 15  5  0
    0  3 15  2  0 11  8  0
    0  4 12  0  0  8  8  0
    0  5  8  0  0  9  8  0
    0  4 11  0  1 12  7  0
    0  2 14  5 10 12  0  0
    0  0  6 13 10  0  0  0
"""


def test_digits_have_known_sizes_and_values(tmp_path: Path) -> None:
    data = Digits(**section()).read(tmp_path)
    train, evaluation = data.train.columns, data.eval.columns

    assert train["image"].shape == (1_438, 8, 8, 1)
    assert evaluation["image"].shape == (359, 8, 8, 1)
    assert train["image"].dtype == np.uint8
    assert evaluation["label"].dtype == np.int32
    first = np.array(FIRST_DIGIT.split(), int).reshape(8, 8)
    np.testing.assert_array_equal(train["image"][:1][0, :, :, 0], first)
    assert max(int(split["image"][:].max()) for split in (train, evaluation)) == 16
    labels = np.concatenate([train["label"][:], evaluation["label"][:]])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.classes == tuple("0123456789")


def test_every_fifth_digit_is_held_out(tmp_path: Path) -> None:
    data = Digits(**section()).read(tmp_path)

    # The file begins 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9.
    assert data.train.columns["label"][:8].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert data.eval.columns["label"][:4].tolist() == [4, 9, 4, 9]


def test_facts_match_the_data(tmp_path: Path) -> None:
    source = Digits(**section())
    data, facts = source.read(tmp_path), source.facts()

    assert (len(data.train), len(data.eval)) == (facts.train_size, facts.eval_size)
    assert data.train.specs()["image"].shape == facts.image
    assert len(data.classes) == facts.classes


def test_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="must be null; the digits are shipped"):
        Digits(**section(root=tmp_path))


def test_attribution_is_beside_the_data() -> None:
    text = Path(digits.__file__).with_name("digits.txt").read_text(encoding="utf-8")

    for part in ("E. Alpaydin, C. Kaynak", "10.24432/C50P49", "CC BY 4.0"):
        assert part in text


def test_digit_halves_are_the_upper_image_and_sums_of_lower_rows(tmp_path: Path) -> None:
    data = DigitHalves(**section()).read(tmp_path)
    whole = Digits(**section()).read(tmp_path)
    first = np.array(FIRST_DIGIT.split(), int).reshape(8, 8)

    columns = data.train.columns
    assert list(columns) == ["image", "features", "label"]
    assert data.inputs == ("image",)
    np.testing.assert_array_equal(columns["image"][:1][0, :, :, 0], first[:4])
    assert columns["features"][:1].tolist() == [[30, 35, 43, 29]]
    assert (columns["image"].dtype, columns["features"].dtype) == (np.uint8, np.float32)
    for split in ("train", "eval"):
        halves, digits_of_split = getattr(data, split), getattr(whole, split)
        assert len(halves) == len(digits_of_split)
        np.testing.assert_array_equal(halves.columns["label"], digits_of_split.columns["label"])
