"""Runs in a nursery: their arguments, and how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.faults.preload import make_environment

LIMIT_S = 60.0
"""A run takes two seconds; after this time it hangs."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `status` is negative for a signal."""

    status: int
    hangs: bool
    seconds: float
    console: str


class Nursery:
    """A process that forks runs, one at a time."""

    def __init__(self, library: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=make_environment(library),
            text=True,
        )

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        whole: bool = True,
        limit_s: float = LIMIT_S,
    ) -> RunResult:
        """Run the pipeline in a folder; its output goes to a file beside it."""
        console = folder.with_name(f"{folder.name}.console")
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "console": str(console),
            "environment": dict(environment),
            "whole": whole,
            "limit_s": limit_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return RunResult(**answer, console=console.read_text(errors="replace"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
