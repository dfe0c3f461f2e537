"""Errors of code in a `with` body, reported as problems of the recipe's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from flax.errors import FlaxError

from pipeline.core.errors import RecipeError, first_line
from pipeline.core.host.array_values import explain_value_read, is_value_read

Draft = TypeVar("Draft")
UNTRACEABLE = (TypeError, ArithmeticError, LookupError, MemoryError, RecursionError, FlaxError)
"""Errors besides ValueError that jax and flax raise for impossible sizes."""


@contextmanager
def blaming_key(key: str, code_key: str | None = None) -> Iterator[None]:
    """Turn errors in the body into a RecipeError that begins with `key`.

    For code that can't be traced it begins with `code_key` if there is one.
    """
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{key}: {error}") from error
    except UNTRACEABLE as error:
        if is_value_read(error):
            raise RecipeError(f"{code_key or key}: {explain_value_read(error)}") from error
        reason = first_line(error)
        if isinstance(error, LookupError | ZeroDivisionError):
            # Custom components raise these, and a message such as 'x' doesn't show what is wrong.
            reason = f"{type(error).__name__}: {reason}"
        raise RecipeError(f"{code_key or key}: can't be traced: {reason}") from error


@contextmanager
def prefixing_problems(prefix: str) -> Iterator[None]:
    """Turn a ValueError in the body into a RecipeError whose text begins with `prefix`."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{prefix}{error}") from error


def require_all(checks: Sequence[Callable[[Draft], None]], draft: Draft) -> None:
    """Run all checks. Raises one RecipeError with the problems of all."""
    problems: list[str] = []
    for check in checks:
        try:
            check(draft)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
