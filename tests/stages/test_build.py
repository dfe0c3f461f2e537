from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import jax
import numpy as np
import pytest
from rich.console import Console

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.columns import Targets
from pipeline.data.dataset_spec import Op
from pipeline.data.inputs import NetworkInputs
from pipeline.stages.build import Built, build, make_step_config
from pipeline.stages.build_checks import check_outputs
from pipeline.stages.data import load_data
from pipeline.training.features.gradient_rules import SharpnessAware
from tests.conftest import OPS

Compose = Callable[..., Recipe]

NORMALISED = [
    "model=layers",
    "model.layers=[{name: conv, features: 2, kernel: 3},batch_norm,relu,global_avg_pool,"
    "{name: dense, features: '$classes'}]",
]


def built(recipe: Recipe) -> Built:
    reporter = Reporter(console=Console(file=io.StringIO()))
    return build(recipe, load_data(recipe, reporter), reporter)


def problem(recipe: Recipe) -> str:
    with pytest.raises(RecipeError) as caught:
        built(recipe)
    (only,) = caught.value.problems
    return only


def test_custom_op_with_a_layout_encodes_no_table(tiny: Compose) -> None:
    class Transpose(Op):
        name: Literal["transpose"] = "transpose"
        column: str = "image"
        layout: str = "NCHW"

        def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
            return values

    recipe = tiny("model=wide_deep", "model.vocabulary=7")
    targets = Targets(("one", "two"))
    built_config = make_step_config(recipe, targets, NetworkInputs(()), (Transpose(),), ())
    assert built_config.train_ops == (Transpose(),)


@pytest.mark.slow
def test_build_report_has_one_line(tiny: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides in (["train.steps=45"], ["train.steps=3", "train.sink=false"]):
        recipe = tiny("train.sink_size=7", *overrides)
        build(recipe, load_data(recipe, Reporter()), Reporter())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("build")]
    assert lines == [
        "build      lenet5: 61,684 parameters, 0.2 MB; 45 steps, sinks of 7 steps, 7.50 epochs",
        "build      lenet5: 61,684 parameters, 0.2 MB; 3 steps, no sinks, 0.50 epochs",
    ]


@pytest.mark.medium
@pytest.mark.parametrize(("last", "is_warned"), [("sigmoid", True), ("relu", False)])
def test_probabilities_that_are_read_as_logits_are_warned_of(
    last: str, is_warned: bool, tiny: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = f"[flatten,{{name: dense, features: '$classes'}},{last}]"
    recipe = tiny("model=layers", f"model.layers={layers}")
    build(recipe, load_data(recipe, Reporter()), Reporter())
    printed = " ".join("".join(capsys.readouterr()).split())
    expected = "model layers: ends in sigmoid, and train.loss = cross_entropy reads outputs as"
    assert (expected in printed) == is_warned


@pytest.mark.medium
def test_independent_problems_are_reported_together(tiny: Compose) -> None:
    names = ["train.mode=eager", "train.jit_layers=[outside]"]
    with pytest.raises(RecipeError) as caught:
        built(tiny(*names, "train.to_float=[{pattern: nowhere, dtype: float16}]"))
    first, second = caught.value.problems
    assert first.startswith("train.to_float: pattern 'nowhere' matches none of the ")
    assert second.startswith("train.jit_layers: pattern 'outside' matches none of the ")


def test_build_creates_no_weights(tiny: Compose) -> None:
    made = built(tiny())
    leaves = jax.tree.leaves(made.state)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert made.parameters == sum(leaf.size for leaf in jax.tree.leaves(made.state.params))
    assert (made.parameters, made.parameter_bytes) == (61_684, 4 * 61_684)


@pytest.mark.slow
def test_seed_and_rates_are_inputs_of_the_step(tiny: Compose) -> None:
    made = built(tiny("train.steps=10", "seed=4294967303", "schedule=cosine"))
    assert made.seed.tolist() == [7, 1]
    assert (made.learning_rates.shape, made.learning_rates.dtype) == ((10,), np.float32)
    assert made.learning_rates[0] == np.float32(0.01)
    assert made.learning_rates[-1] < 0.001
    assert made.run_schedule.total == 10


@pytest.mark.slow
def test_images_too_small_for_the_network_are_refused(tiny: Compose) -> None:
    none = ["dataset.train.ops=[]", "dataset.eval.ops=[]"]
    message = problem(tiny(*none))
    assert message.startswith("model lenet5: ")
    assert "the images are too small for this network" in message


@pytest.mark.medium
def test_padding_in_batch_statistics_is_refused(tiny: Compose) -> None:
    """D-09, D-17: masked out of the loss it can be, out of the statistics it can't."""
    recipe = tiny(*NORMALISED, "dataset.train.drop_remainder=false", "train.batch_size=20")
    assert problem(recipe) == (
        "dataset.train.drop_remainder = false: the last batch would hold 16 of 20 samples and its "
        "padding would enter the batch statistics of layers; must be true for this network"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([*NORMALISED, "train.batch_size=16"], 6),
        (["model=mlp", "model.hidden=[4]", "train.batch_size=20"], 5),
    ],
    ids=["no batch is short", "no statistics"],
)
def test_harmless_partial_batch_is_used(overrides: list[str], steps: int, tiny: Compose) -> None:
    made = built(tiny("dataset.train.drop_remainder=false", *overrides))
    assert made.run_schedule.steps_per_epoch == steps


@pytest.mark.medium
def test_decay_rule_without_a_match_is_refused(tiny: Compose) -> None:
    rules = "train.optimizer.decay_rules=[{pattern: nothing/*, weight_decay: 0.0}]"
    message = problem(tiny(rules))
    assert "decay_rules: pattern 'nothing/*' matches none of the 8 parameters" in message
    assert message.startswith("train.optimizer")


@pytest.mark.slow
def test_labels_of_another_loss_are_refused(tiny: Compose) -> None:
    label = "{name: type_cast, column: label, dtype: float32}"
    recipe = tiny(f"dataset.train.ops={OPS[:-1]},{label}]")
    assert "labels of shape (16,) and dtype float32 do not fit" in problem(recipe)


@pytest.mark.slow
def test_per_position_outputs_with_one_label_are_refused(tiny: Compose) -> None:
    layers = "model.layers=[{name: conv, features: '$classes', kernel: 3}]"
    assert problem(tiny("model=layers", layers)) == (
        "model layers: the network ends in shape ('batch', 32, 32, 10), not (batch, classes), and "
        "a label is one class; end it in global_avg_pool or flatten, and dense"
    )


@pytest.mark.slow
def test_number_of_outputs_must_equal_the_classes(tiny: Compose) -> None:
    layers = "model.layers=[flatten,{name: dense, features: '$classes'},{name: dense, features: 3}]"
    assert problem(tiny("model=layers", layers)) == (
        "model layers: the network ends in 3 outputs, and the dataset has 10 classes"
    )


def test_outputs_without_an_axis_are_refused() -> None:
    recipe = SimpleNamespace(model=SimpleNamespace(name="torch"))
    draft: Any = SimpleNamespace(outputs=(), recipe=recipe, dataset=None)
    with pytest.raises(RecipeError, match="model torch: the network ends in one number for each"):
        check_outputs(draft)


def test_too_many_evaluation_labels_are_refused(
    tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stages.build_checks.MAX_LABELS", 10)
    assert "labels, and 10 can be counted; set eval.samples" in problem(tiny())


@pytest.mark.medium
def test_regression_metric_is_refused_for_classes(tiny: Compose) -> None:
    for name in ("mae", "rmse", "r2"):
        text = problem(tiny("model=mlp", f"eval.metrics=[{name}]"))
        assert text.startswith(f"eval.metrics.0 ({name}): needs a number for each output")


RULES: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda b, p, k: int("x"), "invalid literal for int"),
    "leaves": (lambda b, p, k: None, "can't be traced: cannot unpack non-iterable NoneType"),
    "structure": (lambda b, p, k: ({"a": 1.0}, b(p)[1]), "returns gradients of shapes {'a': ()}"),
    "shapes": (
        lambda b, p, k: (jax.tree.map(lambda g: g[..., :1], b(p)[0]), b(p)[1]),
        "must be like the parameters",
    ),
    "result": (lambda b, p, k: (b(p)[0], b(p)[0]), "other results of the backward pass"),
    "values": (
        lambda b, p, k: (jax.tree.map(np.asarray, b(p)[0]), b(p)[1]),
        "reads the value of an array, which a traced function doesn't have",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_invalid_gradient_rule_is_refused_before_compiling(
    rule: str, tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, message = RULES[rule]
    monkeypatch.setattr(SharpnessAware, "build", lambda self: function)
    text = problem(tiny("model=mlp", "train.gradients=sam"))
    assert text.startswith("train.gradients = sam: ")
    assert message in text


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.gradients=sam", "train.gradients = sam"),
        ("loss=mse", "train.loss = mse"),
    ],
)
def test_unbuildable_component_is_named(
    override: str, key: str, tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny("model=mlp", override)

    def fail(self: Any) -> Any:
        raise ValueError("rho is odd")

    component = recipe.train.gradients if "gradients" in key else recipe.train.loss
    monkeypatch.setattr(type(component), "build", fail)
    assert problem(recipe) == f"{key}: rho is odd"


@pytest.mark.slow
def test_average_of_an_optimizer_that_cannot_be_made_is_named(
    tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> Any:
        raise ValueError("b1 is odd")

    recipe = tiny("model=mlp", "optimizer=schedule_free_adamw")
    monkeypatch.setattr(type(recipe.train.optimizer), "iterate_average", fail)
    assert problem(recipe) == "train.optimizer = schedule_free_adamw: b1 is odd"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.end_step=400", "train.end_step = 400: must be at most the 210 steps of training"),
        pytest.param(
            "train.epochs=20000000",
            "train: 280000000 steps in all; must be at most 100000000",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_length_is_checked_when_the_size_of_the_data_is_known(override: str, expected: str) -> None:
    """A table's number of rows is known after it is read."""
    assert problem(load_recipe("breast_cancer_mlp", [override])) == expected


@pytest.mark.slow
def test_warmup_that_fills_training_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("breast_cancer_mlp", ["train.schedule.warmup_steps=210"])
    build(recipe, load_data(recipe, Reporter()), Reporter())
    text = " ".join(capsys.readouterr().out.split())
    assert "train.schedule: warmup of 210 steps must be shorter than the 210 steps" in text
