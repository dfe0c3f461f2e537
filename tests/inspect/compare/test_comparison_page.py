"""The page of a comparison holds all rows, texts stay texts, and only its own script may run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import RunError
from pipeline.inspect.compare.comparison_page import write_page
from pipeline.inspect.compare.tensor_rows import HEADER, TensorRow, Thresholds, compare_tensors
from pipeline.inspect.dumps.tensor_names import TensorName

HOSTILE = "</script><img src=x onerror=alert(1)>"


def make_rows() -> list[TensorRow]:
    names = [TensorName(layer, "output", "0") for layer in (HOSTILE, "conv", "lost")]
    left = {name: np.arange(4.0) for name in names}
    right = {names[0]: np.arange(4.0), names[1]: np.array([9.0, 1, 2, 3])}
    return compare_tensors(names, names[:2], left.get, right.get, {})


def test_page_has_all_rows_and_its_script_alone_may_run(tmp_path: Path) -> None:
    rows = make_rows()
    write_page(rows, tmp_path / "rows.html", Thresholds(cosine=0.9))
    text = (tmp_path / "rows.html").read_text()
    assert HOSTILE not in text
    found = re.search(r'<script type="application/json" id="rows">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["header"] == list(HEADER)
    assert data["rows"] == [list(row.cells) for row in rows]
    assert [row[1] for row in data["rows"]] == [HOSTILE, "conv", "lost"]
    assert [(limit["name"], limit["value"], limit["below"]) for limit in data["limits"]] == [
        ("CosineSimilarity", 0.9, True),
        ("MaxAbsoluteError", 5.0, False),
        ("RelativeEuclideanDistance", 0.1, False),
    ]
    for place, limit in enumerate(data["limits"]):
        assert HEADER[limit["column"]] == limit["name"]
        assert f'<input type="range" id="limit-{place}"' in text
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in text
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write", script)


def test_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rows\.html: can't be written"):
        write_page(make_rows(), tmp_path / "missing" / "rows.html", Thresholds())
