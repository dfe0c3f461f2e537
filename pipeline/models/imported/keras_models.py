"""Adapter that turns Keras 3 models on the JAX backend into pure networks."""

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
from pipeline.models.imported.calls import list_inputs, list_parameters, make_with
from pipeline.models.imported.imported_network import PARAMS, STATISTICS, Variables

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
"""Keras's dtype policy for each dtype of activations. All have weights in float32."""
_GRADIENTS = "train.gradients=NAME names a component that computes gradients"
_LOSS = "loss=NAME names the loss"
_METRICS = "eval.metrics=[NAME] names metrics"
TRAINING_METHODS = {
    "train_step": _GRADIENTS,
    "compute_loss_and_updates": _GRADIENTS,
    "compute_loss": _LOSS,
    "stateless_compute_loss": _LOSS,
    "test_step": _METRICS,
    "compute_metrics": _METRICS,
}
"""Methods of a model that Keras calls in training and evaluation, with a recipe's keys for them."""
SEED_STATE = "seed_generator_state"
"""Last part of the path of a random generator's state, uint32 (2,)."""


def adapt_model(
    reference: str, target: Any, arguments: Mapping[str, Any], classes: int, dtype: str
) -> KerasNetwork:
    """Return the pure network of a model: `target` itself, or the result of calling `target`.

    Raises ValueError if Keras isn't installed or computes with another backend, and if `target`
    isn't a model or computes in another dtype.
    """
    keras = _import_keras(reference)
    if isinstance(target, keras.Model):
        if arguments:
            raise ValueError(f"{reference}: is a model; arguments must be {{}}")
        compute_dtype = target.dtype_policy.compute_dtype
        if compute_dtype != dtype:
            raise ValueError(
                f"{reference}: is a model that computes in {compute_dtype}, and the recipe in "
                f"{dtype}; must be a function that returns a model"
            )
        return KerasNetwork(reference, lambda seed: target)

    def make(seed: int) -> Any:
        with _fresh_session(keras, seed, POLICIES[dtype]):
            model = make_with(reference, target, arguments, classes, dtype)
        if not isinstance(model, keras.Model):
            raise ValueError(
                f"{reference}: makes a {type(model).__name__}; must make a keras.Model"
            )
        return model

    if not callable(target):
        raise ValueError(f"{reference}: is {target!r}; must be a function, class or model of Keras")
    return KerasNetwork(reference, make)


def find_inputs(target: Any) -> Sequence[str]:
    """Return the names of the inputs of a functional model, or in the signature of a class's
    `call`; () for another object."""
    if isinstance(target, type):
        call = getattr(target, "call", None)
        return list_inputs(call, 1) if callable(call) else ()
    return getattr(target, "input_names", None) or ()


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
def _fresh_session(keras: Any, seed: int, policy: str) -> Iterator[None]:
    """Give Keras the state of a new process, on which names and random numbers depend.

    Its seed also changes the generators of Python and NumPy. These and Keras's dtype policy are
    restored at the end.
    """
    policy_before = keras.config.dtype_policy()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy_before)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@dataclass(frozen=True)
class KerasNetwork:
    """A Keras model as a pure network: calls don't change its variables."""

    reference: str
    make: Callable[[int], Any]
    """Makes the model from a seed."""
    has_dtype: bool = True
    root: str = ""
    _models: dict[int, Any] = field(default_factory=dict)
    """Models by seed. They are stored since it is slow to draw the weights of a model."""

    def init(self, key: Array, inputs: Any, seed: int) -> Variables:
        """Return the weights that Keras draws from the seed, by their paths.

        The program has them as constants. Raises ValueError for a model that ends in softmax, and
        for one with rules of training that a recipe doesn't follow.
        """
        model = self._find_model(seed, inputs)
        _refuse_softmax(model)
        _refuse_training_rules(model)
        with jax.ensure_compile_time_eval():
            params = _read_values(model, model.trainable_variables)
            statistics = [
                variable
                for variable in model.non_trainable_variables
                if not _is_seed_state(variable)
            ]
            return {PARAMS: params, STATISTICS: _read_values(model, statistics)}

    def apply(
        self, variables: Variables, inputs: Any, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Return the logits, and the statistics after the call.

        Random generators start from the key. Raises ValueError for a model that adds losses.
        """
        # Any model will do: models of different seeds differ only in initial weights.
        model = self._find_model(next(iter(self._models), 0), inputs)
        params = flatten_dict(dict(variables[PARAMS]))
        statistics = flatten_dict(dict(variables[STATISTICS]))
        trained = [params[_read_path(model, variable)] for variable in model.trainable_variables]
        key = jax.random.key(0) if key is None else key
        untrained = [
            jax.random.bits(jax.random.fold_in(key, number), (2,), jnp.uint32)
            if _is_seed_state(variable)
            else statistics[_read_path(model, variable)]
            for number, variable in enumerate(model.non_trainable_variables)
        ]
        # Keras's step calls a model without this parameter without it too.
        flag = {"training": train} if "training" in list_parameters(model.call) else {}
        logits, changed, losses = model.stateless_call(
            trained, untrained, *_arrange(model, inputs), **flag, return_losses=True
        )
        if losses:
            raise ValueError(
                f"adds {len(losses)} losses, by regularizers or add_loss, which the recipe's loss "
                "ignores; must add none: train.optimizer.weight_decay decays weights"
            )
        pairs = zip(model.non_trainable_variables, changed, strict=True)
        after = {_read_path(model, v): value for v, value in pairs if not _is_seed_state(v)}
        return logits, unflatten_dict(after) if train else variables[STATISTICS]

    def _find_model(self, seed: int, inputs: Any) -> Any:
        """Return the model of a seed. The first call for the seed makes and builds it."""
        if seed not in self._models:
            # Weights must be concrete arrays, although JAX may be tracing a program.
            with jax.ensure_compile_time_eval():
                model = self.make(seed)
                if not model.built:
                    zeros = jax.tree.map(lambda a: np.zeros((1, *a.shape[1:]), a.dtype), inputs)
                    model(*_arrange(model, zeros))
            self._models[seed] = model
        return self._models[seed]


def _arrange(model: Any, inputs: Any) -> tuple[Any, ...]:
    """Return the arguments of a model's call: one array, or several in the form in which it takes
    them: by the names of its inputs, in their order, or as separate parameters."""
    if not isinstance(inputs, Mapping):
        return (inputs,)
    structure = getattr(model, "_inputs_struct", None)
    if isinstance(structure, Mapping):
        return (dict(inputs),)
    names = getattr(model, "input_names", None) or []
    arrays = [inputs[name] for name in names] if set(names) == set(inputs) else [*inputs.values()]
    if structure is not None:
        return (arrays,)
    parameters = list_inputs(model.call)
    if len(parameters) < 2:
        return (dict(inputs),)
    by_name = set(parameters) <= set(inputs)
    return tuple(inputs[name] for name in parameters) if by_name else tuple(inputs.values())


def _read_values(model: Any, variables: Sequence[Any]) -> Any:
    """Return nested dicts of variables' values, by path."""
    return unflatten_dict({_read_path(model, v): jnp.asarray(v.value) for v in variables})


def _is_seed_state(variable: Any) -> bool:
    return bool(variable.path.rpartition("/")[2] == SEED_STATE)


def _read_path(model: Any, variable: Any) -> tuple[str, ...]:
    """Return the path of a variable without the model's name."""
    path: list[str] = variable.path.split("/")
    starts_at_model = path[0] == model.name and len(path) > 1
    return tuple(path[1:] if starts_at_model else path)


def _refuse_training_rules(model: Any) -> None:
    """Raise ValueError for overridden methods of training, constraints and quantised updates."""
    for method, instead in TRAINING_METHODS.items():
        function = getattr(getattr(model, method, None), "__func__", None)
        if function is None or not function.__module__.startswith("keras."):
            raise ValueError(
                f"{type(model).__name__} overrides {method}, which the recipe's step doesn't call; "
                f"must not: {instead}"
            )
    for variable in model.trainable_variables:
        name = "/".join(_read_path(model, variable))
        if variable.constraint is not None:
            raise ValueError(
                f"{name} has the constraint {type(variable.constraint).__name__}, which the "
                "recipe's optimizer ignores; must have none"
            )
        if variable.overwrite_with_gradient:
            raise ValueError(
                f"{name} is overwritten by its gradient, which the recipe's optimizer doesn't do; "
                "must be trained in a type that isn't quantised"
            )


def _refuse_softmax(model: Any) -> None:
    layers: Sequence[Any] = model.layers
    last = layers[-1] if layers else None
    activation = getattr(getattr(last, "activation", None), "__name__", "")
    if activation == "softmax" or type(last).__name__ == "Softmax":
        raise ValueError("ends in softmax; must end in logits, which the loss expects")
