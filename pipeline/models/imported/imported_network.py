"""Networks that are the user's own code, as a flax module whose layers are lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax import Array

from pipeline.models.imported.calls import blaming
from pipeline.models.imported.with_lowerings import KeptOperation, list_kept, with_lowerings
from pipeline.models.lowerings.problem.lowering import DEFAULTS, LoweringPolicy

PARAMS, STATISTICS = "params", "batch_stats"
Variables = Mapping[str, Any]
"""Nested dicts of arrays under `params` and `batch_stats`."""


class PureNetwork(Protocol):
    """A network of any framework as two pure functions."""

    @property
    def root(self) -> str:
        """Scope around the whole network, which is no layer; "" where there is none."""

    @property
    def has_type(self) -> bool:
        """Whether it was made for the recipe's type of activations."""

    def init(self, key: Array, images: Array, seed: int) -> Variables:
        """Fresh parameters, and statistics where it has any, for images (1, H, W, C) float32.

        `seed` is for those that can't be drawn from a key while they are traced.
        """

    def apply(
        self, variables: Variables, images: Array, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Logits, and the statistics afterwards. There is a key for random draws in training."""


class ImportedNetwork(nn.Module):
    """A network of the user's own, from images to logits.

    Its parameters, float32, and its batch statistics have the names that it gives them. Where it
    can't be made for a type of activations, its images and parameters are cast to that type.
    """

    network: PureNetwork
    reference: str
    """The value of `import`, for messages."""
    dtype: str
    """Type of the activations."""
    policy: LoweringPolicy = DEFAULTS
    """Chooses how convolutions, dense products and max pooling are computed."""
    seed: int = 0
    """The recipe's seed, for initialisers that can't draw from a key."""

    @nn.compact
    def __call__(self, images: Array, train: bool) -> Array:
        """Logits (batch, ..., classes), float32, of images (batch, height, width, channels).

        Raises ValueError, which names the line, for an error of the user's code, for a parameter
        that is not float32, and for a result that is not one array.
        """
        if self.is_initializing():
            self._put(self._fresh(images))
        variables = {name: _plain(self.variables.get(name, {})) for name in (PARAMS, STATISTICS)}
        key = self.make_rng("dropout") if train and self.has_rng("dropout") else None
        compute = with_lowerings(self._function(train), self.policy, self.network.root)
        logits, statistics = compute(variables, images, key)
        if train and self.is_mutable_collection(STATISTICS):
            self._put({STATISTICS: statistics})
        return logits

    @nn.nowrap
    def list_kept(
        self, variables: Variables, images: jax.ShapeDtypeStruct
    ) -> tuple[KeptOperation, ...]:
        """List what no lowering replaces in a step of training, by tracing shapes."""
        key = jax.random.key(0)
        return list_kept(self._function(True), variables, images, key, root=self.network.root)

    @nn.nowrap
    def _function(self, train: bool) -> Callable[..., Any]:
        # No method, since flax would put a scope around that.
        return partial(_compute, self.network, self.reference, self.dtype, train)

    @nn.nowrap
    def _put(self, variables: Variables) -> None:
        for collection, tree in variables.items():
            for name, value in tree.items():
                self.put_variable(collection, name, value)

    @nn.nowrap
    def _fresh(self, images: Array) -> Variables:
        with blaming(self.reference):
            variables = self.network.init(self.make_rng(PARAMS), images, self.seed)
        parameters = flatten_dict(dict(variables.get(PARAMS, {})), sep="/")
        if not parameters:
            raise ValueError(f"{self.reference}: has no parameters to train")
        wrong = [(path, leaf) for path, leaf in parameters.items() if leaf.dtype != jnp.float32]
        if wrong:
            path, leaf = wrong[0]
            raise ValueError(
                f"{self.reference}: parameter {path} is {leaf.dtype}; parameters must be float32, "
                "which layers cast to the type that they compute in"
            )
        return variables


def _compute(
    network: PureNetwork,
    reference: str,
    dtype: str,
    train: bool,
    variables: Variables,
    images: Array,
    key: Array | None,
) -> tuple[Array, Variables]:
    """Logits float32, and the statistics afterwards."""
    given = dict(variables)
    if not network.has_type:
        images, given[PARAMS] = _cast((images, given[PARAMS]), dtype)
    with blaming(reference):
        logits, statistics = network.apply(given, images, key, train=train)
    if not isinstance(logits, jax.Array) or logits.ndim < 2:
        found = f"shape {logits.shape}" if isinstance(logits, jax.Array) else type(logits).__name__
        raise ValueError(f"{reference}: returns {found}; must return logits (batch, classes) alone")
    # A loop carries them, so that their types must stay.
    kept = jax.tree.map(lambda new, old: new.astype(old.dtype), statistics, given[STATISTICS])
    return logits.astype(jnp.float32), kept


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def _plain(tree: Any) -> Any:
    """The tree as dicts, which flax freezes."""
    if isinstance(tree, Mapping):
        return {name: _plain(value) for name, value in tree.items()}
    return tree
