"""Record of a profiled run: the profiler's file, and the other inputs of a report.

The command `profile RUN` writes the report again from this record, as `msprof` parses raw data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline.core.errors import DataError, first_line, get_system_reason
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_bytes
from pipeline.inspect.profiler.iterations import Traced
from pipeline.inspect.profiler.measured_profile import ProfiledRun, measured_profile
from pipeline.inspect.profiler.profile_files import ProfileReport
from pipeline.inspect.profiler.step_profile import StepProfile, StepVerdict
from pipeline.inspect.profiler.trace import read_operations
from pipeline.inspect.profiler.verdict import Evidence, decide
from pipeline.stages.record.run_directory import PROFILE

RAW = "raw"
"""Folder of the record in the folder of a profile."""
RECORD = "record.json"
XSPACE = "trace.xplane.pb"
MAX_RAW_BYTES = 1 << 30


@dataclass(frozen=True)
class ProfileRecord:
    """A profiled run without its trace."""

    run: ProfiledRun
    evidence: Evidence
    verdict: StepVerdict
    """The verdict, with the measured gain of its change."""
    modelled: StepProfile | None
    """The profile of an emulated device."""


def write_record(record: ProfileRecord, raw: bytes, folder: Path) -> None:
    """Write a record and the profiler's file into the folder of a profile. Raises OSError."""
    (folder / RAW).mkdir(exist_ok=True)
    write_whole(folder / RAW / XSPACE, raw)
    write_whole(folder / RAW / RECORD, TypeAdapter(ProfileRecord).dump_json(record).decode())


def find_profile(path: Path) -> Path:
    """Return the folder of a recorded profile, at `path` or in the run there. Raises DataError."""
    folder = path if (path / RAW).is_dir() else path / PROFILE
    if not (folder / RAW).is_dir():
        raise DataError(
            f"{path}: has no recorded trace, {PROFILE}/{RAW}; profile the run with "
            "profile.mode=on, or name the folder of its profile.output"
        )
    return folder


def read_report(folder: Path) -> ProfileReport:
    """Return the report of a recorded run. Raises DataError if its files are damaged."""
    try:
        events = read_operations(read_bytes(folder / RAW / XSPACE, MAX_RAW_BYTES))
        text = read_bytes(folder / RAW / RECORD, MAX_RAW_BYTES)
        record = TypeAdapter(ProfileRecord).validate_json(text)
        evidence = record.evidence
        peaks = evidence.profile.peaks
        if peaks is None:
            raise ValueError(f"{RECORD} has no peaks of the device")
        profile, traced = measured_profile(record.run, peaks, events)
    except OSError as error:
        raise DataError(f"{folder / RAW}: can't be read: {get_system_reason(error)}") from error
    except ValidationError as error:
        raise DataError(f"{folder / RAW / RECORD}: isn't a record: {first_line(error)}") from error
    except (ValueError, LookupError, ArithmeticError) as error:
        raise DataError(f"{folder / RAW}: isn't a recorded trace: {first_line(error)}") from error
    host = evidence.host
    evidence = replace(evidence, profile=replace(profile, host=host, step_ms=host.step))
    verdict = decide(evidence)
    # The recorded verdict has a measured gain, so it is replaced only if the rules now differ.
    if verdict.name != record.verdict.name:
        record = replace(record, verdict=verdict)
    return make_report(record, evidence, traced)


def make_report(record: ProfileRecord, evidence: Evidence, traced: Traced) -> ProfileReport:
    """Return the report of a recorded run and its traced operations."""
    profiles = tuple(filter(None, (evidence.profile, record.modelled)))
    return ProfileReport(profiles, record.verdict, traced)
