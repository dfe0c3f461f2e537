"""Every lowering against what jax derives, wherever a kernel may stand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pipeline.models.lowerings.candidates import FORMULAS, can_compute, compute, list_candidates
from pipeline.models.lowerings.problem import (
    ROLES,
    ConvolutionProblem,
    ConvWindow,
    Engine,
    Lowering,
    Role,
    make_window,
)
from tests.models.build import QUICK
from tests.models.lowerings.engines import engines_here

TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02, "float16": 1e-3}
"""Of the largest value: sums in another order in float32; operands rounded in bfloat16; the result
alone rounded in float16."""

BATCH, HEIGHT, WIDTH, CHANNELS, FEATURES = 4, 11, 9, 4, 8

WINOGRAD = ("winograd2", "winograd4")

KERNELS = (1, 3, 5, 7)
STRIDES = (1, 2, 3)
PADDINGS: tuple[str | Sequence[tuple[int, int]], ...] = ("SAME", "VALID", ((0, 2), (3, 1)))
PLAIN = [
    (kernel, stride, padding, 1, 1)
    for (row, kernel), (column, stride) in itertools.product(enumerate(KERNELS), enumerate(STRIDES))
    for number, padding in enumerate(PADDINGS)
    if kernel == 3 or (row + column + 2) % 3 == number
]
"""All of a kernel of 3, which most families compute; of others every stride and every padding."""
DILATED_OR_GROUPED = [
    (3, 1, "SAME", 2, 1),
    (3, 2, "VALID", 3, 1),
    (5, 2, ((1, 0), (2, 2)), 2, 1),
    (3, 1, "SAME", 1, 2),
    (3, 2, "SAME", 1, 4),
    (1, 1, "VALID", 1, 2),
    (3, 2, "SAME", 2, 2),
    (3, 1, "SAME", 1, 4),
    (5, 2, ((1, 0), (2, 2)), 1, 4),
    (3, 3, "VALID", 1, 4),
]


def operands(dtype: str, groups: int, kernel: int) -> tuple[jax.Array, jax.Array]:
    generator = np.random.default_rng(kernel)
    images = generator.standard_normal((BATCH, HEIGHT, WIDTH, CHANNELS))
    weights = generator.standard_normal((kernel, kernel, CHANNELS // groups, FEATURES))
    return jnp.asarray(images, dtype), jnp.asarray(weights, dtype)


def slide(window: ConvWindow, images: jax.Array, kernel: jax.Array) -> jax.Array:
    """In float32 whatever the operands are."""
    return lax.conv_general_dilated(
        images.astype(jnp.float32),
        kernel.astype(jnp.float32),
        window.strides,
        window.pads,
        rhs_dilation=window.dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=window.groups,
    )


def expected(
    window: ConvWindow, images: jax.Array, kernel: jax.Array, cotangent: jax.Array
) -> dict[Role, np.ndarray]:
    """The results of jax by role, in float32, outside any loop."""

    def results(x: jax.Array, k: jax.Array, by_result: jax.Array) -> tuple[jax.Array, ...]:
        result, pull = jax.vjp(lambda x, k: slide(window, x, k), x, k)
        return result, *pull(by_result.astype(jnp.float32))

    found = jax.jit(results, compiler_options=QUICK)(images, kernel, cotangent)
    return {role: np.asarray(r, np.float32) for role, r in zip(ROLES, found, strict=True)}


def reads_by_role(
    images: jax.Array, kernel: jax.Array, cotangent: jax.Array
) -> dict[Role, tuple[jax.Array, jax.Array]]:
    return {
        "forward": (images, kernel),
        "input_grad": (kernel, cotangent),
        "weight_grad": (images, cotangent),
    }


def problem(role: Role, window: ConvWindow, dtype: str) -> ConvolutionProblem:
    return ConvolutionProblem(role, window, BATCH, CHANNELS, FEATURES, dtype)


def assert_all_equal(window: ConvWindow, dtype: str, engines: frozenset[Engine]) -> None:
    images, kernel = operands(dtype, window.groups, window.rows.kernel)
    shape = (BATCH, *window.output_size, FEATURES)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)
    reads = reads_by_role(images, kernel, cotangent)
    require_candidates(window, dtype, engines, reads, expected(window, images, kernel, cotangent))


def require_candidates(
    window: ConvWindow,
    dtype: str,
    engines: frozenset[Engine],
    reads: Mapping[Role, tuple[jax.Array, jax.Array]],
    truths: Mapping[Role, np.ndarray],
) -> None:
    """By role, every candidate of what is read gives the true result within the tolerance."""
    for role, truth in truths.items():
        asked = problem(role, window, dtype)
        lowerings = list_candidates(asked, engines)
        assert lowerings
        # The formulas are what is tested; compiling them well would take most of the time.
        quickly = jax.jit(
            lambda a, b, p=asked, lowerings=lowerings: [compute(p, w, (a, b)) for w in lowerings],
            compiler_options=QUICK,
        )
        results = quickly(*reads[role])
        for lowering, result in zip(lowerings, results, strict=True):
            assert result.dtype == dtype
            error = np.abs(np.asarray(result, np.float32) - truth).max()
            assert error <= TOLERANCE[dtype] * np.abs(truth).max(), (
                f"{lowering} of {asked}: {error}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "groups"), PLAIN)
def test_candidates_equal_jax(
    kernel: int, stride: int, padding: str | Sequence[tuple[int, int]], dilation: int, groups: int
) -> None:
    window = _window(kernel, stride, padding, dilation, groups)
    assert_all_equal(window, "float32", engines_here("float32"))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "groups"), DILATED_OR_GROUPED)
def test_dilated_and_grouped_candidates_equal_jax(
    kernel: int, stride: int, padding: str | Sequence[tuple[int, int]], dilation: int, groups: int
) -> None:
    window = _window(kernel, stride, padding, dilation, groups)
    assert_all_equal(window, "float32", engines_here("float32"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "stride", "groups"),
    [(1, 1, 1), (1, 2, 1), (3, 1, 1), (3, 2, 1), (7, 2, 1), (3, 1, 2), (3, 2, 4)],
)
def test_bfloat16_candidates_equal_jax(kernel: int, stride: int, groups: int) -> None:
    window = _window(kernel, stride, "SAME", 1, groups)
    assert_all_equal(window, "bfloat16", engines_here("bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (3, 1), (3, 2)])
def test_float16_candidates_equal_jax_and_float32_candidates(kernel: int, stride: int) -> None:
    window = _window(kernel, stride, "SAME", 1, 1)
    assert_all_equal(window, "float16", engines_here("float16"))
    float32 = problem("forward", window, "float32")
    float16 = problem("forward", window, "float16")
    engines: frozenset[Engine] = frozenset(("xla", "onednn"))
    assert list_candidates(float16, engines) == list_candidates(float32, engines)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pads", [((1, 1), (2, 0)), ((0, 2), (0, 3)), ((3, 0), (1, 4))])
def test_padding_may_be_wider_than_the_kernel(
    pads: tuple[tuple[int, int], tuple[int, int]], stride: int
) -> None:
    """Against zeros that are put there beforehand: there XLA:CPU's own gradient is not right."""
    window = make_window((HEIGHT, WIDTH), (2, 2), (stride, stride), pads, (1, 1), 1)
    images, kernel = operands("float32", 1, 2)
    shape = (BATCH, *window.output_size, FEATURES)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)

    def plain(x: jax.Array, k: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        dimensions = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, k, (stride, stride), "VALID", dimension_numbers=dimensions
        )

    result, pull = jax.vjp(plain, images, kernel)
    results = map(np.asarray, (result, *pull(cotangent)))
    truths = dict(zip(ROLES, results, strict=True))
    reads = reads_by_role(images, kernel, cotangent)
    require_candidates(window, "float32", engines_here("float32"), reads, truths)


def _window(
    kernel: int, stride: int, padding: str | Sequence[tuple[int, int]], dilation: int, groups: int
) -> ConvWindow:
    return make_window(
        (HEIGHT, WIDTH), (kernel,) * 2, (stride,) * 2, padding, (dilation,) * 2, groups
    )


def test_every_family_is_a_candidate_of_a_problem() -> None:
    windows = [
        _window(*case)
        for case in [
            *((kernel, 1, "VALID", 1, 1) for kernel in (1, 3)),
            *((3, stride, "SAME", 1, 1) for stride in (1, 2)),
            (3, 1, "SAME", 1, 4),
        ]
    ]
    for role in ROLES:
        seen = {
            lowering.family
            for window in windows
            for lowering in list_candidates(
                problem(role, window, "float32"), frozenset(("xla", "onednn"))
            )
        }
        assert seen == set(FORMULAS["conv2d"][role])


def test_plain_xla_convolution_is_the_first_candidate() -> None:
    for role in ROLES:
        asked = problem(role, _window(3, 2, "SAME", 1, 2), "float32")
        assert list_candidates(asked, frozenset(("xla",)))[0] == Lowering("convolution", "xla")


BOTH: frozenset[Engine] = frozenset(("xla", "onednn"))


@pytest.mark.parametrize(
    ("role", "batch", "size", "channels", "kernel", "stride", "groups", "dtype", "expected"),
    [
        (
            *("forward", 64, 32, 16, 3, 1, 1, "float32"),
            {"convolution": (), **dict.fromkeys(("im2col", *WINOGRAD), (2, 4, 8, 16, 32))},
        ),
        (*("forward", 64, 32, 40, 3, 1, 4, "float32"), {"convolution": ()}),
        (*("input_grad", 64, 32, 16, 3, 2, 1, "float32"), {"convolution": (), "phases": ()}),
        (
            *("weight_grad", 32, 56, 64, 1, 1, 1, "bfloat16"),
            dict.fromkeys(("convolution", "per_tap_matmul"), (1, 2, 4, 8, 16)),
        ),
        (
            *("weight_grad", 6, 14, 6, 5, 1, 1, "float16"),
            dict.fromkeys(("convolution", "per_tap_matmul", "im2col"), ()),
        ),
        (
            *("weight_grad", 48, 28, 32, 1, 2, 1, "float32"),
            dict.fromkeys(("convolution", "per_tap_matmul"), (2, 4, 8, 16)),
        ),
    ],
)
def test_candidates_match_the_expected_list(
    role: Role,
    batch: int,
    size: int,
    channels: int,
    kernel: int,
    stride: int,
    groups: int,
    dtype: str,
    expected: dict[str, tuple[int, ...]],
) -> None:
    """By family the chunks that are tried, each with all engines."""
    window = make_window((size,) * 2, (kernel,) * 2, (stride,) * 2, "SAME", (1, 1), groups)
    asked = ConvolutionProblem(role, window, batch, channels, 32, dtype)
    engines: tuple[Engine, ...] = ("xla", "onednn")
    assert list_candidates(asked, BOTH) == tuple(
        Lowering(family, engine, images)
        for family, chunks in expected.items()
        for engine in engines
        for images in (None, *chunks)
    )
    assert all(can_compute(asked, lowering, BOTH) for lowering in list_candidates(asked, BOTH))
    assert {
        lowering for lowering in list_candidates(asked, BOTH) if lowering.engine == "xla"
    } == set(list_candidates(asked, frozenset(("xla",))))


@pytest.mark.parametrize(
    ("lowering", "able"),
    [
        ("patches/xla/64", True),  # all images at once, which is not tried beside None
        ("patches/xla/1", True),  # smaller than what is tried
        ("patches/xla/3", False),
        ("patches/xla/128", False),
        ("convolution/xla/2", False),
        ("pixels/xla", False),
        ("dots/xla", False),
    ],
)
def test_computable_lowerings_include_more_than_candidates(lowering: str, able: bool) -> None:
    window = make_window((32, 32), (3, 3), (1, 1), "SAME", (1, 1), 1)
    asked = ConvolutionProblem("forward", window, 64, 16, 32, "float32")
    assert can_compute(asked, Lowering.parse(lowering), BOTH) is able
    assert not can_compute(asked, Lowering("im2col", "onednn"), frozenset(("xla",)))


def test_unsuitable_lowering_is_refused() -> None:
    asked = problem("forward", _window(3, 1, "SAME", 1, 1), "float32")
    images, kernel = operands("float32", 1, 3)
    with pytest.raises(ValueError, match=r"pixels/xla can't compute conv2d forward 4x11x9x4"):
        compute(asked, Lowering("pointwise"), (images, kernel))


@pytest.mark.parametrize("lowering", [Lowering("dots", "onednn", 8), Lowering("im2col")])
def test_lowering_is_unchanged_after_formatting_and_parsing(lowering: Lowering) -> None:
    assert Lowering.parse(str(lowering)) == lowering


@pytest.mark.parametrize("text", ["", "dots", "dots/mkl", "dots/xla/8/9", "dots/xla/many"])
def test_invalid_lowering_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lowering|unpack|invalid literal"):
        Lowering.parse(text)
