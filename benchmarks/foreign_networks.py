"""Small networks of timm and transformers, drawn by a seed, with random weights."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import library as torch_library
from torch import nn

from benchmarks.foreign_page import COUNTS, Package
from pipeline.models.torch_graph.conversion.layer_list import choose_tensor

_LIBRARY = torch_library.Library("torchvision", "FRAGMENT")
CLASSES = 10
TOKENS = 12
SAMPLES = 2000
"""Samples of a sound, of one channel."""
_SIDES = (64, 96, 128, 224, 256)
"""Heights and widths of images, of which a network gets the smallest that it computes."""
_SMALL = re.compile(
    r"test_|tiny|nano|atto|pico|femto|small|mini|micro|zepto|_t\d?$|_x*s\d?$|_0\d\d|[bms][01]$"
)
"""Marks of small variants of a family of timm, of which one is drawn."""
_COUNTS_OF_STAGES = (4, 3, 2, 5)
SHRINKS: tuple[Mapping[str, Any], ...] = (
    *({"depths": (1,) * count} for count in _COUNTS_OF_STAGES),
    {"depth": 2},
    *({"layers": (1,) * count} for count in _COUNTS_OF_STAGES),
    {"num_blocks": 2},
    {},
)
"""Arguments of timm's networks that make them small, of which each accepts some."""
_NARROW: Mapping[str, Mapping[str, Any]] = {"mobilenetv5": {"channel_multiplier": 0.25}}
"""Further arguments of families whose depth is fixed: 294 million parameters."""

Kind = Literal["decoder", "text", "image", "sound"]
KINDS: Mapping[Kind, tuple[str, str]] = {
    "decoder": (
        "AutoModelForCausalLM",
        "llama qwen2 qwen3 gemma mistral phi gpt_neox qwen3_moe gemma2 gemma3_text mixtral phi3 "
        "gpt2 gptj opt bloom falcon stablelm olmo2 granite mamba mamba2 cohere smollm3 gpt_oss "
        "starcoder2 codegen glm4",
    ),
    "text": (
        "AutoModelForSequenceClassification",
        "bert roberta distilbert albert electra deberta-v2 mpnet modernbert fnet xlnet squeezebert "
        "convbert mobilebert nystromformer",
    ),
    "image": (
        "AutoModelForImageClassification",
        "vit deit beit swin swinv2 convnext convnextv2 resnet regnet dinov2 mobilevit segformer "
        "poolformer levit cvt",
    ),
    "sound": (
        "AutoModelForAudioClassification",
        "wav2vec2 hubert wavlm audio-spectrogram-transformer",
    ),
}
"""Class of transformers and families of each kind of network."""
ALWAYS = ("llama", "qwen2", "gemma", "mistral", "phi", "gpt_neox", "qwen3_moe")
"""Families that are drawn whatever the seed."""
# fmt: off
_SIZES: Mapping[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "d_model": 32, "d_inner": 64,
    "n_inner": 64, "ffn_dim": 64, "word_embed_proj_dim": 32, "dim": 32, "n_heads": 4,
    "n_layers": 2, "hidden_dim": 64, "embedding_size": 32, "head_dim": 8, "rotary_dim": 4,
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "num_local_experts": 4, "image_size": 32, "patch_size": 4, "embed_dim": 16,
    "state_size": 8, "time_step_rank": 4, "num_heads": 4, "n_groups": 1, "chunk_size": 4,
    "sliding_window": 8, "query_pre_attn_scalar": 8, "position_buckets": 16,
    "bottleneck_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16,
    "num_mel_bins": 16, "max_length": 32, "num_landmarks": 4, "local_attention": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
# fmt: on
"""Settings of small networks of transformers; each has some of them."""
_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "swin": {"depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    "convnext": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]},
    "convnextv2": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]},
    "resnet": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "embedding_size": 8},
    "regnet": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "groups_width": 8},
    "poolformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "patch_size": 7},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]},
    "mobilevit": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
        "patch_size": 2,
        "image_size": 64,
    },
    "levit": {"image_size": 64, "hidden_sizes": [16, 32, 48], "depths": [1, 1, 1]},
    "cvt": {"depth": [1, 1, 1], "embed_dim": [16, 32, 48], "num_heads": [1, 2, 3]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mobilebert": {"num_feedforward_networks": 1, "embedding_size": 16},
    "xlnet": {"d_inner": 64, "n_head": 4, "d_head": 8},
    "audio-spectrogram-transformer": {"patch_size": 4, "time_stride": 4, "frequency_stride": 4},
}
_OF_ONE_STAGE = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_SOUND_SIZES: Mapping[str, Any] = {
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 4, 4],
    "conv_stride": [5, 4, 4],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
}


@dataclass(frozen=True)
class ForeignNetwork:
    """A module, and what it reads and returns."""

    package: Package
    family: str
    variant: str
    module: nn.Module
    kind: Kind
    shape: tuple[int, ...]
    """Shape of a sample as the module reads it."""

    @property
    def dtype(self) -> str:
        """Dtype of the samples."""
        return "int64" if self.kind in ("decoder", "text") else "float32"

    def draw_batches(self, count: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield samples and labels; the labels of a decoder are tokens."""
        random = np.random.default_rng(0)
        for _ in range(count):
            if self.dtype == "int64":
                x = random.integers(3, 99, (size, *self.shape))
            else:
                x = random.normal(size=(size, *self.shape)).astype(np.float32)
            is_decoder = self.kind == "decoder"
            labels = random.integers(3, 99, x.shape) if is_decoder else None
            yield x, random.integers(0, CLASSES, size) if labels is None else labels

    def choose_logits(self, result: Any) -> Any:
        """Return the logits among the results of the module."""
        return choose_tensor(torch, result)


def draw_families(package: Package, seed: int) -> list[str]:
    """Return families in the order of the alphabet."""
    random = np.random.default_rng(seed)
    if package == "timm":
        families = sorted(_list_variants())
        drawn = random.choice(families, COUNTS[package], replace=False)
        return sorted(map(str, drawn))
    families = [name for _, names in KINDS.values() for name in names.split()]
    others = [name for name in families if name not in ALWAYS]
    drawn = random.choice(others, COUNTS[package] - len(ALWAYS), replace=False)
    return sorted((*ALWAYS, *map(str, drawn)))


def make_network(package: Package, family: str, seed: int) -> ForeignNetwork:
    """Make a small network of a family, without random draws in training."""
    make = _make_timm if package == "timm" else _make_transformers
    network = make(family, seed)
    stop_draws(network.module)
    for parameter in network.module.parameters():
        # A head that starts at zero has logits of zero.
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter.data, std=0.05)
    return network


def stop_draws(module: nn.Module) -> None:
    """Set the rates of dropout and of its like to 0, of layers and of calls within a forward."""
    for layer in module.modules():
        for name, value in vars(layer).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(layer, name, 0.0)


def import_foreign(package: Package) -> Any:
    """Import timm or transformers.

    Both import torchvision, whose build for GPUs lacks its operators beside a torch for CPUs. No
    network calls them, so declarations are enough there.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                _LIBRARY.define(f"{name}{signature}")
    return importlib.import_module(package)


def _list_variants() -> Mapping[str, Sequence[str]]:
    """Return the names of timm's networks by the module that defines them."""
    timm = import_foreign("timm")
    variants: dict[str, list[str]] = {}
    for name in timm.list_models():
        module = timm.models.model_entrypoint(name).__module__
        variants.setdefault(module.rpartition(".")[2], []).append(name)
    return variants


def _make_timm(family: str, seed: int) -> ForeignNetwork:
    import_foreign("timm")
    names = sorted(_list_variants()[family])
    small = [name for name in names if _SMALL.search(name)] or names
    random = np.random.default_rng([seed, *family.encode()])
    drawn = str(random.choice(small))
    # An encoder has no classes: then another variant of its family is compared.
    for name in (drawn, *(name for name in small if name != drawn)):
        network = _shrink_variant(family, name, seed)
        if network is not None:
            return network
    raise ValueError(f"{', '.join(small)}: none classifies images of {_SIDES[0]} to {_SIDES[-1]}")


def _shrink_variant(family: str, name: str, seed: int) -> ForeignNetwork | None:
    """Return a network of timm, made as small as it can be.

    None if it computes no images, or has no classes.
    """
    timm = import_foreign("timm")
    torch.manual_seed(seed)
    for arguments in SHRINKS:
        further = {**_NARROW.get(family, {}), **arguments}
        make = partial(timm.create_model, name, num_classes=CLASSES, **further)
        for side in _SIDES:
            for create in (partial(make, img_size=side), make):
                module, shape = _try_image_network(create, side)
                if module is None:
                    continue
                if shape != (2, CLASSES):  # Neither another size nor another depth has classes.
                    return None
                return ForeignNetwork("timm", family, name, module, "image", (3, side, side))
            if not _can_make(make):
                break
    return None


def _can_make(make: Callable[[], nn.Module]) -> bool:
    """Return whether a network accepts its arguments."""
    try:
        with torch.device("meta"):
            make()
    except Exception:  # a network raises any error for what it doesn't accept
        return False
    return True


def _try_image_network(
    make: Callable[[], nn.Module], side: int
) -> tuple[nn.Module | None, tuple[int, ...]]:
    """Return the module if it computes two images of a size, and the shape of its result."""
    try:
        module = make()
        with torch.no_grad():
            module.train()(torch.randn(2, 3, side, side))
            result = module.eval()(torch.randn(2, 3, side, side))
    except Exception:  # a network raises any error for a size
        return None, ()
    return module, tuple(getattr(result, "shape", ()))


def _make_transformers(family: str, seed: int) -> ForeignNetwork:
    transformers = import_foreign("transformers")
    kind = next(kind for kind, (_, names) in KINDS.items() if family in names.split())
    config_class = type(transformers.AutoConfig.for_model(family))
    defaults = config_class().to_dict()
    sizes = {**_SIZES, **(_SOUND_SIZES if kind == "sound" else {})}
    options = {
        name: value
        for name, value in sizes.items()
        if name in {**defaults, **config_class.attribute_map}
        and not (isinstance(defaults.get(name), list) and not isinstance(value, list))
    }
    options |= {
        name: 0.0
        for name, value in defaults.items()
        if isinstance(value, float) and ("drop" in name or name.endswith("pdrop"))
    }
    overrides = _OVERRIDES.get(family, {})
    if "depths" in overrides:
        # They have another name there, for stages.
        options = {n: x for n, x in options.items() if n not in _OF_ONE_STAGE}
    options |= overrides
    config = config_class(**options, num_labels=CLASSES)
    if kind == "decoder":
        config.use_cache = False
    torch.manual_seed(seed)
    module = getattr(transformers, KINDS[kind][0]).from_config(config)
    shape: tuple[int, ...] = (TOKENS,)
    if kind == "image":
        side = getattr(config, "image_size", 32)
        shape = (3, side, side) if isinstance(side, int) else (3, *side)
    elif kind == "sound":
        is_spectrogram = hasattr(config, "num_mel_bins")
        shape = (config.max_length, config.num_mel_bins) if is_spectrogram else (SAMPLES,)
    return ForeignNetwork("transformers", family, type(module).__name__, module, kind, shape)
