from __future__ import annotations

import numpy as np
import pytest

from tests.models.build import conf_model, count, initialise, parameters, shapes

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
def test_lenet5_draws_weights_and_biases_from_a_truncated_normal_of_002() -> None:
    module = conf_model("lenet5").build(10, "float32")
    variables = initialise(module, np.zeros((1, *IMAGE)))
    for values in parameters(variables).values():
        assert 0 < np.abs(values).max() <= 0.04
    assert np.std(parameters(variables)["dense_0/kernel"]) == pytest.approx(0.0176, rel=0.02)


def test_lenet5_written_as_layers_is_the_same_network() -> None:
    python = conf_model("lenet5")
    written = conf_model("layers", blocks={}, layers=WRITTEN, init=python.init)
    assert written.layers_for(10) == python.layers_for(10)
    modules = (python.build(10, "float32"), written.build(10, "float32"))
    assert shapes(modules[0], IMAGE) == shapes(modules[1], IMAGE)


def test_lenet5_refuses_images_that_it_shrinks_to_nothing() -> None:
    module = conf_model("lenet5").build(10, "float32")
    with pytest.raises(
        ValueError, match=r"conv_1: a window of 5x5 does not fit into shape \(1, 4, 4, 6"
    ):
        shapes(module, (12, 12, 1))
