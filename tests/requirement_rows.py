"""The rows of docs/requirements.md: a feature, a command and a test for each code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "requirements.md"


class Row(NamedTuple):
    """A row of the table."""

    code: str
    feature: str
    command: str
    test: str


ROWS = [
    Row(*(cell.strip() for cell in line.strip("|\n").split(" | ")))
    for line in DOCUMENT.read_text().splitlines()
    if re.match(r"\| [A-Z]-\d\d \|", line)
]
