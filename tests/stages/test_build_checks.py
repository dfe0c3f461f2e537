"""Impossible layers, parameters, types and tasks are refused when the network is built."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from rich.console import Console

from pipeline import load_recipe, run
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.columns import Split
from pipeline.data.padding.buckets import SIZE, Padding
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Residual
from pipeline.models.layers.standard import Sequence as LayerSequence
from pipeline.models.layers.tokens import Embedding
from pipeline.models.modules.network import Network
from pipeline.stages.build import build
from pipeline.stages.build_checks import (
    StepDraft,
    check_buckets,
    check_privacy,
    check_vocabulary,
)
from pipeline.stages.data import load_data
from pipeline.training.update import init_state

REFUSED = {
    "freezes nothing": (
        ["train.freeze=[convolution]"],
        "train.freeze: pattern 'convolution' matches none of the 8 parameters in conv_0, "
        "conv_1, dense_0 (2), dense_1 (2), dense_2 (2), such as conv_0/kernel",
    ),
    "freezes all": (
        ["train.freeze=['*']"],
        "train.freeze: * freezes all 8 parameters; nothing is left to train",
    ),
    "rate of nothing": (
        ["train.lr_rules=[{pattern: head, factor: 2.0}]"],
        "train.lr_rules: pattern 'head' matches none of the 8 parameters",
    ),
    "initialiser of nothing": (
        ["model.init={rules: [{pattern: head, init: zeros}]}"],
        "model lenet5: init.rules: pattern 'head' matches none of the 8 parameters",
    ),
    "microbatches of different sizes": (
        ["train.accumulate_steps=3"],
        "train.accumulate_steps = 3: must divide train.batch_size = 16",
    ),
    "two settings of types": (
        ["train.precision=O2", "train.to_float=[{pattern: conv_0, dtype: float16}]"],
        "train.to_float: conflicts with train.precision = O2, which is O2 on cpu",
    ),
    "a pattern that matches nothing": (
        ["train.to_float=[{pattern: convolution_7, dtype: float16}]"],
        "train.to_float: pattern 'convolution_7' matches none of the 12 layers in conv_0, ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_recipes_are_refused_before_compiling(
    overrides: list[str], message: str, tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        run(tiny(*overrides), tmp_path)
    assert message in str(caught.value)


SMALL = Embedding(vocabulary=10, features=8)
NESTED = LayerSequence(scope="stem", body=(SMALL,))


@pytest.mark.parametrize(
    "layer", [SMALL, NESTED, Residual(body=(NESTED,))], ids=["first", "inner", "innermost"]
)
@pytest.mark.parametrize("model", ["layers", "gpt"])
def test_small_vocabulary_of_an_inner_layer_is_refused(model: str, layer: LayerSpec) -> None:
    """A token without a row would become NaN."""
    settings = {"vocabulary": 10} if model == "gpt" else {}
    key = "model.vocabulary" if settings else "model layers: layer embedding: vocabulary"
    network = Network((layer,), initializers=None, dtype="float32")  # type: ignore[arg-type]
    draft: Any = SimpleNamespace(
        dataset=SimpleNamespace(text=SimpleNamespace(vocabulary=11)),
        step_config=SimpleNamespace(network=network),
        recipe=SimpleNamespace(model=SimpleNamespace(name=model, **settings)),
    )
    with pytest.raises(RecipeError, match=f"{key} = 10: must be at least 11, the number of"):
        check_vocabulary(draft)
    draft.dataset.text.vocabulary = 10
    check_vocabulary(draft)


def _list_problems(recipe: Recipe) -> Sequence[str]:
    reporter = Reporter(console=Console(file=io.StringIO()))
    with pytest.raises(RecipeError) as caught:
        build(recipe, load_data(recipe, reporter), reporter)
    return caught.value.problems


@pytest.mark.slow
@pytest.mark.parametrize("key", ["dataset.train.drop_remainder=false", "train.ledger=true"])
def test_op_is_named_by_its_place_in_the_recipe(key: str, cache: Path) -> None:
    """The op that encodes the table isn't counted."""
    ops = "[{name: one_hot, classes: 2},{name: mix_up, column: features}]"
    overrides = [f"dataset.train.ops={ops}", key, f"cache.root={cache}"]
    (problem,) = _list_problems(load_recipe("breast_cancer_mlp", overrides))
    assert "dataset.train.ops.1 (mix_up)" in problem


@pytest.mark.slow
def test_problems_of_loss_and_metrics_are_reported_together(cache: Path) -> None:
    keys = ["loss=binary_cross_entropy", "checkpoint.best=accuracy", f"cache.root={cache}"]
    loss, best = _list_problems(load_recipe("diabetes_mlp", keys))
    assert loss.startswith("train.loss = binary_cross_entropy: must be one for regression: ")
    assert best.startswith("checkpoint.best = accuracy: must be a metric of regression: loss, mae")


class Multiplied(nn.Module):
    """A matrix for images of 8 x 8, which has an error of its own for images of 4 x 4."""

    @nn.compact
    def __call__(self, images: Any, train: bool = False) -> Any:
        weights = self.param("weights", lambda _: jnp.zeros((64, 10)))
        return images.reshape(images.shape[0], -1) @ weights


class Divided(nn.Module):
    """Divides by the height of an image above 6."""

    @nn.compact
    def __call__(self, images: Any, *, train: bool = False) -> Any:
        1 // (images.shape[1] // 6)
        return Multiplied()(images)


@pytest.mark.slow
def test_bucket_that_a_custom_network_cannot_read_is_refused(tiny: Callable[..., Recipe]) -> None:
    """The product of arrays raises TypeError, not ValueError."""
    recipe = tiny("dataset.train.ops=[]", "dataset.eval.ops=[]", "model=mlp", "model.hidden=[4]")
    reporter = Reporter(console=Console(file=io.StringIO()))
    dataset = load_data(recipe, reporter)
    made = build(recipe, dataset, reporter)
    network = Multiplied()
    step_config = replace(
        made.step_config,
        network=network,
        lowerings=None,
        padding=Padding(((4, 4), (8, 8)), False, "image"),
    )
    image = jax.ShapeDtypeStruct((1, 8, 8, 1), np.float32)
    variables = jax.eval_shape(network.init, jax.random.key(0), image)
    state = jax.eval_shape(lambda initial: init_state(step_config, initial), variables)
    sizes = np.full((len(dataset.eval), 2), 8, np.int32)
    evaluated = Split({**dataset.eval.columns, SIZE: sizes})
    draft = StepDraft(
        recipe,
        replace(dataset, eval=evaluated),
        step_config,
        made.seed,
        (10,),
        variables,
        state,
    )
    with pytest.raises(RecipeError, match=r"dataset\.buckets: the network can't read all of them"):
        check_buckets(draft)
    draft = replace(draft, step_config=replace(step_config, network=Divided()))
    with pytest.raises(RecipeError, match=r"dataset\.buckets: the network can't .*: .* by zero"):
        check_buckets(draft)


def test_private_custom_network_is_refused_for_its_lack_of_layers() -> None:
    draft: Any = SimpleNamespace(
        recipe=SimpleNamespace(privacy=object(), model=SimpleNamespace(name="mine")),
        step_config=SimpleNamespace(network=Multiplied()),
        state=SimpleNamespace(collections={"memory": np.zeros(3)}),
    )
    with pytest.raises(RecipeError, match="model mine: must be a list of layers with privacy"):
        check_privacy(draft)
