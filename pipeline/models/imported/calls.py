"""Calls of the user's own code: its parameters by name, and its errors with their line."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array

from pipeline.core.errors import PipelineError, first_line

TRAINS = ("train", "training", "is_training")
KEYS = ("key", "rng")
CLASS_COUNTS = ("classes", "num_classes")


def make_with(
    reference: str,
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    classes: int,
    dtype: str,
    **others: Any,
) -> Any:
    """Call a class or a function with `arguments`, and others that it has parameters for.

    These are the number of classes, the type of activations and `others`. Raises ValueError for an
    argument that it does not take, one that it lacks, and an error of its own.
    """
    parameters = parameters_of(target)
    offered = {**dict.fromkeys(CLASS_COUNTS, classes), "dtype": getattr(jnp, dtype), **others}
    given = {name: value for name, value in offered.items() if name in parameters}
    given |= arguments
    try:
        _signature(target).bind(**given)
    except TypeError as error:
        known = ", ".join(name for name in parameters if name not in ("parent", "name"))
        raise ValueError(f"{reference}: {error}; its parameters are {known or 'none'}") from error
    with blaming(reference):
        return target(**given)


def takes(target: Callable[..., Any], name: str) -> bool:
    """Whether a function or a class has a parameter of this name."""
    return name in parameters_of(target)


def parameters_of(target: Callable[..., Any]) -> list[str]:
    """Names of the parameters that can be given by name; none where Python can't tell."""
    try:
        parameters = _signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]


def _signature(target: Callable[..., Any]) -> inspect.Signature:
    """Parameters of a function, or those that a class is made with."""
    if not isinstance(target, type):
        return inspect.signature(target)
    # Of `__init__`, since a metaclass may take anything, as that of nnx does.
    own = inspect.signature(getattr(target, "__init__"))  # noqa: B009 - mypy distrusts the attribute
    return own.replace(parameters=list(own.parameters.values())[1:])


def call_with(
    function: Callable[..., Any], values: Sequence[Any], *, train: bool, key: Array | None = None
) -> Any:
    """Call a function with values in their order, and with what it takes by name.

    That are flags of training, and `key` where there is one. Raises TypeError where it takes fewer
    values, or needs more.
    """
    arguments, by_name = _arranged(function, values, train, key)
    return function(*arguments, **by_name)


def require_callable_with(
    reference: str, function: Callable[..., Any], values: Sequence[str], *, has_key: bool = False
) -> None:
    """Raise ValueError unless `call_with` can call a function with values of these names."""
    key: Any = object() if has_key else None
    try:
        arguments, by_name = _arranged(function, values, True, key)
        inspect.signature(function).bind(*arguments, **by_name)
    except TypeError as error:
        named = ", ".join((*TRAINS, "deterministic", *(KEYS if has_key else ())))
        raise ValueError(
            f"{reference}: is to be called with {' and '.join(values)}, and with those of {named} "
            f"that it takes, but: {error}"
        ) from error


def _arranged(
    function: Callable[..., Any], values: Sequence[Any], train: bool, key: Array | None
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position and by name."""
    named: dict[str, Any] = {**dict.fromkeys(TRAINS, train), "deterministic": not train}
    named |= {} if key is None else dict.fromkeys(KEYS, key)
    waiting, arguments, by_name = list(values), list[Any](), dict[str, Any]()
    for parameter in inspect.signature(function).parameters.values():
        positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if parameter.kind == parameter.VAR_POSITIONAL:
            arguments, waiting = [*arguments, *waiting], []
        elif parameter.name in named and positional and not by_name and waiting:
            arguments.append(named[parameter.name])
        elif parameter.name in named and parameter.kind != parameter.VAR_KEYWORD:
            by_name[parameter.name] = named[parameter.name]
        elif positional and waiting:
            arguments.append(waiting.pop(0))
    if waiting:
        raise TypeError(f"it does not take {' and '.join(map(str, waiting))}")
    return arguments, by_name


@contextmanager
def blaming(reference: str) -> Iterator[None]:
    """Raise an error of the user's code as ValueError with its file and line."""
    try:
        yield
    except (PipelineError, UserCodeError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        message = f"{reference}: {_place(error)}{kind}{first_line(error)}"
        raise UserCodeError(message) from error


class UserCodeError(ValueError):
    """An error of the user's code, whose message says where it arose."""


def _place(error: Exception) -> str:
    """The last line of the traceback that is neither installed nor of this package."""
    installed, own = Path(sys.prefix), Path(__file__).parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and own not in file.parents and not _is_installed(file, installed):
            return f"{file.name}, line {frame.lineno}: "
    return ""


def _is_installed(file: Path, prefix: Path) -> bool:
    return "site-packages" in file.parts or prefix in file.parents or "lib" in file.parts
