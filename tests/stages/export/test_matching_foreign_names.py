from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import read_weights, write_weights
from pipeline.stages.export.matching import convert_to_foreign_names, match_weights
from pipeline.stages.export.network import NetworkArrays
from tests.command_line import convert
from tests.stages.export.test_matching import (
    WIDTHS,
    in_mindspore,
    lenet,
    lenet_needs,
    needs,
    rand,
    resnet_names,
    resnet_needs,
    vgg_names,
    vit_names,
)

VIT = {"features": 6, "hidden": 8, "heads": 2, "blocks": 2}
VGG = {"convs": [1, 2], "widths": [4, 6], "hidden": 5, "batch_norm": True}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make_theirs", "make_network"),
    [
        (lenet, lenet_needs),
        (lambda: resnet_names(WIDTHS), resnet_needs),
        (lambda: in_mindspore(resnet_names(WIDTHS)), resnet_needs),
        (lambda: vgg_names(batch_norm=True), lambda: needs("vgg16", **VGG)),
        (lambda: vit_names("torchvision"), lambda: needs("vit_tiny", **VIT)),
        (lambda: vit_names("timm"), lambda: needs("vit_tiny", **VIT)),
    ],
    ids=["lenet5", "resnet", "resnet in MindSpore", "vgg", "vit", "vit of timm"],
)
def test_foreign_names_round_trip(
    make_theirs: Callable[[], Arrays], make_network: Callable[[], NetworkArrays]
) -> None:
    """Weights read from a file and put into a file of other values make the first again."""
    theirs, network = make_theirs(), make_network()
    ours = match_weights("a.pth", theirs, network).arrays
    counters = [name for name in theirs if "num_batches" in name]
    model = {name: a if name in counters else rand(*a.shape) for name, a in theirs.items()}
    back = convert_to_foreign_names("b.pth", model, ours, network)
    assert list(back) == list(theirs)
    for name, array in theirs.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_names_of_a_keras_file_round_trip() -> None:
    """Keras has kernels and flattened images in the network's layout."""
    shapes = {"conv_0": (3, 3, 1, 6), "dense_0": (24, 10)}
    ours = {f"params/{layer}/kernel": rand(*shape) for layer, shape in shapes.items()}
    ours |= {f"params/{layer}/bias": rand(shape[-1]) for layer, shape in shapes.items()}
    network = NetworkArrays(
        "layers", {name: array.shape for name, array in ours.items()}, {"dense_0": 6}
    )
    names = {"conv2d": "conv_0", "dense": "dense_0"}
    theirs = {
        f"{name}.{leaf}": ours[f"params/{layer}/{leaf}"]
        for name, layer in names.items()
        for leaf in ("kernel", "bias")
    }
    model = {name: np.zeros_like(array) for name, array in theirs.items()}
    back = convert_to_foreign_names("keras.h5", model, ours, network)
    for name, array in theirs.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_dtypes_follow_the_file() -> None:
    theirs = lenet()
    ours = match_weights("a.pth", theirs, lenet_needs()).arrays
    model = {name: array.astype(np.float16) for name, array in theirs.items()}
    back = convert_to_foreign_names("b.pth", model, ours, lenet_needs())
    np.testing.assert_array_equal(back["fc1.weight"], theirs["fc1.weight"].astype(np.float16))


def test_values_beyond_the_type_of_the_file_are_refused() -> None:
    ours = match_weights("a.pth", lenet(), lenet_needs()).arrays
    ours["params/dense_2/bias"] = np.full(10, 1e5, np.float32)
    model = {name: array.astype(np.float16) for name, array in lenet().items()}
    with pytest.raises(DataError, match=r"has fc3.bias as float16, which can't hold the largest"):
        convert_to_foreign_names("b.pth", model, ours, lenet_needs())


def test_file_of_another_network_is_refused() -> None:
    ours = match_weights("a.pth", lenet(), lenet_needs()).arrays
    with pytest.raises(DataError, match=r"b.pth: 7 of 8 arrays matched .*1 misshapen"):
        convert_to_foreign_names("b.pth", lenet() | {"fc3.bias": rand(9)}, ours, lenet_needs())
    del ours["params/dense_2/bias"]
    with pytest.raises(
        DataError, match=r"b.pth: has fc3.bias, and the network has no such weights"
    ):
        convert_to_foreign_names("b.pth", lenet(), ours, lenet_needs())


@pytest.mark.medium
def test_convert_writes_names_of_a_reference_file(tmp_path: Path) -> None:
    theirs, others = lenet(), lenet()
    write_weights(tmp_path / "theirs.npz", theirs)
    write_weights(tmp_path / "others.ckpt", others)
    files = ["weights", str(tmp_path / "theirs.npz"), str(tmp_path / "out.ckpt")]
    like = f"--like={tmp_path / 'others.ckpt'}"
    with pytest.raises(UsageError, match=r"--like .*: needs a recipe, whose network the"):
        convert([*files, like])
    assert convert([*files, like, "+recipe=lenet5_digits"]) == 0
    written = read_weights(tmp_path / "out.ckpt")
    assert list(written) == list(others)
    for name, array in theirs.items():
        np.testing.assert_array_equal(written[name], array)
