"""The flax module of a network in custom code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.imported.calls import blame
from pipeline.models.imported.observed_layers import apply_observed
from pipeline.models.modules.layer_capture import is_observing

PARAMS = "params"
STATISTICS = "batch_stats"
Variables = Mapping[str, Any]
"""Nested dicts of arrays under `params` and `batch_stats`."""


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
