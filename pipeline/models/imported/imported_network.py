"""The flax module of a network in custom code, whose dense and convolutional layers are observed.

Some optimizers read the inputs of layers. The network is traced to a jaxpr, which is evaluated
equation by equation. A parameter named `kernel` is followed through calls, casts and transposes. A
product or a convolution with it is a layer if its axes are flax's: (inputs, features) or (height,
width, inputs, features). Layers in loops, branches, `jax.checkpoint` and functions with custom
derivatives aren't observed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.extend import core

from pipeline.core.host.jaxpr import (
    bind_equation,
    enter_scope,
    evaluate_traced,
    find_called_jaxpr,
    interpret_jaxpr,
    join_scope,
)
from pipeline.models.imported.calls import blame
from pipeline.models.lowerings.problem import make_window
from pipeline.models.modules.layer_capture import is_observing, observe_layer, with_observer

PARAMS = "params"
STATISTICS = "batch_stats"
Variables = Mapping[str, Any]
"""Nested dicts of arrays under `params` and `batch_stats`."""
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"))
"""Primitives of calls into which kernels are followed."""


class PureNetwork(Protocol):
    """A network of any framework as two pure functions."""

    @property
    def root(self) -> str:
        """Name of a scope around all layers of the network; "" if none exists."""

    @property
    def has_dtype(self) -> bool:
        """Whether the network was made for the recipe's dtype of activations."""

    def init(self, key: Array, inputs: Any, seed: int) -> Variables:
        """Initialise parameters and statistics for one sample: an array, or several by name.

        `seed` is for initialisers that can't draw from a key while they are traced.
        """

    def apply(
        self, variables: Variables, inputs: Any, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Return the logits and the statistics after the call. The key isn't None in training."""


class ImportedNetwork(nn.Module):
    """A custom network, from samples to logits.

    Parameters, which are float32, and batch statistics have the custom code's names. If the network
    can't be made for a dtype of activations, float inputs and parameters are cast to that dtype.
    """

    is_imported: ClassVar[bool] = True
    network: PureNetwork
    reference: str
    """The value of `import`, for messages."""
    dtype: str
    """Dtype of the activations."""
    seed: int = 0
    """The recipe's seed, for initialisers that can't draw from a key."""

    @nn.compact
    def __call__(self, inputs: Any, train: bool) -> Array:
        """Return logits (batch, ..., classes), float32, of an array, such as images (batch, height,
        width, channels), or of several by name.

        Raises ValueError for an error in the custom code, with its line, for a parameter that isn't
        float32, and for a result that isn't a single array.
        """
        if self.is_initializing():
            self._put_variables(self._initialise(inputs))
        variables = {
            name: unfreeze(dict(self.variables.get(name, {}))) for name in (PARAMS, STATISTICS)
        }
        key = self.make_rng("dropout") if train and self.has_rng("dropout") else None
        logits, statistics = self._compute_logits(variables, inputs, key, train)
        if train and self.is_mutable_collection(STATISTICS):
            self._put_variables({STATISTICS: statistics})
        return logits

    @property
    def scope_root(self) -> str:
        """Scopes around all layers, joined by slashes."""
        return "/".join(filter(None, (type(self).__name__, self.network.root)))

    @nn.nowrap
    def _put_variables(self, variables: Variables) -> None:
        for collection, tree in variables.items():
            for name, value in tree.items():
                self.put_variable(collection, name, value)

    @nn.nowrap
    def _initialise(self, inputs: Any) -> Variables:
        with blame(self.reference):
            variables = self.network.init(self.make_rng(PARAMS), inputs, self.seed)
        parameters = flatten_dict(dict(variables.get(PARAMS, {})), sep="/")
        if not parameters:
            raise ValueError(f"{self.reference}: has no parameters to train")
        for path, leaf in parameters.items():
            if leaf.dtype != jnp.float32:
                raise ValueError(
                    f"{self.reference}: parameter {path} is {leaf.dtype}; must be float32, "
                    "which layers cast to the type that they compute in"
                )
        return variables

    @nn.nowrap
    def _compute_logits(
        self, variables: Variables, inputs: Any, key: Array | None, train: bool
    ) -> tuple[Array, Variables]:
        """Return the logits, float32, and the statistics after the call."""
        state = dict(variables)
        if not self.network.has_dtype:
            inputs, state[PARAMS] = jax.tree.map(self._cast, (inputs, state[PARAMS]))
        apply: Callable[..., Any] = partial(self.network.apply, train=train)
        if is_observing():
            apply = partial(apply_observed, apply)
        with blame(self.reference):
            logits, statistics = apply(state, inputs, key)
        is_array = isinstance(logits, jax.Array)
        if not is_array or logits.ndim < 2:
            actual = f"shape {logits.shape}" if is_array else type(logits).__name__
            raise ValueError(
                f"{self.reference}: returns {actual}; must return only logits (batch, classes)"
            )
        # A loop carries the statistics, so their dtypes must not change.
        statistics = jax.tree.map(
            lambda new, old: new.astype(old.dtype), statistics, state[STATISTICS]
        )
        return logits.astype(jnp.float32), statistics

    @nn.nowrap
    def _cast(self, leaf: Array) -> Array:
        """Return floats in the dtype of activations."""
        return leaf.astype(self.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def to_nested_dicts(tree: Any) -> dict[str, Any]:
    """Return nested dicts of a pytree's leaves. Keys are text, for items of sequences numbers."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return unflatten_dict({_name_keys(path): leaf for path, leaf in leaves})


def from_nested_dicts(values: Mapping[str, Any], structure: Any) -> Any:
    """Return the pytree of this structure from which `to_nested_dicts` made `values`."""
    flat = flatten_dict(dict(values))
    return jax.tree.map_with_path(lambda path, _: flat[_name_keys(path)], structure)


def _name_keys(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("params",)


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

    def evaluate(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        pairs = zip(operands, kernels, strict=True)
        values = [_Value(operand, kernel) for operand, kernel in pairs]
        results = _Evaluation(jax.tree.leaves(inputs)[0].shape[0]).evaluate(closed, values)
        return [result.array for result in results]

    return evaluate_traced(trace, arguments, evaluate)


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

    def evaluate(self, closed: core.ClosedJaxpr, values: Sequence[_Value]) -> list[_Value]:
        """Evaluate a jaxpr."""
        return interpret_jaxpr(closed, values, self._compute, lambda _, constant: _Value(constant))

    def _compute(self, equation: Any, values: list[_Value]) -> list[_Value]:
        with enter_scope(join_scope(equation)), equation.ctx.manager:
            called = find_called_jaxpr(equation) if equation.primitive.name in CALLS else None
            if called is not None and any(value.kernel for value in values):
                return self.evaluate(called, values)
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
