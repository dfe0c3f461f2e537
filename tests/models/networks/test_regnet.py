from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "widths", "group_width", "expected"),
    [
        ([1, 2, 7, 12], [32, 64, 160, 400], 16, 5_495_976),
        ([2, 4, 10, 2], [72, 168, 408, 912], 24, 9_190_136),
    ],
)
def test_siblings_have_as_many_parameters_as_torchvisions(
    blocks: list[int], widths: list[int], group_width: int, expected: int
) -> None:
    changes: dict[str, Any] = {"blocks": blocks, "widths": widths, "group_width": group_width}
    module = conf_model("regnet_x_800mf", **changes).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": [1]}, "must have one entry per stage each"),
        ({"group_width": 24}, r"must be multiples of group_width 24; 64 is not"),
    ],
)
def test_stages_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        conf_model("regnet_x_800mf", **changes)
