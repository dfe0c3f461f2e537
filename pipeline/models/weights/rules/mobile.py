"""Names of small networks: MobileNets, EfficientNet, ShuffleNet and SqueezeNet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.models.weights.rules.residual import make_squeeze_rules
from pipeline.models.weights.rules.syntax import LayerRules


def _number_blocks(blocks: Sequence[int], first: int, stage: int) -> Iterator[tuple[int, str]]:
    """Yield each block's number in the file, from `first` on, and its scope, from `stage` on."""
    for number, count in enumerate(blocks, start=stage):
        for block in range(count):
            yield first, f"stage{number}_block{block}"
            first += 1


def _make_timm_block(
    block: str, scope: str, convs: tuple[str, ...] = ("pw", "dw", "pwl")
) -> LayerRules:
    """Return rules for timm's inverted residual blocks, with convolutions of these names."""
    return (
        *((rf"{block}conv_{conv}", f"{scope}/conv_{n}") for n, conv in enumerate(convs)),
        *((rf"{block}bn{n + 1}", f"{scope}/batch_norm_{n}") for n in range(len(convs))),
        *make_squeeze_rules(rf"{block}se\.", scope),
    )


_FIRST = ("dw", "pw")
"""Convolutions of a block that begins with the depthwise convolution."""
_TIMM_ENDS: LayerRules = (
    (r"conv_stem|bn1", "{kind}_0"),
    (r"conv_head|bn2", "{kind}_1"),
    (r"classifier", "dense_0"),
)

_V1_STAGES = (1, 2, 2, 6, 2)


def _list_mobilenet_v1() -> Iterator[tuple[str, str]]:
    yield r"conv_stem|bn1", "{kind}_0"
    blocks = [(stage, index) for stage, count in enumerate(_V1_STAGES) for index in range(count)]
    for number, (stage, index) in enumerate(blocks):
        block = rf"blocks\.{stage}\.{index}\."
        yield rf"{block}(?:conv_dw|bn1)", f"{{kind}}_{2 * number + 1}"
        yield rf"{block}(?:conv_pw|bn2)", f"{{kind}}_{2 * number + 2}"
    yield r".+", "{kind}_#"


MOBILENET_V1_TORCH: LayerRules = tuple(_list_mobilenet_v1())
"""timm, and others by the order of their layers."""

_V2_STAGES = (1, 2, 3, 4, 3, 3, 1)


def _make_mobilenet_v2(block: str, first: int, ends: str) -> LayerRules:
    numbered = _number_blocks(_V2_STAGES, first, stage=0)
    return (
        *((rf"features\.{n}\.{block}\..+", f"{scope}/{{kind}}_#") for n, scope in numbered),
        (ends, "{kind}_#"),
        (r"classifier(?:\.\d)?", "dense_0"),
    )


MOBILENET_V2_TORCH: LayerRules = (
    *_make_mobilenet_v2("conv", first=1, ends=r"features\.(?:0|18)\.\d"),
    *_make_timm_block(r"blocks\.0\.0\.", "stage0_block0", _FIRST),
    *_make_timm_block(r"blocks\.(\d)\.(\d)\.", r"stage\1_block\2"),
    *_TIMM_ENDS,
)
"""torchvision and timm."""
MOBILENET_V2_MINDSPORE = _make_mobilenet_v2("layers", first=3, ends=r"features\.\d+")
"""mindcv."""

MOBILENET_V3_TORCH: LayerRules = (
    *make_squeeze_rules(r"features\.(\d+)\.block\.\d\.", r"block<\1-1>"),
    (r"features\.(\d+)\.block\.\d\.\d", r"block<\1-1>/{kind}_#"),
    (r"features\.\d+\.\d", "{kind}_#"),
    (r"classifier\.\d", "dense_#"),
)
"""torchvision."""
MOBILENET_V3_MINDSPORE: LayerRules = (
    *make_squeeze_rules(r"features\.(\d+)\.layers\.\d\.", r"block<\1-3>"),
    (r"features\.(\d+)\.layers\.\d", r"block<\1-3>/{kind}_#"),
    (r"features\.\d+", "{kind}_#"),
    (r"classifier\.\d", "dense_#"),
)
"""mindcv."""

EFFICIENTNET_TORCH: LayerRules = (
    *make_squeeze_rules(r"features\.(\d)\.(\d+)\.block\.\d\.", r"stage\1_block\2"),
    (r"features\.(\d)\.(\d+)\.block\.\d\.\d", r"stage\1_block\2/{kind}_#"),
    (r"features\.0\.\d", "{kind}_0"),
    (r"features\.8\.\d", "{kind}_1"),
    (r"classifier\.1", "dense_0"),
    *_make_timm_block(r"blocks\.0\.(\d+)\.", r"stage1_block\1", _FIRST),
    *_make_timm_block(r"blocks\.(\d)\.(\d+)\.", r"stage<\1+1>_block\2"),
    *_TIMM_ENDS,
)
"""torchvision and timm."""
EFFICIENTNET_MINDSPORE: LayerRules = (
    *make_squeeze_rules(r"features\.(\d)\.(\d+)\.block\.\d\.", r"stage<\1-2>_block\2"),
    (r"features\.(\d)\.(\d+)\.block\.\d", r"stage<\1-2>_block\2/{kind}_#"),
    (r"features\.\d+", "{kind}_#"),
    (r"mlp_head", "dense_0"),
)
"""mindcv."""

SHUFFLENET_V2_TORCH: LayerRules = (
    (r"conv1\.\d", "{kind}_0"),
    (r"stage(\d)\.(\d+)\.branch1\.\d", r"stage\1_unit\2/branch_0/{kind}_#"),
    (r"stage(\d)\.(\d+)\.branch2\.\d", r"stage\1_unit\2/branch_1/{kind}_#"),
    (r"conv5\.\d", "{kind}_1"),
    (r"fc", "dense_0"),
)
"""torchvision."""
_SHUFFLENET_UNITS = (4, 8, 4)


def _list_mindcv_shufflenet() -> Iterator[tuple[str, str]]:
    for number, scope in _number_blocks(_SHUFFLENET_UNITS, first=0, stage=2):
        unit = scope.replace("block", "unit")
        yield rf"features\.{number}\.branch_proj\.\d", f"{unit}/branch_0/{{kind}}_#"
        yield rf"features\.{number}\.branch_main\.\d", f"{unit}/branch_1/{{kind}}_#"
    yield r"first_conv\.\d", "{kind}_0"
    yield r"conv_last\.\d", "{kind}_1"
    yield r"classifier", "dense_0"


SHUFFLENET_V2_MINDSPORE: LayerRules = tuple(_list_mindcv_shufflenet())
"""mindcv."""

SQUEEZENET: LayerRules = (
    (r"features\.0", "conv_0"),
    (r"features\.\d+\.squeeze", "fire#/conv_0"),
    (r"features\.\d+\.expand1x1", "fire#/branches_0/branch_0/conv_0"),
    (r"features\.\d+\.expand3x3", "fire#/branches_0/branch_1/conv_0"),
    (r"classifier\.1|final_conv", "conv_1"),
)
"""torchvision and mindcv."""
