"""Compute what the other definitions of our networks give, and keep it in `networks/`.

    python tests/golden/make_networks.py [case ...]

Needs mindspore, mindcv, torch, torchvision, transformers and monai. The weights of `network_cases`
are copied in by its rules; batch norm is in evaluation mode, with running statistics that were
drawn likewise.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden.network_cases import CASES, EVEN, Case, drawn, paths_here, samples

FOLDER = Path(__file__).parent / "networks"
KINDS = {
    "Conv2d": "conv",
    "ConvTranspose2d": "conv_transpose",
    "Dense": "dense",
    "Linear": "dense",
    "Conv1D": "turned_dense",
    "BatchNorm2d": "batch_norm",
    "LayerNorm": "layer_norm",
    "Embedding": "embedding",
}
LEAVES = {
    "weight": "kernel",
    "gamma": "scale",
    "beta": "bias",
    "moving_mean": "mean",
    "moving_variance": "var",
    "running_mean": "mean",
    "running_var": "var",
}


@dataclass(frozen=True)
class Weight:
    """A parameter or statistic of the other definition; `kind` is empty outside of modules."""

    module: str
    kind: str
    leaf: str
    shape: tuple[int, ...]


def copied(case: Case, weights: list[Weight]) -> list[np.ndarray]:
    """The values of the weights, in their layouts."""
    modules = {weight.module: weight.kind.removeprefix("turned_") for weight in weights}
    paths = paths_here(modules.items(), case.rules)
    return [_value(case, weight, paths[weight.module]) for weight in weights]


def _value(case: Case, weight: Weight, layers: list[str]) -> np.ndarray:
    if layers == [""]:
        return np.zeros(weight.shape, np.float32)
    if not weight.kind:
        return drawn(layers[0], weight.shape, case.gain)
    axis = 1 if weight.kind == "turned_dense" and weight.leaf == "kernel" else 0
    shape = list(weight.shape)
    shape[axis] //= len(layers)
    parts = []
    for layer in layers:
        path = f"{layer}/{weight.leaf}"
        kernel = weight.leaf == "kernel"
        value = _kernel(case, weight.kind, path, shape) if kernel else drawn(path, shape, case.gain)
        parts.append(value)
    return np.concatenate(parts, axis)


def _kernel(case: Case, kind: str, path: str, shape: list[int]) -> np.ndarray:
    """Of (height, width, inputs, outputs) or (inputs, outputs) here."""
    if kind == "turned_dense":
        return drawn(path, shape, case.gain)
    if kind == "conv_transpose":
        inputs, outputs, *window = shape
        return drawn(path, (*window, inputs, outputs), case.gain)[::-1, ::-1].transpose(2, 3, 0, 1)
    outputs, inputs, *window = shape
    if re.search(r"(dense_\d+|query|key|value|out|pooler)/kernel$", path):
        values = drawn(path, (inputs, outputs), case.gain)
        if case.flattened and path == "dense_0/kernel":
            values = values.reshape(*case.flattened, outputs).transpose(2, 0, 1, 3)
        return values.reshape(inputs, outputs).T.reshape(shape)
    return drawn(path, (*window, inputs, outputs), case.gain).transpose(3, 2, 0, 1)


def _leaf(kind: str, name: str) -> str:
    if name == "weight" and "norm" in kind:
        return "scale"
    if kind == "embedding":
        return "table"
    return LEAVES.get(name, name)


def _weights(
    modules: Iterable[tuple[str, Any]], named: Iterable[tuple[str, Any]]
) -> tuple[list[Weight], list[Any]]:
    """What has to be filled in, and the tensors to fill it into."""
    kinds = {name: KINDS.get(type(module).__name__, "") for name, module in modules}
    weights, tensors = [], []
    for name, tensor in named:
        module, _, leaf = name.rpartition(".")
        kind = kinds.get(module, "")
        if leaf == "num_batches_tracked":
            continue
        leaf = _leaf(kind, "weight" if leaf == "embedding_table" else leaf)
        weights.append(Weight(module if kind else name, kind, leaf, tuple(tensor.shape)))
        tensors.append(tensor)
    return weights, tensors


def of_mindspore(case: Case, network: Any) -> tuple[int, np.ndarray]:
    """How many parameters a mindspore network has, and its logits."""
    import mindspore as ms

    # Ops that eager mode has for other devices alone are put together from others in a graph.
    ms.set_context(mode=ms.GRAPH_MODE)
    network.set_train(False)
    weights, tensors = _weights(network.cells_and_names(), network.parameters_and_names())
    for tensor, value in zip(tensors, copied(case, weights), strict=True):
        tensor.set_data(ms.Tensor(np.ascontiguousarray(value)))
    images = samples(case)
    if case.peer != "mindspore:wide_deep":
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    logits = network(ms.Tensor(images)).asnumpy()
    return _count(weights), logits


def of_torch(case: Case, network: Any, read: Callable[[Any, Any], Any]) -> tuple[int, np.ndarray]:
    """How many parameters a torch network has, and its logits."""
    import torch

    network.eval()
    state = network.state_dict(keep_vars=True)
    tied = {id(tensor): name for name, tensor in reversed(state.items())}
    named = [(name, tensor) for name, tensor in state.items() if tied[id(tensor)] == name]
    weights, tensors = _weights(network.named_modules(), named)
    with torch.no_grad():
        for tensor, value in zip(tensors, copied(case, weights), strict=True):
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(value)))
        logits = read(network, torch.from_numpy(samples(case)))
    return _count(weights), logits.numpy()


def _count(weights: list[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights if weight.leaf not in ("mean", "var"))


def mindcv(case: Case, name: str) -> tuple[int, np.ndarray]:
    """A network of mindcv, changed where it differs on purpose from what its name stands for."""
    import mindspore as ms
    from mindcv.models.vit import VisionTransformer

    if name == "VisionTransformer":
        norm = partial(ms.nn.LayerNorm, epsilon=1e-6)
        network = VisionTransformer(num_classes=case.classes, norm_layer=norm, **case.peer_changes)
        return of_mindspore(case, network)
    network = _of_mindcv(name, case.classes)
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
    return of_mindspore(case, network)


def _of_mindcv(name: str, classes: int) -> Any:
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


def _shuffle_at_the_end(shufflenet: Any) -> None:
    """Shuffle behind the two branches and split in halves before them, as in the paper's fig. 3;
    mindcv splits into even and odd channels, which is the same up to the order of channels."""
    from mindspore import nn, ops

    class Shuffled(nn.Cell):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.block = block

        def construct(self, x: Any) -> Any:
            y = self.block(x)
            batch, channels, height, width = y.shape
            y = y.reshape(batch, 2, channels // 2, height, width).swapaxes(1, 2)
            return y.reshape(batch, channels, height, width)

    for block in shufflenet.features:
        block.channel_shuffle = lambda x: ops.split(x, x.shape[1] // 2, axis=1)
    shufflenet.features = nn.SequentialCell([Shuffled(block) for block in shufflenet.features])


def mindspore(case: Case, name: str) -> tuple[int, np.ndarray]:
    """A network of MindSpore's model zoo, written out with its layers and MindSpore's."""
    return of_mindspore(case, {"alexnet": _alexnet, "wide_deep": _wide_deep}[name](case))


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


def transformers(case: Case, name: str) -> tuple[int, np.ndarray]:
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
        return of_torch(case, library.GPT2LMHeadModel(config), _logits_of_tokens)
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
    return of_torch(case, library.BertForSequenceClassification(config), _logits_of_tokens)


def _logits_of_tokens(network: Any, numbers: Any) -> Any:
    return network(numbers.reshape(len(numbers), -1).long()).logits


def monai(case: Case, name: str) -> tuple[int, np.ndarray]:
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
    return of_torch(case, network, _logits_of_pixels)


def _logits_of_pixels(network: Any, images: Any) -> Any:
    return network(images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def torchvision(case: Case, name: str) -> tuple[int, np.ndarray]:
    """A network of torchvision."""
    from torchvision import models

    network = models.get_model(name, weights=None, num_classes=case.classes, **case.peer_changes)
    return of_torch(case, network, lambda network, images: network(images.permute(0, 3, 1, 2)))


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
        if sys.argv[1:] and case.kept not in sys.argv[1:]:
            continue
        library, _, name = case.peer.partition(":")
        parameters, logits = LIBRARIES[library](case, name)
        result = {
            "definition": f"{library} {version(library)}, {name}",
            "parameters": parameters,
            "logits": logits.astype(float).round(7).tolist(),
        }
        (FOLDER / f"{case.kept}.json").write_text(json.dumps(result) + "\n")
        print(case.kept, parameters, logits.shape, np.abs(logits).max(), logits.std())


if __name__ == "__main__":
    main()
