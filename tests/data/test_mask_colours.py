from __future__ import annotations

import numpy as np

from pipeline.data.mask_colours import IGNORED_COLOUR, draw_masks, make_class_colours


def test_class_colors_are_distinct() -> None:
    colours = make_class_colours(40)
    assert colours[0].tolist() == [0, 0, 0]
    assert len({tuple(colour) for colour in colours.tolist()}) == 40


def test_mask_is_drawn_by_class() -> None:
    mask = np.array([[0, 1, 2], [255, 1, 0]])
    picture = draw_masks(mask, 3)
    np.testing.assert_array_equal(picture[0], make_class_colours(3))
    assert tuple(picture[1, 0]) == IGNORED_COLOUR
