"""A component whose name alone was changed is one problem, which says how to choose it whole."""

from __future__ import annotations

import pytest

from pipeline import load_recipe
from pipeline.core.errors import RecipeError


def problem(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", overrides)
    (found,) = caught.value.problems
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.loss.name=mse",
            "train.loss.name = mse: the section has class_weights, smoothing, "
            "smoothing_convention, z_loss, which mse lacks; leave that out, or choose it whole: "
            "loss=mse (in a recipe file, "
            "`override /loss: mse` in its defaults)",
        ),
        (
            "train.optimizer.name=adam",
            "train.optimizer.name = adam: the section lacks b1, b2, eps and has momentum, "
            "nesterov, which adam lacks; choose it whole: optimizer=adam (in a ",
        ),
        ("train.loss=mse", "train.loss = mse: the section lacks reduction; choose it whole: loss="),
        (
            "dataset.name=synthetic",
            "dataset.name = synthetic: the section lacks like; give that, or choose it whole: data",
        ),
        ("model.name=resnet", "choose one whole: model=resnet101, resnet152, "),
    ],
)
def test_component_name_without_its_keys_is_refused(override: str, message: str) -> None:
    """Each key used to be a problem, and two of them proposed one another."""
    assert message in problem(override)


@pytest.mark.slow
def test_selected_component_is_not_suggested_again() -> None:
    assert problem("model=lenet5", "model.hidden=[8]") == (
        "model.hidden = [8]: there is no such key"
    )
    assert "choose it whole: loss=cross_entropy" in problem(
        "loss=mse", "train.loss.name=cross_entropy"
    )


def test_typed_key_is_reported_as_unknown() -> None:
    """The section of a GPU is that of a CPU and an index."""
    assert problem("+device.index=0") == "device.index = 0: there is no such key"


@pytest.mark.slow
def test_key_of_another_component_is_unknown() -> None:
    overrides = ["optimizer=adam", "train.optimizer.momentum=0.9"]
    assert problem(*overrides).startswith("train.optimizer.momentum = 0.9: there is no such key")


@pytest.mark.slow
def test_other_problems_of_the_section_are_also_reported() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", ["train.optimizer.name=adam", "train.optimizer.lr=x"])
    assert len(caught.value.problems) == 2
    assert caught.value.problems[1] == "train.optimizer.lr = x: must be a number"
