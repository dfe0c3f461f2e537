"""Observation of the dense and convolutional layers of any JAX function.

Some optimizers read the inputs of layers. The network is traced to a jaxpr, which is evaluated
equation by equation. A parameter named `kernel` is followed through calls, casts and transposes. A
product or a convolution with it is a layer if its axes are flax's: (inputs, features) or (height,
width, inputs, features). Layers in loops, branches, `jax.checkpoint` and functions with custom
derivatives aren't observed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend import core

from pipeline.core.host.jaxpr import (
    bind_equation,
    enter_scope,
    find_called_jaxpr,
    interpret_jaxpr,
    join_scope,
    run_traced,
)
from pipeline.models.lowerings.problem.conv_window import make_window
from pipeline.models.modules.layer_capture import observe_layer, with_observer

CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"))
"""Primitives of calls into which kernels are followed."""


@dataclass(frozen=True)
class _Kernel:
    """A kernel, whose axes may have been transposed."""

    layer: str
    """Path of the layer."""
    axes: tuple[int, ...]
    """The parameter's axis for each axis of the array."""


@dataclass(frozen=True)
class _Value:
    """An array, and the kernel that it is, or None."""

    array: Any
    kernel: _Kernel | None = None


def apply_observed(
    apply: Callable[..., Any], variables: Mapping[str, Any], inputs: Any, key: Array | None
) -> Any:
    """Apply the network and observe its layers. Raises ValueError if a kernel is used twice."""

    def trace(variables: Any, inputs: Any, key: Array | None) -> Any:
        # Without an observer: flax's modules would pass the same layers to it.
        with with_observer(None):
            return apply(variables, inputs, key)

    arguments = (variables, inputs, key)
    paths, _ = jax.tree.flatten_with_path(arguments)
    kernels = [_find_kernel(path, leaf) for path, leaf in paths]

    def run(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        pairs = zip(operands, kernels, strict=True)
        values = [_Value(operand, kernel) for operand, kernel in pairs]
        results = _Evaluation(jax.tree.leaves(inputs)[0].shape[0]).run(closed, values)
        return [result.array for result in results]

    return run_traced(trace, arguments, run)


def _find_kernel(path: Any, leaf: Any) -> _Kernel | None:
    """Return the kernel for a leaf of (variables, inputs, key), or None if it isn't a kernel."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if names[:2] != ["0", "params"] or names[-1] != "kernel" or leaf.ndim not in (2, 4):
        return None
    return _Kernel("/".join(names[2:-1]), tuple(range(leaf.ndim)))


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs for a batch of samples, and observes their layers."""

    batch_size: int

    def run(self, closed: core.ClosedJaxpr, values: Sequence[_Value]) -> list[_Value]:
        """Evaluate a jaxpr."""
        return interpret_jaxpr(closed, values, self._compute, lambda _, constant: _Value(constant))

    def _compute(self, equation: Any, values: list[_Value]) -> list[_Value]:
        with enter_scope(join_scope(equation)), equation.ctx.manager:
            called = find_called_jaxpr(equation) if equation.primitive.name in CALLS else None
            if called is not None and any(value.kernel for value in values):
                return self.run(called, values)
            results = bind_equation(equation, [value.array for value in values])
            kernels = [value.kernel for value in values]
            match equation.primitive.name, kernels:
                case "convert_element_type" | "copy", [kernel]:
                    return [_Value(results[0], kernel)]
                case "transpose", [_Kernel() as kernel]:
                    axes = tuple(kernel.axes[axis] for axis in equation.params["permutation"])
                    return [_Value(results[0], _Kernel(kernel.layer, axes))]
                case "dot_general", [_, _Kernel() as kernel]:
                    rows = values[0].array
                    results = [self._observe_product(equation, kernel, rows, results[0])]
                case "conv_general_dilated", [_, _Kernel() as kernel]:
                    images = values[0].array
                    results = [self._observe_convolution(equation, kernel, images, results[0])]
            return [_Value(result) for result in results]

    def _observe_product(self, equation: Any, kernel: _Kernel, rows: Array, result: Array) -> Array:
        """Return the result of a product, observed if it is (batch, ..., inputs) @ kernel."""
        (left, right), batches = equation.params["dimension_numbers"]
        is_dense = len(right) == 1 and kernel.axes[right[0]] == 0 and len(kernel.axes) == 2
        is_dense &= tuple(left) == (rows.ndim - 1,) and batches == ((), ())
        if not is_dense or rows.ndim < 2 or rows.shape[0] != self.batch_size:
            return result
        return observe_layer(kernel.layer, rows, result, None)

    def _observe_convolution(
        self, equation: Any, kernel: _Kernel, images: Array, result: Array
    ) -> Array:
        """Return the result of a convolution, observed if images are convolved with the kernel."""
        params = equation.params
        numbers = params["dimension_numbers"]
        output_axis, input_axis, *sizes_axes = (kernel.axes[axis] for axis in numbers.rhs_spec)
        is_plain = (*sizes_axes, input_axis, output_axis) == (0, 1, 2, 3)
        is_plain &= params["feature_group_count"] == params["batch_group_count"] == 1
        is_plain &= tuple(params["lhs_dilation"]) == (1, 1)
        is_plain &= all(edge >= 0 for pad in params["padding"] for edge in pad)
        if not is_plain or images.shape[numbers.lhs_spec[0]] != self.batch_size:
            return result
        order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
        nhwc = images.transpose(numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
        sizes = equation.invars[1].aval.shape
        window = make_window(
            (nhwc.shape[1], nhwc.shape[2]),
            (sizes[numbers.rhs_spec[2]], sizes[numbers.rhs_spec[3]]),
            tuple(params["window_strides"]),
            tuple(map(tuple, params["padding"])),
            tuple(params["rhs_dilation"]),
            groups=1,
        )
        outputs = observe_layer(kernel.layer, nhwc, result.transpose(order), window)
        return outputs.transpose(np.argsort(order))
