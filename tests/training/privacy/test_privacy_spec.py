"""What the section privacy refuses by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError

SECTIONS = {
    "both": ("{epsilon: 3.0, noise: 1.0, delta: 1.0e-3}", "exactly one of epsilon and noise"),
    "neither": ("{delta: 1.0e-3}", "exactly one of epsilon and noise"),
    "delta": ("{noise: 1.0, delta: 1.5}", "privacy.delta = 1.5: must be less than 1"),
    "clip": ("{noise: 1.0, delta: 1.0e-3, clip: 0}", "must be a number above 0, or {quantile:"),
    "seed": ("{noise: 1.0, delta: 1.0e-3, seed: none}", "must be secret, or a whole number"),
    "fixed": (
        "{noise: 1.0, delta: 1.0e-3, sampling: fixed}",
        "neighbours = add_remove: must be replace_one with sampling = fixed",
    ),
    "audit of fixed": (
        "{noise: 1.0, delta: 1.0e-3, sampling: fixed, neighbours: replace_one,"
        " audit: {canaries: 20}}",
        "audit: must be null with sampling = fixed",
    ),
    "expected size of fixed": (
        "{noise: 1.0, delta: 1.0e-3, sampling: fixed, neighbours: replace_one,"
        " expected_batch_size: 3}",
        "expected_batch_size: must be null with sampling = fixed",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", SECTIONS)
def test_invalid_privacy_section_is_refused(tiny: Callable[..., Recipe], name: str) -> None:
    section, problem = SECTIONS[name]
    with pytest.raises(RecipeError) as error:
        tiny(f"+privacy={section}")
    assert problem in str(error.value)
