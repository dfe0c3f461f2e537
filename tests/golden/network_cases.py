"""Networks whose logits are compared with another definition: sizes, weights and samples.

`make_networks.py` computes the logits with the other definition and keeps them in `networks/`, with
the names and shapes of its arrays; the tests compute them here. Both draw every array by its name
and shape there, from raw words of a generator whose stream numpy keeps stable; here its way into
the network is that of any weight file.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Rename = tuple[str, str]
"""A regular expression for names of the other definition, and what they become."""

_TABLE = re.compile(r"(.*\.)?(wte|wpe|\w*embeddings)\.weight")
"""Rows that are looked up."""


@dataclass(frozen=True)
class Case:
    """A network of conf/model and its other definition."""

    model: str
    peer: str
    """Library and name there."""
    image: tuple[int, int, int]
    classes: int = 10
    renames: tuple[Rename, ...] = ()
    """For names of a definition that is no collection's."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model that differ from conf/model."""
    peer_changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the other definition."""
    gain: float = 1.0
    """How many times the deviation of a kernel is 1 / sqrt(fan in)."""
    vocabulary: int | None = None
    """The first channel of samples are whole numbers below this."""
    without: int = 0
    """How many parameters the other definition has that are one with others here."""
    variant: str = ""
    """What tells it from another case of the same network."""

    @property
    def file_stem(self) -> str:
        """The name of the file that has its logits."""
        return f"{self.model}_{self.variant}" if self.variant else self.model

    @property
    def file(self) -> str:
        """A name for a file of its weights."""
        return "w.ckpt" if self.peer.startswith("mind") else "w.pth"


def uniforms(name: str, shape: Sequence[int]) -> np.ndarray:
    """float32 in [0, 1) of this shape, by the name alone."""
    size = math.prod(shape)
    words = np.random.PCG64(zlib.crc32(name.encode())).random_raw(size // 2 + 1).view(np.uint32)
    return ((words[:size] >> 8).astype(np.float32) * np.float32(2**-24)).reshape(shape)


def draw_arrays(case: Case, shapes: Iterable[tuple[str, Sequence[int]]]) -> dict[str, np.ndarray]:
    """The arrays of the other definition, by their names and shapes there."""
    return {name: _draw_array(name, shape, case.gain) for name, shape in shapes}


def _draw_array(name: str, shape: Sequence[int], gain: float) -> np.ndarray:
    uniform, leaf = uniforms(name, shape), name.rpartition(".")[2]
    if leaf in ("running_var", "moving_variance"):
        return uniform + np.float32(0.5)
    if leaf not in ("weight", "gamma") or _TABLE.fullmatch(name):
        return uniform - np.float32(0.5)
    if len(shape) == 1:
        return uniform * np.float32(0.4) + np.float32(0.8)
    return (2 * uniform - 1) * np.float32(gain * math.sqrt(3 / math.prod(shape[1:])))


def samples(case: Case, count: int = 2) -> np.ndarray:
    """What the networks read, float32 (count, height, width, channels)."""
    values = 2 * uniforms("samples", (count, *case.image)) - 1
    if case.vocabulary:
        values[..., 0] = np.floor(np.abs(values[..., 0]) * case.vocabulary)
    return values


def _residual(model: str, peer: str, gain: float = 1.0) -> Case:
    """A ResNet of mindcv; a deep one needs a smaller gain, since every block adds to the last."""
    return Case(model, f"mindcv:{peer}", (65, 65, 3), gain=gain)


def _vgg(model: str) -> Case:
    return Case(
        model,
        f"mindcv:{model}",
        (32, 32, 3),
        changes={"hidden": 64},
        peer_changes={"hidden": 64},
        gain=math.sqrt(2),
    )


def _vit(model: str, patch: int, size: int, features: int, heads: int) -> Case:
    return Case(
        model,
        "mindcv:VisionTransformer",
        (size, size, 3),
        peer_changes={
            "image_size": size,
            "patch_size": patch,
            "embed_dim": features,
            "num_heads": heads,
        },
    )


_TEXT_SIZES = {"features": 32, "hidden": 64, "heads": 4, "blocks": 3}


_GOOGLENET_WITH_NORMS = (
    (r"(conv\d)\.relu\.0\.(.+)", r"\1.bn.\2"),
    (r"(inception..\.)b(\d.*)\.relu\.0\.(.+)", r"\1branch\2.bn.\3"),
    (r"(inception..\.)b(\d.+)", r"\1branch\2"),
    (r"classifier\.(.+)", r"fc.\1"),
)
"""mindcv's definition has no batch norm, so that its names with one are nobody's."""

CASES = (
    Case(
        "alexnet",
        "mindspore:alexnet",
        (67, 67, 3),
        changes={"hidden": 64},
        peer_changes={"hidden": 64},
        gain=math.sqrt(2),
    ),
    *map(_vgg, ("vgg11", "vgg13", "vgg16", "vgg19")),
    *(_residual(f"resnet{n}", f"resnet{n}") for n in (18, 34, 50)),
    *(_residual(f"resnet{n}", f"resnet{n}", gain=0.75) for n in (101, 152)),
    _residual("se_resnet18", "seresnet18"),
    _residual("se_resnet50", "seresnet50"),
    _residual("resnext50_32x4d", "resnext50_32x4d"),
    Case(
        "googlenet",
        "mindcv:googlenet",
        (64, 64, 3),
        renames=_GOOGLENET_WITH_NORMS,
        gain=math.sqrt(2),
    ),
    Case(
        "inception_v3",
        "mindcv:inception_v3",
        (107, 107, 3),
        gain=math.sqrt(2),
    ),
    Case("squeezenet1_0", "mindcv:squeezenet1_0", (64, 64, 3), gain=math.sqrt(2)),
    Case("mobilenet_v1", "mindcv:mobilenet_v1_100", (65, 65, 3), gain=math.sqrt(2)),
    Case(
        "mobilenet_v2",
        "mindcv:mobilenet_v2_100",
        (65, 65, 3),
        gain=math.sqrt(2),
    ),
    Case(
        "shufflenet_v2_x1_0",
        "mindcv:shufflenet_v2_x1_0",
        (64, 64, 3),
        changes={"padding": "symmetric_convs"},
        gain=1.2,
    ),
    Case(
        "densenet121",
        "mindcv:densenet121",
        (64, 64, 3),
        changes={"padding": "symmetric"},
        gain=math.sqrt(2),
    ),
    Case(
        "efficientnet_b0",
        "mindcv:efficientnet_b0",
        (64, 64, 3),
        gain=1.35,
    ),
    _vit("vit_b_16", 16, 48, 768, 12),
    _vit("vit_b_32", 32, 64, 768, 12),
    _vit("vit_tiny", 16, 48, 192, 3),
    Case(
        "bert_base",
        "transformers:Bert",
        (9, 1, 1),
        changes={**_TEXT_SIZES, "vocabulary": 300},
        vocabulary=300,
        without=2 * 32,
    ),
    Case(
        "gpt2",
        "transformers:GPT2",
        (9, 1, 1),
        classes=300,
        changes=_TEXT_SIZES,
        vocabulary=300,
    ),
    Case(
        "unet",
        "monai:BasicUNet",
        (32, 48, 3),
        classes=4,
        changes={"widths": [16, 16, 32, 64, 128]},
        gain=math.sqrt(2),
    ),
    Case(
        "wide_deep",
        "mindspore:wide_deep",
        (39, 1, 2),
        classes=2,
        changes={"vocabulary": 300, "embedding": 8, "hidden": [32, 16]},
        vocabulary=300,
    ),
)


def _even(model: str, padding: str, **changed: Any) -> Case:
    """The case of a network at a size where it counts how images are padded."""
    case = next(case for case in CASES if case.model == model)
    changes = {**case.changes, "padding": padding}
    return replace(case, **{"variant": "64", **changed}, image=(64, 64, 3), changes=changes)


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
        renames=(),
        peer_changes={"aux_logits": False, "init_weights": False},
    ),
    Case(
        "regnet_x_800mf",
        "torchvision:regnet_x_800mf",
        (64, 64, 3),
        changes={"padding": "symmetric"},
    ),
)
"""At even sizes, each padded as its other definition has it."""
