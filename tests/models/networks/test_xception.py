from __future__ import annotations

import pytest

from tests.models.build import conf_model, positions


@pytest.mark.slow
def test_flows_give_the_positions_and_features_of_the_paper() -> None:
    seen = positions(conf_model("xception").build(1000, "float32"), (299, 299, 3))
    assert seen["conv_1"] == (147, 147, 64)
    assert seen["entry0"] == (74, 74, 128)
    assert seen["entry2"] == (19, 19, 728)
    assert seen["middle7"] == (19, 19, 728)
    assert seen["exit"] == (10, 10, 1024)
    assert seen["batch_norm_3"] == (10, 10, 2048)


def test_convolutions_of_blocks_are_depthwise_and_pointwise_in_turn() -> None:
    layers = {layer.scope: layer for layer in conf_model("xception").layers_for(10) if layer.scope}
    convs = [layer for layer in layers["middle0"].body if layer.name == "conv"]
    assert [(conv.kernel, conv.groups) for conv in convs] == [(3, 728), (1, 1)] * 3
