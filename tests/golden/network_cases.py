"""Networks whose logits are compared with another definition: sizes, weights and names.

`make_networks.py` computes the logits with the other definition and keeps them in `networks/`;
the tests compute them here. Neither reads the other's weights: every parameter is drawn by the path
that it has here, from raw words of a generator whose stream numpy keeps stable.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Rule = tuple[str, str]
"""A pattern for the modules of the other definition, and what they are here.

The first pattern that matches the start of a module's name counts. What it stands for is the scope
here, in which layers are numbered by kind in the other's order. With `=` before it, it is a layer,
or several between braces, whose outputs stand side by side in the other definition: `=a/{b,c}`.
"""


@dataclass(frozen=True)
class Case:
    """A network of conf/model and its other definition."""

    model: str
    peer: str
    """Library and name there."""
    image: tuple[int, int, int]
    classes: int = 10
    rules: tuple[Rule, ...] = (("", ""),)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model that differ from conf/model."""
    peer_changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the other definition."""
    gain: float = 1.0
    """How many times the deviation of a kernel is 1 / sqrt(fan in)."""
    vocabulary: int | None = None
    """The first channel of samples are whole numbers below this."""
    flattened: tuple[int, int, int] | None = None
    """Height, width and channels of what `dense_0` reads; the other definition flattens it in the
    order of channels, height and width."""
    without: int = 0
    """How many parameters the other definition has that stand for nothing here."""
    variant: str = ""
    """What tells it from another case of the same network."""

    @property
    def kept(self) -> str:
        """The name of the file that has its logits."""
        return f"{self.model}_{self.variant}" if self.variant else self.model


def uniforms(path: str, shape: Sequence[int]) -> np.ndarray:
    """float32 in [0, 1) of this shape, by the path alone."""
    size = math.prod(shape)
    words = np.random.PCG64(zlib.crc32(path.encode())).random_raw(size // 2 + 1).view(np.uint32)
    return ((words[:size] >> 8).astype(np.float32) * np.float32(2**-24)).reshape(shape)


def drawn(path: str, shape: Sequence[int], gain: float) -> np.ndarray:
    """The parameter or statistic at a path here, in the layout it has here."""
    uniform, name = uniforms(path, shape), path.rpartition("/")[2]
    if name == "kernel":
        return (2 * uniform - 1) * np.float32(gain * math.sqrt(3 / math.prod(shape[:-1])))
    if name == "scale":
        return uniform * np.float32(0.4) + np.float32(0.8)
    if name == "var":
        return uniform + np.float32(0.5)
    return uniform - np.float32(0.5)


def samples(case: Case, count: int = 2) -> np.ndarray:
    """What the networks read, float32 (count, height, width, channels)."""
    values = 2 * uniforms("samples", (count, *case.image)) - 1
    if case.vocabulary:
        values[..., 0] = np.floor(np.abs(values[..., 0]) * case.vocabulary)
    return values


def paths_here(modules: Iterable[tuple[str, str]], rules: Sequence[Rule]) -> dict[str, list[str]]:
    """The layers here of every module of the other definition, given by name and kind in order."""
    counts: Counter[str] = Counter()
    paths = {}
    for name, kind in modules:
        matches = ((re.match(pattern, name), template) for pattern, template in rules)
        scope = next(match.expand(template) for match, template in matches if match)
        if scope.startswith("="):
            paths[name] = _braced(scope[1:])
        else:
            numbered = f"{scope}/{kind}".lstrip("/")
            paths[name] = [f"{numbered}_{counts[numbered]}"]
            counts[numbered] += 1
    return paths


def _braced(path: str) -> list[str]:
    before, _, rest = path.partition("{")
    names, _, after = rest.partition("}")
    return [before + name + after for name in names.split(",")]


def _residual(model: str, peer: str, gain: float = 1.0) -> Case:
    """A ResNet of mindcv; a deep one needs a smaller gain, since every block adds to the last."""
    block = r"layer(\d)\.(\d+)\."
    rules = (
        (rf"{block}se_module\.", r"stage\1_block\2/squeeze_excite"),
        (rf"{block}down_?sample\.", r"stage\1_block\2/shortcut"),
        (block, r"stage\1_block\2"),
        ("", ""),
    )
    return Case(model, f"mindcv:{peer}", (65, 65, 3), rules=rules, gain=gain)


def _vgg(model: str) -> Case:
    return Case(
        model,
        f"mindcv:{model}",
        (32, 32, 3),
        changes={"hidden": 64},
        peer_changes={"hidden": 64},
        gain=math.sqrt(2),
        flattened=(1, 1, 512),
    )


_INCEPTION = (
    (r"(inception\d\w)\.b1\.", r"\1/branch_0"),
    (r"(inception\d\w)\.b2\.", r"\1/branch_1"),
    (r"(inception\d\w)\.b3\.", r"\1/branch_2"),
    (r"(inception\d\w)\.b4\.", r"\1/branch_3"),
    ("", ""),
)
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


def _inception_v3() -> Iterable[Rule]:
    for theirs, scope in _INCEPTION_V3_SCOPES.items():
        module = f"inception{theirs}"
        last = 2 if scope.startswith("reduction") else 3
        if scope.startswith("expanded"):
            for branch in (1, 2):
                inner = f"{scope}/branch_{branch}/branches_0"
                yield rf"{module}\.branch{branch}a\.", f"{inner}/branch_0"
                yield rf"{module}\.branch{branch}b\.", f"{inner}/branch_1"
        yield rf"{module}\.branch_pool\.", f"{scope}/branch_{last}"
        yield rf"{module}\.branch(\d)\.", rf"{scope}/branch_\1"
    yield "", ""


def _stages(theirs: str, blocks: Sequence[int], first: int, number: int) -> Iterable[Rule]:
    """Numbered blocks, from `first` on, by stage, from `number` on."""
    for stage, count in enumerate(blocks, start=number):
        for index in range(count):
            yield theirs.format(first), f"stage{stage}_block{index}"
            first += 1


def _efficientnet() -> Iterable[Rule]:
    for stage, count in enumerate((1, 2, 2, 3, 3, 4, 1), start=1):
        for index in range(count):
            block, scope = rf"features\.{stage + 2}\.{index}\.block\.", f"stage{stage}_block{index}"
            yield rf"{block}\d\.conv_reduce", f"={scope}/squeeze_excite/dense_0"
            yield rf"{block}\d\.conv_expand", f"={scope}/squeeze_excite/dense_1"
            yield block, scope
    yield "", ""


def _shufflenet() -> Iterable[Rule]:
    blocks = [(stage, index) for stage, count in ((2, 4), (3, 8), (4, 4)) for index in range(count)]
    for number, (stage, index) in enumerate(blocks):
        scope = f"stage{stage}_unit{index}"
        yield rf"features\.{number}\.block\.branch_main\.", f"{scope}/branch_1"
        yield rf"features\.{number}\.block\.branch_proj\.", f"{scope}/branch_0"
    yield "", ""


def _squeezenet(model: str, fires: Sequence[int]) -> Case:
    """`fires` are the places of the fire modules among the features."""
    rules: list[Rule] = []
    for number, place in enumerate(fires, start=2):
        rules += [
            (rf"features\.{place}\.squeeze$", f"fire{number}"),
            (rf"features\.{place}\.expand1x1$", f"fire{number}/branches_0/branch_0"),
            (rf"features\.{place}\.expand3x3$", f"fire{number}/branches_0/branch_1"),
        ]
    return Case(model, f"mindcv:{model}", (64, 64, 3), rules=(*rules, ("", "")), gain=math.sqrt(2))


_DENSE = (
    (r"features\.denseblock(\d)\.cell_list\.(\d+)\.", r"block\1_layer\2/branch_1"),
    ("", ""),
)
_VIT_BLOCK = r"blocks\.(\d+)\."
_VIT = (
    ("cls_token", "=class_token_0/token"),
    ("pos_embed", "=position_embedding_0/table"),
    (rf"{_VIT_BLOCK}norm1", r"=block\1/residual_0/layer_norm_0"),
    (rf"{_VIT_BLOCK}attn\.qkv", r"=block\1/residual_0/self_attention_0/{query,key,value}"),
    (rf"{_VIT_BLOCK}attn\.proj", r"=block\1/residual_0/self_attention_0/out"),
    (_VIT_BLOCK, r"block\1/residual_1"),
    ("", ""),
)


def _vit(model: str, patch: int, size: int, features: int, heads: int) -> Case:
    return Case(
        model,
        "mindcv:VisionTransformer",
        (size, size, 3),
        rules=_VIT,
        peer_changes={
            "image_size": size,
            "patch_size": patch,
            "embed_dim": features,
            "num_heads": heads,
        },
    )


_BERT_LAYER = r"bert\.encoder\.layer\.(\d+)\."
_BERT = (
    (r"bert\.embeddings\.word_embeddings", "=embedding_0"),
    (r"bert\.embeddings\.position_embeddings", "=position_embedding_0"),
    (r"bert\.embeddings\.token_type_embeddings", "="),
    (rf"{_BERT_LAYER}attention\.self\.(\w+)", r"=block\1/residual_0/self_attention_0/\2"),
    (rf"{_BERT_LAYER}attention\.output\.dense", r"=block\1/residual_0/self_attention_0/out"),
    (rf"{_BERT_LAYER}(intermediate|output)\.dense", r"block\1/residual_1"),
    (_BERT_LAYER, r"block\1"),
    (r"bert\.pooler", "=pooler"),
    ("", ""),
)
_GPT_BLOCK = r"transformer\.h\.(\d+)\."
_GPT = (
    (r"transformer\.wte", "=tokens"),
    (r"transformer\.wpe", "=tokens/position_embedding_0"),
    (
        rf"{_GPT_BLOCK}attn\.c_attn",
        r"=tokens/block\1/residual_0/self_attention_0/{query,key,value}",
    ),
    (rf"{_GPT_BLOCK}attn\.c_proj", r"=tokens/block\1/residual_0/self_attention_0/out"),
    (rf"{_GPT_BLOCK}ln_1", r"=tokens/block\1/residual_0/layer_norm_0"),
    (_GPT_BLOCK, r"tokens/block\1/residual_1"),
    ("", "tokens"),
)
_TEXT_SIZES = {"features": 32, "hidden": 64, "heads": 4, "blocks": 3}


def _unet() -> Iterable[Rule]:
    inner = ["", *("/".join(f"below{i}/branch_1" for i in range(n + 1)) for n in range(4))]
    yield r"conv_0\.", ""
    for depth in range(1, 5):
        yield rf"down_{depth}\.", inner[depth]
        yield rf"upcat_{depth}\.upsample\.", inner[depth]
        yield rf"upcat_{depth}\.", inner[depth - 1]
    yield "", ""


CASES = (
    Case(
        "alexnet",
        "mindspore:alexnet",
        (67, 67, 3),
        changes={"hidden": 64},
        peer_changes={"hidden": 64},
        gain=math.sqrt(2),
        flattened=(1, 1, 256),
    ),
    *map(_vgg, ("vgg11", "vgg13", "vgg16", "vgg19")),
    *(_residual(f"resnet{n}", f"resnet{n}") for n in (18, 34, 50)),
    *(_residual(f"resnet{n}", f"resnet{n}", gain=0.75) for n in (101, 152)),
    _residual("se_resnet18", "seresnet18"),
    _residual("se_resnet50", "seresnet50"),
    _residual("resnext50_32x4d", "resnext50_32x4d"),
    Case("googlenet", "mindcv:googlenet", (64, 64, 3), rules=_INCEPTION, gain=math.sqrt(2)),
    Case(
        "inception_v3",
        "mindcv:inception_v3",
        (107, 107, 3),
        rules=tuple(_inception_v3()),
        gain=math.sqrt(2),
    ),
    _squeezenet("squeezenet1_0", (3, 4, 5, 7, 8, 9, 10, 12)),
    Case("mobilenet_v1", "mindcv:mobilenet_v1_100", (65, 65, 3), gain=math.sqrt(2)),
    Case(
        "mobilenet_v2",
        "mindcv:mobilenet_v2_100",
        (65, 65, 3),
        rules=(
            *_stages(r"features\.{}\.layers\.", (1, 2, 3, 4, 3, 3, 1), first=3, number=0),
            ("", ""),
        ),
        gain=math.sqrt(2),
    ),
    Case(
        "shufflenet_v2_x1_0",
        "mindcv:shufflenet_v2_x1_0",
        (64, 64, 3),
        rules=tuple(_shufflenet()),
        changes={"padding": "symmetric_convs"},
        gain=1.2,
    ),
    Case(
        "densenet121",
        "mindcv:densenet121",
        (64, 64, 3),
        rules=_DENSE,
        changes={"padding": "symmetric"},
        gain=math.sqrt(2),
    ),
    Case(
        "efficientnet_b0",
        "mindcv:efficientnet_b0",
        (64, 64, 3),
        rules=tuple(_efficientnet()),
        gain=1.35,
    ),
    _vit("vit_b_16", 16, 48, 768, 12),
    _vit("vit_b_32", 32, 64, 768, 12),
    _vit("vit_tiny", 16, 48, 192, 3),
    Case(
        "bert_base",
        "transformers:Bert",
        (9, 1, 1),
        rules=_BERT,
        changes={**_TEXT_SIZES, "vocabulary": 300},
        vocabulary=300,
        without=2 * 32,
    ),
    Case(
        "gpt2",
        "transformers:GPT2",
        (9, 1, 1),
        classes=300,
        rules=_GPT,
        changes=_TEXT_SIZES,
        vocabulary=300,
    ),
    Case(
        "unet",
        "monai:BasicUNet",
        (32, 48, 3),
        classes=4,
        rules=tuple(_unet()),
        changes={"widths": [16, 16, 32, 64, 128]},
        gain=math.sqrt(2),
    ),
    Case(
        "wide_deep",
        "mindspore:wide_deep",
        (39, 1, 2),
        classes=2,
        rules=(
            ("wide_bias", "=wide_bias"),
            ("wide", "=wide"),
            ("deep", "=deep"),
            ("", ""),
        ),
        changes={"vocabulary": 300, "embedding": 8, "hidden": [32, 16]},
        vocabulary=300,
    ),
)


def _even(model: str, padding: str, **changed: Any) -> Case:
    """The case of a network at a size where it counts how images are padded."""
    case = next(case for case in CASES if case.model == model)
    changes = {**case.changes, "padding": padding}
    return replace(case, **{"variant": "64", **changed}, image=(64, 64, 3), changes=changes)


_INCEPTION_OF_TORCHVISION = (
    *((rf"(inception\d\w)\.branch{n}\.", rf"\1/branch_{n - 1}") for n in (1, 2, 3, 4)),
    ("", ""),
)
_REGNET = (
    (r"trunk_output\.block(\d)\.block\d-(\d+)\.proj\.", r"stage\1_block\2/shortcut"),
    (r"trunk_output\.block(\d)\.block\d-(\d+)\.", r"stage\1_block\2"),
    ("", ""),
)

EVEN = (
    *(_even(model, "symmetric_convs") for model in ("resnet18", "resnet50", "se_resnet18")),
    _even("mobilenet_v1", "symmetric"),
    _even("mobilenet_v2", "symmetric"),
    _even("resnet18", "symmetric", variant="torchvision", peer="torchvision:resnet18"),
    _even(
        "googlenet",
        "symmetric_convs",
        variant="torchvision",
        peer="torchvision:googlenet",
        peer_changes={"aux_logits": False, "init_weights": False},
        rules=_INCEPTION_OF_TORCHVISION,
    ),
    Case(
        "regnet_x_800mf",
        "torchvision:regnet_x_800mf",
        (64, 64, 3),
        rules=_REGNET,
        changes={"padding": "symmetric"},
    ),
)
"""At even sizes, each padded as its other definition has it."""
