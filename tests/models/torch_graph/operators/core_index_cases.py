"""Arguments drawn by a seed for core operators that read or write at indices."""

from __future__ import annotations

import numpy as np

from tests.models.torch_graph.operators.core_cases import CASES, Case, Draws, Shape, case_of

# Look-ups and changes at indices.
case_of("embedding.default")(lambda d: Case((d.floats((5, 3)), d.whole(0, 4, d.shape()))))


@case_of("gather.default")
def _(d: Draws) -> Case:
    shape = d.shape()
    axis = d.axis(shape)
    sizes = [d.number(1, size) for size in shape]
    sizes[axis] = d.number(1, 5)
    return Case((d.floats(shape), axis, d.whole(0, shape[axis] - 1, tuple(sizes))))


case_of("index_select.default")(
    lambda d: (lambda s, a: Case((d.floats(s), a, d.whole(0, s[a] - 1, (d.number(1, 5),)))))(
        (2, 3, 4), d.number(-3, 2)
    )
)


def _indices(d: Draws) -> tuple[np.ndarray | None, ...]:
    """Indices of axes of sizes 3, 4 and 5."""
    first, second, third = (
        d.whole(-size, size - 1, d.choice((2,), (2, 1), (2, 2))) for size in (3, 4, 5)
    )
    return d.choice(  # type: ignore[no-any-return]
        (first,), (None, second), (first, second), (first, None, third), (None, second, third),
        (first, second, third),
    )  # fmt: skip


case_of("index.Tensor")(lambda d: Case((d.floats((3, 4, 5)), _indices(d))))


@case_of("index_put.default")
def _(d: Draws) -> Case:
    x = d.floats((3, 4, 5))
    if d.number(0, 3) == 0:
        return Case((x, (d.mask((3, 4)),), d.floats(()), d.flag()))
    if d.flag():
        # Different places, since the last of equal ones isn't defined.
        places = (np.array([0, 2]), np.array([1, -1]))
        return Case((x, places, d.floats(d.choice((2, 5), (5,), ())), False))
    indices = _indices(d)
    picked = np.zeros((3, 4, 5))[tuple(slice(None) if i is None else i for i in indices)]
    return Case((x, indices, d.floats(d.choice(picked.shape, picked.shape[1:], ())), True))


def _scattered(d: Draws) -> tuple[np.ndarray, int, np.ndarray, Shape]:
    """An array, an axis, indices that may be equal, and the shape of a larger source."""
    shape = (4, 3, 4)
    axis = d.axis(shape)
    sizes = tuple(d.number(1, size) for size in shape)
    more = d.number(0, 1)
    source = tuple(size + more for size in sizes)
    return d.floats(shape), axis, d.whole(0, shape[axis] - 1, sizes), source


def _count_slopes(indices: np.ndarray, source: Shape) -> int | None:
    """Return 0 if PyTorch has no gradient, which is if the source is larger than the indices."""
    return None if indices.shape == source else 0


@case_of("scatter.src", "scatter.value")
def _(d: Draws) -> Case:
    x, axis, indices, source = _scattered(d)
    # Different indices along the axis, since the last of equal ones isn't defined.
    order = np.argsort(d.random.random(x.shape), axis)
    indices = order[tuple(slice(size) for size in indices.shape)]
    return Case((x, axis, indices, d.floats(source)), num_slopes=_count_slopes(indices, source))


def _by_value(d: Draws) -> Case:
    case = CASES["scatter.src"](d)
    return Case((*case.args[:3], d.choice(1.5, 2)))


CASES["scatter.value"] = _by_value


@case_of("scatter_add.default")
def _(d: Draws) -> Case:
    x, axis, indices, source = _scattered(d)
    return Case((x, axis, indices, d.floats(source)), num_slopes=_count_slopes(indices, source))


@case_of("scatter_reduce.two")
def _(d: Draws) -> Case:
    x, axis, indices, _ = _scattered(d)
    rule = d.choice("sum", "prod", "mean", "amax", "amin")
    values = d.smooth if rule == "prod" else d.floats
    # PyTorch has the gradient of a product only for a source of the indices' shape.
    shape = indices.shape
    return Case((values(x.shape), axis, indices, values(shape), rule), {"include_self": d.flag()})


@case_of("masked_scatter.default")
def _(d: Draws) -> Case:
    return Case((d.floats((3, 4)), d.mask(d.choice((3, 4), (4,))), d.floats((13,))))


@case_of("_embedding_bag.default")
def _(d: Draws) -> Case:
    mode = d.number(0, 2)
    offsets = np.array(d.choice([0, 2, 2, 5], [0, 3, 5, 6]))
    weights = d.smooth((7,)) if mode == 0 and d.flag() else None
    last = d.flag()
    if last:
        offsets = np.append(offsets, 7)
    padding = d.choice(-1, 2)
    args = (d.smooth((6, 3)), d.whole(0, 5, (7,)), offsets, False, mode, False)
    return Case((*args, weights, last, padding), num_slopes=1)
