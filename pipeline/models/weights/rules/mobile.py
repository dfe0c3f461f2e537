"""Rules for layers' names in files of MobileNets, EfficientNet, ShuffleNet and SqueezeNet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.models.weights.rules.residual import make_squeeze_rules
from pipeline.models.weights.rules.syntax import LayerRules


def _number_blocks(
    blocks_by_stage: Sequence[int], first_number: int, first_stage: int, part: str = "block"
) -> Iterator[tuple[int, str]]:
    """Yield the number of each block in the file, and the block's scope in the network.

    The file numbers the blocks of all stages from `first_number`. A scope has the number of the
    stage, from `first_stage`, and the number of the block in it, from 0.
    """
    number = first_number
    for stage, num_blocks in enumerate(blocks_by_stage, start=first_stage):
        for block in range(num_blocks):
            yield number, f"stage{stage}_{part}{block}"
            number += 1


def _make_timm_block(
    prefix: str, scope: str, convs: tuple[str, ...] = ("pw", "dw", "pwl")
) -> LayerRules:
    """Return rules for timm's inverted residual blocks.

    Layers' names in the file begin with a match of the pattern `prefix`, and the convolutions are
    called `conv_` and a name of `convs`.
    """
    return (
        *((rf"{prefix}conv_{conv}", f"{scope}/conv_{n}") for n, conv in enumerate(convs)),
        *((rf"{prefix}bn{n + 1}", f"{scope}/batch_norm_{n}") for n in range(len(convs))),
        *make_squeeze_rules(rf"{prefix}se\.", scope),
    )


_DEPTHWISE_FIRST = ("dw", "pw")
"""Convolutions of a block without expansion: the depthwise one and the pointwise one."""
_TIMM_ENDS: LayerRules = (
    (r"conv_stem|bn1", "{kind}_0"),
    (r"conv_head|bn2", "{kind}_1"),
    (r"classifier", "dense_0"),
)

_V1_BLOCKS_BY_STAGE = (1, 2, 2, 6, 2)


def _list_mobilenet_v1() -> Iterator[tuple[str, str]]:
    yield r"conv_stem|bn1", "{kind}_0"
    num_convs = 1  # The stem is conv_0.
    for stage, num_blocks in enumerate(_V1_BLOCKS_BY_STAGE):
        for block in range(num_blocks):
            prefix = rf"blocks\.{stage}\.{block}\."
            yield rf"{prefix}(?:conv_dw|bn1)", f"{{kind}}_{num_convs}"
            yield rf"{prefix}(?:conv_pw|bn2)", f"{{kind}}_{num_convs + 1}"
            num_convs += 2
    # Names that aren't timm's: layers are placed by their order in the file.
    yield r".+", "{kind}_#"


MOBILENET_V1_TORCH: LayerRules = tuple(_list_mobilenet_v1())
"""timm, and files whose layers are in timm's order."""

_V2_BLOCKS_BY_STAGE = (1, 2, 3, 4, 3, 3, 1)


def _make_mobilenet_v2(submodule: str, first_block: int, stem_and_head: str) -> LayerRules:
    """Return rules for files that call a block `features.N.SUBMODULE`, with N from `first_block`.

    `stem_and_head` is the pattern of the layers before and after the blocks.
    """
    numbered_scopes = _number_blocks(_V2_BLOCKS_BY_STAGE, first_block, first_stage=0)
    return (
        *(
            (rf"features\.{number}\.{submodule}\..+", f"{scope}/{{kind}}_#")
            for number, scope in numbered_scopes
        ),
        (stem_and_head, "{kind}_#"),
        (r"classifier(?:\.\d)?", "dense_0"),
    )


MOBILENET_V2_TORCH: LayerRules = (
    *_make_mobilenet_v2("conv", first_block=1, stem_and_head=r"features\.(?:0|18)\.\d"),
    *_make_timm_block(r"blocks\.0\.0\.", "stage0_block0", _DEPTHWISE_FIRST),
    *_make_timm_block(r"blocks\.(\d)\.(\d)\.", r"stage\1_block\2"),
    *_TIMM_ENDS,
)
"""torchvision and timm."""
MOBILENET_V2_MINDSPORE = _make_mobilenet_v2("layers", first_block=3, stem_and_head=r"features\.\d+")
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
    *_make_timm_block(r"blocks\.0\.(\d+)\.", r"stage1_block\1", _DEPTHWISE_FIRST),
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
_SHUFFLENET_UNITS_BY_STAGE = (4, 8, 4)


def _list_mindcv_shufflenet() -> Iterator[tuple[str, str]]:
    for number, unit in _number_blocks(_SHUFFLENET_UNITS_BY_STAGE, 0, first_stage=2, part="unit"):
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
