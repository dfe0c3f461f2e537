"""What PyTorch, MindSpore and their model collections call the arrays of networks that are here.

Two tables make a name: how a framework calls the arrays of a layer (`weight`, `gamma`), and how
the collections call the layers of a network (`layer1.0.conv1`). In a layer's new name

    \\1       is what the pattern's group matched,
    {kind}   is conv, dense, batch_norm or layer_norm, told by the arrays that the layer has,
    #        counts the layers that come to the same name otherwise, in the order of the file or,
             where that keeps none, of the numbers in their names; what fits nowhere is passed over,
    {a,b}    spreads an array over several, in equal parts of its first axis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Framework = Literal["torch", "mindspore"]


@dataclass(frozen=True)
class Convention:
    """How a framework calls the arrays of a layer, by kind of layer, and what is no weight."""

    leaves: dict[str, str]
    """Ours by theirs, for layers that are linear maps; norms call their factor `scale`."""
    not_weights: re.Pattern[str]
    """Whole names of counters, rates and the state of optimizers, which are left out."""


TORCH = Convention(
    {"weight": "kernel", "bias": "bias", "running_mean": "mean", "running_var": "var"},
    re.compile(r"(.*\.)?num_batches_tracked"),
)
MINDSPORE = Convention(
    {
        "weight": "kernel",
        "bias": "bias",
        "gamma": "scale",
        "beta": "bias",
        "moving_mean": "mean",
        "moving_variance": "var",
    },
    re.compile(
        r"(moments|moment1|moment2|accum|accumulation|stat|mean_square|mean_gradient)\..*"
        r"|learning_rate|momentum|global_step|epoch_num|step_num|current_iterator_step"
        r"|last_overflow_iterator_step|scale_sense|loss_scale|beta1_power|beta2_power"
    ),
)
CONVENTIONS: dict[Framework, Convention] = {"torch": TORCH, "mindspore": MINDSPORE}

WRAPPERS = ("module.", "_orig_mod.", "network.", "_backbone.", "backbone.")
"""What wrappers of a whole network put before every name."""

LayerRules = tuple[tuple[str, str], ...]

RESNET: LayerRules = (
    (
        r"layer(\d+)\.(\d+)\.(?:downsample|down_sample|down_sample_layer|shortcut)\.\d+",
        r"stage\1_block\2/shortcut/{kind}_#",
    ),
    (r"layer(\d+)\.(\d+)\.se\.\w+(?:\.\d+)?", r"stage\1_block\2/squeeze_excite/dense_#"),
    (r"layer(\d+)\.(\d+)\.(?:conv|bn|norm)\d", r"stage\1_block\2/{kind}_#"),
    (r"conv1|bn1|norm1", "{kind}_#"),
    (r"fc|linear|classifier|end_point|head", "dense_#"),
)

VIT: LayerRules = (
    (r"class_token|cls_token", "class_token_0/token"),
    (r"(?:encoder\.)?(?:pos_embedding|pos_embed)", "position_embedding_0/table"),
    (r"conv_proj|patch_embed\.proj|patch_embedding\.(?:conv|proj)", "conv_0"),
    *(
        (rf"{block}\.{theirs}", rf"block\1/{ours}")
        for block in (r"encoder\.layers\.encoder_layer_(\d+)", r"blocks\.(\d+)")
        for theirs, ours in (
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

IN_ORDER: LayerRules = ((r".+", "{kind}_#"),)
"""For networks without blocks: the convolutions in order, the dense layers in order, and so on."""

BY_MODEL: dict[str, LayerRules] = {"resnet": RESNET, "vit": VIT}
