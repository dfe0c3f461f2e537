"""A step that runs share: what each computes, and numbers that decide what is compiled.

Constants of traced functions: which differ, and the function that takes them as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from pipeline.backends.base import CompileInputs
from pipeline.backends.loading.loader import make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.backends.xla import XlaBackend
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch
from pipeline.data.columns import Split
from pipeline.data.order import SampleOrder
from pipeline.data.random import seed_words
from pipeline.study.population.groups import collect_numbers
from pipeline.study.population.shared_step import (
    CompiledInError,
    read_bits,
    read_constants,
    share_step,
    with_arguments,
)
from pipeline.training.metrics import EvalSums, zero_sums
from pipeline.training.parallel.devices import find_device
from pipeline.training.parallel.state_sharing import DevicePlacement
from pipeline.training.state import Record, TrainState
from pipeline.training.step import TrainStep

Tiny = Callable[..., Recipe]
STEPS = 8
PLACEMENT = DevicePlacement((find_device("cpu", 0),))
X = np.arange(4, dtype=np.float32)
Function = Callable[[Array], Any]


def recipe_of(tiny: Tiny, momentum: float, smoothing: float) -> Recipe:
    return tiny(f"train.optimizer.momentum={momentum}", f"train.loss.smoothing={smoothing}")


def make_step(recipe: Recipe, *, threshold: float = 1.0, initial: float = 0.0) -> TrainStep:
    """A step without a network: its loss is a moving average of labels."""
    optimizer, loss = recipe.train.optimizer, recipe.train.loss
    decay, smoothing = optimizer.momentum, loss.smoothing  # type: ignore[attr-defined]

    def init(seed: jax.Array) -> TrainState:
        total = seed.astype(jnp.float32).sum() * 0 + (initial * decay)
        return TrainState(jnp.int32(0), {"total": total}, {}, (), {})

    def step(state: TrainState, batch: Batch, rates: jax.Array) -> tuple[TrainState, Record]:
        label = batch.columns["label"][0].astype(jnp.float32)
        total = state.params["total"] * decay + (1 - decay) * label
        if decay > threshold:
            total = total + 1
        record = Record(total, rates[state.step], 2 * label, jnp.float32(1))
        return replace(state, step=state.step + 1, params={"total": total}), record

    def evaluate(state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
        loss = state.params["total"] * (1 - smoothing) + smoothing
        return replace(sums, loss_sum=sums.loss_sum + loss, count=sums.count + batch.count)

    return TrainStep(init, step, evaluate, lambda: zero_sums(2))


def inputs_of(step: TrainStep) -> CompileInputs:
    order = SampleOrder(
        seed=3,
        samples=STEPS,
        batch_size=1,
        shuffle=False,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    labels = Split({"label": np.arange(1, 1 + STEPS, dtype=np.int32)})
    loader = make_loader(LoaderSource(labels, order, PLACEMENT), "resident")
    return CompileInputs(step, loader, loader, np.arange(STEPS, dtype=np.float32), seed_words(3))


def losses(inputs: CompileInputs) -> tuple[np.ndarray, np.ndarray]:
    """The losses of all steps, and the sum of an evaluation."""
    compiled = XlaBackend(PLACEMENT).compile(inputs, lambda _: nullcontext())
    state, telemetry = compiled.run(compiled.init(), 0, STEPS, "loop")
    return telemetry.loss, np.asarray(compiled.evaluate(state, 0, STEPS).loss_sum)


@pytest.mark.medium
def test_shared_step_has_the_bits_of_a_separate_step(tiny: Tiny) -> None:
    """Bit for bit, also one whose numbers come later."""
    recipes = [recipe_of(tiny, *numbers) for numbers in ((0.9, 0.1), (0.7, 0.2), (0.35, 0.3))]
    inputs = inputs_of(make_step(recipes[0]))
    members = list(map(collect_numbers, recipes[:2]))
    shared = share_step(recipes[0], members, make_step, inputs)
    assert shared.has_same_init
    for recipe in recipes:
        constants = shared.list_arguments(collect_numbers(recipe), make_step(recipe))
        assert len(constants) == 4, "momentum, 1 - momentum, smoothing and 1 - smoothing"
        together = losses(replace(inputs, step=shared.step, constants=constants))
        alone = losses(replace(inputs, step=make_step(recipe)))
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one, other)


def test_equal_members_have_no_arguments(tiny: Tiny) -> None:
    recipe = recipe_of(tiny, 0.9, 0.1)
    inputs = inputs_of(make_step(recipe))
    shared = share_step(recipe, [collect_numbers(recipe)] * 2, make_step, inputs)
    assert shared.step is inputs.step
    assert shared.list_arguments(collect_numbers(recipe), inputs.step) == ()


@pytest.mark.medium
def test_program_changing_number_is_named(tiny: Tiny) -> None:
    recipes = [recipe_of(tiny, 0.9, 0.1), recipe_of(tiny, 0.5, 0.2)]

    def make(recipe: Recipe) -> TrainStep:
        return make_step(recipe, threshold=0.8)

    def refuse(recipe: Recipe) -> TrainStep:
        if recipe.train.loss.smoothing != 0.1:  # type: ignore[attr-defined]
            raise ValueError("no such step")
        return make_step(recipe)

    members, inputs = list(map(collect_numbers, recipes)), inputs_of(make(recipes[0]))
    with pytest.raises(CompiledInError, match=r"^train\.optimizer\.momentum: decides") as error:
        share_step(recipes[0], members, make, inputs)
    assert error.value.keys == ("train.optimizer.momentum",)
    with pytest.raises(CompiledInError, match=r"^train\.loss\.smoothing: decides"):
        share_step(recipes[0], members, refuse, inputs_of(make_step(recipes[0])))


@pytest.mark.medium
def test_later_member_with_another_program_is_refused(tiny: Tiny) -> None:
    recipes = [recipe_of(tiny, momentum, 0.1) for momentum in (0.9, 0.85, 0.5)]

    def make(recipe: Recipe) -> TrainStep:
        return make_step(recipe, threshold=0.8)

    members, inputs = list(map(collect_numbers, recipes[:2])), inputs_of(make(recipes[0]))
    shared = share_step(recipes[0], members, make, inputs)
    with pytest.raises(CompiledInError, match=r"^train\.optimizer\.momentum: decides"):
        shared.list_arguments(collect_numbers(recipes[2]), make(recipes[2]))


def test_initial_states_that_depend_on_numbers_are_detected(tiny: Tiny) -> None:
    recipes = [recipe_of(tiny, momentum, 0.1) for momentum in (0.9, 0.85)]

    def make(recipe: Recipe) -> TrainStep:
        return make_step(recipe, initial=2.0)

    inputs = inputs_of(make(recipes[0]))
    assert not share_step(
        recipes[0], list(map(collect_numbers, recipes)), make, inputs
    ).has_same_init


def expression(number: float) -> Function:
    return lambda x: x * number + (1 - number) * x


def called(number: float) -> Function:
    return jax.jit(expression(number))


def in_a_loop(number: float) -> Function:
    return lambda x: lax.fori_loop(0, 3, lambda _, y: y * number + x, x)


def in_a_scan(number: float) -> Function:
    return lambda x: lax.scan(lambda y, _: (y * number, y.sum()), x, None, length=3)


def in_a_branch(number: float) -> Function:
    return lambda x: lax.cond(x[1] > 0, expression(number), lambda x: x, x)


def by_platform(number: float) -> Function:
    return lambda x: lax.platform_dependent(x, cpu=expression(number), default=jnp.sin)


def in_an_array(number: float) -> Function:
    return lambda x: x + np.array([number, 1, 2, 3], np.float32)


def in_half_precision(number: float) -> Function:
    return lambda x: x.astype(jnp.bfloat16) * number


def with_a_key(number: float) -> Function:
    key = jax.random.key(3)
    return lambda x: x * number + jax.random.uniform(key, x.shape)


USES = (with_a_key, expression, called, in_a_loop, in_a_scan, in_a_branch, by_platform, in_an_array)


def differing(first: Function, second: Function) -> list[int]:
    one, other = read_constants(jax.make_jaxpr(first)(X)), read_constants(jax.make_jaxpr(second)(X))
    assert one.structure == other.structure
    pairs = zip(one.values, other.values, strict=True)
    return [n for n, (a, b) in enumerate(pairs) if read_bits(a) != read_bits(b)]


@pytest.mark.parametrize("make", [*USES, in_half_precision])
def test_arguments_have_the_bits_of_constants(
    make: Callable[[float], Function],
) -> None:
    """The same bits as of the function that has the other number."""
    first, second = make(0.9), make(0.3)
    places = differing(first, second)
    assert places
    constants = read_constants(jax.make_jaxpr(second)(X)).values
    values = [constants[place] for place in places]
    shared = jax.jit(with_arguments(first, [[place] for place in places]))
    computed, expected = shared(X, *values), jax.jit(second)(X)
    assert jax.tree.structure(computed) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(computed), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_constant_expression_is_rounded_once() -> None:
    """So it is no expression of the rounded number."""
    traced = read_constants(jax.make_jaxpr(expression(0.9))(X))
    assert [value.dtype for value in traced.values] == [np.float32, np.float32]
    assert traced.values == [np.float32(0.9), np.float32(1 - 0.9)]
    assert np.float32(1 - 0.9) != np.float32(1) - np.float32(0.9)


def test_one_argument_replaces_several_constants() -> None:
    def make(number: float) -> Function:
        return lambda x: (x * number, x + number)

    places = differing(make(0.9), make(0.3))
    assert len(places) == 2
    product, total = with_arguments(make(0.9), [places])(X, np.float32(0.3))
    np.testing.assert_array_equal(np.asarray(product), X * np.float32(0.3))
    np.testing.assert_array_equal(np.asarray(total), X + np.float32(0.3))


def test_constants_are_equal_in_every_trace() -> None:
    for make in USES:
        assert differing(make(0.9), make(0.9)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda number: lambda x: x if number < 0.5 else x + 1,
        lambda number: lambda x: jnp.pad(x, int(10 * number)),
        lambda number: lambda x: jnp.sum(x, axis=int(number > 0.5) - 1, keepdims=number > 0.5),
        lambda number: jax.checkpoint(lambda x: x * number),
        lambda number: lambda x: x ** int(10 * number),
    ],
    ids=["branch", "shape", "parameter", "checkpoint", "power"],
)
def test_numbers_that_decide_equations_change_the_structure(
    make: Callable[[float], Function],
) -> None:
    one, other = (read_constants(jax.make_jaxpr(make(number))(X)) for number in (0.9, 0.3))
    assert one.structure != other.structure
