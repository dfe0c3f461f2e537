from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, initialise, parameters, random, shapes


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
