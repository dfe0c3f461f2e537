"""A profile as text and as files: profile.json, table.txt, trace.json and picture.svg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.strict_json import json_text
from pipeline.inspect.profiler.iterations import Traced
from pipeline.inspect.profiler.measured_trace import trace_events
from pipeline.inspect.profiler.profile_picture import profile_picture
from pipeline.inspect.profiler.profile_table import profile_table
from pipeline.inspect.profiler.profiled_executable import TimedDispatch
from pipeline.inspect.profiler.step_profile import StepProfile, StepVerdict

JSON, TABLE, TRACE, PICTURE = "profile.json", "table.txt", "trace.json", "picture.svg"
FORMAT = 1


@dataclass(frozen=True)
class ProfileReport:
    """The profiles of a run's step, the measured one first, and the verdict on it."""

    profiles: tuple[StepProfile, ...]
    verdict: StepVerdict
    traced: Traced
    dispatches: tuple[TimedDispatch, ...] = ()
    """Those of the traced steps."""

    def __str__(self) -> str:
        return profile_table(self.profiles, self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return profile.json."""
        return {
            "format": FORMAT,
            "verdict": {**asdict(self.verdict), "text": str(self.verdict)},
            "profiles": [profile.to_dict() for profile in self.profiles],
        }


def write_profile(report: ProfileReport, folder: Path) -> Path:
    """Write the files of a profile into a folder, made where it is missing, and return it.

    Raises OSError as the system does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / JSON, json_text(report.to_dict(), indent=1) + "\n")
    write_whole(folder / TABLE, profile_table(report.profiles, report.verdict, rows=None) + "\n")
    events: Sequence[dict[str, Any]] = trace_events(report.traced, report.profiles[0])
    write_whole(folder / TRACE, json_text({"displayTimeUnit": "ms", "traceEvents": events}) + "\n")
    write_whole(folder / PICTURE, profile_picture(report.traced, report.profiles, report.verdict))
    return folder
