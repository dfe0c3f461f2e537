"""Compute what the other definitions of our networks give, and keep it in `networks/`.

    python tests/golden/make_networks.py [case ...]

with mindspore 2.10.0, mindcv 0.3.0, torch 2.13.0 and torchvision 0.28.0 (both CPU), transformers
5.23.0 and monai 1.6.1. Every array is drawn by its name and shape, as `network_cases` has it; batch
norm is in evaluation mode.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden.network_cases import CASES, EVEN, Case, draw_arrays, samples

FOLDER = Path(__file__).parent / "networks"
STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var")


@dataclass(frozen=True)
class Computed:
    """What is kept of another definition."""

    shapes: list[tuple[str, list[int]]]
    """Its arrays, in its order."""
    logits: np.ndarray

    @property
    def parameters(self) -> int:
        """How many it has."""
        named = [shape for name, shape in self.shapes if not name.endswith(STATISTICS)]
        return sum(map(math.prod, named))


def compute_mindspore(case: Case, network: Any) -> Computed:
    """The arrays of a mindspore network, and its logits."""
    import mindspore as ms

    # Ops that eager mode has for other devices alone are put together from others in a graph.
    ms.set_context(mode=ms.GRAPH_MODE)
    network.set_train(False)
    named = [(_unwrap(name), tensor) for name, tensor in network.parameters_and_names()]
    shapes = [(name, list(tensor.shape)) for name, tensor in named]
    for (_, tensor), value in zip(named, draw_arrays(case, shapes).values(), strict=True):
        tensor.set_data(ms.Tensor(value))
    images = samples(case)
    if case.peer != "mindspore:wide_deep":
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return Computed(shapes, network(ms.Tensor(images)).asnumpy())


def compute_torch(case: Case, network: Any, read: Callable[[Any, Any], Any]) -> Computed:
    """The arrays of a torch network, and its logits."""
    import torch

    network.eval()
    state = network.state_dict(keep_vars=True)
    tied = {id(tensor): name for name, tensor in reversed(state.items())}
    untied = [name for name, tensor in state.items() if tied[id(tensor)] == name]
    shapes = [
        (name, list(state[name].shape)) for name in untied if "num_batches_tracked" not in name
    ]
    with torch.no_grad():
        for name, value in draw_arrays(case, shapes).items():
            state[name].copy_(torch.from_numpy(value))
        logits = read(network, torch.from_numpy(samples(case)))
    return Computed(shapes, logits.numpy())


def mindcv(case: Case, name: str) -> Computed:
    """A network of mindcv, changed where it differs on purpose from what its name stands for."""
    import mindspore as ms
    from mindcv.models.vit import VisionTransformer

    if name == "VisionTransformer":
        norm = partial(ms.nn.LayerNorm, epsilon=1e-6)
        network = VisionTransformer(num_classes=case.classes, norm_layer=norm, **case.peer_changes)
        return compute_mindspore(case, network)
    network = _build_mindcv(name, case.classes)
    if name.startswith("vgg"):
        _give_biases(network.features)
        _set_hidden(network.classifier, 512, case.peer_changes["hidden"], case.classes)
    if name.startswith("seresnet"):
        _squeeze_exactly(network)
    if name == "googlenet":
        _normalise(network)
    if name.startswith("shufflenet"):
        network.classifier = ms.nn.Dense(network.classifier.in_channels, case.classes)
        _share_evenly(network.features[0])
        _shuffle_at_the_end(network)
    return compute_mindspore(case, network)


def _build_mindcv(name: str, classes: int) -> Any:
    import mindcv
    from mindcv.models.googlenet import GoogLeNet
    from mindcv.models.inceptionv3 import InceptionV3
    from mindspore.nn import BatchNorm2d

    with_auxiliary = {"googlenet": GoogLeNet, "inception_v3": InceptionV3}
    if name in with_auxiliary:
        return with_auxiliary[name](num_classes=classes, aux_logits=False)
    if name.startswith("efficientnet"):
        norm = partial(BatchNorm2d, eps=1e-3)  # as the paper's code has it
        return mindcv.create_model(name, num_classes=classes, norm_layer=norm)
    return mindcv.create_model(name, num_classes=classes)


def _give_biases(features: Any) -> None:
    """Biases to the convolutions of a VGG, as in the paper."""
    from mindspore import nn

    for place, cell in enumerate(features):
        if isinstance(cell, nn.Conv2d):
            sizes = (cell.in_channels, cell.out_channels, cell.kernel_size)
            features[place] = nn.Conv2d(*sizes, pad_mode="pad", padding=1, has_bias=True)


def _set_hidden(classifier: Any, channels: int, hidden: int, classes: int) -> None:
    """Give the three dense layers of a VGG other sizes."""
    from mindspore import nn

    sizes = [(channels, hidden), (hidden, hidden), (hidden, classes)]
    places = [i for i, cell in enumerate(classifier) if isinstance(cell, nn.Dense)]
    for place, (inputs, outputs) in zip(places, sizes, strict=True):
        classifier[place] = nn.Dense(inputs, outputs)


def _squeeze_exactly(seresnet: Any) -> None:
    """One hidden feature for 16 channels, as in the paper; mindcv's are multiples of 8."""
    for _, cell in seresnet.cells_and_names():
        if hasattr(cell, "se_module"):
            channels = cell.se_module.conv_reduce.in_channels
            cell.se_module = type(cell.se_module)(channels, rd_channels=channels // 16)


def _normalise(googlenet: Any) -> None:
    """Batch norm behind every convolution, and 3x3 for 5x5, as in MindSpore's model zoo."""
    from mindspore import nn

    for _, cell in googlenet.cells_and_names():
        if type(cell).__name__ == "BasicConv2d":
            conv = cell.conv
            if conv.kernel_size == (5, 5):
                cell.conv = nn.Conv2d(conv.in_channels, conv.out_channels, 3)
            cell.relu = nn.SequentialCell(nn.BatchNorm2d(conv.out_channels, eps=1e-3), nn.ReLU())


def _share_evenly(unit: Any) -> None:
    """Half of its features from either branch of the first unit of a ShuffleNet, as in the paper;
    in mindcv one branch gives as many as the unit reads."""
    from mindspore.nn import BatchNorm2d, Conv2d

    reads, inner = unit.branch_proj[2].in_channels, unit.branch_main[5].in_channels
    unit.branch_proj[2], unit.branch_proj[3] = Conv2d(reads, inner, 1), BatchNorm2d(inner)
    unit.branch_main[5], unit.branch_main[6] = Conv2d(inner, inner, 1), BatchNorm2d(inner)


def _unwrap(name: str) -> str:
    """The name that an array had before `_shuffle_at_the_end`."""
    return name.replace(".unshuffled.", ".")


def _shuffle_at_the_end(shufflenet: Any) -> None:
    """Shuffle behind the two branches and split in halves before them, as in the paper's fig. 3;
    mindcv splits into even and odd channels, which is the same up to the order of channels."""
    from mindspore import nn, ops

    class Shuffled(nn.Cell):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.unshuffled = block

        def construct(self, x: Any) -> Any:
            y = self.unshuffled(x)
            batch, channels, height, width = y.shape
            y = y.reshape(batch, 2, channels // 2, height, width).swapaxes(1, 2)
            return y.reshape(batch, channels, height, width)

    for block in shufflenet.features:
        block.channel_shuffle = lambda x: ops.split(x, x.shape[1] // 2, axis=1)
    shufflenet.features = nn.SequentialCell([Shuffled(block) for block in shufflenet.features])


def mindspore(case: Case, name: str) -> Computed:
    """A network of MindSpore's model zoo, written out with its layers and MindSpore's."""
    return compute_mindspore(case, {"alexnet": _alexnet, "wide_deep": _wide_deep}[name](case))


def _alexnet(case: Case) -> Any:
    from mindspore import nn

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[Any]:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, pad_mode="same", has_bias=True)
        return [layer, nn.ReLU()]

    hidden = case.peer_changes["hidden"]
    return nn.SequentialCell(
        *conv(3, 64, 11, 4),
        nn.MaxPool2d(3, 2),
        *conv(64, 128, 5),
        nn.MaxPool2d(3, 2),
        *conv(128, 192, 3),
        *conv(192, 256, 3),
        *conv(256, 256, 3),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Dense(256, hidden),
        nn.ReLU(),
        nn.Dense(hidden, hidden),
        nn.ReLU(),
        nn.Dense(hidden, case.classes),
    )


def _wide_deep(case: Case) -> Any:
    import mindspore as ms
    from mindspore import Parameter, nn, ops

    sizes = case.changes
    vocabulary, length = sizes["vocabulary"], sizes["embedding"]

    def zeros(*shape: int) -> Any:
        return ms.Tensor(np.zeros(shape, np.float32))

    class WideDeep(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.wide = Parameter(zeros(vocabulary, 1), name="wide")
            self.wide_bias = Parameter(zeros(1), name="wide_bias")
            self.deep = Parameter(zeros(vocabulary, length), name="deep")
            widths = [case.image[0] * length, *sizes["hidden"], 1]
            self.layers = nn.CellList([nn.Dense(a, b) for a, b in pairwise(widths)])

        def construct(self, samples: Any) -> Any:
            numbers, values = samples[:, :, 0, 0].astype(ms.int32), samples[:, :, 0, 1:]
            wide = (ops.gather(self.wide, numbers, 0) * values).sum(1) + self.wide_bias
            deep = (ops.gather(self.deep, numbers, 0) * values).reshape(len(samples), -1)
            for layer in self.layers:
                deep = layer(ops.relu(deep))
            logit = wide + deep
            return ops.cat((ops.zeros_like(logit), logit), 1)

    return WideDeep()


def transformers(case: Case, name: str) -> Computed:
    """A text model of transformers, with the tanh form of GELU."""
    import transformers as library

    sizes, tokens = case.changes, case.image[0]
    if name == "GPT2":
        config = library.GPT2Config(
            vocab_size=case.classes,
            n_positions=tokens,
            n_embd=sizes["features"],
            n_inner=sizes["hidden"],
            n_head=sizes["heads"],
            n_layer=sizes["blocks"],
        )
        return compute_torch(case, library.GPT2LMHeadModel(config), _logits_of_tokens)
    config = library.BertConfig(
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=tokens,
        hidden_size=sizes["features"],
        intermediate_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_hidden_layers=sizes["blocks"],
        hidden_act="gelu_new",
        num_labels=case.classes,
    )
    return compute_torch(case, library.BertForSequenceClassification(config), _logits_of_tokens)


def _logits_of_tokens(network: Any, numbers: Any) -> Any:
    return network(numbers.reshape(len(numbers), -1).long()).logits


def monai(case: Case, name: str) -> Computed:
    """MONAI's U-Net; its last transposed convolution has our features where the first two agree."""
    from monai.networks.nets import BasicUNet

    widths = case.changes["widths"]
    network = BasicUNet(
        spatial_dims=2,
        in_channels=case.image[-1],
        out_channels=case.classes,
        features=(*widths, widths[0]),
        act="relu",
        norm="batch",
        bias=False,
    )
    return compute_torch(case, network, _logits_of_pixels)


def _logits_of_pixels(network: Any, images: Any) -> Any:
    return network(images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def torchvision(case: Case, name: str) -> Computed:
    """A network of torchvision."""
    from torchvision import models

    network = models.get_model(name, weights=None, num_classes=case.classes, **case.peer_changes)
    return compute_torch(case, network, lambda network, images: network(images.permute(0, 3, 1, 2)))


LIBRARIES = {
    "mindcv": mindcv,
    "mindspore": mindspore,
    "transformers": transformers,
    "monai": monai,
    "torchvision": torchvision,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in (*CASES, *EVEN):
        if sys.argv[1:] and case.file_stem not in sys.argv[1:]:
            continue
        library, _, name = case.peer.partition(":")
        computed = LIBRARIES[library](case, name)
        result = {
            "definition": f"{library} {version(library)}, {name}",
            "parameters": computed.parameters,
            "arrays": computed.shapes,
            "logits": computed.logits.astype(float).round(7).tolist(),
        }
        (FOLDER / f"{case.file_stem}.json").write_text(json.dumps(result) + "\n")
        logits = computed.logits
        print(case.file_stem, computed.parameters, np.abs(logits).max(), logits.std(), flush=True)


if __name__ == "__main__":
    main()
