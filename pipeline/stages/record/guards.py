"""Context managers around a run, which convert errors and write the summary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from jax.errors import JaxRuntimeError

from pipeline.core.errors import RunError, first_line, get_exit_status, get_status_after
from pipeline.core.host.signals import conclude
from pipeline.stages.record.run_directory import RECIPE, RunFolder, read_outcome
from pipeline.stages.record.summary import Summary


@contextmanager
def convert_os_errors(run_dir: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk's, into a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or run_dir}: {error.strerror or error}") from error


@contextmanager
def convert_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of the host or the device into a RunError of one line."""
    try:
        yield
    except (MemoryError, JaxRuntimeError) as error:
        if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            f"out of memory: {first_line(error)}; train.memory=auto or train.accumulate_steps "
            "computes fewer samples at once"
        ) from error


@contextmanager
def write_summary(summary: Summary, folder: RunFolder) -> Iterator[None]:
    """Write the summary of a run at its end, with the status of the error in the body if any.

    The summary of a resumed run is replaced only after the run has advanced. If the run is refused,
    stopped or killed before its first new step, its directory doesn't change.
    """
    earlier_metrics = read_outcome(folder.path).get("metrics")
    started_at = time.perf_counter()
    try:
        yield
        if folder.advanced.is_held and not folder.accepted.is_held and summary.status != "stopped":
            # The run was accepted and trained no step, so the earlier metrics are still valid.
            metrics = {name: value for name, value in summary.metrics.items() if value is not None}
            if isinstance(earlier_metrics, dict):
                metrics = {**earlier_metrics, **metrics}
            summary.metrics = metrics
            folder.advanced.release()
    except BaseException as error:
        summary.status = get_status_after(error)
        summary.reason = str(error) or type(error).__name__
        summary.exit_status = get_exit_status(error)
        raise
    finally:
        summary.time["total_s"] = time.perf_counter() - started_at
        # If a failed run can't write its summary, the first failure is reported.
        with suppress(OSError) if summary.status == "failed" else nullcontext():
            # Without its recipe the directory is still free for a run.
            if not folder.advanced.is_held and (folder.path / RECIPE).exists():
                with conclude():
                    summary.write(folder.path)


@contextmanager
def record_time(summary: Summary, name: str) -> Iterator[None]:
    """Record the seconds of the body in `summary.time`, unless it raises."""
    started_at = time.perf_counter()
    yield
    summary.time[name] = time.perf_counter() - started_at
