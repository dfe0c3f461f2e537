from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, positions, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "last", "expected"),
    [([176, 352, 704], 1024, 3_503_624), ([244, 488, 976], 2048, 7_393_996)],
)
def test_wide_ones_have_as_many_parameters_as_torchvisions(
    widths: list[int], last: int, expected: int
) -> None:
    module = conf_model("shufflenet_v2_x1_0", widths=widths, last=last).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.slow
def test_first_units_halve_and_the_others_split() -> None:
    model = conf_model("shufflenet_v2_x1_0")
    units = [layer for layer in model.layers_for(10) if layer.name == "branches"]
    assert [unit.split for unit in units] == [i not in (0, 4, 12) for i in range(16)]
    seen = positions(model.build(10, "float32"), (224, 224, 3))
    assert seen["stage2_unit0"] == (28, 28, 116)
    assert seen["stage4_unit3"] == (7, 7, 464)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": [4], "widths": [48, 96]}, "must have one entry per stage each"),
        ({"units": [4], "widths": [47]}, "multiple of 2"),
    ],
)
def test_stages_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        conf_model("shufflenet_v2_x1_0", **changes)
