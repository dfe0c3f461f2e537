"""Names of arrays in PyTorch, MindSpore and their model collections, for the networks here.

Two tables make a name: a framework's names for the arrays of a layer (`CONVENTIONS`), and the
collections' names for the layers of a network (the other modules, in the language of `syntax`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.weights.rules import branches, mobile, residual, transformers
from pipeline.models.weights.rules.syntax import Framework, LayerRules

IN_ORDER: LayerRules = ((r".+", "{kind}_#"),)
"""Rules for networks without blocks: layers are counted by kind, in order."""
VGG: LayerRules = (
    (r"pre_logits\.fc(\d)", r"dense_<\1-1>"),
    (r"head\.fc", "dense_2"),
    *IN_ORDER,
)
"""timm has convolutions over entire images instead of the first dense layers."""


def _pair(torch: LayerRules, mindspore: LayerRules) -> Mapping[Framework, LayerRules]:
    return {"torch": torch, "mindspore": mindspore}


def _both(rules: LayerRules) -> Mapping[Framework, LayerRules]:
    return _pair(rules, rules)


BY_MODEL: Mapping[str, Mapping[Framework, LayerRules]] = {
    "bert": _both(transformers.BERT),
    "densenet": _both(branches.DENSENET),
    "dpn": {"torch": residual.DPN_TORCH},
    "efficientnet": _pair(mobile.EFFICIENTNET_TORCH, mobile.EFFICIENTNET_MINDSPORE),
    "googlenet": _both(branches.GOOGLENET),
    "gpt": {"torch": transformers.GPT},
    "inception_v3": _pair(branches.INCEPTION_V3_TORCH, branches.INCEPTION_V3_MINDSPORE),
    "mobilenet_v1": _pair(mobile.MOBILENET_V1_TORCH, IN_ORDER),
    "mobilenet_v2": _pair(mobile.MOBILENET_V2_TORCH, mobile.MOBILENET_V2_MINDSPORE),
    "mobilenet_v3": _pair(mobile.MOBILENET_V3_TORCH, mobile.MOBILENET_V3_MINDSPORE),
    "regnet_x": _pair(residual.REGNET_TORCH, residual.REGNET_MINDSPORE),
    "repvgg": _pair(residual.REPVGG_TORCH, residual.REPVGG_MINDSPORE),
    "resnet": _both(residual.RESNET),
    "resnet_v2": {"torch": residual.RESNET_V2_TORCH},
    "shufflenet_v2": _pair(mobile.SHUFFLENET_V2_TORCH, mobile.SHUFFLENET_V2_MINDSPORE),
    "squeezenet": _both(mobile.SQUEEZENET),
    "unet": _both(branches.UNET),
    "vgg": _both(VGG),
    "vit": _both(transformers.VIT),
    "wide_deep": _both(IN_ORDER),
    "xception": _pair(residual.XCEPTION_TORCH, residual.XCEPTION_MINDSPORE),
}
"""Rules by the name of a model component and by framework."""


def layer_rules(model: str, framework: Framework, *, blocks: bool) -> LayerRules:
    """Return the rules for a model; without any, the rules of networks without blocks, or none."""
    if model in BY_MODEL:
        return BY_MODEL[model].get(framework, ())
    return () if blocks else IN_ORDER
