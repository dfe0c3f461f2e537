"""Sums over the processes of a run, for custom code."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Operation = Literal["sum", "mean", "max", "min"]


def all_reduce(values: Any, operation: Operation = "sum") -> Any:
    """Return numbers or arrays, in any pytree, reduced over all processes, as numpy arrays.

    All processes must call it, with equal shapes and dtypes, and get the same bits: values are
    added in the order of ranks. Raises ValueError for another operation.
    """
    import jax
    from jax.experimental.multihost_utils import process_allgather

    reductions: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
    if operation not in reductions:
        raise ValueError(f"operation = {operation!r}: must be one of {', '.join(reductions)}")

    def reduce(value: Any) -> np.ndarray:
        array = np.atleast_1d(np.asarray(value))
        # As bytes, since JAX would round 64 bits to 32.
        content = np.frombuffer(array.tobytes(), np.uint8)
        gathered = np.asarray(process_allgather(content)).reshape(jax.process_count(), -1)
        arrays = [np.frombuffer(row.tobytes(), array.dtype) for row in gathered]
        result = reductions[operation](np.stack(arrays), axis=0)
        return np.asarray(result).reshape(np.shape(value))

    return jax.tree.map(reduce, values)
