from __future__ import annotations

import pytest

from tests.models.build import conf_model, count, positions, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("growth", "blocks", "expected"),
    [(32, [6, 12, 48, 32], 20_013_928), (48, [6, 12, 36, 24], 28_681_000)],
)
def test_densenet201_and_161_have_as_many_parameters_as_torchvisions(
    growth: int, blocks: list[int], expected: int
) -> None:
    module = conf_model("densenet121", growth=growth, blocks=blocks).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.slow
def test_blocks_grow_and_transitions_halve() -> None:
    seen = positions(conf_model("densenet121").build(10, "float32"), (224, 224, 3))
    assert seen["block1_layer0"] == (56, 56, 96)
    assert seen["block1_layer5"] == (56, 56, 256)
    assert seen["conv_1"] == (56, 56, 128)
    assert seen["block2_layer11"] == (28, 28, 512)
    assert seen["block4_layer15"] == (7, 7, 1024)
