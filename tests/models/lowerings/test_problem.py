"""Problems and lowerings, and their texts: the keys of banks and of a run's own choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from pipeline.models.lowerings.candidates import list_candidates
from pipeline.models.lowerings.lowered_layers import conv2d
from pipeline.models.lowerings.problem import (
    DEFAULT,
    DEFAULTS,
    FILE_NAMES,
    ROLES,
    ConvolutionProblem,
    ConvWindow,
    Lowering,
    Lowerings,
    RecordingPolicy,
    Role,
    make_convolution_problem,
    make_window,
)
from tests.models.lowerings.engines import engines_here, require
from tests.models.lowerings.problems import PROBLEMS, parse_problem

BATCH, SIZES, CHANNELS, FEATURES = 2, (9, 7), 4, 6
WAYS = st.builds(
    Lowering,
    st.sampled_from(("convolution", "im2col", "default")),
    st.sampled_from(("xla", "onednn")),
    st.none() | st.integers(1, 512),
)


def window(padding: str = "VALID", groups: int = 1) -> ConvWindow:
    return make_window(SIZES, (3, 2), (2, 1), padding, (1, 2), groups)


def problem(role: Role = "forward", padding: str = "VALID", groups: int = 1) -> ConvolutionProblem:
    return ConvolutionProblem(role, window(padding, groups), BATCH, CHANNELS, FEATURES, "float32")


@pytest.mark.medium
@given(PROBLEMS)
def test_text_of_a_problem_is_complete(asked: ConvolutionProblem) -> None:
    """So that no two of them share a key."""
    assert parse_problem(str(asked)) == asked


def test_problem_text_is_compatible_with_banks() -> None:
    assert str(problem("weight_grad", "SAME", 2)) == (
        "conv2d kernel_gradient 2x9x7x4 kernel 3x2x6 stride 2x1 pads 1+1,1+1 "
        "dilation 1x2 groups 2 float32"
    )


@given(WAYS)
def test_lowering_is_unchanged_after_formatting_and_parsing(lowering: Lowering) -> None:
    assert Lowering.parse(str(lowering)) == lowering


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_operand_shapes_match_a_convolution(padding: str, groups: int) -> None:
    asked = {role: problem(role, padding, groups) for role in ROLES}
    images, kernel = asked["forward"].operand_shapes
    w = asked["forward"].window
    result = jax.eval_shape(
        lambda x, k: conv2d(
            x, k, strides=w.strides, padding=padding, dilation=w.dilation, groups=groups
        ),
        jax.ShapeDtypeStruct(images, jnp.float32),
        jax.ShapeDtypeStruct(kernel, jnp.float32),
    )
    assert images == (BATCH, *SIZES, CHANNELS)
    assert kernel == (3, 2, CHANNELS // groups, FEATURES)
    assert asked["input_grad"].operand_shapes == (kernel, result.shape)
    assert asked["weight_grad"].operand_shapes == (images, result.shape)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("role", ROLES)
def test_flops_match_the_xla_count(role: Role, groups: int) -> None:
    """Without padding, where XLA counts no products that it can leave out."""
    asked = problem("forward", "VALID", groups)
    w = asked.window
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in asked.operand_shapes)

    def slide(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            images,
            kernel,
            w.strides,
            w.pads,
            rhs_dilation=w.dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    cost = jax.jit(slide).lower(*shapes).cost_analysis()
    assert cost is not None
    assert problem(role, "VALID", groups).flops == cost["flops"]


@pytest.mark.parametrize(("family", "name"), FILE_NAMES.items())
def test_family_names_in_files_are_unchanged(family: str, name: str) -> None:
    assert str(Lowering(family)) == f"{name}/xla"
    assert Lowering.parse(f"{name}/onednn/8") == Lowering(family, "onednn", 8)


def test_lowering_is_selected_by_problem_or_the_default() -> None:
    lowering = Lowering("im2col", "onednn", 8)
    chosen = Lowerings(((str(problem()), lowering),))
    assert chosen.choose(problem()) == lowering
    assert chosen.choose(problem(padding="SAME")) == DEFAULT
    assert DEFAULTS.choose(problem()) == DEFAULT


def test_lowerings_are_equal_and_hashed_by_choice() -> None:
    """As flax does with a module's fields, to tell whether a function was traced before."""
    one, other = (Lowerings((("a", Lowering(name)),)) for name in ("pointwise", "im2col"))
    assert hash(one) == hash(Lowerings((("a", Lowering("pointwise")),)))
    assert one == Lowerings((("a", Lowering("pointwise")),))
    assert one != other


def test_problems_are_recorded_once_in_network_order() -> None:
    listing = RecordingPolicy()
    images = jax.ShapeDtypeStruct((BATCH, *SIZES, CHANNELS), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 2, CHANNELS, CHANNELS), jnp.float32)

    def network(x: jax.Array, k: jax.Array) -> jax.Array:
        for padding in ("SAME", "VALID", "SAME"):
            x = conv2d(x, k, padding=padding, policy=listing)
        return x

    jax.eval_shape(network, images, kernel)
    heights = {"SAME": (9, 7), "VALID": (9, 7), "SAME again": (7, 6)}
    expected = [
        ConvolutionProblem(
            role,
            make_window(sizes, (3, 2), (1, 1), padding.split()[0], (1, 1), 1),
            BATCH,
            CHANNELS,
            CHANNELS,
            "float32",
        )
        for padding, sizes in heights.items()
        for role in ROLES
    ]
    assert list(listing.problems) == expected


def test_listings_are_distinguished_by_identity() -> None:
    """Else a network that is listed twice would be taken for one that was traced already."""
    assert RecordingPolicy() != RecordingPolicy()
    assert len({RecordingPolicy(), RecordingPolicy()}) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_problem_is_made_from_the_operands(dtype: str) -> None:
    shapes = problem(groups=2).operand_shapes
    images, kernel = (jnp.zeros(shape, dtype) for shape in shapes)
    made = make_convolution_problem("forward", window(groups=2), images, kernel)
    assert made == ConvolutionProblem("forward", window(groups=2), BATCH, CHANNELS, FEATURES, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_onednn_lowerings_are_among_the_tested_candidates(dtype: str) -> None:
    """Skipped where `engines_here` leaves them out of every other test."""
    require("onednn", dtype)
    asked = ConvolutionProblem("forward", window(), BATCH, CHANNELS, FEATURES, dtype)
    assert Lowering("convolution", "onednn") in list_candidates(asked, engines_here(dtype))
