from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, shapes


@pytest.mark.parametrize(
    ("convs", "expected"), [([1, 1, 2, 2, 2], 132_863_336), ([2, 2, 2, 2, 2], 133_047_848)]
)
def test_vgg11_and_vgg13_have_as_many_parameters_as_torchvisions(
    convs: list[int], expected: int
) -> None:
    module = conf_model("vgg16", convs=convs).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.parametrize(("convs", "widths"), [([2, 2], [64]), ([], [])])
def test_stages_need_convolutions_and_widths(convs: list[int], widths: list[int]) -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("vgg16", convs=convs, widths=widths)
