"""Rules for layers' names in files of residual, branched and mobile networks, and transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.models.weights.rules.syntax import SKIPPED, LayerRules


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
_TIMM_STEM = (r"conv_stem|bn1", "{kind}_0")
_TIMM_ENDS: LayerRules = (
    _TIMM_STEM,
    (r"conv_head|bn2", "{kind}_1"),
    (r"classifier", "dense_0"),
)

_V1_BLOCKS_BY_STAGE = (1, 2, 2, 6, 2)


def _list_mobilenet_v1() -> Iterator[tuple[str, str]]:
    yield _TIMM_STEM
    num_convs = 1  # The stem is conv_0.
    for stage, num_blocks in enumerate(_V1_BLOCKS_BY_STAGE):
        for block in range(num_blocks):
            prefix = rf"blocks\.{stage}\.{block}\."
            yield rf"{prefix}(?:conv_dw|bn1)", f"{{kind}}_{num_convs}"
            yield rf"{prefix}(?:conv_pw|bn2)", f"{{kind}}_{num_convs + 1}"
            num_convs += 2
    # Layers of files without timm's names are placed by their order; timm's classifier too.
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

VIT: LayerRules = (
    (r"class_token|cls_token", "class_token_0/token"),
    (r"(?:encoder\.)?(?:pos_embedding|pos_embed)", "position_embedding_0/table"),
    (r"conv_proj|patch_embed\.proj|patch_embedding\.(?:conv|proj)", "conv_0"),
    *(
        (rf"{block}\.{layer}", rf"block\1/{path}")
        for block in (r"encoder\.layers\.encoder_layer_(\d+)", r"blocks\.(\d+)")
        for layer, path in (
            (r"(?:ln_1|norm1)", "residual_0/layer_norm_0"),
            (
                r"(?:self_attention\.in_proj|attn\.qkv)",
                "residual_0/self_attention_0/{query,key,value}",
            ),
            (r"(?:self_attention\.out_proj|attn\.proj)", "residual_0/self_attention_0/out"),
            (r"(?:ln_2|norm2)", "residual_1/layer_norm_0"),
            (r"mlp\.(?:0|3|linear_1|linear_2|fc1|fc2)", "residual_1/dense_#"),
        )
    ),
    (r"encoder\.ln|norm", "layer_norm_0"),
    (r"heads\.head|heads\.0|head(?:\.\w+)?", "dense_0"),
)
"""torchvision, timm and mindcv."""

_LAYER = r"(?:bert\.)?encoder\.layer\.(\d+)\."
BERT: LayerRules = (
    (r"(?:bert\.)?embeddings\.position_ids", SKIPPED),
    (r"(?:bert\.)?embeddings\.word_embeddings", "embedding_0"),
    (r"(?:bert\.)?embeddings\.position_embeddings", "position_embedding_0"),
    (r"(?:bert\.)?embeddings\.token_type_embeddings", "+position_embedding_0"),
    (r"(?:bert\.)?embeddings\.LayerNorm", "layer_norm_0"),
    (rf"{_LAYER}attention\.self\.(query|key|value)", r"block\1/residual_0/self_attention_0/\2"),
    (rf"{_LAYER}attention\.output\.dense", r"block\1/residual_0/self_attention_0/out"),
    (rf"{_LAYER}attention\.output\.LayerNorm", r"block\1/layer_norm_0"),
    (rf"{_LAYER}intermediate\.dense", r"block\1/residual_1/dense_0"),
    (rf"{_LAYER}output\.dense", r"block\1/residual_1/dense_1"),
    (rf"{_LAYER}output\.LayerNorm", r"block\1/layer_norm_1"),
    (r"(?:bert\.)?pooler\.dense", "pooler"),
    (r"classifier", "dense_0"),
)
"""transformers. In this package all tokens are of the first segment, so its vector is added to the
vectors of the positions."""

_BLOCK = r"(?:transformer\.)?h\.(\d+)\."
_ATTENTION = r"tokens/block\1/residual_0/self_attention_0"
GPT: LayerRules = (
    (r"(?:transformer\.)?wte|lm_head", "tokens"),
    (r"(?:transformer\.)?wpe", "tokens/position_embedding_0"),
    (rf"{_BLOCK}attn(?:\.masked_bias)?", SKIPPED),
    (rf"{_BLOCK}attn\.c_attn", rf"{_ATTENTION}/{{query,key,value}}^T"),
    (rf"{_BLOCK}attn\.c_proj", rf"{_ATTENTION}/out^T"),
    (rf"{_BLOCK}mlp\.c_fc", r"tokens/block\1/residual_1/dense_0^T"),
    (rf"{_BLOCK}mlp\.c_proj", r"tokens/block\1/residual_1/dense_1^T"),
    (rf"{_BLOCK}ln_([12])", r"tokens/block\1/residual_<\2-1>/layer_norm_0"),
    (r"(?:transformer\.)?ln_f", "tokens/layer_norm_0"),
)
"""transformers, whose linear layers have weights (in, out) only in this model."""
