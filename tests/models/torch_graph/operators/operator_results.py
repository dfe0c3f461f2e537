"""Results and gradients of operators, by JAX and by torch, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.operator_table import OperatorContext, TorchTensor
from pipeline.models.torch_graph.operators.known_operators import OPERATORS
from tests.models.torch_graph.operators.core_cases import Case

Arrays = list[np.ndarray | None]
"""Results, and then a gradient for each array that has one; None for what isn't computed."""
CONTEXT = OperatorContext("float32", DEFAULTS, "nhwc", lambda: jax.random.key(0))


def map_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples and dicts with every other value changed."""
    if isinstance(value, tuple):
        return tuple(map_arguments(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_arguments(item, change) for key, item in value.items()}
    return change(value)


def find_inputs(case: Case) -> list[np.ndarray]:
    """Return the arrays of a case that have gradients, in their order."""
    inputs: list[np.ndarray] = []

    def collect(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            inputs.append(value)

    map_arguments((case.args, case.kwargs), collect)
    return inputs


def draw_cotangent(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the gradient of the loss with respect to a result."""
    return np.random.default_rng(number).normal(size=shape)


def compute_by_jax(name: str, case: Case, order_seed: int = 0) -> tuple[Arrays, Arrays]:
    """Return the results of an operator, and gradients; the axes of arrays are in any order."""

    def apply(inputs: list[Any]) -> list[Any]:
        remaining = iter(inputs)
        random = np.random.default_rng(order_seed)

        def convert(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            array = next(remaining) if value.dtype == np.float32 else jnp.asarray(value)
            order = tuple(map(int, random.permutation(value.ndim)))
            return TorchTensor(jnp.transpose(array, order), order)

        args, kwargs = map_arguments((case.args, case.kwargs), convert)
        result = OPERATORS[f"aten.{name}"](CONTEXT, *args, **kwargs)
        results = tuple(result) if isinstance(result, tuple) else (result,)
        return [x.plain() if isinstance(x, TorchTensor) else x for x in results]

    inputs = [jnp.asarray(x) for x in find_inputs(case)]
    results = apply(inputs)
    places = list(_differentiable(case, results))
    arrays: Arrays = [None if x is None else np.asarray(x) for x in results]
    if not inputs or not places:
        return arrays, []

    def compute_loss(inputs: list[Any]) -> Any:
        outputs = apply(inputs)
        return sum(
            jnp.sum(jnp.real(outputs[n]) * draw_cotangent(n, outputs[n].shape)) for n in places
        )

    return arrays, [np.asarray(g) for g in jax.grad(compute_loss)(inputs)]


def _differentiable(case: Case, results: list[Any]) -> Iterator[int]:
    """Yield the numbers of the results whose gradients are compared."""
    count = len(results) if case.num_slopes is None else case.num_slopes
    for number, x in enumerate(results[:count]):
        if x is not None and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact):
            yield number


def compute_by_torch(name: str, case: Case) -> tuple[Arrays, Arrays]:
    """Return the results of an operator, and gradients, in the case's dtype."""
    import torch

    inputs: list[Any] = []

    def convert(value: Any) -> Any:
        if isinstance(value, TypeOf):
            return getattr(torch, case.dtype if value.name == "float32" else value.name)
        if not isinstance(value, np.ndarray):
            return value
        tensor = torch.from_numpy(np.array(value))
        if value.dtype == np.float32:
            tensor = tensor.to(getattr(torch, case.dtype)).requires_grad_(case.num_slopes != 0)
            inputs.append(tensor)
        return tensor.to(torch.complex128) if tensor.is_complex() else tensor

    args, kwargs = map_arguments((case.args, case.kwargs), convert)
    if name == "_native_batch_norm_legit.default":
        # It changes the running statistics in place, which have no gradients.
        args = (*args[:3], *(a.detach().clone() for a in args[3:5]), *args[5:])
    packet, overload = name.split(".")
    result = getattr(getattr(torch.ops.aten, packet), overload)(*args, **kwargs)
    results = list(result) if isinstance(result, tuple | list) else [result]
    arrays: Arrays = [_to_numpy(x) if torch.is_tensor(x) else x for x in results]
    count = len(results) if case.num_slopes is None else case.num_slopes
    losses = [
        (torch.real(y) * torch.from_numpy(draw_cotangent(n, tuple(y.shape)))).sum()
        for n, y in enumerate(results[:count])
        if torch.is_tensor(y) and y.requires_grad
    ]
    if not losses:
        return arrays, []
    gradients = torch.autograd.grad(sum(losses), inputs, allow_unused=True)
    return arrays, [None if g is None else g.numpy(force=True) for g in gradients]


def _to_numpy(x: Any) -> Any:
    return x.detach().resolve_conj().resolve_neg().numpy()


def assert_same(ours: tuple[Arrays, Arrays], theirs: tuple[Arrays, Arrays], case: Case) -> None:
    """Compare results and gradients; a gradient that is missing in one is 0 in the other.

    Results that are computed for gradients alone may be missing here.
    """
    for number, (x, expected) in enumerate(zip(ours[0], theirs[0], strict=False)):
        if x is not None and expected is not None:
            is_value_compared = case.num_values is None or number < case.num_values
            _assert_close(x, expected, is_value_compared=is_value_compared)
    count = max(len(ours[1]), len(theirs[1]))
    ours_or_none, theirs_or_none = (side or [None] * count for side in (ours[1], theirs[1]))
    for x, expected in zip(ours_or_none, theirs_or_none, strict=True):
        if x is not None or expected is not None:
            example = x if expected is None else expected
            _assert_close(
                np.zeros_like(example) if x is None else x,
                np.zeros_like(example) if expected is None else expected,
            )


def _assert_close(x: Any, expected: Any, *, is_value_compared: bool = True) -> None:
    x, expected = np.asarray(x), np.asarray(expected)
    assert x.shape == expected.shape
    assert _kind(x) == _kind(expected), f"dtype {x.dtype}; must be {expected.dtype}"
    if is_value_compared:
        np.testing.assert_allclose(x, expected, rtol=1e-3, atol=3e-5)


def _kind(x: np.ndarray) -> str:
    return "i" if x.dtype.kind == "u" else x.dtype.kind
