"""Page of a comparison: a table whose rows are marked by thresholds that the reader moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.pages.page import Page, render_page
from pipeline.inspect.compare.tensor_rows import HEADER, TensorRow, Thresholds


def write_page(rows: Sequence[TensorRow], path: Path, limits: Thresholds) -> None:
    """Write the page of a comparison's rows; sliders begin at `limits`. Raises RunError if the file
    can't be written."""
    text = render_page(
        Page("compare", "Comparison", f"{len(rows):,} rows; a row beyond a limit is marked."),
        "comparison.html",
        content=make_page_data(rows, limits),
    )
    with convert_write_errors(path):
        write_whole(path, text)


def make_page_data(rows: Sequence[TensorRow], limits: Thresholds) -> dict[str, Any]:
    """Return the input of the page's script as a tree for JSON."""

    def make_limit(name: str, value: float, upper: float, *, below: bool = False) -> dict[str, Any]:
        return {
            "name": name,
            "column": HEADER.index(name),
            "below": below,
            "value": value,
            "min": 0,
            "max": upper,
            "step": upper / 1000,
        }

    return {
        "header": HEADER,
        "rows": [row.cells for row in rows],
        "limits": [
            make_limit("CosineSimilarity", limits.cosine, 1.0, below=True),
            make_limit("MaxAbsoluteError", limits.max_absolute, 5.0),
            make_limit("RelativeEuclideanDistance", limits.relative_euclidean, 1.0),
        ],
    }
