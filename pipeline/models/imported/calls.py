"""Calls of custom code with the values for which it has parameters, and places of its errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
from jax import Array

from pipeline.core.errors import PipelineError, first_line
from pipeline.core.host.array_values import (
    explain_value_read,
    is_value_read,
    locate_custom_code,
)

TRAINS = ("train", "training", "is_training")
KEYS = ("key", "rng")
CLASS_COUNTS = ("classes", "num_classes")
"""Names of parameters for the flag of training, for a random key and for the number of classes."""


def make_with(
    reference: str,
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    classes: int,
    dtype: str,
    **optional: Any,
) -> Any:
    """Call a class or a function with `arguments`, and return its result.

    The number of classes, the dtype of activations and `optional` are passed too, if it has
    parameters for them. Raises ValueError if an argument is unknown or missing, and for an error of
    the custom code.
    """
    names = list_parameters(target)
    offered = {**dict.fromkeys(CLASS_COUNTS, classes), "dtype": getattr(jnp, dtype), **optional}
    values = {name: value for name, value in offered.items() if name in names}
    values |= arguments
    try:
        _inspect_signature(target).bind(**values)
    except TypeError as error:
        listed = ", ".join(name for name in names if name not in ("parent", "name"))
        raise ValueError(f"{reference}: {error}; its parameters are {listed or 'none'}") from error
    with blame(reference):
        return target(**values)


def list_parameters(target: Callable[..., Any]) -> list[str]:
    """List the parameters that can be passed by name; none if Python can't inspect the target."""
    try:
        parameters = _inspect_signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _inspect_signature(target: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of a class's `__init__` without `self`."""
    if not isinstance(target, type):
        return inspect.signature(target)
    # The signature of the class is its metaclass's, which may accept anything, as in nnx.
    signature = inspect.signature(getattr(target, "__init__"))  # noqa: B009 - mypy distrusts it
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def call_with(
    function: Callable[..., Any],
    values: Sequence[Any],
    *,
    inputs: Any = None,
    train: bool,
    key: Array | None = None,
) -> Any:
    """Call a function with positional values, then the network's inputs, and the flag and key if it
    has parameters for them.

    Several inputs, a dictionary, are passed by name if the function has a parameter for each; as
    one dictionary if it has a single parameter for all; else by position. Raises TypeError if the
    function accepts fewer values, or requires more.
    """
    positional, keywords = _match_parameters(function, values, inputs, train, key)
    return function(*positional, **keywords)


def require_callable_with(
    reference: str,
    function: Callable[..., Any],
    values: Sequence[str],
    *,
    inputs: Sequence[str] = (),
    has_key: bool = False,
) -> None:
    """Raise ValueError unless `call_with` can call a function with values and inputs of these
    names."""
    key: Any = object() if has_key else None
    named = {name: name for name in inputs}
    passed: Any = named if len(inputs) > 1 else next(iter(inputs), None)
    values, inputs = list(values), list(inputs)
    try:
        positional, keywords = _match_parameters(function, values, passed, True, key)
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError as error:
        flags = ", ".join((*TRAINS, "deterministic", *(KEYS if has_key else ())))
        raise ValueError(
            f"{reference}: must accept {' and '.join([*values, *inputs])}, and may accept {flags}: "
            f"{error}"
        ) from error


def list_inputs(function: Callable[..., Any], values: int = 0) -> list[str]:
    """List the parameters without a default that are inputs of a network: those after `values`
    others, without flags and keys."""
    others = (*TRAINS, "deterministic", *KEYS)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in kinds
        and parameter.default is parameter.empty
        and parameter.name not in others
    ]
    return names[values:]


def _match_parameters(
    function: Callable[..., Any],
    values: Sequence[Any],
    inputs: Any,
    train: bool,
    key: Array | None,
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments of `call_with`'s call."""
    named: dict[str, Any] = {**dict.fromkeys(TRAINS, train), "deterministic": not train}
    if key is not None:
        named |= dict.fromkeys(KEYS, key)
    remaining = list(values)
    if isinstance(inputs, Mapping):
        if set(inputs) <= set(list_parameters(function)):
            named |= inputs
        elif len(list_inputs(function, len(values))) == 1:
            remaining.append(inputs)
        else:
            remaining += inputs.values()
    elif inputs is not None:
        remaining.append(inputs)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        has_position = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if parameter.kind == parameter.VAR_POSITIONAL:
            positional += remaining
            remaining = []
        elif parameter.name in named and has_position and not keywords and remaining:
            # A flag or key before a value, as in apply(train, images), must have its position.
            positional.append(named[parameter.name])
        elif parameter.name in named and parameter.kind != parameter.VAR_KEYWORD:
            keywords[parameter.name] = named[parameter.name]
        elif has_position and remaining:
            positional.append(remaining.pop(0))
    if remaining:
        raise TypeError(f"no parameter for {' and '.join(map(str, remaining))}")
    return positional, keywords


@contextmanager
def blame(reference: str) -> Iterator[None]:
    """Raise errors of custom code as UserCodeError, with their file and line."""
    try:
        yield
    except (PipelineError, UserCodeError):
        raise
    except Exception as error:
        if is_value_read(error):
            raise UserCodeError(f"{reference}: {explain_value_read(error)}") from error
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        place = locate_custom_code(error)
        message = f"{reference}: {f'{place}: ' if place else ''}{kind}{first_line(error)}"
        raise UserCodeError(message) from error


class UserCodeError(ValueError):
    """An error of custom code. The message names the error's file and line."""
