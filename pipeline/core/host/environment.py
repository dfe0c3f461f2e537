"""Requirements of every command: a working folder, a valid clock, asserts, valid flags of XLA.

They are checked before anything is written. The check is fast unless XLA_FLAGS is set.
"""

from __future__ import annotations

import os
import sys
import time
from functools import cache

from pipeline.core.errors import RunError

FLAGS = "XLA_FLAGS"
DAY_S = 24 * 3600
_PARSE_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"
"""A program that parses the flags as XLA does, without opening a device."""


def require_usable_environment() -> None:
    """Raise RunError if a run can't work in this process, whatever its recipe is."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RunError(
            "the working folder has been removed; change to one that exists, cd DIR"
        ) from error
    require_usable_clock()
    if sys.flags.optimize:
        raise RunError(
            f"PYTHONOPTIMIZE = {sys.flags.optimize}, or python -O: removes asserts, without which "
            "Hydra can't parse overrides; unset it"
        )
    offset_s = time.localtime().tm_gmtoff
    if abs(offset_s) >= DAY_S:
        raise RunError(
            f"TZ = {os.environ.get('TZ')}: is {offset_s / 3600:+g} hours from UTC; must be less "
            "than 24, as in TZ=Europe/Berlin"
        )


def require_usable_clock() -> None:
    """Raise RunError if the system clock shows a time that files can't have."""
    try:
        is_before_1970 = time.time() < 0.0
    except (OverflowError, ValueError) as error:
        raise RunError(
            "the system clock is too far from the present: Python counts from 1677 to 2262; set it"
        ) from error
    if is_before_1970:
        shown = time.strftime("%Y-%m-%d", time.gmtime())
        raise RunError(
            f"the system clock shows {shown}: files of checkpoints have times from 1970 on; set it"
        )


def require_known_flags() -> None:
    """Raise RunError for a wrong flag in XLA_FLAGS, at which XLA would abort this process."""
    if FLAGS in os.environ:
        _require_flags(os.environ[FLAGS])


@cache
def _require_flags(flags: str) -> None:
    """Raise RunError if another process, which parses the flags by XLA, fails."""
    # Imported here: few runs need it.
    import subprocess

    process = subprocess.run(
        [sys.executable, "-c", _PARSE_FLAGS], stdin=subprocess.DEVNULL, capture_output=True
    )
    if process.returncode == 0:
        return
    lines = process.stderr.decode(errors="replace").splitlines()
    # XLA logs lines such as `E1125 05:02:16.4 29408 flags.cc:93] Can't interpret ...`.
    reason = next((line.partition("] ")[2] for line in lines if "] " in line), "")
    raise RunError(f"{FLAGS} = {flags}: XLA refuses it{': ' if reason else ''}{reason}")
