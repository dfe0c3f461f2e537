"""Observation of the calls of flax modules, which doesn't change them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flax import linen as nn


def observe_modules(
    on_call: Callable[[nn.Module, tuple[Any, ...]], None] = lambda module, args: None,
    on_result: Callable[[nn.Module, Any], None] = lambda module, result: None,
) -> AbstractContextManager[None]:
    """Observe the calls of all modules in the body, outer and inner ones.

    `on_call` gets a module and its positional arguments, `on_result` a module and its result.
    """

    def intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        is_forward = context.method_name == "__call__"
        if is_forward:
            on_call(context.module, args)
        result = call(*args, **kwargs)
        if is_forward:
            on_result(context.module, result)
        return result

    return nn.intercept_methods(intercept)
