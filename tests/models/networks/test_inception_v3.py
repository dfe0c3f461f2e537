from __future__ import annotations

import pytest

from tests.models.build import conf_model, positions


@pytest.mark.slow
def test_modules_give_the_positions_and_features_of_the_paper() -> None:
    seen = positions(conf_model("inception_v3").build(1000, "float32"), (299, 299, 3))
    assert [seen[f"conv_{index}"] for index in range(5)] == [
        (149, 149, 32),
        (147, 147, 32),
        (147, 147, 64),
        (73, 73, 80),
        (71, 71, 192),
    ]
    assert seen["square0"] == (35, 35, 256)
    assert seen["square2"] == (35, 35, 288)
    assert seen["reduction0"] == (17, 17, 768)
    assert seen["factored3"] == (17, 17, 768)
    assert seen["reduction1"] == (8, 8, 1280)
    assert seen["expanded1"] == (8, 8, 2048)
