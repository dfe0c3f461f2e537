"""Names of networks whose layers lie side by side: GoogLeNet, Inception-v3 and DenseNet."""

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
_BRANCHES_OF_TORCHVISION = (
    (r"branch1x1\..+", "branch_0"),
    (r"branch_pool\..+", "branch_3"),
)
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


def _inception_v3_of_torchvision() -> Iterator[tuple[str, str]]:
    yield r"AuxLogits\..+", SKIPPED
    yield r"Conv2d_\d\w_\dx\d\.(?:conv|bn)", "{kind}_#"
    for theirs, scope in _INCEPTION_V3_SCOPES.items():
        own = next(rules for name, rules in _BY_SCOPE.items() if scope.startswith(name))
        for branch, path in (*_BRANCHES_OF_TORCHVISION, *own):
            yield rf"Mixed_{theirs}\.{branch}", f"{scope}/{path}/{{kind}}_#"
    yield r"fc", "dense_0"


INCEPTION_V3_TORCH: LayerRules = tuple(_inception_v3_of_torchvision())
"""torchvision and timm."""


def _inception_v3_of_mindcv() -> Iterator[tuple[str, str]]:
    yield r"aux\..+", SKIPPED
    yield r"conv\d\w\.(?:conv|bn)", "{kind}_#"
    for theirs, scope in _INCEPTION_V3_SCOPES.items():
        module = rf"inception{theirs}\."
        yield rf"{module}branch_pool\..+", f"{scope}/branch_3/{{kind}}_#"
        yield rf"{module}branch(\d)\..+", rf"{scope}/branch_\1/{{kind}}_#"
        yield rf"{module}branch(\d)a\..+", rf"{scope}/branch_\1/branches_0/branch_0/{{kind}}_#"
        yield rf"{module}branch(\d)b\..+", rf"{scope}/branch_\1/branches_0/branch_1/{{kind}}_#"
    yield r"classifier", "dense_0"


INCEPTION_V3_MINDSPORE: LayerRules = tuple(_inception_v3_of_mindcv())
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
