"""Models of Keras 3 on its JAX backend, as pure networks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.core.plugins.loading import KERAS_BACKEND
from pipeline.models.imported.calls import make_with
from pipeline.models.imported.imported_network import PARAMS, STATISTICS, PureNetwork, Variables

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
"""Keras's name for computing in each type, with weights in float32."""
SEED_STATE = "seed_generator_state"
"""Last part of the path of the state of a generator of random numbers, uint32 (2,)."""

Path = tuple[str, ...]
Shape = tuple[int, ...]


def adapt_model(
    reference: str, found: Any, arguments: Mapping[str, Any], classes: int, dtype: str
) -> PureNetwork:
    """Adapt a model, or the model that a function or a class makes.

    Raises ValueError where Keras is not installed or computes with another backend, for what is no
    model, and for a model that was made to compute in another type.
    """
    keras = _import_keras(reference)
    if isinstance(found, keras.Model):
        if arguments:
            raise ValueError(f"{reference}: is a model already, so that arguments must be {{}}")
        own = found.dtype_policy.compute_dtype
        if own != dtype:
            raise ValueError(
                f"{reference}: is a model that computes in {own}, where the recipe says {dtype}; "
                "must be a function that returns a model"
            )
        return KerasNetwork(reference, lambda seed: found)

    def make(seed: int) -> Any:
        with _session(keras, seed, POLICIES[dtype]):
            model = make_with(reference, found, arguments, classes, dtype)
        if not isinstance(model, keras.Model):
            raise ValueError(
                f"{reference}: makes a {type(model).__name__}, which is no keras.Model"
            )
        return model

    if not callable(found):
        raise ValueError(f"{reference}: is no function, class or model of Keras, but {found!r}")
    return KerasNetwork(reference, make)


def _import_keras(reference: str) -> Any:
    try:
        import keras
    except ImportError as error:
        raise ValueError(
            f"{reference}: needs Keras 3: pip install 'recipe-pipeline[keras]' ({error})"
        ) from error
    backend = keras.config.backend()
    if backend != "jax":
        raise ValueError(
            f"{reference}: Keras computes with {backend}; must be jax: set {KERAS_BACKEND}=jax"
        )
    return keras


@contextmanager
def _session(keras: Any, seed: int, policy: str) -> Iterator[None]:
    """Keras as in a fresh process: names start at their first number, draws at the seed.

    Its type of layers, and the generators of Python and numpy that it seeds, are put back after.
    """
    before, states = keras.config.dtype_policy(), (random.getstate(), np.random.get_state())
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
        random.setstate(states[0])
        np.random.set_state(states[1])


@dataclass(frozen=True)
class KerasNetwork:
    """A model of Keras, called without changing its own variables."""

    reference: str
    make: Callable[[int], Any]
    """Makes the model from a seed."""
    has_type: bool = True
    root: str = ""
    _models: dict[int, Any] = field(default_factory=dict)
    """Models that were made, by seed: making one takes as long as drawing its weights."""

    def init(self, key: Array, images: Array, seed: int) -> Variables:
        """Weights as Keras draws them from the seed, by their paths.

        They are constants of the program. Raises ValueError for a model that ends in softmax.
        """
        model = self._model(seed, images.shape[1:])
        _refuse_softmax(model)
        with jax.ensure_compile_time_eval():
            params, others = (
                {_path(model, variable): jnp.asarray(variable.value) for variable in variables}
                for variables in (model.trainable_variables, _carried(model))
            )
        return {PARAMS: unflatten_dict(params), STATISTICS: unflatten_dict(others)}

    def apply(
        self, variables: Variables, images: Array, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Logits, and what the layers leave in variables that are not trained.

        Generators of random numbers start from the key in every step. Raises ValueError for a model
        with losses of its own.
        """
        model = self._model(next(iter(self._models), 0), images.shape[1:])
        params, others = (
            flatten_dict(dict(variables[collection])) for collection in (PARAMS, STATISTICS)
        )
        trained = [params[_path(model, variable)] for variable in model.trainable_variables]
        key = jax.random.key(0) if key is None else key
        rest = [
            _draw(key, number) if _is_seed(variable) else others[_path(model, variable)]
            for number, variable in enumerate(model.non_trainable_variables)
        ]
        logits, changed, losses = model.stateless_call(
            trained, rest, images, training=train, return_losses=True
        )
        if losses:
            raise ValueError(
                f"has {len(losses)} losses of its own, of regularizers or add_loss, which the "
                "recipe's loss does not count; leave them out, as for train.optimizer.weight_decay"
            )
        pairs = zip(model.non_trainable_variables, changed, strict=True)
        after = {_path(model, one): value for one, value in pairs if not _is_seed(one)}
        return logits, unflatten_dict(after) if train else variables[STATISTICS]

    def _model(self, seed: int, image: Shape) -> Any:
        """The model, with its variables."""
        if seed not in self._models:
            # Called while a program is traced: weights must be arrays nevertheless.
            with jax.ensure_compile_time_eval():
                model = self.make(seed)
                if not model.built:
                    model(np.zeros((1, *image), np.float32))
            self._models[seed] = model
        return self._models[seed]


def _carried(model: Any) -> list[Any]:
    """Variables that are not trained, but for states of random numbers."""
    return [variable for variable in model.non_trainable_variables if not _is_seed(variable)]


def _is_seed(variable: Any) -> bool:
    return bool(variable.path.rpartition("/")[2] == SEED_STATE)


def _path(model: Any, variable: Any) -> Path:
    """The path of a variable without the name of the model, which no scope has either."""
    first, *rest = variable.path.split("/")
    return tuple(rest) if first == model.name and rest else (first, *rest)


def _draw(key: Array, number: int) -> Array:
    return jax.random.bits(jax.random.fold_in(key, number), (2,), jnp.uint32)


def _refuse_softmax(model: Any) -> None:
    layers: Sequence[Any] = model.layers
    last = layers[-1] if layers else None
    activation = getattr(getattr(last, "activation", None), "__name__", "")
    if activation == "softmax" or type(last).__name__ == "Softmax":
        raise ValueError("ends in softmax, and must end in logits, which the loss expects")
