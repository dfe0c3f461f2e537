from __future__ import annotations

import pytest

from tests.models.build import conf_model, positions


@pytest.mark.slow
def test_modules_give_the_positions_and_features_of_the_paper() -> None:
    seen = positions(conf_model("googlenet").build(1000, "float32"), (224, 224, 3))
    modules = {path: shape for path, shape in seen.items() if "/" not in path and "incep" in path}
    assert modules == {
        "inception3a": (28, 28, 256),
        "inception3b": (28, 28, 480),
        "inception4a": (14, 14, 512),
        "inception4b": (14, 14, 512),
        "inception4c": (14, 14, 512),
        "inception4d": (14, 14, 528),
        "inception4e": (14, 14, 832),
        "inception5a": (7, 7, 832),
        "inception5b": (7, 7, 1024),
    }


@pytest.mark.slow
def test_width_scales_every_convolution() -> None:
    seen = positions(conf_model("googlenet", width=0.5).build(10, "float32"), (64, 64, 3))
    assert seen["conv_0"][-1] == 32
    assert seen["inception5b"][-1] == 512
