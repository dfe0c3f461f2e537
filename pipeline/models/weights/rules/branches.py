"""Rules for layers' names in files of GoogLeNet, Inception v3, DenseNet and U-Net."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.models.weights.rules.syntax import SKIPPED, LayerRules

GOOGLENET: LayerRules = (
    (r"aux\d\..+", SKIPPED),
    (r"conv(\d)\.(?:conv|bn)", "{kind}_#"),
    (r"inception(\d\w)\.branch(\d)\..+", r"inception\1/branch_<\2-1>/{kind}_#"),
    (r"fc", "dense_0"),
)
"""torchvision."""

_INCEPTION_V3_SCOPES = {
    "5b": "square0",
    "5c": "square1",
    "5d": "square2",
    "6a": "reduction0",
    "6b": "factored0",
    "6c": "factored1",
    "6d": "factored2",
    "6e": "factored3",
    "7a": "reduction1",
    "7b": "expanded0",
    "7c": "expanded1",
}
_TORCHVISION_BRANCHES = ((r"branch1x1\..+", "branch_0"), (r"branch_pool\..+", "branch_3"))
_BY_SCOPE = {
    "square": ((r"branch5x5_\d\..+", "branch_1"), (r"branch3x3dbl_\d\..+", "branch_2")),
    "reduction0": ((r"branch3x3\..+", "branch_0"), (r"branch3x3dbl_\d\..+", "branch_1")),
    "factored": ((r"branch7x7_\d\..+", "branch_1"), (r"branch7x7dbl_\d\..+", "branch_2")),
    "reduction1": ((r"branch3x3_\d\..+", "branch_0"), (r"branch7x7x3_\d\..+", "branch_1")),
    "expanded": (
        (r"branch3x3_1\..+", "branch_1"),
        (r"branch3x3_2a\..+", "branch_1/branches_0/branch_0"),
        (r"branch3x3_2b\..+", "branch_1/branches_0/branch_1"),
        (r"branch3x3dbl_[12]\..+", "branch_2"),
        (r"branch3x3dbl_3a\..+", "branch_2/branches_0/branch_0"),
        (r"branch3x3dbl_3b\..+", "branch_2/branches_0/branch_1"),
    ),
}


def _list_torchvision_inception() -> Iterator[tuple[str, str]]:
    yield r"AuxLogits\..+", SKIPPED
    yield r"Conv2d_\d\w_\dx\d\.(?:conv|bn)", "{kind}_#"
    for block, scope in _INCEPTION_V3_SCOPES.items():
        # `reduction0` and `reduction1` have different branches, `square0` and `square1` the same.
        branches = _BY_SCOPE.get(scope) or _BY_SCOPE[scope.rstrip("0123456789")]
        for branch, path in (*_TORCHVISION_BRANCHES, *branches):
            yield rf"Mixed_{block}\.{branch}", f"{scope}/{path}/{{kind}}_#"
    yield r"fc", "dense_0"


INCEPTION_V3_TORCH: LayerRules = tuple(_list_torchvision_inception())
"""torchvision and timm."""


def _list_mindcv_inception() -> Iterator[tuple[str, str]]:
    yield r"aux\..+", SKIPPED
    yield r"conv\d\w\.(?:conv|bn)", "{kind}_#"
    for block, scope in _INCEPTION_V3_SCOPES.items():
        module = rf"inception{block}\."
        yield rf"{module}branch_pool\..+", f"{scope}/branch_3/{{kind}}_#"
        yield rf"{module}branch(\d)\..+", rf"{scope}/branch_\1/{{kind}}_#"
        yield rf"{module}branch(\d)a\..+", rf"{scope}/branch_\1/branches_0/branch_0/{{kind}}_#"
        yield rf"{module}branch(\d)b\..+", rf"{scope}/branch_\1/branches_0/branch_1/{{kind}}_#"
    yield r"classifier", "dense_0"


INCEPTION_V3_MINDSPORE: LayerRules = tuple(_list_mindcv_inception())
"""mindcv."""

DENSENET: LayerRules = (
    (r"features\.(?:conv0|norm0)", "{kind}_0"),
    (
        r"features\.denseblock(\d)\.denselayer(\d+)\.(?:conv|norm)(\d)",
        r"block\1_layer<\2-1>/branch_1/{kind}_<\3-1>",
    ),
    (
        r"features\.denseblock(\d)\.cell_list\.(\d+)\.(?:conv|norm)(\d)",
        r"block\1_layer\2/branch_1/{kind}_<\3-1>",
    ),
    (r"features\.transition(\d)\.(?:features\.)?(?:conv|norm)", r"{kind}_\1"),
    (r"features\.norm5", "batch_norm_4"),
    (r"classifier", "dense_0"),
)
"""torchvision, timm and mindcv."""

_DEPTHS = 5


def _nest_scope(depth: int) -> str:
    """Return the scope of the layers at a depth, which is nested in the depth above."""
    return "".join(f"below{above}/branch_1/" for above in range(depth))


def _list_unet() -> Iterator[tuple[str, str]]:
    """Yield rules. Of the four convolutions of a depth, 0 and 1 are in the encoder."""
    yield r"conv_0\.conv_(\d)\..+", r"{kind}_\1"
    yield r"inc\.double_conv\.[01]", "{kind}_0"
    yield r"inc\.double_conv\.[34]", "{kind}_1"
    for depth in range(1, _DEPTHS):
        below = _nest_scope(depth)
        above = _nest_scope(depth - 1)
        yield rf"down_{depth}\.convs\.conv_(\d)\..+", rf"{below}{{kind}}_\1"
        yield rf"upcat_{depth}\.upsample\.deconv", f"{below}conv_transpose_0"
        yield rf"upcat_{depth}\.convs\.conv_(\d)\..+", rf"{above}{{kind}}_<\1+2>"
        yield rf"down{depth}\.maxpool_conv\.1\.double_conv\.[01]", f"{below}{{kind}}_0"
        yield rf"down{depth}\.maxpool_conv\.1\.double_conv\.[34]", f"{below}{{kind}}_1"
        up = rf"up{_DEPTHS - depth}\."
        yield rf"{up}up", f"{below}conv_transpose_0"
        yield rf"{up}conv\.double_conv\.[01]", f"{above}{{kind}}_2"
        yield rf"{up}conv\.double_conv\.[34]", f"{above}{{kind}}_3"
    yield r"final_conv|outc\.conv", "conv_4"


UNET: LayerRules = tuple(_list_unet())
"""MONAI's BasicUNet, and the widespread `inc`, `down1`, `up1`, `outc` of five depths."""
