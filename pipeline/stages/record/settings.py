"""Settings outside of a recipe that decide numbers: jax's, XLA's flags and oneDNN's."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax

from pipeline.core.files.error_text import shown
from pipeline.core.files.value_text import first_lines
from pipeline.stages.record.provenance import Provenance

NUMERICS = (
    *("threefry_partitionable", "default_prng_impl", "random_seed_offset", "enable_custom_prng"),
    *("high_dynamic_range_gumbel", "default_matmul_precision", "enable_x64", "explicit_x64_dtypes"),
    *("numpy_dtype_promotion", "allow_f16_reductions", "softmax_custom_jvp", "accurate_erf_inv"),
    *("use_hlo_logistic_lowering", "disable_jit", "disable_most_optimizations"),
    *("optimization_level", "exec_time_optimization_effort", "threefry_gpu_kernel_lowering"),
    *("use_direct_linearize", "use_shardy_partitioner", "use_magma"),
)
"""Settings of jax that decide numbers, without `jax_`; a version has those that it knows."""
XLA_FLAGS = "XLA_FLAGS"
DECISIVE_VARIABLES = ("--", XLA_FLAGS, "ONEDNN_", "DNNL_", "NVIDIA_TF32")
"""Prefixes of variables, and of XLA's flags, that choose how libraries compute."""
HARMLESS_VARIABLES = ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "ONEDNN_JIT_DUMP", "DNNL_JIT_DUMP")
HARMLESS_FLAGS = (
    *("--xla_dump_", "--xla_hlo_profile", "--xla_force_host_platform_device_count"),
    *("--xla_cpu_collective_timeout_seconds", "--xla_cpu_collective_call_"),
    *("--xla_gpu_enable_command_buffer", "--xla_gpu_graph_min_graph_size"),
    *("--xla_gpu_cuda_data_dir", "--xla_gpu_force_compilation_parallelism"),
)
"""Prefixes of XLA's flags that change no number: this package sets some of them itself."""
MAX_SETTINGS = 8
"""Most settings that one message names."""


def describe_numerics() -> dict[str, Any]:
    """Return the values of jax's settings that decide numbers, as JSON."""
    values = {name: jax.config.values.get(f"jax_{name}", ...) for name in NUMERICS}
    return {
        name: value.name.lower() if isinstance(value, Enum) else value
        for name, value in values.items()
        if isinstance(value, Enum | bool | int | float | str | None)
    }


@dataclass(frozen=True)
class ChangedSettings:
    """Settings that differ, a line each: those that decide numbers, and others."""

    decisive: Sequence[str] = ()
    others: Sequence[str] = ()


def compare_settings(before: Sequence[Mapping[str, Any]], now: Provenance) -> ChangedSettings:
    """Compare with the newest process that has recorded `numerics`.

    The values may be a stranger's: they are only compared and shown.
    """
    recorded = [process for process in before if isinstance(process.get("numerics"), Mapping)]
    if not recorded or not recorded[-1]["numerics"]:
        return ChangedSettings()
    numerics, variables = recorded[-1]["numerics"], recorded[-1].get("settings")
    lines: dict[bool, list[str]] = {True: [], False: []}
    # A name that only one of them has is another version's.
    for name in now.numerics:
        if name in numerics and numerics[name] != now.numerics[name]:
            lines[True].append(_line(f"jax_{name}", numerics[name], now.numerics[name]))
    was = _split(variables if isinstance(variables, Mapping) else {})
    is_now = _split(now.settings)
    for name in dict.fromkeys((*was, *is_now)):
        known = name.lower().removeprefix("jax_") in now.numerics
        if not known and was.get(name) != is_now.get(name):
            lines[_is_decisive(name)].append(_line(name, was.get(name), is_now.get(name)))
    return ChangedSettings(
        first_lines(lines[True], MAX_SETTINGS), first_lines(lines[False], MAX_SETTINGS)
    )


def _split(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables by name, and XLA's flags that may change numbers, each by its own."""
    others = {str(name): value for name, value in variables.items() if name != XLA_FLAGS}
    return {**others, **dict(_flags(variables.get(XLA_FLAGS)))}


def _flags(text: Any) -> Iterator[tuple[str, Any]]:
    try:
        words = shlex.split(text) if isinstance(text, str) else []
    except ValueError:
        words = [str(text)]
    for word in words:
        name, _, value = word.partition("=")
        if not name.startswith("--"):
            yield XLA_FLAGS, word  # a file of flags
        elif not name.startswith(HARMLESS_FLAGS):
            yield name, value or "true"


def _is_decisive(name: str) -> bool:
    """Whether a variable, or a flag that starts with `--`, can change numbers."""
    return name.startswith(DECISIVE_VARIABLES) and not name.startswith(HARMLESS_VARIABLES)


def _line(name: str, old: Any, new: Any) -> str:
    was, is_now = (shown("not set" if value is None else str(value)) for value in (old, new))
    return f"{shown(name)}: was {was}, is {is_now}"
