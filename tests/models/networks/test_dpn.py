from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, positions, shapes


@pytest.mark.slow
def test_dpn98_has_as_many_parameters_as_timms() -> None:
    changes: dict[str, Any] = {
        "stem": 96,
        "inner": 160,
        "groups": 40,
        "blocks": [3, 6, 20, 3],
        "growths": [16, 32, 32, 128],
    }
    module = conf_model("dpn92", **changes).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == 61_570_728


@pytest.mark.slow
def test_blocks_append_and_later_stages_start_anew() -> None:
    seen = positions(conf_model("dpn92").build(10, "float32"), (224, 224, 3))
    assert seen["stage1_block0"] == (56, 56, 256 + 3 * 16)
    assert seen["stage1_block2"] == (56, 56, 256 + 5 * 16)
    assert seen["stage2_block0"] == (28, 28, 512 + 3 * 32)
    assert seen["stage4_block2"] == (7, 7, 2048 + 5 * 128)


def test_stages_need_blocks_and_growths() -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("dpn92", growths=[16])
