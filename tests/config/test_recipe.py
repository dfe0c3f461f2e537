"""Numbers of a recipe that no program can compute with are refused, whichever key has them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.cli.schema import recipe_schema
from pipeline.config.compose import check_tree
from pipeline.core.errors import RecipeError
from pipeline.core.files.tree_diff import TreePath, iterate_leaves

FAR = (10**400, 10**40, -1e308, float("nan"), float("inf"))
NEAR = (-1, 0, -0.0, True)
RECIPES = {
    "lenet5_digits": [],
    "lenet5_mnist_thor": ["train.ema.decay=0.9", "train.on_nan={name: skip}"],
    "mlp_mnist": ["optimizer=adam", "schedule=exponential", "train.loss_scale={name: dynamic}"],
}


def numbers_of(tree: dict[str, Any]) -> list[TreePath]:
    """The places of numbers, and of null in whose place there could be one."""
    return [
        where
        for where, value in iterate_leaves(tree)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    ]


def with_number(tree: dict[str, Any], where: TreePath, number: float) -> dict[str, Any]:
    changed = deepcopy(tree)
    section: Any = changed
    for key in where[:-1]:
        section = section[key]
    section[where[-1]] = number
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_out_of_range_number_is_refused(name: str) -> None:
    tree = load_recipe(name, RECIPES[name]).model_dump(mode="json")
    places = numbers_of(tree)
    assert len(places) > 30
    taken = [
        (where, number)
        for where in places
        for number in (*FAR, *NEAR)
        if is_taken(with_number(tree, where, number))
    ]
    assert [(where, number) for where, number in taken if number in FAR] == []


def is_taken(tree: dict[str, Any]) -> bool:
    """Is it a recipe? Whatever else than RecipeError is raised, the test fails with."""
    try:
        check_tree(tree)
    except RecipeError:
        return False
    return True


def unbounded(node: Any, where: str = "") -> Iterator[str]:
    """Numbers of a JSON schema that lack a bound, and aren't chosen from a list."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from unbounded(item, f"{where}/{index}")
    if not isinstance(node, dict):
        return
    above, below = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
    is_bounded = "enum" in node or (node.keys() & set(above) and node.keys() & set(below))
    if node.get("type") in ("integer", "number") and not is_bounded:
        yield where
    for key, value in node.items():
        yield from unbounded(value, f"{where}/{key}")


@pytest.mark.slow
def test_every_number_of_the_schema_has_bounds() -> None:
    """Those of other distributions' components too: the base of all components gives them."""
    assert list(unbounded(recipe_schema())) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"train.sink_size={10**30}", "a whole number or auto, and at most 2,147,483,647"),
        ("train.dispatch_seconds=1e308", "train.dispatch_seconds = 1e+308: must be less than or"),
        ("checkpoint.every_seconds=1e9", "must be less than or equal to 31622400"),
        ("train.optimizer.lr=1e39", "must be at most 3.403e+38, the largest of float32"),
        ("train.batch_size=3000000000", "must be at most 2,147,483,647"),
        ("train.schedule.warmup_epochs=1e300", "must be at most 3.403e+38"),
        ("dataset.ignore_index=-3000000000", "must be greater than or equal to -2147483648"),
        ("train.epochs=9223372036854775807", "must be at most 2,147,483,647"),
        ("seed=9223372036854775808", "must be less than 9223372036854775808"),
        (f"train.optimizer.lr={10**400}", "...: must be at most 3.403e+38, the largest of float32"),
        (f"seed={'9' * 5_000}", "999...: Exceeds the limit (4300 digits) for integer string conv"),
        ("seed=true", "seed = true: must be a whole number"),
        ("seed=-0.0", "seed = -0.0: must be a whole number"),
    ],
)
def test_out_of_range_message_has_the_bound(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", [override])
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.medium
def test_lr_for_batch_scales_rate_with_batch() -> None:
    keys = ["train.batch_size=64", "train.optimizer.lr=0.1", "train.optimizer.lr_for_batch=256"]
    rule = "{pattern: dense_0, optimizer: {name: sgd, lr: 0.004, lr_for_batch: 32, "
    rule += "weight_decay: 0.0, decay_rules: []}}"
    recipe = load_recipe("lenet5_digits", [*keys, f"train.optimizers=[{rule}]"])
    assert recipe.train.optimizer.lr == 0.025
    assert recipe.train.optimizers[0].optimizer.lr == 0.008
    tree = recipe.model_dump(mode="json")["train"]
    assert "lr_for_batch" not in {**tree["optimizer"], **tree["optimizers"][0]["optimizer"]}
    recorded = recipe.model_dump(mode="json")
    assert check_tree(recorded).model_dump(mode="json") == recorded
    # A recipe that is validated again isn't scaled again.
    assert type(recipe.train).model_validate(recipe.train).optimizer.lr == 0.025
    assert recipe.train.optimizer.unscale_rate(0.025, batch_size=64) == 0.1


def test_lr_for_batch_must_be_positive() -> None:
    with pytest.raises(RecipeError, match=r"train\.optimizer\.lr_for_batch = 0: must be"):
        load_recipe("lenet5_digits", ["train.optimizer.lr_for_batch=0"])
