"""Compile the programs of tests quickly, or as a user's.

Compiling takes two thirds of the time of all tests, and a fifth as long with few optimizations and
without XLA's newer emitters of fusions. Most tests check results, not speed; those that compare the
bits of different programs compile as a user does. LLVM's first level of optimization doubles the
compile time of a program and makes its steps several times faster (LeNet-5 on the digits, 32
images: 23 ms a step without it, 3 ms with it, on one busy core), so long runs use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

# The only public way to set options of all programs is XLA_FLAGS, which are read once.
from jax._src import compiler
from jaxlib.version import __version_info__ as jaxlib_version

_EMITTERS = ("xla_cpu_use_fusion_emitters",) if jaxlib_version < (0, 11, 2) else ()
"""Later versions have only the newer emitters; an unknown flag of XLA ends the process."""
_QUICKLY = dict.fromkeys(_EMITTERS, False)
_LIGHTLY = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


def _format_flags(options: Mapping[str, int | bool]) -> str:
    return " ".join(f"--{name}={value}".lower() for name, value in options.items())


_QUICK_ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": _format_flags(_QUICKLY)}
_LIGHT_ENVIRONMENT = {"XLA_FLAGS": _format_flags({**_LIGHTLY, **_QUICKLY})}
_options: Callable[..., Any] = compiler.get_compile_options


def compile_quickly(quickly: bool, *, lightly: bool = False) -> None:
    """Compile programs of this process and its child processes quickly, or fully.

    With `lightly`, quickly but with LLVM's first level of optimization.
    """
    overrides = {**dict.fromkeys(_EMITTERS, not quickly), **(_LIGHTLY if lightly else {})}

    def options(*args: Any, **kwargs: Any) -> Any:
        # Always set, since this process has already read XLA_FLAGS.
        merged = {**overrides, **(kwargs.get("env_options_overrides") or {})}
        return _options(*args, **{**kwargs, "env_options_overrides": merged})

    jax.config.update("jax_disable_most_optimizations", quickly and not lightly)
    compiler.get_compile_options = options
    for name in _QUICK_ENVIRONMENT:
        os.environ.pop(name, None)
    if quickly:
        os.environ.update(_LIGHT_ENVIRONMENT if lightly else _QUICK_ENVIRONMENT)


@contextmanager
def optimized() -> Iterator[None]:
    """Compile programs as a user's in the context."""
    compile_quickly(False)
    try:
        yield
    finally:
        compile_quickly(True)


@contextmanager
def unoptimized() -> Iterator[None]:
    """Compile programs quickly in a context inside `optimized`."""
    compile_quickly(True)
    try:
        yield
    finally:
        compile_quickly(False)


@contextmanager
def lightly_optimized() -> Iterator[None]:
    """Optimize programs a little in the context, for runs of hundreds of steps."""
    compile_quickly(True, lightly=True)
    try:
        yield
    finally:
        compile_quickly(True)
