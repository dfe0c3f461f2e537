"""Rules for layers' names in files of vision and text transformers."""

from __future__ import annotations

from pipeline.models.weights.rules.syntax import SKIPPED, LayerRules

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
