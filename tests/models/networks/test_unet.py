from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, initialise, parameters, positions, random, shapes

SMALL = {"widths": [3, 4, 5]}


def test_depths_halve_the_image_and_come_back_to_its_size() -> None:
    seen = positions(conf_model("unet").build(7, "float32"), (32, 48, 3))
    deepest = "below0/branch_1/below1/branch_1/below2/branch_1/below3"
    assert seen["conv_1"] == (32, 48, 64)
    assert seen[f"{deepest}/branch_1/conv_1"] == (2, 3, 1024)
    assert seen[deepest] == (4, 6, 2 * 512)
    assert seen["conv_4"] == (32, 48, 7)


@pytest.mark.slow
def test_a_pixel_far_away_is_seen_through_the_depths_alone() -> None:
    module = conf_model("unet", **SMALL, batch_norm=False).build(2, "float32")
    images = random(1, 32, 32, 1)
    variables = initialise(module, images)
    changed = images.copy()
    changed[0, 0, 0] += 1
    before, after = (module.apply(variables, x, train=False) for x in (images, changed))
    rows = np.flatnonzero(np.abs(after - before).max((0, 2, 3)) > 0)
    # Four 3x3 convolutions in the size of the image would reach 4 pixels.
    assert 12 < rows.max() < 31


def test_without_batch_norm_convolutions_have_biases() -> None:
    paths = parameters(
        shapes(conf_model("unet", batch_norm=False).build(2, "float32"), (32, 32, 3))
    )
    assert "conv_0/bias" in paths
    assert not any("batch_norm" in path for path in paths)


def test_sides_that_do_not_halve_often_enough_are_refused() -> None:
    with pytest.raises(ValueError, match="below2: the branches return shapes"):
        shapes(conf_model("unet").build(2, "float32"), (36, 32, 3))


def test_one_depth_is_no_unet() -> None:
    with pytest.raises(ValidationError, match="widths"):
        conf_model("unet", widths=[64])
