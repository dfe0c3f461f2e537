from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.renames import RenameSpec
from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnSpec
from pipeline.data.inputs import NetworkInput, NetworkInputs
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import read_weights, write_weights
from pipeline.stages.export.matching import Matching, format_table, match_weights
from pipeline.stages.export.network import NetworkArrays, trace_model_arrays
from tests.models.build import conf_model

RNG = np.random.default_rng(3)


def needs(name: str, image: Sequence[int] = (32, 32, 3), **changes: Any) -> NetworkArrays:
    return trace_model_arrays(conf_model(name, **changes), 10, one_input("image", image))


def one_input(name: str, shape: Sequence[int], dtype: str = "float32") -> NetworkInputs:
    return NetworkInputs((NetworkInput(name, name, ColumnSpec(tuple(shape), dtype)),))


def rand(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


LENET = {
    "conv1.weight": (6, 1, 5, 5),
    "conv2.weight": (16, 6, 5, 5),
    "fc1.weight": (120, 400),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "fc3.weight": (10, 84),
    "fc3.bias": (10,),
}


def lenet() -> Arrays:
    return {name: rand(*shape) for name, shape in LENET.items()}


@cache
def lenet_needs() -> NetworkArrays:
    return needs("lenet5", (32, 32, 1))


def statuses(matching: Matching) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in matching.rows:
        found.setdefault(row.status, []).append(row.source or row.target)
    return found


def test_native_names_need_no_rules() -> None:
    network = lenet_needs()
    own = {name: rand(*shape) for name, shape in network.shapes.items()}
    for prefix in ("", "params/"):
        arrays = {name.removeprefix("params/" if not prefix else ""): a for name, a in own.items()}
        matching = match_weights("f", arrays, network)
        assert matching.rules is None
        assert statuses(matching) == {"matched": list(arrays)}
        for name, array in own.items():
            np.testing.assert_array_equal(matching.arrays[name], array)


def test_kernels_are_transposed_and_flattened_images_reordered() -> None:
    theirs, network = lenet(), lenet_needs()
    matching = match_weights("f", theirs, network)
    assert matching.rules == "torch"
    kernel = matching.arrays["params/conv_1/kernel"]
    np.testing.assert_array_equal(kernel[4, 2, 5, 11], theirs["conv2.weight"][11, 5, 4, 2])
    np.testing.assert_array_equal(matching.arrays["params/dense_1/kernel"], theirs["fc2.weight"].T)
    image = rand(5, 5, 16)
    here = image.reshape(-1) @ matching.arrays["params/dense_0/kernel"]
    there = theirs["fc1.weight"] @ image.transpose(2, 0, 1).reshape(-1)
    np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-4)


def test_flat_network_is_matched_in_file_order() -> None:
    names = ["features.0", "features.3", "hidden", "also_hidden", "a_head"]
    modules = dict(zip(["conv1", "conv2", "fc1", "fc2", "fc3"], names, strict=True))
    theirs = {
        f"module.{modules[name.partition('.')[0]]}.{name.partition('.')[2]}": array
        for name, array in lenet().items()
    }
    assert list(statuses(match_weights("f", theirs, lenet_needs()))) == ["matched"]


def resnet_names(widths: Sequence[int]) -> Arrays:
    """The state dict of the common definition of ResNet-18, built by hand."""
    arrays: Arrays = {"conv1.weight": rand(widths[0], 3, 3, 3), **norm("bn1", widths[0])}
    channels = widths[0]
    for stage, width in enumerate(widths, start=1):
        for block in range(2):
            at = f"layer{stage}.{block}"
            arrays |= {
                f"{at}.conv1.weight": rand(width, channels, 3, 3),
                **norm(f"{at}.bn1", width),
            }
            arrays |= {f"{at}.conv2.weight": rand(width, width, 3, 3), **norm(f"{at}.bn2", width)}
            if channels != width:
                arrays[f"{at}.downsample.0.weight"] = rand(width, channels, 1, 1)
                arrays |= norm(f"{at}.downsample.1", width)
            channels = width
    return {**arrays, "fc.weight": rand(10, channels), "fc.bias": rand(10)}


def norm(name: str, width: int) -> Arrays:
    leaves = ("weight", "bias", "running_mean", "running_var")
    counter = {f"{name}.num_batches_tracked": np.array(7)}
    return {**{f"{name}.{leaf}": rand(width) for leaf in leaves}, **counter}


WIDTHS = [4, 6, 8, 10]


@cache
def resnet_needs() -> NetworkArrays:
    return needs("resnet18", widths=WIDTHS, stem="cifar")


def in_mindspore(arrays: Arrays) -> Arrays:
    """The same weights under MindSpore's names."""
    norms = {name.rpartition(".")[0] for name in arrays if name.endswith("running_mean")}
    leaves = {"weight": "gamma", "bias": "beta"}
    moving = {"running_mean": "moving_mean", "running_var": "moving_variance"}
    result = {}
    for name, array in arrays.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "num_batches_tracked":
            new = moving.get(leaf, leaves.get(leaf, leaf) if layer in norms else leaf)
            result[f"{layer}.{new}".replace("downsample", "down_sample")] = array
    return result


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_residual_networks_are_recognised_by_their_blocks(framework: str) -> None:
    torch = resnet_names(WIDTHS)
    theirs = torch if framework == "torch" else in_mindspore(torch)
    matching = match_weights("f", theirs, resnet_needs())
    assert matching.rules == framework
    assert set(statuses(matching)) <= {"matched", "skipped"}
    assert len(matching.arrays) == len(resnet_needs().shapes)
    expected = {
        "params/stage3_block0/conv_1/kernel": torch["layer3.0.conv2.weight"].transpose(2, 3, 1, 0),
        "params/stage3_block0/shortcut/batch_norm_0/scale": torch["layer3.0.downsample.1.weight"],
        "batch_stats/stage2_block1/batch_norm_0/var": torch["layer2.1.bn1.running_var"],
        "batch_stats/batch_norm_0/mean": torch["bn1.running_mean"],
        "params/dense_0/kernel": torch["fc.weight"].T,
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(matching.arrays[name], array)


@pytest.mark.slow
def test_squeeze_and_excitation_can_be_convolutions() -> None:
    network = needs("se_resnet18", widths=[16, 16, 16, 16], stem="cifar")
    theirs = resnet_names([16, 16, 16, 16])
    for stage in range(1, 5):
        for block in range(2):
            at = f"layer{stage}.{block}"
            if stage > 1 and block == 0:
                theirs[f"{at}.downsample.0.weight"] = rand(16, 16, 1, 1)
                theirs |= norm(f"{at}.downsample.1", 16)
            for index, (wide, narrow) in enumerate([(16, 1), (1, 16)], start=1):
                theirs[f"{at}.se.fc{index}.weight"] = rand(narrow, wide, 1, 1)
                theirs[f"{at}.se.fc{index}.bias"] = rand(narrow)
    matching = match_weights("f", theirs, network)
    assert set(statuses(matching)) == {"matched", "skipped"}
    np.testing.assert_array_equal(
        matching.arrays["params/stage2_block1/squeeze_excite/dense_1/kernel"],
        theirs["layer2.1.se.fc2.weight"][:, :, 0, 0].T,
    )


def vgg_names(
    batch_norm: bool, counts: Sequence[int] = (1, 2), widths: Sequence[int] = (4, 6)
) -> Arrays:
    """VGG as one list of features and one of classifiers, numbered with all that has no weights."""
    arrays: Arrays = {}
    index, channels = 0, 3
    for width, count in zip(widths, counts, strict=True):
        for _ in range(count):
            arrays[f"features.{index}.weight"] = rand(width, channels, 3, 3)
            arrays[f"features.{index}.bias"] = rand(width)
            if batch_norm:
                arrays |= norm(f"features.{index + 1}", width)
            index, channels = index + 2 + batch_norm, width
        index += 1
    for index, (inputs, outputs) in zip((0, 3, 6), ((384, 5), (5, 5), (5, 10)), strict=True):
        arrays[f"classifier.{index}.weight"] = rand(outputs, inputs)
        arrays[f"classifier.{index}.bias"] = rand(outputs)
    return arrays


@pytest.mark.parametrize("batch_norm", [False, True])
def test_vgg_is_read_in_order(batch_norm: bool) -> None:
    network = needs("vgg16", convs=[1, 2], widths=[4, 6], hidden=5, batch_norm=batch_norm)
    theirs = vgg_names(batch_norm)
    matching = match_weights("f", theirs, network)
    assert set(statuses(matching)) <= {"matched", "skipped"}
    last = "features.7.weight" if batch_norm else "features.5.weight"
    kernel = matching.arrays["params/conv_2/kernel"]
    np.testing.assert_array_equal(kernel, theirs[last].transpose(2, 3, 1, 0))


def through_safetensors(arrays: Arrays, folder: Path) -> tuple[str, Arrays]:
    """The name of a file of these arrays, and what is read from it, in an order of its own."""
    path = folder / "w.safetensors"
    write_weights(path, arrays)
    return str(path), read_weights(path)


def dense_layers(*names: str, width: int = 8) -> Arrays:
    """Layers of one shape, the last of them with ten outputs."""
    arrays: Arrays = {}
    for name in names:
        outputs = 10 if name == names[-1] else width
        arrays |= {f"{name}.weight": rand(outputs, width), f"{name}.bias": rand(outputs)}
    return arrays


@cache
def mlp_needs(hidden: int, width: int = 8) -> NetworkArrays:
    return needs("mlp", (width, 1, 1), hidden=[width] * hidden)


@pytest.mark.parametrize("at", ["net.{}", "layers.layer_{}", "{}.dense"])
def test_unordered_file_is_ordered_by_numbers_in_names(at: str, tmp_path: Path) -> None:
    theirs = dense_layers(*(at.format(2 * index) for index in range(13)))
    matching = match_weights(*through_safetensors(theirs, tmp_path), mlp_needs(12))
    assert list(statuses(matching)) == ["matched"]
    for index in range(13):
        kernel = theirs[f"{at.format(2 * index)}.weight"].T
        np.testing.assert_array_equal(matching.arrays[f"params/dense_{index}/kernel"], kernel)


@pytest.mark.slow
def test_vgg_of_many_layers_is_read_in_order_from_safetensors(tmp_path: Path) -> None:
    network = needs("vgg16", convs=[4, 4], widths=[6, 6], hidden=5, batch_norm=True)
    theirs = vgg_names(batch_norm=True, counts=(4, 4), widths=(6, 6))
    assert "features.22.weight" in theirs
    matching = match_weights(*through_safetensors(theirs, tmp_path), network)
    assert set(statuses(matching)) == {"matched", "skipped"}
    known = match_weights("w.pth", theirs, network)
    assert set(matching.arrays) == set(network.shapes)
    for name, array in known.arrays.items():
        np.testing.assert_array_equal(matching.arrays[name], array)


NAMED = ("fc_in", "fc_hidden", "fc_out")


def test_ambiguous_layer_order_is_refused(tmp_path: Path) -> None:
    theirs = dense_layers(*NAMED)
    file, arrays = through_safetensors(theirs, tmp_path)
    told = r"the order of fc_hidden and fc_in, which have the same shapes, is unknown"
    for partial in (False, True):
        with pytest.raises(DataError, match=told) as error:
            match_weights(file, arrays, mlp_needs(2)).require(partial=partial)
    assert r"{match: 'fc_hidden\.(.*)', to: '0.\1'}" in str(error.value)
    rules = [rename(rf"{name}\.(.*)", rf"{index}.\1") for index, name in enumerate(NAMED)]
    for renames in (rules, rules[:2]):
        matching = match_weights(file, arrays, mlp_needs(2), renames)
        assert list(statuses(matching)) == ["matched"]
        for index, name in enumerate(NAMED):
            kernel = matching.arrays[f"params/dense_{index}/kernel"]
            np.testing.assert_array_equal(kernel, theirs[f"{name}.weight"].T)


def test_ordered_format_needs_no_numbers(tmp_path: Path) -> None:
    theirs = dense_layers(*NAMED)
    for suffix in (".npz", ".ckpt"):
        path = tmp_path / f"w{suffix}"
        write_weights(path, theirs)
        matching = match_weights(str(path), read_weights(path), mlp_needs(2))
        assert list(statuses(matching)) == ["matched"]
        kernel = matching.arrays["params/dense_1/kernel"]
        np.testing.assert_array_equal(kernel, theirs["fc_hidden.weight"].T)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_foreign_layer_does_not_shift_later_layers(at: int) -> None:
    items = list(lenet().items())
    theirs = dict([*items[:at], ("foreign.weight", rand(7, 7, 3, 3)), *items[at:]])
    matching = match_weights("f", theirs, lenet_needs())
    assert statuses(matching)["extra"] == ["foreign.weight"]
    assert len(matching.arrays) == 8
    kernel = matching.arrays["params/conv_1/kernel"]
    np.testing.assert_array_equal(kernel, theirs["conv2.weight"].transpose(2, 3, 1, 0))


def test_misshapen_layer_retains_its_position() -> None:
    theirs = dense_layers("a", "b", "c", "d")
    theirs["b.weight"] = rand(9, 9)
    theirs["b.bias"] = rand(9)
    matching = match_weights("f", theirs, mlp_needs(3))
    assert statuses(matching)["misshapen"] == ["b.weight", "b.bias"]
    kernel = matching.arrays["params/dense_2/kernel"]
    np.testing.assert_array_equal(kernel, theirs["c.weight"].T)


def vit_names(style: str) -> Arrays:
    features, hidden, tokens = 6, 8, 5
    torchvision = style == "torchvision"
    arrays: Arrays = {
        "class_token" if torchvision else "cls_token": rand(1, 1, features),
        "encoder.pos_embedding" if torchvision else "pos_embed": rand(1, tokens, features),
    }

    def layer(name: str, *shape: int) -> None:
        arrays[f"{name}.weight"] = rand(*shape)
        arrays[f"{name}.bias"] = rand(shape[0])

    layer("conv_proj" if torchvision else "patch_embed.proj", features, 3, 16, 16)
    for block in range(2):
        at = f"encoder.layers.encoder_layer_{block}" if torchvision else f"blocks.{block}"
        layer(f"{at}.ln_1" if torchvision else f"{at}.norm1", features)
        if torchvision:
            arrays[f"{at}.self_attention.in_proj_weight"] = rand(3 * features, features)
            arrays[f"{at}.self_attention.in_proj_bias"] = rand(3 * features)
        else:
            layer(f"{at}.attn.qkv", 3 * features, features)
        layer(
            f"{at}.self_attention.out_proj" if torchvision else f"{at}.attn.proj",
            features,
            features,
        )
        layer(f"{at}.ln_2" if torchvision else f"{at}.norm2", features)
        layer(f"{at}.mlp.0" if torchvision else f"{at}.mlp.fc1", hidden, features)
        layer(f"{at}.mlp.3" if torchvision else f"{at}.mlp.fc2", features, hidden)
    layer("encoder.ln" if torchvision else "norm", features)
    layer("heads.head" if torchvision else "head", 10, features)
    return arrays


@pytest.mark.medium
@pytest.mark.parametrize("style", ["torchvision", "timm"])
def test_packed_projection_of_transformers_is_split(style: str) -> None:
    network = needs("vit_tiny", features=6, hidden=8, heads=2, blocks=2)
    theirs = vit_names(style)
    matching = match_weights("f", theirs, network)
    assert statuses(matching) == {"matched": [row.source for row in matching.rows]}
    packed = next(array for name, array in theirs.items() if array.shape == (18, 6))
    attention = "params/block0/residual_0/self_attention_0"
    for index, name in enumerate(("query", "key", "value")):
        expected = packed[6 * index : 6 * index + 6].T
        np.testing.assert_array_equal(matching.arrays[f"{attention}/{name}/kernel"], expected)


@pytest.mark.medium
def test_training_state_is_skipped() -> None:
    theirs = in_mindspore(resnet_names(WIDTHS))
    theirs |= {"moments.conv1.weight": theirs["conv1.weight"], "learning_rate": rand(1)}
    found = statuses(match_weights("f", theirs, resnet_needs()))
    assert found["skipped"] == ["moments.conv1.weight", "learning_rate"]
    assert set(found) == {"matched", "skipped"}


def test_mismatches_are_reported_in_a_table() -> None:
    theirs = lenet()
    del theirs["fc2.bias"]
    theirs["fc3.weight"] = rand(7, 84)
    theirs["fc9.extra"] = rand(2, 3)
    matching = match_weights("weights.pth", theirs, lenet_needs())
    with pytest.raises(DataError) as error:
        matching.require(partial=False)
    assert error.value.exit_status == 2
    assert str(error.value).splitlines() == [
        "weights.pth: 6 of 8 arrays matched (torch names), 1 missing, 1 extra, 1 misshapen; "
        "nothing is loaded; rename entries with checkpoint.renames, or load the matching ones with "
        "checkpoint.partial=true; the network reads image 32x32x1 after the map ops",
        "           in the file  shape  in the network         shape",
        "misshapen  fc3.weight   84x7   params/dense_2/kernel  84x10  7x84 in the file",
        "extra      fc9.extra    2x3    -                      -",
        "missing    -            -      params/dense_1/bias    84",
    ]
    matching.require(partial=True)
    assert len(matching.arrays) == 6


def test_partial_matching_requires_a_match() -> None:
    matching = match_weights("f", {"other": rand(2)}, lenet_needs())
    with pytest.raises(DataError, match="0 of 8 arrays matched"):
        matching.require(partial=True)


def test_integer_arrays_are_misshapen() -> None:
    theirs = lenet() | {"fc3.bias": np.arange(10)}
    rows = match_weights("f", theirs, lenet_needs()).rows
    assert [(row.source, row.note) for row in rows if row.status == "misshapen"] == [
        ("fc3.bias", "is int64; must be floating point")
    ]


def test_values_beyond_float32_are_misshapen() -> None:
    theirs = lenet() | {"fc3.bias": np.full(10, 1e300), "fc2.bias": np.full(84, np.inf)}
    rows = match_weights("f", theirs, lenet_needs()).rows
    assert [(row.source, row.note) for row in rows if row.status == "misshapen"] == [
        ("fc3.bias", "has values beyond float32")
    ]


def test_long_table_is_truncated() -> None:
    theirs = {f"layer{index}.oops": rand(1) for index in range(100)}
    text = format_table(match_weights("f", theirs, lenet_needs()).rows)
    assert text.splitlines()[-1] == "... and 48 more"
    assert len(text.splitlines()) == 62


def rename(match: str, to: str | None, syntax: str = "regex") -> RenameSpec:
    return RenameSpec.model_validate({"match": match, "to": to, "syntax": syntax})


def test_user_rules_apply_first_and_in_order() -> None:
    theirs = {f"net/{name}": array for name, array in lenet().items()} | {"net/junk": rand(1)}
    rules = [
        rename(r"net/fc(\d)\.(.*)", r"head\1.\2"),
        rename(r"net/junk", None),
        rename(r"net/*", r"\1", "glob"),
    ]
    matching = match_weights("f", theirs, lenet_needs(), rules)
    assert statuses(matching) == {
        "matched": [name for name in theirs if name != "net/junk"],
        "skipped": ["net/junk"],
    }


def test_renamed_entries_have_the_names_of_the_network() -> None:
    """Entries that a rule gives the network's names aren't taken for PyTorch's."""
    network = lenet_needs()
    arrays = {f"net:{path}": rand(*shape) for path, shape in network.shapes.items()}
    rule = RenameSpec.model_validate({"match": "net:(.*)", "to": r"\1"})
    matching = match_weights("w.npz", arrays, network, [rule])
    assert matching.rules is None
    assert statuses(matching) == {"matched": list(arrays)}
    for path in network.shapes:
        np.testing.assert_array_equal(matching.arrays[path], arrays[f"net:{path}"])


def test_message_names_the_key_of_the_framework() -> None:
    network = lenet_needs()
    arrays = {f"net:{path}": rand(*shape) for path, shape in network.shapes.items()}
    with pytest.raises(
        DataError, match=r"names are taken for torch's, or with checkpoint\.rules=none"
    ):
        match_weights("w.npz", arrays, network).require(partial=False)
    with pytest.raises(DataError) as caught:
        match_weights("w.npz", arrays, network, rules="none").require(partial=False)
    assert "taken for" not in str(caught.value)


def test_entry_can_have_the_name_of_the_network() -> None:
    theirs = lenet()
    theirs["a"] = theirs.pop("fc3.weight")
    matching = match_weights("f", theirs, lenet_needs(), [rename("a", "dense_2/kernel")], "torch")
    np.testing.assert_array_equal(matching.arrays["params/dense_2/kernel"], theirs["a"].T)


def test_rule_without_a_match_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"checkpoint.renames.1.match = x: must match one of the 8 entri"
    ):
        match_weights("f", lenet(), lenet_needs(), [rename("fc1.*", "head"), rename("x", "y")])


def test_duplicate_entries_for_one_array_are_reported() -> None:
    theirs = {"w": rand(84, 10), "v": rand(84, 10)}
    rules = [rename("w", "dense_2/kernel"), rename("v", "dense_2/kernel")]
    rows = match_weights("f", theirs, lenet_needs(), rules, "none").rows
    assert [(row.status, row.note) for row in rows[:2]] == [
        ("matched", ""),
        ("extra", "w has that name already"),
    ]


def test_flatten_inside_a_block_is_refused() -> None:
    layers = [
        {"name": "sequence", "body": [{"name": "flatten"}, {"name": "dense", "features": 5}]},
        {"name": "dense", "features": "$classes"},
    ]
    network = needs("layers", layers=layers, blocks={})
    with pytest.raises(DataError, match="sequence has a flatten inside; the order of values"):
        match_weights("f", {"0.weight": rand(5, 3072)}, network)
    own = {name: rand(*shape) for name, shape in network.shapes.items()}
    assert list(statuses(match_weights("f", own, network))) == ["matched"]


def text_names(bert: bool, features: int = 6, hidden: int = 8) -> Arrays:
    """A text model of transformers with one block, by hand."""
    if bert:
        names = ["word_embeddings", "position_embeddings", "token_type_embeddings"]
        sizes = [(9, features), (4, features), (2, features)]
        return {f"bert.embeddings.{n}.weight": rand(*s) for n, s in zip(names, sizes, strict=True)}
    words = rand(9, features)
    return {
        "transformer.wte.weight": words,
        "transformer.wpe.weight": rand(4, features),
        "transformer.h.0.mlp.c_fc.weight": rand(features, hidden),
        "lm_head.weight": words,
    }


TEXT = {"features": 6, "hidden": 8, "heads": 2, "blocks": 1}


@pytest.mark.medium
def test_segment_vectors_are_added_to_position_vectors() -> None:
    theirs = text_names(bert=True)
    network = trace_model_arrays(
        conf_model("bert_base", vocabulary=9, **TEXT), 10, one_input("tokens", (4,), "int32")
    )
    matching = match_weights("f", theirs, network)
    assert statuses(matching)["added"] == ["bert.embeddings.token_type_embeddings.weight"]
    words, places, segments = theirs.values()
    table = matching.arrays["params/position_embedding_0/table"]
    np.testing.assert_array_equal(table, places + segments[0])
    np.testing.assert_array_equal(matching.arrays["params/embedding_0/table"], words)


def test_decoder_weights_can_be_tied_and_transposed() -> None:
    theirs = text_names(bert=False)
    tokens = one_input("tokens", (4,), "int32")
    network = trace_model_arrays(conf_model("gpt2", **TEXT), 9, tokens)
    matching = match_weights("f", theirs, network)
    assert statuses(matching)["tied"] == ["lm_head.weight"]
    kernel = matching.arrays["params/tokens/block0/residual_1/dense_0/kernel"]
    np.testing.assert_array_equal(kernel, theirs["transformer.h.0.mlp.c_fc.weight"])
    untied = match_weights("f", theirs | {"lm_head.weight": rand(9, 6)}, network)
    assert statuses(untied)["extra"] == ["lm_head.weight"]
