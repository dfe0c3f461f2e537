"""How the programs of tests are compiled: quickly, or as a user's are.

Compiling takes two thirds of the time of all tests, and a fifth as long with few optimizations and
without XLA's newer emitters of fusions. Tests ask what a run does, not how fast; those that compare
the bits of different programs have them compiled as a user's are. LLVM's first level of
optimization doubles the time that a program takes to compile and makes its steps several times as
fast (LeNet-5 on the digits, 32 images: 23 ms a step without, 3 ms with it, on one busy core), so
long runs have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

# JAX has no public interface to options of all programs but XLA_FLAGS, which are read once.
from jax._src import compiler
from jaxlib.version import __version_info__ as jaxlib_version

_EMITTERS = ("xla_cpu_use_fusion_emitters",) if jaxlib_version < (0, 11, 2) else ()
"""Later versions have the newer emitters alone; a flag that XLA doesn't know ends the process."""
_QUICKLY = dict.fromkeys(_EMITTERS, False)
_LIGHTLY = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


def _flags(options: Mapping[str, int | bool]) -> str:
    return " ".join(f"--{name}={value}".lower() for name, value in options.items())


_OF_PROCESSES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": _flags(_QUICKLY)}
_OF_LONG_ONES = {"XLA_FLAGS": _flags({**_LIGHTLY, **_QUICKLY})}
_options: Callable[..., Any] = compiler.get_compile_options


def compile_quickly(quickly: bool, *, lightly: bool = False) -> None:
    """Compile programs of this process, and of those that it starts, quickly or fully.

    `lightly` optimized ones are compiled quickly but for LLVM's first level of optimization.
    """
    asked_here = {**dict.fromkeys(_EMITTERS, not quickly), **(_LIGHTLY if lightly else {})}

    def options(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("env_options_overrides") or {}
        # Said either way, since this process has read XLA_FLAGS by now.
        return _options(*args, **{**kwargs, "env_options_overrides": {**asked_here, **asked}})

    jax.config.update("jax_disable_most_optimizations", quickly and not lightly)
    compiler.get_compile_options = options
    for name in _OF_PROCESSES:
        os.environ.pop(name, None)
    if quickly:
        os.environ.update(_OF_LONG_ONES if lightly else _OF_PROCESSES)


@contextmanager
def optimized() -> Iterator[None]:
    """Within the context, programs are compiled as a user's are."""
    compile_quickly(False)
    try:
        yield
    finally:
        compile_quickly(True)


@contextmanager
def unoptimized() -> Iterator[None]:
    """Within the context, which lies within that of `optimized`, programs are compiled quickly."""
    compile_quickly(True)
    try:
        yield
    finally:
        compile_quickly(False)


@contextmanager
def lightly_optimized() -> Iterator[None]:
    """Within the context, programs are optimized a little: for runs of hundreds of steps."""
    compile_quickly(True, lightly=True)
    try:
        yield
    finally:
        compile_quickly(True)
