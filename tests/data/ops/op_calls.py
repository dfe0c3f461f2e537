"""Images and labels for tests of map ops, and calls of an op."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.data.columns import ColumnSpec

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (16, 7, 9, 3), dtype=np.uint8)
FLOATS = RNG.standard_normal((16, 7, 9, 3), dtype=np.float32)
LABELS = RNG.integers(0, 10, 16).astype(np.int32)
IMAGE = ColumnSpec((7, 9, 3), "uint8")
LABEL = ColumnSpec((), "int32")
CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}  # D-06
images = arrays(
    np.uint8, st.tuples(st.just(2), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
)
units = arrays(np.float32, (2, 2), elements=st.floats(0, 1, exclude_max=True, width=32))


def uniforms_for(op, batch=16):
    return np.random.default_rng(1).random((batch, op.draws), dtype=np.float32)


def on_host(op, values, uniforms=None):
    return op(np, values, uniforms_for(op, len(values)) if uniforms is None else uniforms)


def spec_of(values):
    return ColumnSpec(values.shape[1:], values.dtype.name)


def op_id(op):
    names = ("interpolation", "mode", "policy", "convention")
    return "-".join([op.name, *(getattr(op, name) for name in names if hasattr(op, name))])


GREY = ColumnSpec((7, 9, 1), "uint8")
