"""The result of pricing a step, in print and as files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.backends.ascend.report.figures import Figures
from pipeline.backends.ascend.report.html_timeline import write_picture
from pipeline.backends.ascend.report.perfetto_trace import write_trace
from pipeline.backends.ascend.report.text import printout


@dataclass(frozen=True, eq=False, repr=False)
class Report(Figures):
    """The price of one step. Every figure in it is modelled; times are of one steady step."""

    def __str__(self) -> str:
        return printout(self)

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def save_trace(self, path: str | Path) -> None:
        """Write the step as a trace that Perfetto and chrome://tracing open."""
        write_trace(self.timeline, self.graph, Path(path))

    def save_picture(self, path: str | Path, title: str = "Modelled step") -> None:
        """Write the step as a picture: an HTML page that needs no other file."""
        write_picture(self.timeline, self.graph, Path(path), title=title)
