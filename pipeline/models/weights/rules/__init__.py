"""Names of arrays in PyTorch, MindSpore and their model collections, for the networks here.

Two tables make a name: a framework's names for the arrays of a layer (`frameworks`), and the
collections' names for the layers of a network (the other modules, in the language of `syntax`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.weights.rules.branches import (
    DENSENET,
    GOOGLENET,
    INCEPTION_V3_MINDSPORE,
    INCEPTION_V3_TORCH,
    UNET,
)
from pipeline.models.weights.rules.frameworks import Framework
from pipeline.models.weights.rules.mobile import (
    EFFICIENTNET_MINDSPORE,
    EFFICIENTNET_TORCH,
    MOBILENET_V1_TORCH,
    MOBILENET_V2_MINDSPORE,
    MOBILENET_V2_TORCH,
    MOBILENET_V3_MINDSPORE,
    MOBILENET_V3_TORCH,
    SHUFFLENET_V2_MINDSPORE,
    SHUFFLENET_V2_TORCH,
    SQUEEZENET,
)
from pipeline.models.weights.rules.residual import (
    DPN_TORCH,
    REGNET_MINDSPORE,
    REGNET_TORCH,
    REPVGG_MINDSPORE,
    REPVGG_TORCH,
    RESNET,
    RESNET_V2_TORCH,
    XCEPTION_MINDSPORE,
    XCEPTION_TORCH,
)
from pipeline.models.weights.rules.syntax import LayerRules
from pipeline.models.weights.rules.transformers import BERT, GPT, VIT

IN_ORDER: LayerRules = ((r".+", "{kind}_#"),)
"""Rules for networks without blocks: layers are counted by kind, in order."""
VGG: LayerRules = (
    (r"pre_logits\.fc(\d)", r"dense_<\1-1>"),
    (r"head\.fc", "dense_2"),
    *IN_ORDER,
)
"""timm has convolutions over entire images instead of the first dense layers."""


def _both(rules: LayerRules) -> Mapping[Framework, LayerRules]:
    return {"torch": rules, "mindspore": rules}


BY_MODEL: Mapping[str, Mapping[Framework, LayerRules]] = {
    "bert": _both(BERT),
    "densenet": _both(DENSENET),
    "dpn": {"torch": DPN_TORCH},
    "efficientnet": {"torch": EFFICIENTNET_TORCH, "mindspore": EFFICIENTNET_MINDSPORE},
    "googlenet": _both(GOOGLENET),
    "gpt": {"torch": GPT},
    "inception_v3": {"torch": INCEPTION_V3_TORCH, "mindspore": INCEPTION_V3_MINDSPORE},
    "mobilenet_v1": {"torch": MOBILENET_V1_TORCH, "mindspore": IN_ORDER},
    "mobilenet_v2": {"torch": MOBILENET_V2_TORCH, "mindspore": MOBILENET_V2_MINDSPORE},
    "mobilenet_v3": {"torch": MOBILENET_V3_TORCH, "mindspore": MOBILENET_V3_MINDSPORE},
    "regnet_x": {"torch": REGNET_TORCH, "mindspore": REGNET_MINDSPORE},
    "repvgg": {"torch": REPVGG_TORCH, "mindspore": REPVGG_MINDSPORE},
    "resnet": _both(RESNET),
    "resnet_v2": {"torch": RESNET_V2_TORCH},
    "shufflenet_v2": {"torch": SHUFFLENET_V2_TORCH, "mindspore": SHUFFLENET_V2_MINDSPORE},
    "squeezenet": _both(SQUEEZENET),
    "unet": _both(UNET),
    "vgg": _both(VGG),
    "vit": _both(VIT),
    "wide_deep": _both(IN_ORDER),
    "xception": {"torch": XCEPTION_TORCH, "mindspore": XCEPTION_MINDSPORE},
}
"""Rules by the name of a model's part and by framework."""


def layer_rules(model: str, framework: Framework, *, blocks: bool) -> LayerRules:
    """Return the rules for a model; without any, the rules of networks without blocks, or none."""
    if model in BY_MODEL:
        return BY_MODEL[model].get(framework, ())
    return () if blocks else IN_ORDER
