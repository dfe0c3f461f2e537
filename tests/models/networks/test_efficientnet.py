from __future__ import annotations

import pytest

from tests.models.build import conf_model, count, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "depth", "expected"), [(1.1, 1.2, 9_109_994), (1.2, 1.4, 12_233_232)]
)
def test_b2_and_b3_have_as_many_parameters_as_torchvisions(
    width: float, depth: float, expected: int
) -> None:
    module = conf_model("efficientnet_b0", width=width, depth=depth).build(1000, "float32")
    assert count(shapes(module, (64, 64, 3))) == expected


def test_depth_adds_blocks_to_every_stage() -> None:
    def blocks(name: str) -> int:
        return sum(layer.scope is not None for layer in conf_model(name).layers_for(10))

    assert (blocks("efficientnet_b0"), blocks("efficientnet_b1")) == (16, 23)
