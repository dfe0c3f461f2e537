from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config.compose import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests.slow_cases import mark_slow_except

PGD = "++train.adversarial={attack: pgd, radius: 0.1}"
REFUSED = {
    "privacy": (
        [PGD, "+privacy={noise: 1.0, delta: 1.0e-3}"],
        "train.adversarial = pgd: must be null with privacy, since an attack reads gradients of "
        "samples without the noise of the private step",
    ),
    "eager": ([PGD, "train.mode=eager"], "must be null with train.mode = eager"),
    "thor": ([PGD, "optimizer=thor"], "must be null with thor, which looks into layers"),
    "dumps": ([PGD, "dump.steps='0'"], "must be null with dump.steps"),
    "radius": (
        ["++train.adversarial={attack: pgd, radius: 1.1}"],
        "train.adversarial.radius = 1.1: must be at most 1, the range of a pixel",
    ),
    "no radius": (
        ["++eval.robustness=[{attack: pgd}]"],
        "eval.robustness.0.radius = null: must be a number above 0 without train.adversarial",
    ),
    "square in l2": (
        ["++eval.robustness=[{attack: square, norm: l2, radius: 1.0}]"],
        "eval.robustness.0.norm = l2: must be linf with attack = square",
    ),
    "another attack": (["++eval.robustness=[{attack: deepfool}]"], "eval.robustness.0"),
    "values": (
        [PGD, "dataset.train.ops=[whiten]", "dataset.eval.ops=[whiten]"],
        "dataset.train.ops.0 (whiten): changes values so that they have no radius in pixels; must "
        "be rescale or normalize with train.adversarial",
    ),
}


@pytest.mark.parametrize("case", mark_slow_except([*REFUSED][::4], REFUSED))
def test_attacks_with_incompatible_settings_are_refused(
    case: str, tiny: Callable[..., Recipe]
) -> None:
    overrides, problem = REFUSED[case]
    with pytest.raises(RecipeError) as caught:
        tiny(*overrides)
    assert problem in str(caught.value)


def test_attacks_on_tokens_are_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("gpt_text", [PGD, "++eval.robustness=[{attack: fgsm}]"])
    message = str(caught.value)
    assert "train.adversarial: attacks change pixels, and dataset = text has tokens" in message
    assert "eval.robustness: attacks change pixels, and dataset = text has tokens" in message


def test_recipe_with_attacks_is_accepted(tiny: Callable[..., Recipe]) -> None:
    recipe = tiny(PGD, "++eval.robustness=[{attack: apgd, losses: [ce]}, {attack: corruptions}]")
    assert recipe.train.adversarial is not None
    assert recipe.train.adversarial.num_steps == 7
    assert [attack.attack for attack in recipe.eval.robustness] == ["apgd", "corruptions"]
