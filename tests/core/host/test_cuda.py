"""Why there is no GPU, and shares of one; the driver is that of the machine."""

from __future__ import annotations

import pytest

from pipeline.core.host import cuda
from pipeline.core.host.cuda import (
    INSTALL,
    MEMORY_SHARE,
    PLATFORMS_VARIABLE,
    explain_missing_gpu,
    make_memory_share,
)


def test_processes_share_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_SHARE, raising=False)
    assert make_memory_share(1) == {}
    assert make_memory_share(3) == {MEMORY_SHARE: "0.250"}
    monkeypatch.setenv(MEMORY_SHARE, "0.9")
    assert make_memory_share(3) == {}


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_share_that_the_user_has_set_stays_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX refuses both names together."""
    monkeypatch.setenv(name, "0.5")
    assert make_memory_share(4) == {}


def test_missing_gpu_reason_is_the_first_applicable_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_plugin", lambda: None)
    assert explain_missing_gpu("CUDA failed") == INSTALL
    monkeypatch.setattr(cuda, "find_plugin", lambda: "jax-cuda13-pjrt 0.10.0")
    monkeypatch.setenv(PLATFORMS_VARIABLE, "cpu")
    assert explain_missing_gpu().startswith("JAX_PLATFORMS = cpu leaves GPUs out; unset it")
    monkeypatch.setenv(PLATFORMS_VARIABLE, "cuda,cpu")
    monkeypatch.setattr(cuda, "DRIVER", "libmissing.so.1")
    assert explain_missing_gpu() == (
        "this machine has no NVIDIA driver (libmissing.so.1 can't be loaded); "
        "jax-cuda13-pjrt 0.10.0 is installed"
    )
    monkeypatch.setattr(cuda, "find_driver_problem", lambda: None)
    assert explain_missing_gpu("CUDA failed") == "CUDA failed; jax-cuda13-pjrt 0.10.0 is installed"
    assert explain_missing_gpu().startswith("JAX gives no reason; ")
