"""Rules for layers' names in files of ResNets, RegNet, RepVGG, DPN and Xception."""

from __future__ import annotations

from pipeline.models.weights.rules.syntax import LayerRules


def make_squeeze_rules(prefix: str, scope: str) -> LayerRules:
    """Return rules for the dense layers of squeeze and excitation in the block `scope`."""
    return (
        (rf"{prefix}(?:fc1|conv_reduce|fc\.0)", f"{scope}/squeeze_excite/dense_0"),
        (rf"{prefix}(?:fc2|conv_expand|fc\.2)", f"{scope}/squeeze_excite/dense_1"),
    )


RESNET: LayerRules = (
    (
        r"layer(\d+)\.(\d+)\.(?:downsample|down_sample|down_sample_layer|shortcut)\.\d+",
        r"stage\1_block\2/shortcut/{kind}_#",
    ),
    *make_squeeze_rules(r"layer(\d+)\.(\d+)\.(?:se|se_module)\.", r"stage\1_block\2"),
    (r"layer(\d+)\.(\d+)\.se\.\w+(?:\.\d+)?", r"stage\1_block\2/squeeze_excite/dense_#"),
    (r"layer(\d+)\.(\d+)\.(?:conv|bn|norm)\d", r"stage\1_block\2/{kind}_#"),
    (r"conv1|bn1|norm1|layer0\.(?:conv1|bn1|0|1)", "{kind}_#"),
    (r"fc|linear|classifier|end_point|head|last_linear", "dense_#"),
)
"""torchvision, timm, mindcv and MindSpore's model zoo."""

_PREACTIVATED = r"stages\.(\d+)\.blocks\.(\d+)\."
RESNET_V2_TORCH: LayerRules = (
    (r"stem\.conv|norm", "{kind}_0"),
    (r"head\.fc", "dense_0"),
    (r"stages\.(\d+)\.blocks\.0\.norm1", r"stage<\1+1>_block0/batch_norm_0"),
    (
        r"stages\.(\d+)\.blocks\.0\.downsample\.conv",
        r"stage<\1+1>_block0/residual_0/shortcut/conv_0",
    ),
    (r"stages\.(\d+)\.blocks\.0\.norm(\d)", r"stage<\1+1>_block0/residual_0/batch_norm_<\2-2>"),
    (r"stages\.(\d+)\.blocks\.0\.conv(\d)", r"stage<\1+1>_block0/residual_0/conv_<\2-1>"),
    (rf"{_PREACTIVATED}(?:norm|conv)(\d)", r"stage<\1+1>_block\2/{kind}_<\3-1>"),
)
"""timm."""

REGNET_TORCH: LayerRules = (
    (r"stem\.(?:\d|conv|bn)", "{kind}_0"),
    (r"trunk_output\.block(\d)\.block\d-(\d+)\.proj\.\d", r"stage\1_block\2/shortcut/{kind}_0"),
    (r"trunk_output\.block(\d)\.block\d-(\d+)\.f\.a\.\d", r"stage\1_block\2/{kind}_0"),
    (r"trunk_output\.block(\d)\.block\d-(\d+)\.f\.b\.\d", r"stage\1_block\2/{kind}_1"),
    (r"trunk_output\.block(\d)\.block\d-(\d+)\.f\.c\.\d", r"stage\1_block\2/{kind}_2"),
    (r"s(\d)\.b(\d+)\.downsample\.(?:conv|bn)", r"stage\1_block<\2-1>/shortcut/{kind}_0"),
    (r"s(\d)\.b(\d+)\.conv(\d)\.(?:conv|bn)", r"stage\1_block<\2-1>/{kind}_<\3-1>"),
    (r"fc|head\.fc", "dense_0"),
)
"""torchvision and timm."""
REGNET_MINDSPORE: LayerRules = (
    (r"stem\.(?:conv|bn)", "{kind}_0"),
    (r"stages\.(\d)\.blocks\.(\d+)\.(?:proj|bn)", r"stage<\1+1>_block\2/shortcut/{kind}_0"),
    (r"stages\.(\d)\.blocks\.(\d+)\.f\.a(?:_bn)?", r"stage<\1+1>_block\2/{kind}_0"),
    (r"stages\.(\d)\.blocks\.(\d+)\.f\.b(?:_bn)?", r"stage<\1+1>_block\2/{kind}_1"),
    (r"stages\.(\d)\.blocks\.(\d+)\.f\.c(?:_bn)?", r"stage<\1+1>_block\2/{kind}_2"),
    (r"head\.fc", "dense_0"),
)
"""mindcv."""

REPVGG_TORCH: LayerRules = (
    (r"stem\.conv_kxk\.(?:conv|bn)", "stem/{kind}_0"),
    (r"stem\.conv_1x1\.(?:conv|bn)", "stem/shortcut/{kind}_0"),
    (r"stages\.(\d)\.0\.conv_kxk\.(?:conv|bn)", r"stage<\1+1>_block0/{kind}_0"),
    (r"stages\.(\d)\.0\.conv_1x1\.(?:conv|bn)", r"stage<\1+1>_block0/shortcut/{kind}_0"),
    (r"stages\.(\d)\.(\d+)\.conv_kxk\.(?:conv|bn)", r"stage<\1+1>_block\2/convs/{kind}_0"),
    (r"stages\.(\d)\.(\d+)\.conv_1x1\.(?:conv|bn)", r"stage<\1+1>_block\2/convs/shortcut/{kind}_0"),
    (r"stages\.(\d)\.(\d+)\.identity", r"stage<\1+1>_block\2/shortcut/batch_norm_0"),
    (r"head\.fc", "dense_0"),
)
"""timm."""
REPVGG_MINDSPORE: LayerRules = (
    (r"stage0\.rbr_dense\.\d", "stem/{kind}_0"),
    (r"stage0\.rbr_1x1\.\d", "stem/shortcut/{kind}_0"),
    (r"stage(\d)\.0\.rbr_dense\.\d", r"stage\1_block0/{kind}_0"),
    (r"stage(\d)\.0\.rbr_1x1\.\d", r"stage\1_block0/shortcut/{kind}_0"),
    (r"stage(\d)\.(\d+)\.rbr_dense\.\d", r"stage\1_block\2/convs/{kind}_0"),
    (r"stage(\d)\.(\d+)\.rbr_1x1\.\d", r"stage\1_block\2/convs/shortcut/{kind}_0"),
    (r"stage(\d)\.(\d+)\.rbr_identity", r"stage\1_block\2/shortcut/batch_norm_0"),
    (r"linear", "dense_0"),
)
"""mindcv, and the paper's code."""

DPN_TORCH: LayerRules = (
    (r"features\.conv1_1\.(?:conv|bn)", "{kind}_0"),
    (r"features\.conv(\d)_1\.c1x1_w_s\d\.(?:conv|bn)", r"stage<\1-1>_block0/shortcut/{kind}_0"),
    (r"features\.conv(\d)_(\d+)\.c1x1_a\.(?:conv|bn)", r"stage<\1-1>_block<\2-1>/{kind}_0"),
    (r"features\.conv(\d)_(\d+)\.c3x3_b\.(?:conv|bn)", r"stage<\1-1>_block<\2-1>/{kind}_1"),
    (r"features\.conv(\d)_(\d+)\.c1x1_c\.(?:conv|bn)", r"stage<\1-1>_block<\2-1>/{kind}_2"),
    (r"features\.conv5_bn_ac\.bn", "batch_norm_1"),
    (r"classifier", "dense_0"),
)
"""timm."""


def _make_xception(block: str, first: int) -> LayerRules:
    """Return rules for 3 entry blocks, 8 middle blocks and an exit, numbered from `first`."""
    scopes = (*(f"entry{i}" for i in range(3)), *(f"middle{i}" for i in range(8)), "exit")
    numbered_scopes = list(enumerate(scopes, start=first))
    return (
        (r"(?:conv|bn)[12]|conv[34]\.(?:conv1|pointwise)|bn[34]", "{kind}_#"),
        *(
            (rf"{block}{number}\.skip(?:bn)?", f"{scope}/shortcut/{{kind}}_0")
            for number, scope in numbered_scopes
        ),
        *(
            (rf"{block}{number}\.rep\..+", f"{scope}/{{kind}}_#")
            for number, scope in numbered_scopes
        ),
        (r"fc|classifier", "dense_0"),
    )


XCEPTION_TORCH = _make_xception("block", first=1)
"""timm."""
XCEPTION_MINDSPORE = _make_xception(r"blocks\.", first=0)
"""mindcv."""
