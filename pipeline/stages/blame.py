"""Errors of what a recipe describes, as problems of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flax.errors import FlaxError

from pipeline.core.errors import RecipeError, first_line

UNTRACEABLE = (TypeError, ArithmeticError, LookupError, MemoryError, RecursionError, FlaxError)
"""Errors that jax and flax raise, besides ValueError, for sizes that no array can have."""


@contextmanager
def blaming_key(key: str, untraceable: str | None = None) -> Iterator[None]:
    """Report errors of the body as a problem of the recipe, under this key.

    Code that can't be traced is a problem of `untraceable`, where that is another key.
    """
    try:
        yield
    except ValueError as error:
        raise RecipeError([f"{key}: {error}"]) from error
    except UNTRACEABLE as error:
        code = untraceable or key
        raise RecipeError([f"{code}: can't be traced: {first_line(error)}"]) from error
