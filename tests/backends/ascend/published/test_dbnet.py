from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pipeline.backends.ascend.published.dbnet import dbnet
from tests.models.build import conf_model, count, initialise, positions, random, shapes

WIDTHS = {
    "resnet18": (64, 128, 256, 512),
    "resnet50": (256, 512, 1024, 2048),
    "mobilenet_v3_large": (24, 40, 112, 960),
}
HEADLESS = {
    "resnet18": 11_689_512 - 513 * 1000,
    "resnet50": 25_557_032 - 2049 * 1000,
    "mobilenet_v3_large": 5_483_032 - 961 * 1280 - 1281 * 1000,
}
"""Parameters of torchvision's networks without their classifiers."""


@pytest.mark.slow
@pytest.mark.parametrize("backbone", WIDTHS)
def test_parameter_count_is_backbone_pyramid_and_heads(backbone: Any) -> None:
    pyramid = 256 * sum(WIDTHS[backbone]) + 4 * 9 * 256 * 64
    head = 9 * 256 * 64 + 2 * 64 + (4 * 64 * 64 + 64) + 2 * 64 + (4 * 64 + 1)
    expected = HEADLESS[backbone] + pyramid + 2 * head
    assert count(shapes(dbnet(conf_model(backbone)), (640, 640, 3))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("backbone", WIDTHS)
def test_pyramid_reads_every_scale_and_maps_have_image_size(backbone: Any) -> None:
    seen = positions(dbnet(conf_model(backbone)), (640, 640, 3))
    assert {stride: seen[f"lateral{stride}"] for stride in (4, 8, 16, 32)} == {
        4: (160, 160, 256),
        8: (80, 80, 256),
        16: (40, 40, 256),
        32: (20, 20, 256),
    }
    assert seen["smooth32"] == (160, 160, 64)
    assert seen["probability"] == (640, 640, 1)
    assert seen["__call__"] == (640, 640, 3)


@pytest.mark.slow
def test_binary_map_is_a_steep_step_at_the_threshold() -> None:
    changes: dict[str, Any] = {"blocks": [1] * 4, "widths": [4] * 4, "stem": "imagenet"}
    module = dbnet(conf_model("resnet20", **changes), features=8)
    images = random(2, 32, 64, 3)
    variables = initialise(module, images)
    apply = jax.jit(lambda v, x: module.apply(v, x, train=True, mutable=["batch_stats"])[0])
    maps = np.asarray(apply(variables, images), np.float64)
    assert maps.shape == (2, 32, 64, 3)
    probability, threshold, binary = np.moveaxis(maps, -1, 0)
    assert ((probability > 0) & (probability < 1) & (threshold > 0) & (threshold < 1)).all()
    np.testing.assert_allclose(
        binary, 1 / (1 + np.exp(-50 * (probability - threshold))), rtol=1e-3, atol=1e-6
    )


def test_images_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 640, 600, 3\): must be .* multiples of 32"):
        shapes(dbnet(conf_model("resnet18")), (640, 600, 3))
