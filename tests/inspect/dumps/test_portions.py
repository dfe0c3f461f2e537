"""Portions of a batch: those that the training step computes, whatever splits the batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from pipeline.config.recipe import Recipe
from pipeline.inspect.dumps.dump_step import CapturedStep, capture_step
from pipeline.inspect.dumps.layer_programs import LayerPrograms, Weights
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, open_recipe

SMALL = (
    "model=layers",
    "model.layers=[{name: conv, features: 4, kernel: 3, stride: 4},batch_norm,relu,"
    "{name: dropout, rate: 0.3},flatten,{name: dense, features: '$classes'}]",
)
SPLITS = {
    "whole": (),
    "microbatches": ("train.accumulate_steps=2",),
    "shards": ("parallel.mode=data", "parallel.devices=2"),
    "float16": ("train.precision=O3",),
}


def captured(opened: OpenedRecipe, step: int = 0) -> CapturedStep:
    """The tensors of a step from the fresh state."""
    programs = opened.programs(step)
    weights = Weights.of(opened.fresh_state())
    return capture_step(programs, weights, opened.batch(step), step)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_loss_statistics_and_gradients_equal_the_step(
    name: str, tiny: Callable[..., Recipe]
) -> None:
    opened = open_recipe(tiny(*SMALL, *SPLITS[name]))
    found, batch = captured(opened).merge_passes(), opened.batch(0)
    step = opened.built.step_on(opened.built.step_config.shards)
    state = opened.fresh_state()
    after, record = jax.jit(step.step)(state, jax.tree.map(jnp.asarray, batch), jnp.ones(9))
    narrow = name == "float16"
    assert found.loss == pytest.approx(float(record.loss), rel=1e-3 if narrow else 2e-6)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in found.parameters.values()))
    assert norm == pytest.approx(float(record.grad_norm), rel=2e-2 if narrow else 2e-5)
    for path, statistics in flatten_dict(after.collections["batch_stats"], sep="/").items():
        np.testing.assert_allclose(
            found.statistics[path], statistics, rtol=1e-2 if narrow else 2e-5, atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_tensors_equal_separately_computed_layers(tiny: Callable[..., Recipe]) -> None:
    opened = open_recipe(tiny(*SMALL))
    step = captured(opened)
    found = step.merge_passes()
    assert list(found.forms) == [
        "conv_0",
        "batch_norm_0",
        "relu_0",
        "dropout_0",
        "flatten_0",
        "dense_0",
    ]
    np.testing.assert_array_equal(found.inputs["conv_0"], step.inputs["0"])
    np.testing.assert_array_equal(found.inputs["relu_0"], found.outputs["batch_norm_0"])
    np.testing.assert_array_equal(np.maximum(found.inputs["relu_0"], 0), found.outputs["relu_0"])
    passed = found.output_gradients["relu_0"] * (found.inputs["relu_0"] > 0)
    np.testing.assert_array_equal(passed, found.input_gradients["relu_0"])
    # The gradient at what a layer gives is that at what the next one reads.
    np.testing.assert_array_equal(
        found.output_gradients["batch_norm_0"], found.input_gradients["relu_0"]
    )
    kept = found.outputs["dropout_0"] != 0
    np.testing.assert_allclose(
        found.outputs["dropout_0"][kept], found.inputs["dropout_0"][kept] / 0.7, rtol=1e-6
    )
    weights = opened.fresh_state().params["dense_0"]
    product = found.inputs["dense_0"] @ np.asarray(weights["kernel"]) + np.asarray(weights["bias"])
    np.testing.assert_allclose(found.outputs["dense_0"], product, rtol=1e-4, atol=1e-5)
    by_kernel = found.inputs["dense_0"].T @ found.output_gradients["dense_0"]
    np.testing.assert_allclose(found.parameters["dense_0/kernel"], by_kernel, rtol=1e-4, atol=1e-6)


@pytest.mark.medium
def test_tensors_are_equal_in_any_layout(tiny: Callable[..., Recipe]) -> None:
    opened = open_recipe(tiny(*SMALL))
    programs, batch = opened.programs(0), opened.batch(0)
    weights = Weights.of(opened.fresh_state())
    by_layout = {}
    for layout in ("nhwc", "chwn"):
        network = programs.config.network.clone(layout=layout)
        own = LayerPrograms(
            programs.config.__class__(**{**vars(programs.config), "network": network}),
            programs.device,
        )
        by_layout[layout] = capture_step(own, weights, batch, 0).merge_passes()
    for kind in ("inputs", "outputs", "input_gradients", "output_gradients"):
        assert getattr(by_layout["nhwc"], kind)
        for path, array in getattr(by_layout["nhwc"], kind).items():
            other = getattr(by_layout["chwn"], kind)[path]
            assert other.shape == array.shape, (kind, path)
            np.testing.assert_allclose(other, array, rtol=1e-3, atol=1e-5, err_msg=f"{kind} {path}")


@pytest.mark.slow
def test_dropout_draws_are_equal_in_any_precision(tiny: Callable[..., Recipe]) -> None:
    """V-01: both sides have the draws of the training step, so its loss too."""
    masks = []
    for level in ("O0", "bf16"):
        opened = open_recipe(tiny(*SMALL, f"train.precision={level}"))
        found = captured(opened).merge_passes()
        masks.append(found.outputs["dropout_0"] != 0)
        step = opened.built.step_on(None)
        batch = jax.tree.map(jnp.asarray, opened.batch(0))
        _, record = jax.jit(step.step)(opened.fresh_state(), batch, jnp.ones(9))
        assert found.loss == pytest.approx(float(record.loss), rel=2e-6 if level == "O0" else 1e-2)
    # A value next to 0 may be rounded to it.
    assert np.mean(masks[0] == masks[1]) > 0.99


@pytest.mark.medium
def test_network_without_a_list_of_layers_is_refused(tiny: Callable[..., Recipe]) -> None:
    opened = open_recipe(tiny(*SMALL))
    config = vars(opened.built.step_config) | {"network": object()}
    with pytest.raises(ValueError, match="isn't a list of layers"):
        LayerPrograms(type(opened.built.step_config)(**config), jax.devices("cpu")[0])
