"""Where the kept outputs of networks lie."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
