from __future__ import annotations

from typing import Any

import jax
import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
    ],
)
def test_resnets_for_imagenet_have_as_many_parameters_as_torchvisions(
    name: str, expected: int
) -> None:
    module = conf_model(name).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"blocks": [3, 4, 23, 3], "groups": 32, "group_width": 8}, 88_791_336),
        ({"blocks": [3, 4, 23, 3], "squeeze": 16}, 49_326_872),
    ],
)
def test_resnext101_and_se_resnet101_have_as_many_parameters_as_others_count(
    changes: dict[str, Any], expected: int
) -> None:
    module = conf_model("resnet50", **changes).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


def test_squeeze_and_excitation_is_the_last_of_every_body() -> None:
    layers = conf_model("se_resnet18").layers_for(10)
    assert {layer.body[-1].name for layer in layers if layer.name == "residual"} == {"gate"}


@pytest.mark.parametrize("changes", [{"groups": 2}, {"group_width": 128}])
def test_basic_blocks_have_no_groups(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match="are for bottlenecks; must be 1 and 64 for basic blocks"
    ):
        conf_model("resnet18", **changes)


def test_resnet20_has_19_convolutions_and_two_shortcuts() -> None:
    variables = shapes(conf_model("resnet20").build(10, "float32"), (32, 32, 3))
    body = 432 + 6 * 9 * 16 * 16 + 9 * (16 * 32 + 32 * 64) + 5 * 9 * (32 * 32 + 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    shortcuts = 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    assert count(variables) == body + norms + shortcuts + 65 * 10 == 272_474


def tiny(block: str, **changes: Any) -> Any:
    sizes = {"blocks": [2, 1], "widths": [4, 8], "block": block, "stem": "cifar"}
    return conf_model("resnet20", **{**sizes, **changes})


def strided(layers: Any) -> list[tuple[int, int]]:
    """Kernel and stride of the convolutions in layers that move by more than one."""
    return [
        (layer.kernel, layer.stride)
        for layer in layers
        if layer.name == "conv" and layer.stride != 1
    ]


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_the_first_block_of_later_stages_halves_the_image_in_its_3x3(block: str) -> None:
    layers = tiny(block).layers_for(10)
    residuals = {layer.scope: layer for layer in layers if layer.name == "residual"}
    assert list(residuals) == ["stage1_block0", "stage1_block1", "stage2_block0"]
    assert strided(residuals["stage1_block0"].body) == []
    assert strided(residuals["stage2_block0"].body) == [(3, 2)]
    assert strided(residuals["stage2_block0"].shortcut) == [(1, 2)]


@pytest.mark.parametrize(("block", "first"), [("basic", 0), ("bottleneck", 2)])
def test_shortcuts_compute_only_where_the_shape_changes(block: str, first: int) -> None:
    residuals = [layer for layer in tiny(block).layers_for(10) if layer.name == "residual"]
    assert [len(residual.shortcut) for residual in residuals] == [first, 0, 2]


@pytest.mark.slow
def test_stems_differ_in_how_much_they_shrink() -> None:
    def positions(stem: str) -> Any:
        module = tiny("basic", stem=stem).build(10, "float32")
        _, seen = jax.eval_shape(
            lambda images: module.init_with_output(
                jax.random.key(0), images, train=False, capture_intermediates=True
            ),
            jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"),
        )
        return seen["intermediates"]["stage1_block0"]["__call__"][0].shape

    assert positions("cifar") == (1, 32, 32, 4)
    assert positions("imagenet") == (1, 8, 8, 4)


@pytest.mark.parametrize(("zero_init_last", "last"), [(True, 0.0), (False, 1.0)])
def test_zero_init_last_silences_the_last_norm_of_every_block(
    zero_init_last: bool, last: float
) -> None:
    layers = tiny("bottleneck", zero_init_last=zero_init_last).layers_for(10)
    for residual in (layer for layer in layers if layer.name == "residual"):
        norms = [layer.scale_init for layer in residual.body if layer.name == "batch_norm"]
        assert norms == [1.0, 1.0, last]


@pytest.mark.parametrize(("blocks", "widths"), [([2, 2], [16]), ([], [])])
def test_stages_need_blocks_and_widths(blocks: list[int], widths: list[int]) -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("resnet20", blocks=blocks, widths=widths)
