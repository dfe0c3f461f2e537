"""All uses of JAX's private modules, where JAX has no public function.

tests/core/host/test_jax_private.py tests most of them, with every tested version of JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, config, distributed, xla_bridge
from jax.experimental import serialize_executable
from jax.extend.mlir import passmanager

# Logger of compilations: its lines have the names of programs and their seconds.
# `jax.log_compiles` logs the same lines, but only to the console.
COMPILE_LOGGER = "jax._src.interpreters.pxla"

# Logger of plug-ins that can't start. JAX continues without them, and raises no error.
PLUGIN_LOGGER = "jax._src.xla_bridge"

# Classes that write and read a compiled program with the trees of its arguments and results. The
# public `serialize` also writes the machine code, which is incomplete if XLA read the program from
# a file.
ExecutablePickler: Any = serialize_executable._JaxPjrtPickler
ExecutableUnpickler: Any = serialize_executable._JaxPjrtUnpickler


def count_joined_processes() -> int:
    """Return the number of processes of `jax.distributed`; 1 before it is initialized.

    The public `jax.process_count` would open the devices, after which their number is fixed.
    """
    joined = read_joined_process()
    return 1 if joined is None else joined[1]


def read_joined_process() -> tuple[int, int] | None:
    """Return this process's rank and the number of processes; None if it hasn't joined others.

    The public `jax.process_index` would open the devices.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        return None
    return state.process_id, state.num_processes


def get_coordination_client() -> Any:
    """Return the client of `jax.distributed`, by which processes exchange values; None if it's off.

    JAX's public collectives need devices.
    """
    return distributed.global_state.client


def has_open_devices() -> bool:
    """Return whether JAX has opened its devices. Public calls would open them."""
    return xla_bridge.backends_are_initialized()


def use_program_files(open_folder: Callable[[str], tuple[Any, str]]) -> None:
    """Make JAX keep programs in the cache that `open_folder` returns for a path, with that path."""
    compilation_cache.get_file_cache = open_folder  # type: ignore[assignment]
    # JAX may have opened another cache before, and opens a cache only once.
    compilation_cache.reset_cache()


def find_opened_program_files(client: Any) -> object:
    """Return JAX's cache of programs for a client of devices; None if the cache is off."""
    return compilation_cache._get_cache(client)


def with_names_in_cache_key() -> AbstractContextManager[None]:
    """Find cached programs only if names and source lines are equal, in this thread in the body.

    Otherwise JAX finds programs of equal layers with other names. The public `jax.config` changes
    all threads.
    """
    return config.compilation_cache_include_metadata_in_key(True)


UNWRITABLE_PROGRAM = (
    r"Error writing persistent compilation cache entry for .*: MemoryError: std::bad_alloc"
)
"""Pattern of JAX's warning of a program that calls oneDNN, which XLA can't serialize."""


def keep_from_cache() -> AbstractContextManager[None]:
    """Don't write programs that this thread compiles in the body to the cache; it is still read."""
    return config.persistent_cache_min_compile_time_secs(float("inf"))


def read_machine_code(cached: bytes) -> bytes:
    """Return the machine code in an entry of JAX's cache, uncompressed and without its time."""
    unpacked = compilation_cache.decompress_executable(cached)
    code, _ = compilation_cache.extract_executable_and_time(unpacked)
    return code


def is_machine_code(value: Any) -> bool:
    """Return whether a value is a program that XLA has loaded. Its type isn't public."""
    return isinstance(value, jax._src.lib.xla_client.LoadedExecutable)


@cache
def make_values_readable() -> None:
    """Let Python read the value of an array that is differentiated outside of jit.

    JAX's `bool`, `int` and `item` read such values, `float`, `complex`, formats, `tolist` and NumPy
    refuse them. No derivative follows a value that was read. Arrays without a value, under jit or
    vmap, are refused as before, and in a format as by NumPy.
    """
    conversions: dict[str, Callable[..., Any]] = {
        "__float__": float,
        "__complex__": complex,
        "__array__": np.asarray,
        "tolist": np.ndarray.tolist,
    }
    for name, convert in conversions.items():
        setattr(jax.core.Tracer, name, _read_or(getattr(jax.core.Tracer, name), convert))
    setattr(jax.core.Tracer, "__format__", _format_value)  # noqa: B010 - mypy distrusts it


def _format_value(traced: Any, spec: str) -> str:
    """Return the value in a format such as `.3f`; without a format, the text of the array."""
    return format(np.asarray(traced)[()], spec) if spec else str(traced)


def _read_or(refuse: Callable[..., Any], convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of traced arrays that converts the value, or calls `refuse` without one."""

    def read(traced: Any, *args: Any, **kwargs: Any) -> Any:
        value = traced.to_concrete_value()
        if value is None:
            return refuse(traced, *args, **kwargs)
        return convert(np.asarray(value), *args, **kwargs)

    return read


def merge_equal_operations(lowered: Any) -> None:
    """Merge the equal operations of a lowered program, of each function by itself, in place.

    Only the program's text is public, not that JAX compiles a changed one.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)
