"""Errors of the system become one line of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

from pipeline.core.errors import RunError
from pipeline.stages.runner.open_run import convert_os_errors, convert_out_of_memory


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "/runs/a/log"), "/runs/a/log: No space left"),
        (OSError(28, "No space left on device"), "/runs/a: No space left"),
        (OSError("quota"), "/runs/a: quota"),
    ],
)
def test_disk_error_names_the_path(error: OSError, message: str) -> None:
    with pytest.raises(RunError, match=message), convert_os_errors(Path("/runs/a")):
        raise error


@pytest.mark.parametrize(
    "error", [MemoryError("of 8 GB\nmore"), JaxRuntimeError("RESOURCE_EXHAUSTED: of 8 GB\nmore")]
)
def test_out_of_memory_error_has_one_line(error: Exception) -> None:
    with (
        pytest.raises(RunError, match=r"\Aout of memory: .*of 8 GB; train.mem[^\n]*\Z"),
        convert_out_of_memory(),
    ):
        raise error


def test_other_device_errors_are_unchanged() -> None:
    with pytest.raises(JaxRuntimeError, match="INTERNAL"), convert_out_of_memory():
        raise JaxRuntimeError("INTERNAL: no kernel")
