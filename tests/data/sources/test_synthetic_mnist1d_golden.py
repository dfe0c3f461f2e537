"""The source `mnist1d`, compared with the series of the package mnist1d."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.sources.synthetic import Mnist1d, make_series
from tests.conftest import ROOT
from tests.data.section import section

GOLDEN = ROOT / "tests" / "golden" / "mnist1d.npz"


@pytest.mark.slow
def test_series_are_those_of_the_package() -> None:
    series, labels = make_series()
    with np.load(GOLDEN) as golden:
        np.testing.assert_array_equal(labels, golden["label"])
        ends = np.concatenate([series[:20], series[-20:]])
        np.testing.assert_allclose(ends, golden["ends"], atol=1e-12)
        np.testing.assert_allclose(series.sum(axis=1), golden["sums"], atol=1e-10)
    raw = Mnist1d(**section()).read(Path())
    assert (len(raw.train), len(raw.eval)) == (4000, 1000)
    train = np.asarray(raw.train.columns["series"])
    np.testing.assert_array_equal(train[..., 0], series[:4000].astype(np.float32))


def test_root_is_refused() -> None:
    with pytest.raises(ValidationError, match="must be null; the series are made by a formula"):
        Mnist1d(**section(root=Path("a")))
