"""Names of arrays in other frameworks and their model collections, for this package's networks.

A name has two parts: the framework's name for an array of a layer (`syntax.CONVENTIONS`), and the
collection's name for the layer (rules of the other modules, in the language of `syntax`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.weights.rules import families
from pipeline.models.weights.rules.syntax import Framework, LayerRules

IN_ORDER: LayerRules = ((r".+", "{kind}_#"),)
"""Rules for networks without blocks: the layers of each kind are numbered in their order."""
TENSORFLOW: LayerRules = ((r".*conv2d_transpose.*", "conv_transpose_#"), *IN_ORDER)
"""Rules for Keras's networks without blocks. A transposed convolution is recognised by its name,
since it has a convolution's arrays."""
VGG: LayerRules = ((r"pre_logits\.fc(\d)", r"dense_<\1-1>"), (r"head\.fc", "dense_2"), *IN_ORDER)
"""timm has convolutions over whole images instead of the first dense layers."""


def _make_rules(
    torch: LayerRules, mindspore: LayerRules | None = None
) -> Mapping[Framework, LayerRules]:
    """Return rules by framework. MindSpore's names have torch's rules if `mindspore` is None."""
    return {"torch": torch, "mindspore": torch if mindspore is None else mindspore}


BY_MODEL: Mapping[str, Mapping[Framework, LayerRules]] = {
    "bert": _make_rules(families.BERT),
    "densenet": _make_rules(families.DENSENET),
    "dpn": {"torch": families.DPN_TORCH},
    "efficientnet": _make_rules(families.EFFICIENTNET_TORCH, families.EFFICIENTNET_MINDSPORE),
    "googlenet": _make_rules(families.GOOGLENET),
    "gpt": {"torch": families.GPT},
    "inception_v3": _make_rules(families.INCEPTION_V3_TORCH, families.INCEPTION_V3_MINDSPORE),
    "mobilenet_v1": _make_rules(families.MOBILENET_V1_TORCH, IN_ORDER),
    "mobilenet_v2": _make_rules(families.MOBILENET_V2_TORCH, families.MOBILENET_V2_MINDSPORE),
    "mobilenet_v3": _make_rules(families.MOBILENET_V3_TORCH, families.MOBILENET_V3_MINDSPORE),
    "regnet_x": _make_rules(families.REGNET_TORCH, families.REGNET_MINDSPORE),
    "repvgg": _make_rules(families.REPVGG_TORCH, families.REPVGG_MINDSPORE),
    "resnet": _make_rules(families.RESNET),
    "resnet_v2": {"torch": families.RESNET_V2_TORCH},
    "shufflenet_v2": _make_rules(families.SHUFFLENET_V2_TORCH, families.SHUFFLENET_V2_MINDSPORE),
    "squeezenet": _make_rules(families.SQUEEZENET),
    "unet": _make_rules(families.UNET),
    "vgg": _make_rules(VGG),
    "vit": _make_rules(families.VIT),
    "wide_deep": _make_rules(IN_ORDER),
    "xception": _make_rules(families.XCEPTION_TORCH, families.XCEPTION_MINDSPORE),
}
"""Rules by the name of a model component and by framework."""


def find_layer_rules(model: str, framework: Framework, *, has_blocks: bool) -> LayerRules:
    """Return the rules for a model's layers in a framework's files; empty if none exist.

    A model without an entry uses `IN_ORDER` if its network has no blocks. TensorFlow's files are
    supported only for networks without blocks.
    """
    if framework == "tensorflow":
        return () if has_blocks else TENSORFLOW
    if model in BY_MODEL:
        return BY_MODEL[model].get(framework, ())
    return () if has_blocks else IN_ORDER
