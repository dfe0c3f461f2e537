"""What a network reads of the columns of a batch: names, dtypes, the order of axes, padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.data.inputs import NetworkInput, NetworkInputs, resolve_inputs

SPECS = {
    "image": ColumnSpec((4, 5, 2), "uint8"),
    "tokens": ColumnSpec((6,), "uint8"),
    "features": ColumnSpec((3,), "float64"),
    "padding_mask": ColumnSpec((6,), "bool"),
    "label": ColumnSpec((), "int32"),
}


def columns_of(specs: dict[str, ColumnSpec], batch: int = 3) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        name: draw.integers(0, 2, (batch, *spec.shape)).astype(spec.dtype)
        for name, spec in specs.items()
    }


@pytest.mark.parametrize(
    ("wanted", "declared", "default", "names", "is_named"),
    [
        (None, None, ("tokens",), {"tokens": "tokens"}, False),
        (None, None, ("tokens", "features"), {"tokens": "tokens", "features": "features"}, True),
        (
            None,
            None,
            ("tokens", "padding_mask"),
            {"tokens": "tokens", "mask": "padding_mask"},
            True,
        ),
        (None, ("image", "tokens"), ("x",), {"image": "image", "tokens": "tokens"}, True),
        ("features", None, ("tokens",), {"features": "features"}, False),
        (("features", "tokens"), None, ("x",), {"features": "features", "tokens": "tokens"}, True),
        (("features", "tokens"), ("a", "b"), ("x",), {"a": "features", "b": "tokens"}, True),
        ({"b": "tokens", "a": "image"}, ("a", "b"), ("x",), {"a": "image", "b": "tokens"}, True),
        ({"query": "tokens"}, None, ("x",), {"query": "tokens"}, True),
    ],
)
def test_inputs_are_chosen_by_recipe_then_network_then_data(
    wanted: Any, declared: Any, default: Any, names: dict[str, str], is_named: bool
) -> None:
    inputs = resolve_inputs(wanted, declared, SPECS, default)
    assert {array.name: array.column for array in inputs.arrays} == names
    assert all(array.spec == SPECS[array.column] for array in inputs.arrays)
    assert inputs.is_named == is_named


@pytest.mark.parametrize(
    ("wanted", "declared", "message"),
    [
        (
            "text",
            None,
            r"^there is no column 'text'; the columns are features, image, padding_mask",
        ),
        (
            {"query": "text_a"},
            None,
            r"^there is no column 'text_a' for the network's input query; the columns are feat",
        ),
        (
            None,
            ("query", "image"),
            r"^the network reads query, image: there is no column 'query'; ",
        ),
        (
            ("tokens", "tokens"),
            None,
            r"\['tokens', 'tokens'\]: must be one column, or several that",
        ),
        ((), None, r"^\[\]: must be one column, or several that differ"),
        ((), ("tokens",), r"^\[\]: must be one column, or several that differ"),
        ({"a": "tokens", "b": "tokens"}, None, r"must be one column, or several that differ"),
        ("tokens", ("a", "b"), r"^\['tokens'\]: the network reads a, b; must name a column for"),
        (("image", "tokens", "features"), ("a", "b"), r"the network reads a, b; must name a colu"),
        ({"a": "tokens", "c": "image"}, ("a", "b"), r"^\['a', 'c'\]: the network reads a, b;"),
    ],
)
def test_unfit_inputs_are_refused(wanted: Any, declared: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_inputs(wanted, declared, SPECS, ("tokens",))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((6,), "uint8", "int32"),
        ((), "int64", "int32"),
        ((6,), "int32", "int32"),
        ((4, 5, 2), "uint8", "float32"),
        ((6, 2), "int32", "float32"),
        ((6,), "float64", "float32"),
        ((6,), "bool", "bool"),
        ((6, 2), "bool", "bool"),
    ],
)
def test_dtype_follows_kind_and_axes(shape: tuple[int, ...], dtype: str, expected: str) -> None:
    array = NetworkInput("x", "x", ColumnSpec(shape, dtype))
    values = array.convert(np, np.ones((2, *shape), dtype))
    assert array.dtype == values.dtype == expected
    assert values.shape == (2, *array.shape) == (2, *shape)


def test_channels_are_last_in_any_layout() -> None:
    images = np.arange(3 * 2 * 4 * 5, dtype=np.float32).reshape(3, 2, 4, 5)
    array = NetworkInput("image", "image", ColumnSpec((2, 4, 5), "float32", layout="chw"))
    assert array.shape == (4, 5, 2)
    np.testing.assert_array_equal(array.convert(np, images), images.transpose(0, 2, 3, 1))


def test_one_input_is_an_array_and_several_are_a_dictionary() -> None:
    columns = columns_of(SPECS)
    single = resolve_inputs("tokens", None, SPECS, ())
    np.testing.assert_array_equal(single.read(np, columns), columns["tokens"])
    assert (single.image, single.shape, str(single)) == (None, (6,), "tokens 6")
    several = resolve_inputs({"a": "image", "b": "tokens"}, None, SPECS, ())
    read = several.read(np, columns)
    assert list(read) == ["a", "b"]
    np.testing.assert_array_equal(read["a"], columns["image"])
    np.testing.assert_array_equal(read["b"], columns["tokens"])
    assert (several.image, several.shape) == (None, ())
    assert (several.columns, str(several)) == (("image", "tokens"), "a 4x5x2, b 6")
    assert resolve_inputs("image", None, SPECS, ()).image == SPECS["image"]


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("axes", [1, 2])
def test_padding_of_images_is_marked_by_a_channel(xp: Any, axes: int) -> None:
    """Against a loop: 1 inside the sizes, 0 on padding."""
    inputs = resolve_inputs(("image", "tokens"), None, SPECS, ())
    sizes = np.array([[4, 5], [2, 3], [0, 1]], np.int32)[:, :axes]
    columns = columns_of(SPECS)
    read = inputs.read(xp, columns, sizes)
    assert read["image"].dtype == np.float32
    np.testing.assert_array_equal(read["image"][..., :2], columns["image"])
    np.testing.assert_array_equal(read["tokens"], columns["tokens"])
    for n, size in enumerate(sizes):
        for y in range(4):
            for x in range(5):
                inside = y < size[0] and (axes == 1 or x < size[1])
                assert read["image"][n, y, x, 2] == inside


@pytest.mark.medium
def test_padding_of_tokens_is_marked_by_a_mask() -> None:
    inputs = resolve_inputs(None, None, SPECS, ("tokens", "padding_mask"))
    columns = columns_of({"tokens": SPECS["tokens"]})
    sizes = np.array([[6], [2], [0]], np.int32)
    host = inputs.read(np, columns, sizes)
    assert host["mask"].dtype == bool
    assert host["mask"].sum(axis=1).tolist() == [6, 2, 0]
    assert host["mask"][1].tolist() == [True, True, False, False, False, False]
    np.testing.assert_array_equal(host["tokens"], columns["tokens"])
    compiled = jax.jit(lambda columns, sizes: inputs.read(jnp, columns, sizes))(columns, sizes)
    np.testing.assert_array_equal(compiled["mask"], host["mask"])


def test_tokens_alone_have_no_mask() -> None:
    inputs = resolve_inputs("tokens", None, SPECS, ("tokens", "padding_mask"))
    columns = columns_of({"tokens": SPECS["tokens"]})
    read = inputs.read(np, columns, np.array([[6], [2], [0]], np.int32))
    np.testing.assert_array_equal(read, columns["tokens"])


def test_specs_of_a_larger_bucket_replace_those_of_its_column() -> None:
    inputs = resolve_inputs(("image", "tokens"), None, SPECS, ())
    larger = inputs.with_specs({"image": ColumnSpec((8, 9, 2), "uint8")})
    assert [array.shape for array in larger.arrays] == [(8, 9, 2), (6,)]
    assert isinstance(larger, NetworkInputs)
    assert larger.is_named


def test_masks_of_tokens_are_read_beside_them() -> None:
    """By the network's names; other columns that are named like a mask are not read."""
    specs = {
        "text_a": ColumnSpec((6,), "int32"),
        "text_a_mask": ColumnSpec((6,), "bool"),
        "image": ColumnSpec((4, 5, 2), "uint8"),
        "image_mask": ColumnSpec((4, 5), "uint8"),
    }
    inputs = resolve_inputs({"query": "text_a", "photo": "image"}, None, specs, ("text_a",))
    read = {array.name: array.column for array in inputs.with_masks(specs).arrays}
    assert read == {"query": "text_a", "photo": "image", "query_mask": "text_a_mask"}
    named = resolve_inputs(("text_a", "text_a_mask"), None, specs, ("text_a",))
    assert named.with_masks(specs) == named
    alone = resolve_inputs("text_a", None, specs, ("text_a",))
    assert alone.with_masks(specs) == alone
