"""Arguments drawn by a seed for layers beyond the core, and for equations of matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.models.torch_graph.operators.core_cases import CASES, Case, Draws, Shape, case_of
from tests.models.torch_graph.operators.core_layer_cases import (
    draw_convolution,
    draw_image,
    draw_norm,
    draw_pool,
    draw_statistics,
)

# Products.
case_of("linear.default")(
    lambda d: Case(
        (d.floats((*d.choice((2,), (2, 3)), 4)), d.floats((5, 4)), d.maybe(d.floats((5,))))
    )
)
case_of("matmul.default")(
    lambda d: Case(
        d.choice(
            (d.floats((3,)), d.floats((3,))),
            (d.floats((2, 3)), d.floats((3,))),
            (d.floats((3,)), d.floats((2, 3, 4))),
            (d.floats((2, 1, 3, 4)), d.floats((5, 4, 2))),
        )
    )
)
case_of("dot.default", "vdot.default")(lambda d: Case((d.floats((4,)), d.floats((4,)))))
case_of("mv.default")(lambda d: Case((d.floats((3, 4)), d.floats((4,)))))
case_of("baddbmm.default")(
    lambda d: Case(
        (d.floats(d.choice((2, 3, 2), (3, 2), (2,))), d.floats((2, 3, 4)), d.floats((2, 4, 2))),
        {"beta": d.choice(1, 0.5), "alpha": d.choice(1, 2.5)},
    )
)
case_of("einsum.default")(
    lambda d: Case(
        d.choice(
            ("bij,bjk->bik", (d.floats((2, 3, 4)), d.floats((2, 4, 2)))),
            ("...i,i->...", (d.floats((2, 3, 4)), d.floats((4,)))),
            ("ii->i", (d.floats((3, 3)),)),
            ("i,j,k", (d.floats((2,)), d.floats((3,)), d.floats((4,)))),
        )
    )
)
case_of("cross.default")(lambda d: Case((d.smooth((2, 3)), d.smooth((2, 3)), d.choice(-1, 1))))
case_of("linalg_cross.default")(
    lambda d: Case((d.smooth((3, 2)), d.smooth((3, 2))), {"dim": d.choice(0, -2)})
)
case_of("cdist.default")(
    lambda d: Case((d.smooth((2, 3, 4)), d.smooth((2, 5, 4)), d.choice(2.0, 1.0, 3.0)))
)
case_of("pdist.default")(lambda d: CASES["_pdist_forward.default"](d))


@case_of("_grouped_mm.default")
def _(d: Draws) -> Case:
    # Strides of PyTorch's operands must be multiples of 16 bytes.
    if d.flag():
        return Case((d.floats((2, 3, 4)), d.floats((2, 4, 8))), dtype="float32")
    # Some groups may be empty.
    ends = np.asarray([*sorted((d.number(0, 6), d.number(0, 6))), 6], np.int32)
    return Case((d.floats((6, 4)), d.floats((3, 4, 8)), ends), dtype="float32")


# Equations and decompositions.
def _matrix(d: Draws) -> np.ndarray:
    """A matrix, or two, far from singular."""
    x = d.smooth((*d.choice((), (2,)), 3, 3))
    return np.asarray(x + 3 * np.eye(3), np.float32)


def _positive(d: Draws) -> np.ndarray:
    x = _matrix(d)
    return np.asarray(x @ np.swapaxes(x, -1, -2) + np.eye(3), np.float32)


case_of(
    "det.default", "linalg_det.default", "linalg_slogdet.default", "inverse.default",
    "linalg_inv.default", "linalg_inv_ex.default", "_linalg_det.default", "_linalg_slogdet.default",
)(lambda d: Case((_matrix(d),), num_slopes=1))  # fmt: skip
CASES["linalg_slogdet.default"] = lambda d: Case((_matrix(d),))
CASES["_linalg_slogdet.default"] = lambda d: Case((_matrix(d),), num_slopes=2)
case_of("matrix_exp.default", "linalg_matrix_exp.default")(
    lambda d: Case((d.smooth((*d.choice((), (2,)), 3, 3)),))
)


@case_of("linalg_cholesky.default", "linalg_cholesky_ex.default")
def _(d: Draws) -> Case:
    return Case((_positive(d),), {"upper": d.flag()}, num_slopes=1)


case_of("linalg_qr.default")(lambda d: Case((_matrix(d),)))
# The sign of an eigenvector isn't defined.
case_of("linalg_eigh.default", "_linalg_eigh.default")(
    lambda d: Case((_positive(d),), num_slopes=1, num_values=1)
)
case_of("linalg_svd.default", "_linalg_svd.default")(
    lambda d: Case((_matrix(d), d.flag()), num_slopes=0, num_values=0)
)


@case_of("linalg_solve.default", "linalg_solve_ex.default", "_linalg_solve_ex.default")
def _(d: Draws) -> Case:
    left = d.flag()
    matrix = _matrix(d)
    right = d.smooth((*matrix.shape[:-2], *((3, 2) if left else (2, 3))))
    return Case((matrix, right), {"left": left}, num_slopes=1)


@case_of("linalg_solve_triangular.default")
def _(d: Draws) -> Case:
    upper, left = d.flag(), d.flag()
    matrix = _matrix(d)
    matrix = np.triu(matrix) if upper else np.tril(matrix)
    right = d.smooth((*matrix.shape[:-2], *((3, 2) if left else (2, 3))))
    return Case((matrix, right), {"upper": upper, "left": left, "unitriangular": d.flag()})


case_of("_fft_c2c.default")(
    lambda d: Case(
        (
            (d.smooth((2, 3, 4)) + 1j * d.smooth((2, 3, 4))).astype(np.complex64),
            d.choice((2,), (1, 2), (0, 1)),
            d.number(0, 2),
            d.flag(),
        )
    )
)


# Convolutions.
def _forward(d: Draws, axes: int, *, transposed: bool) -> tuple[tuple[Any, ...], int]:
    """Arguments of a convolution of some axes."""
    while True:
        args, outputs = draw_convolution(d)
        if args[5] == transposed and args[0].ndim == axes + 2:
            return args, outputs


for _axes in (1, 2, 3):

    @case_of(f"conv{_axes}d.default")
    def _(d: Draws, axes: int = _axes) -> Case:
        (x, weight, stride, padding, dilation, _, _, groups), outputs = _forward(
            d, axes, transposed=False
        )
        bias = d.maybe(d.floats((outputs,)))
        return Case((x, weight, bias, stride, padding, dilation, groups))

    @case_of(f"conv{_axes}d.padding")
    def _(d: Draws, axes: int = _axes) -> Case:
        (x, weight, _, _, dilation, _, _, groups), outputs = _forward(d, axes, transposed=False)
        bias = d.maybe(d.floats((outputs,)))
        padding = d.choice("same", "valid")
        return Case((x, weight, bias, (1,) * axes, padding, dilation, groups))

    @case_of(f"conv_transpose{_axes}d.{'default' if _axes == 1 else 'input'}")
    def _(d: Draws, axes: int = _axes) -> Case:
        (x, weight, stride, padding, dilation, _, extra, groups), outputs = _forward(
            d, axes, transposed=True
        )
        bias = d.maybe(d.floats((outputs,)))
        return Case((x, weight, bias, stride, padding, extra, groups, dilation))

    @case_of(
        f"max_pool{_axes}d.default", *(["max_pool1d_with_indices.default"] if _axes == 1 else [])
    )
    def _(d: Draws, axes: int = _axes) -> Case:
        return Case(
            (draw_image(d, axes, smooth=True), *draw_pool(d, axes, dilated=True)), num_slopes=1
        )

    @case_of(f"adaptive_max_pool{_axes}d.default")
    def _(d: Draws, axes: int = _axes) -> Case:
        sizes = tuple(d.number(1, 6) for _ in range(axes))
        return Case((draw_image(d, axes, smooth=True), sizes), num_slopes=1)

    if _axes > 1:
        case_of(f"adaptive_avg_pool{_axes}d.default")(CASES[f"_adaptive_avg_pool{_axes}d.default"])

case_of("im2col.default")(
    lambda d: Case(
        (d.floats((2, 3, 5, 6)), (2, d.number(1, 3)), (d.number(1, 2), 1), (d.number(0, 1), 1),
         (d.number(1, 2), 2))
    )
)  # fmt: skip


# Norms.
case_of("batch_norm.default")(
    lambda d: Case((*draw_norm(d), *draw_statistics(d), d.flag(), 0.1, 1e-3, True), num_slopes=1)
)
case_of("_native_batch_norm_legit_functional.default")(
    lambda d: Case((*draw_norm(d), *draw_statistics(d), d.flag(), 0.1, 1e-3), num_slopes=1)
)


@case_of("instance_norm.default")
def _(d: Draws) -> Case:
    weights = d.maybe(d.smooth((3,))), d.maybe(d.smooth((3,)))
    statistics = draw_statistics(d)
    has_statistics = d.flag()
    uses_input = d.flag() if has_statistics else True
    means = statistics if has_statistics else (None, None)
    return Case((d.smooth((2, 3, 4, 5)), *weights, *means, uses_input, 0.1, 1e-3, True))


@case_of("group_norm.default")
def _(d: Draws) -> Case:
    # PyTorch 2.13 has no gradient with a scale alone.
    weights = (d.smooth((4,)), d.smooth((4,))) if d.flag() else (None, None)
    return Case((d.smooth((2, 4, 3)), d.choice(1, 2, 4), *weights, 1e-3))


case_of("layer_norm.default")(
    lambda d: (
        lambda s: Case((d.smooth((2, 3, 4)), s, d.maybe(d.smooth(s)), d.maybe(d.smooth(s)), 1e-3))
    )(d.choice((4,), (3, 4)))
)
case_of("rms_norm.default")(
    lambda d: (
        lambda s: Case((d.smooth((2, 3, 4)), s, d.maybe(d.smooth(s)), d.choice(None, 1e-3)))
    )(d.choice((4,), (3, 4)))
)
case_of("_weight_norm.default")(
    lambda d: (lambda dim: Case((
        d.smooth((3, 4, 2)),
        d.smooth(tuple(n if axis == dim else 1 for axis, n in enumerate((3, 4, 2)))),
        dim,
    )))(d.choice(0, 1, 2))
)  # fmt: skip


# Bags of embeddings.
def _bag(d: Draws) -> Case:
    # The operator without a padding index.
    case = CASES["_embedding_bag.default"](d)
    return Case(case.args[:8], num_slopes=1)


case_of("embedding_bag.default")(_bag)
case_of("_embedding_bag_forward_only.default")(lambda d: replace(_bag(d), num_slopes=0))


@case_of("embedding_bag.padding_idx")
def _(d: Draws) -> Case:
    case = CASES["_embedding_bag.default"](d)
    return Case((*case.args[:8], d.choice(None, 2)), num_slopes=1)


# Images.
case_of("grid_sampler.default")(lambda d: CASES["grid_sampler_2d.default"](d))
case_of("grid_sampler_3d.default")(
    lambda d: Case(
        (d.smooth((2, 3, 3, 4, 5)), d.between(-1.4, 1.4, (2, 2, 3, 4, 3)), d.number(0, 1),
         d.number(0, 2), d.flag())
    )
)  # fmt: skip
case_of("upsample_nearest2d.default")(
    lambda d: Case((d.floats((2, 3, 4, 5)), d.choice((7, 3), (8, 10))))
)
case_of(
    "upsample_bilinear2d.default", "upsample_bicubic2d.default", "_upsample_bilinear2d_aa.default",
    "_upsample_bicubic2d_aa.default",
)(lambda d: Case((d.floats((2, 3, 4, 5)), d.choice((7, 3), (8, 10)), d.flag())))  # fmt: skip
case_of(
    "upsample_bicubic2d.vec", "_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec",
)(lambda d: CASES["upsample_bilinear2d.vec"](d))  # fmt: skip


# Attention.
@case_of("scaled_dot_product_attention.default")
def _(d: Draws) -> Case:
    grouped = d.flag()
    query = d.smooth((2, 4, 3, 5))
    key, value = (d.smooth((2, 2 if grouped else 4, 3, 5)) for _ in range(2))
    mask = d.choice(None, d.smooth((3, 3)), np.tril(np.ones((3, 3), np.bool_)))
    causal = mask is None and d.flag()
    options = {"scale": d.choice(None, 0.3), "enable_gqa": grouped}
    return Case((query, key, value, mask, 0.0, causal), options)


# Recurrent layers.
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _states(d: Draws, name: str, shape: Shape, cell: Shape | None = None) -> Any:
    """The first states: an LSTM has two, the output and the cell."""
    first = d.smooth(shape)
    return (first, d.smooth(cell or shape)) if name == "lstm" else first


for _name in _GATES:

    @case_of(f"{_name}_cell.default")
    def _(d: Draws, name: str = _name) -> Case:
        rows = _GATES[name] * 3
        kernels = d.smooth((rows, 4)), d.smooth((rows, 3))
        biases = d.choice((), (d.smooth((rows,)), d.smooth((rows,))))
        return Case((d.smooth((2, 4)), _states(d, name, (2, 3)), *kernels, *biases))

    @case_of(f"{_name}.input")
    def _(d: Draws, name: str = _name) -> Case:
        layers, directions, has_biases = d.number(1, 2), d.number(1, 2), d.flag()
        # The outputs of an LSTM may be projected to fewer values.
        projected = 2 if name == "lstm" and d.flag() else None
        size = projected or 3
        weights: list[np.ndarray] = []
        for layer in range(layers):
            features = 4 if layer == 0 else size * directions
            for _ in range(directions):
                rows = _GATES[name] * 3
                weights += [d.smooth((rows, features)), d.smooth((rows, size))]
                weights += [d.smooth((rows,)), d.smooth((rows,))] if has_biases else []
                weights += [d.smooth((projected, 3))] if projected else []
        states = _states(d, name, (layers * directions, 2, size), (layers * directions, 2, 3))
        batch_first = d.flag()
        x = d.smooth((2, 5, 4) if batch_first else (5, 2, 4))
        options = (has_biases, layers, 0.0, False, directions == 2, batch_first)
        return Case((x, states, tuple(weights), *options))
