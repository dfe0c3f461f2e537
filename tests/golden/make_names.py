"""Make names/: how collections of models call the arrays of networks that are here.

    python tests/golden/make_names.py

with mindspore 2.10.0, mindcv 0.3.0, torch 2.13.0 and torchvision 0.28.0 (both CPU) and timm 1.0.31.
Names and shapes alone are kept, layer by layer in the order of the state dict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "names"

TORCHVISION = {
    name: name
    for name in (
        *("vgg11", "vgg11_bn", "resnet50", "wide_resnet50_2", "resnext50_32x4d", "densenet121"),
        *("efficientnet_b0", "efficientnet_b1", "googlenet", "inception_v3", "mobilenet_v2"),
        *("mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_800mf", "shufflenet_v2_x0_5"),
        *("squeezenet1_0", "squeezenet1_1", "vit_b_16"),
    )
}
TIMM = {
    "vgg11": "vgg11",
    "seresnet50": "se_resnet50",
    "legacy_seresnet50": "se_resnet50",
    "resnetv2_50": "resnetv2_50",
    "densenet121": "densenet121",
    "dpn92": "dpn92",
    "efficientnet_b0": "efficientnet_b0",
    "inception_v3": "inception_v3",
    "mobilenetv1_100": "mobilenet_v1",
    "mobilenetv2_100": "mobilenet_v2",
    "regnetx_008": "regnet_x_800mf",
    "repvgg_a0": "repvgg_a0",
    "legacy_xception": "xception",
    "vit_tiny_patch16_224": "vit_tiny",
}
MINDCV = {
    "resnext50_32x4d": "resnext50_32x4d",
    "densenet121": "densenet121",
    "efficientnet_b0": "efficientnet_b0",
    "inception_v3": "inception_v3",
    "mobilenet_v1_100": "mobilenet_v1",
    "mobilenet_v2_100": "mobilenet_v2",
    "mobilenet_v3_large_100": "mobilenet_v3_large",
    "mobilenet_v3_small_100": "mobilenet_v3_small",
    "regnet_x_800mf": "regnet_x_800mf",
    "repvgg_a0": "repvgg_a0",
    "squeezenet1_1": "squeezenet1_1",
    "xception": "xception",
    "vit_b_32_224": "vit_b_32",
}
"""By their names there the networks of conf/model."""


def group_by_layer(named: Iterable[tuple[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Shapes of arrays by layer and by their names in it."""
    layers: dict[str, dict[str, list[int]]] = {}
    for name, array in named:
        layer, _, leaf = name.rpartition(".")
        if leaf != "num_batches_tracked":
            layers.setdefault(layer, {})[leaf] = list(array.shape)
    return layers


def write(collection: str, networks: Mapping[str, str], arrays: Mapping[str, Any]) -> None:
    """Keep the names that a collection gives the networks, a network a line."""
    lines = [
        json.dumps(
            {"theirs": theirs, "model": model, "layers": group_by_layer(arrays[theirs])},
            separators=(",", ":"),
        )
        for theirs, model in networks.items()
    ]
    (FOLDER / f"{collection}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Build every network once."""
    import mindcv
    import timm
    from torchvision import models

    FOLDER.mkdir(exist_ok=True)
    of_torchvision = {name: models.get_model(name, weights=None) for name in TORCHVISION}
    states = {name: net.state_dict().items() for name, net in of_torchvision.items()}
    write("torchvision", TORCHVISION, states)
    of_timm = {name: timm.create_model(name) for name in TIMM}
    write("timm", TIMM, {name: net.state_dict().items() for name, net in of_timm.items()})
    of_mindcv = {name: mindcv.create_model(name) for name in MINDCV}
    named = {name: net.parameters_and_names() for name, net in of_mindcv.items()}
    write("mindcv", MINDCV, named)


if __name__ == "__main__":
    main()
