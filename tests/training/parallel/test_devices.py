"""Devices and settings of JAX that no run works with are refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from pipeline.core.errors import RunError
from pipeline.training.parallel import devices
from pipeline.training.parallel.devices import make_host_placement, make_placement
from pipeline.training.parallel.parallel_spec import ParallelSpec

OPEN = (
    "from pipeline.core.errors import RunError\n"
    "from pipeline.training.parallel.devices import find_device\n"
    "try:\n    print(find_device('cpu', 0))\n"
    "except RunError as error:\n    print(error)\n"
)


@pytest.fixture
def alone() -> ParallelSpec:
    from pipeline.config.compose import load_recipe

    return load_recipe("lenet5_digits").parallel


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("jax_disable_jit", True, "JAX_DISABLE_JIT = True: must be False; unset it"),
        (
            "jax_numpy_dtype_promotion",
            "strict",
            "JAX_NUMPY_DTYPE_PROMOTION = strict: must be standard; unset it",
        ),
        (
            "jax_numpy_rank_promotion",
            "raise",
            "JAX_NUMPY_RANK_PROMOTION = raise: must be allow or warn; unset it",
        ),
    ],
)
def test_conflicting_jax_settings_are_refused(
    name: str, value: Any, message: str, alone: ParallelSpec
) -> None:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        for opened in (lambda: make_placement("cpu", 0, alone), lambda: make_host_placement(alone)):
            with pytest.raises(RunError) as caught:
                opened()
            assert str(caught.value) == message
    finally:
        jax.config.update(name, getattr(before, "value", before))


def test_reason_of_jax_is_shown_when_several_devices_are_missing(
    alone: ParallelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(platform: str | None = None) -> list[jax.Device]:
        if platform is None:
            return []
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(devices, "explain_missing_gpu", lambda reason: f"JAX says: {reason}")
    several = alone.model_copy(update={"mode": "data", "devices": 2})
    with pytest.raises(RunError, match="JAX sees 0 of gpu; JAX says: the driver is too old"):
        make_placement("gpu", 0, several)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "banana"])
def test_unavailable_jax_platform_is_reported(platform: str) -> None:
    """JAX fails by an AssertionError without words at the first."""
    ended = subprocess.run(
        [sys.executable, "-c", OPEN],
        env={**os.environ, "JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.startswith(f"JAX_PLATFORMS = {platform}: JAX can't open it: ")
    assert ended.stdout.endswith("; unset it, or name cpu\n")
