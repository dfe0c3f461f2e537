"""Programs that a process compiles once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.backends import programs_in_process
from pipeline.backends.programs_in_process import MOST, compiled_once

DEVICES = jax.devices()[:1]


def lowered(function: Callable[..., Any], size: int = 3) -> Any:
    return jax.jit(function).lower(np.zeros(size, np.float32))


def doubled(x: jax.Array) -> jax.Array:
    with jax.named_scope("one"):
        return x * 2


def renamed(x: jax.Array) -> jax.Array:
    with jax.named_scope("other"):
        return x * 2


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    programs_in_process._PROGRAMS.clear()


def test_the_same_program_is_compiled_once() -> None:
    """Wherever it is made: the text has the functions that were called."""

    def elsewhere() -> Any:
        jax.clear_caches()
        return lowered(doubled)

    first = compiled_once(lowered(doubled), None, DEVICES, object)
    again = compiled_once(elsewhere(), None, DEVICES, object)
    assert (first[1], again[1]) == (False, True)
    assert again[0] is first[0]


def test_another_shape_name_option_or_device_is_another_program() -> None:
    others: list[tuple[Any, dict[str, str] | None, list[Any]]] = [
        (lowered(doubled), None, DEVICES),
        (lowered(doubled, 4), None, DEVICES),
        (lowered(renamed), None, DEVICES),
        (lowered(doubled), {"xla_backend_optimization_level": "0"}, DEVICES),
        (lowered(doubled), None, [*DEVICES, *DEVICES]),
    ]
    assert [compiled_once(*other, object)[1] for other in others] == [False] * 5


def test_the_oldest_is_forgotten() -> None:
    for size in range(1, MOST + 2):
        compiled_once(lowered(doubled, size), None, DEVICES, object)
    assert len(programs_in_process._PROGRAMS) == MOST
    assert compiled_once(lowered(doubled, MOST + 1), None, DEVICES, object)[1]
    assert not compiled_once(lowered(doubled, 1), None, DEVICES, object)[1]


def test_devices_that_were_opened_anew_are_others() -> None:
    """JAX gives up its client where more devices are asked for; its programs can't run any more."""

    class _Device:
        platform, id = "cpu", 0

    earlier: list[Any] = [_Device()]
    now: list[Any] = [_Device()]
    assert not compiled_once(lowered(doubled), None, earlier, object)[1]
    assert not compiled_once(lowered(doubled), None, now, object)[1]
    assert compiled_once(lowered(doubled), None, now, object)[1]
