from __future__ import annotations

import pytest

from tests.models.build import conf_model, count, positions, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "expected"), [(0.25, 475_544 - 5_472), (0.5, 1_342_536 - 10_944)]
)
def test_narrow_ones_have_as_many_trainable_parameters_as_those_of_keras(
    width: float, expected: int
) -> None:
    module = conf_model("mobilenet_v1", width=width).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


def test_every_other_convolution_is_depthwise() -> None:
    convs = [layer for layer in conf_model("mobilenet_v1").layers_for(10) if layer.name == "conv"]
    depthwise = convs[1::2]
    assert [conv.groups for conv in depthwise] == [conv.features for conv in depthwise]
    assert [(conv.kernel, conv.groups) for conv in convs[2::2]] == [(1, 1)] * 13


def test_images_shrink_32_times() -> None:
    seen = positions(conf_model("mobilenet_v1").build(10, "float32"), (224, 224, 3))
    assert seen["conv_26"] == (7, 7, 1024)
