"""The library that lets file operations fail, compiled if there is a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.host.process_start import SETTINGS

SOURCE = Path(__file__).with_name("inject.c")


def explain_skip() -> str | None:
    """Return the reason why nothing can be injected here, or None."""
    if not sys.platform.startswith("linux"):
        return "libraries are preloaded and calls counted on Linux only"
    if shutil.which("cc") is None:
        return "there is no C compiler: cc"
    return None


def compile_library(folder: Path, source: Path = SOURCE) -> Path:
    """Compile a library into a folder."""
    library = folder / f"{source.stem}.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def make_environment(library: Path) -> Mapping[str, str]:
    """Return the environment of a process that preloads the library and doesn't restart itself."""
    return {**os.environ, **SETTINGS, "LD_PRELOAD": str(library)}
