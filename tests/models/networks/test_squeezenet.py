from __future__ import annotations

import pytest

from tests.models.build import conf_model, parameters, positions, shapes


def fires(name: str) -> list[str]:
    """The kind of layer of each fire module."""
    layers = conf_model(name).layers_for(10)
    return [layer.name for layer in layers if layer.scope]


def test_every_other_fire_module_has_a_bypass() -> None:
    assert fires("squeezenet_residual") == ["sequence", "residual"] * 4
    assert fires("squeezenet1_0") == ["sequence"] * 8


@pytest.mark.slow
def test_versions_pool_at_different_places() -> None:
    def sizes(name: str) -> list[int]:
        seen = positions(conf_model(name).build(10, "float32"), (227, 227, 3))
        return [seen[f"fire{number}"][0] for number in range(2, 10)]

    assert sizes("squeezenet1_0") == [55] * 3 + [27] * 4 + [13]
    assert sizes("squeezenet1_1") == [56] * 2 + [27] * 2 + [13] * 4


def test_a_fire_module_expands_to_eight_times_what_it_squeezes_to() -> None:
    module = conf_model("squeezenet1_0").build(10, "float32")
    kernels = parameters(shapes(module, (227, 227, 3)))
    assert kernels["fire9/conv_0/kernel"].shape == (1, 1, 512, 64)
    assert kernels["fire9/branches_0/branch_0/conv_0/kernel"].shape == (1, 1, 64, 256)
    assert kernels["fire9/branches_0/branch_1/conv_0/kernel"].shape == (3, 3, 64, 256)
