"""The device of a chip that is not there, for which XLA can compile but nothing can run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import topologies

from pipeline.backends.gpu.chip_target import ChipTarget
from pipeline.core.errors import RunError, first_line
from pipeline.core.host.cuda import plugin

NEEDED = "install the `gpu-compile` extra, pip install '.[gpu-compile]'"
INITIALIZERS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""The variable with which JAX's plug-in for CUDA does not look for cuDNN and a driver."""


def open_absent_chip(target: ChipTarget) -> jax.Device:
    """Return the device that programs are compiled for.

    Raises RunError where the compiler for GPUs is not installed, or refuses the description.
    """
    if plugin() is None:
        raise RunError(f"device.target: JAX's compiler for GPUs is missing; {NEEDED}")
    with _without_driver():
        try:
            return _describe(target)
        except NotImplementedError:
            # The plug-in was met before, without the variable, and gave up for want of a driver.
            _initialize()
            return _describe(target)


def _describe(target: ChipTarget) -> jax.Device:
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target.to_text(), topology="1x1x1"
        )
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"device.target: XLA refuses {target.chip}: {first_line(error)}") from error
    device: jax.Device = topology.devices[0]
    return device


def _initialize() -> None:
    for name in INITIALIZERS:
        try:
            importlib.import_module(name).initialize()
        except ImportError:
            continue
        return


@contextmanager
def _without_driver() -> Iterator[None]:
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before
