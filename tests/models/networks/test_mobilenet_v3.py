from __future__ import annotations

import pytest

from tests.models.build import conf_model, positions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks", "gated", "last"),
    [
        ("mobilenet_v3_large", 15, [3, 4, 5, 10, 11, 12, 13, 14], (7, 7, 960)),
        ("mobilenet_v3_small", 11, [0, 3, 4, 5, 6, 7, 8, 9, 10], (7, 7, 576)),
    ],
)
def test_sizes_differ_in_blocks_and_gates(
    name: str, blocks: int, gated: list[int], last: tuple[int, ...]
) -> None:
    model = conf_model(name)
    bodies = [layer.body for layer in model.layers_for(10) if layer.scope]
    assert len(bodies) == blocks
    found = [i for i, body in enumerate(bodies) if any(layer.name == "gate" for layer in body)]
    assert found == gated
    assert positions(model.build(10, "float32"), (224, 224, 3))["conv_1"] == last


def test_the_first_block_does_not_expand() -> None:
    first, second, *_ = (
        layer for layer in conf_model("mobilenet_v3_large").layers_for(10) if layer.scope
    )
    assert [layer.kernel for layer in first.body if layer.name == "conv"] == [3, 1]
    assert [layer.kernel for layer in second.body if layer.name == "conv"] == [1, 3, 1]
