from __future__ import annotations

import pytest

from pipeline.config.compose import load_recipe
from pipeline.core.errors import RecipeError


def test_source_of_files_of_the_user_needs_a_root() -> None:
    with pytest.raises(RecipeError, match=r"root: missing; it must be an \.npz file"):
        load_recipe("lenet5_digits", ["dataset=numpy"])


@pytest.mark.parametrize("dataset", ["digits", "mnist1d"])
def test_source_without_files_of_the_user_has_no_root(dataset: str) -> None:
    load_recipe("lenet5_digits", [f"dataset={dataset}"])
    with pytest.raises(RecipeError, match=r"root: elsewhere: must be null; "):
        load_recipe("lenet5_digits", [f"dataset={dataset}", "dataset.root=elsewhere"])
