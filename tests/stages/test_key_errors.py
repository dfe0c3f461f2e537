from __future__ import annotations

import pytest

from pipeline.core.errors import RecipeError
from pipeline.stages.key_errors import blaming_key


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_error_of_custom_code_is_reported_by_type(error: Exception, reason: str) -> None:
    with pytest.raises(RecipeError) as caught, blaming_key("model mine"):
        raise error
    (only,) = caught.value.problems
    assert only.startswith(f"model mine: can't be traced: {reason}")
