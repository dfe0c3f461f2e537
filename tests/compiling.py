"""How the programs of tests are compiled: quickly, or as a user's are.

Compiling takes two thirds of the time of all tests, and a fifth as long with few optimizations and
without XLA's newer emitters of fusions. Tests ask what a run does, not how fast; those that compare
the bits of different programs have them compiled as a user's are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

# JAX has no public interface to options of all programs but XLA_FLAGS, which are read once.
from jax._src import compiler

_FLAG = "xla_cpu_use_fusion_emitters"
_OF_PROCESSES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": f"--{_FLAG}=false"}
_options: Callable[..., Any] = compiler.get_compile_options


def compile_quickly(quickly: bool) -> None:
    """Compile programs of this process, and of those that it starts, quickly or fully."""

    def options(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("env_options_overrides") or {}
        # Said either way, since this process has read XLA_FLAGS by now.
        return _options(*args, **{**kwargs, "env_options_overrides": {_FLAG: not quickly, **asked}})

    jax.config.update("jax_disable_most_optimizations", quickly)
    compiler.get_compile_options = options
    for name, value in _OF_PROCESSES.items():
        os.environ.pop(name, None)
        if quickly:
            os.environ[name] = value


@contextmanager
def optimized() -> Iterator[None]:
    """Within the context, programs are compiled as a user's are."""
    compile_quickly(False)
    try:
        yield
    finally:
        compile_quickly(True)
