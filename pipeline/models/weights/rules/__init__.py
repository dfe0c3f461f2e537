"""Names of arrays in other frameworks and their model collections, for this package's networks.

A name has two parts: the framework's name for an array of a layer (`CONVENTIONS`), and the
collection's name for the layer (rules of the other modules, in the language of `syntax`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.weights.rules import branches, mobile, residual, transformers
from pipeline.models.weights.rules.syntax import Framework, LayerRules

IN_ORDER: LayerRules = ((r".+", "{kind}_#"),)
"""Rules for networks without blocks: layers are counted by kind, in order."""
TENSORFLOW: LayerRules = ((r".*conv2d_transpose.*", "conv_transpose_#"), *IN_ORDER)
"""Keras's names, which begin with a layer's class."""
VGG: LayerRules = ((r"pre_logits\.fc(\d)", r"dense_<\1-1>"), (r"head\.fc", "dense_2"), *IN_ORDER)
"""timm has convolutions over whole images instead of the first dense layers."""


def _make_pair(
    torch: LayerRules, mindspore: LayerRules | None = None
) -> Mapping[Framework, LayerRules]:
    return {"torch": torch, "mindspore": torch if mindspore is None else mindspore}


BY_MODEL: Mapping[str, Mapping[Framework, LayerRules]] = {
    "bert": _make_pair(transformers.BERT),
    "densenet": _make_pair(branches.DENSENET),
    "dpn": {"torch": residual.DPN_TORCH},
    "efficientnet": _make_pair(mobile.EFFICIENTNET_TORCH, mobile.EFFICIENTNET_MINDSPORE),
    "googlenet": _make_pair(branches.GOOGLENET),
    "gpt": {"torch": transformers.GPT},
    "inception_v3": _make_pair(branches.INCEPTION_V3_TORCH, branches.INCEPTION_V3_MINDSPORE),
    "mobilenet_v1": _make_pair(mobile.MOBILENET_V1_TORCH, IN_ORDER),
    "mobilenet_v2": _make_pair(mobile.MOBILENET_V2_TORCH, mobile.MOBILENET_V2_MINDSPORE),
    "mobilenet_v3": _make_pair(mobile.MOBILENET_V3_TORCH, mobile.MOBILENET_V3_MINDSPORE),
    "regnet_x": _make_pair(residual.REGNET_TORCH, residual.REGNET_MINDSPORE),
    "repvgg": _make_pair(residual.REPVGG_TORCH, residual.REPVGG_MINDSPORE),
    "resnet": _make_pair(residual.RESNET),
    "resnet_v2": {"torch": residual.RESNET_V2_TORCH},
    "shufflenet_v2": _make_pair(mobile.SHUFFLENET_V2_TORCH, mobile.SHUFFLENET_V2_MINDSPORE),
    "squeezenet": _make_pair(mobile.SQUEEZENET),
    "unet": _make_pair(branches.UNET),
    "vgg": _make_pair(VGG),
    "vit": _make_pair(transformers.VIT),
    "wide_deep": _make_pair(IN_ORDER),
    "xception": _make_pair(residual.XCEPTION_TORCH, residual.XCEPTION_MINDSPORE),
}
"""Rules by the name of a model component and by framework."""


def find_layer_rules(model: str, framework: Framework, *, blocks: bool) -> LayerRules:
    """Return a model's rules. Other models have `IN_ORDER`, or no rules if they have blocks.

    TensorFlow's files have rules for networks without blocks alone.
    """
    if framework == "tensorflow":
        return () if blocks else TENSORFLOW
    if model in BY_MODEL:
        return BY_MODEL[model].get(framework, ())
    return () if blocks else IN_ORDER
