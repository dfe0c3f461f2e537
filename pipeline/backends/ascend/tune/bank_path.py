"""The file of the custom knowledge bank: named by an option, or in the folder TUNE_BANK_PATH."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.backends.ascend.chip.options import OptionError
from pipeline.core.files.ownership import find_foreign_owner, find_writers

VARIABLE, FILE = "TUNE_BANK_PATH", "custom_bank.json"


def custom_bank(file: str | Path | None) -> str | None:
    """Return the bank's file, None where neither an option nor the environment names one.

    CANN takes the folder of its custom bank from TUNE_BANK_PATH. Raises OptionError unless that is
    a folder that nobody else owns or writes: whoever does decides how operators are tiled.
    """
    if file is not None:
        return str(file)
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise OptionError(f"{VARIABLE} = {named}: must be a folder that exists")
    found = folder.stat()
    owner, writers = find_foreign_owner(found), find_writers(found)
    if owner is not None:
        raise OptionError(f"{VARIABLE} = {named}: must be a folder of your own, not of {owner}")
    if writers is not None:
        raise OptionError(f"{VARIABLE} = {named}: {writers} can write it; make it your own alone")
    return str(folder / FILE)
