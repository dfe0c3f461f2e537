"""Networks without branches: the multilayer perceptron, LeNet-5, AlexNet and VGG."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, initialise, parameters, positions, random, shapes

IMAGE = (32, 32, 1)

WRITTEN = [
    {"name": "conv", "features": 6, "kernel": 5, "padding": "valid"},
    "relu",
    {"name": "max_pool", "kernel": 2},
    {"name": "conv", "features": 16, "kernel": 5, "padding": "valid"},
    "relu",
    {"name": "max_pool", "kernel": 2},
    "flatten",
    {"name": "dense", "features": 120},
    "relu",
    {"name": "dense", "features": 84},
    "relu",
    {"name": "dense", "features": "$classes"},
]


def test_lenet5_has_the_parameters_of_the_tutorials() -> None:
    variables = shapes(conf_model("lenet5").build(10, "float32"), IMAGE)
    assert {path: leaf.shape for path, leaf in parameters(variables).items()} == {
        "conv_0/kernel": (5, 5, 1, 6),
        "conv_1/kernel": (5, 5, 6, 16),
        "dense_0/kernel": (400, 120),
        "dense_0/bias": (120,),
        "dense_1/kernel": (120, 84),
        "dense_1/bias": (84,),
        "dense_2/kernel": (84, 10),
        "dense_2/bias": (10,),
    }
    assert count(variables) == 61_684


@pytest.mark.slow
def test_lenet5_initialiser_is_truncated_normal_with_sigma_002() -> None:
    module = conf_model("lenet5").build(10, "float32")
    variables = initialise(module, np.zeros((1, *IMAGE)))
    for values in parameters(variables).values():
        assert 0 < np.abs(values).max() <= 0.04
    assert np.std(parameters(variables)["dense_0/kernel"]) == pytest.approx(0.0176, rel=0.02)


def test_lenet5_as_a_layer_list_is_the_same_network() -> None:
    python = conf_model("lenet5")
    written = conf_model("layers", blocks={}, layers=WRITTEN, init=python.init)
    assert written.layers_for(10) == python.layers_for(10)
    modules = (python.build(10, "float32"), written.build(10, "float32"))
    assert shapes(modules[0], IMAGE) == shapes(modules[1], IMAGE)


def test_lenet5_refuses_too_small_images() -> None:
    module = conf_model("lenet5").build(10, "float32")
    with pytest.raises(
        ValueError, match=r"conv_1: a window of 5x5 does not fit into shape \(1, 4, 4, 6"
    ):
        shapes(module, (12, 12, 1))


def test_mlp_has_two_hidden_layers_of_512() -> None:
    variables = shapes(conf_model("mlp").build(10, "float32"), (28, 28, 1))
    kernels = [leaf.shape for path, leaf in parameters(variables).items() if "kernel" in path]
    assert kernels == [(784, 512), (512, 512), (512, 10)]
    assert count(variables) == 785 * 512 + 513 * 512 + 513 * 10


@pytest.mark.slow
def test_mlp_without_hidden_layers_is_linear() -> None:
    module, images = conf_model("mlp", hidden=[]).build(3, "float32"), random(2, 2, 2, 1)
    variables = initialise(module, images)
    dense = variables["params"]["dense_0"]
    expected = images.reshape(2, 4) @ dense["kernel"] + dense["bias"]
    np.testing.assert_allclose(module.apply(variables, images, train=False), expected, rtol=1e-5)


def test_mlp_refuses_a_layer_without_features() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        conf_model("mlp", hidden=[512, 0])


@pytest.mark.parametrize("size", [224, 227])
def test_alexnet_dense_input_is_6x6_for_both_image_sizes(size: int) -> None:
    module = conf_model("alexnet").build(10, "float32")
    shape = parameters(shapes(module, (size, size, 3)))["dense_0/kernel"].shape
    assert shape == (6 * 6 * 256, 4096)


def test_alexnet_shapes_match_the_model_zoo_at_227() -> None:
    seen = positions(conf_model("alexnet").build(10, "float32"), (227, 227, 3))
    assert [seen[f"conv_{index}"] for index in range(5)] == [
        (57, 57, 64),
        (28, 28, 128),
        (13, 13, 192),
        (13, 13, 256),
        (13, 13, 256),
    ]


@pytest.mark.parametrize(
    ("convs", "expected"), [([1, 1, 2, 2, 2], 132_863_336), ([2, 2, 2, 2, 2], 133_047_848)]
)
def test_vgg11_and_vgg13_parameter_counts_match_torchvision(
    convs: list[int], expected: int
) -> None:
    module = conf_model("vgg16", convs=convs).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.parametrize(("convs", "widths"), [([2, 2], [64]), ([], [])])
def test_vgg_stages_need_convolutions_and_widths(convs: list[int], widths: list[int]) -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("vgg16", convs=convs, widths=widths)
