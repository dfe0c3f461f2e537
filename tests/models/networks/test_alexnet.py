from __future__ import annotations

import pytest

from tests.models.build import conf_model, parameters, positions, shapes


@pytest.mark.parametrize("size", [224, 227])
def test_the_dense_layers_read_6x6_positions_of_both_sizes_of_images(size: int) -> None:
    module = conf_model("alexnet").build(10, "float32")
    shape = parameters(shapes(module, (size, size, 3)))["dense_0/kernel"].shape
    assert shape == (6 * 6 * 256, 4096)


def test_images_of_227_shrink_as_in_the_zoo() -> None:
    seen = positions(conf_model("alexnet").build(10, "float32"), (227, 227, 3))
    assert [seen[f"conv_{index}"] for index in range(5)] == [
        (57, 57, 64),
        (28, 28, 128),
        (13, 13, 192),
        (13, 13, 256),
        (13, 13, 256),
    ]
