"""THOR's steps against a float64 loop with numpy.linalg, and what they leave alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend.core import ClosedJaxpr, Jaxpr

from pipeline.data.batch import Batch
from pipeline.data.random import seed_words
from pipeline.data.targets import Targets
from pipeline.models.modules.layer_capture import LayerCapture
from pipeline.training.estimated_step import make_estimated_step
from pipeline.training.features.curvature import Curvature, LayerCurvature, sum_layers
from pipeline.training.features.loss_scales import Fixed, ScaledLoss
from pipeline.training.losses import CrossEntropy, TrainingObjective
from pipeline.training.optimizers.thor.thor_spec import DampingSpec, Thor
from pipeline.training.optimizers.thor.thor_transform import clip_each_by_norm, scale_by_thor
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep, make_train_step
from pipeline.training.step_config import StepConfig
from tests.training.step_configs import change_config, read_image

HIDDEN, CLASSES, BATCH, STEPS = 5, 3, 6, 5
SHAPE = (2, 2, 1)
RATES = np.array([0.05, 0.04, 0.03, 0.02, 0.01], np.float32)
KERNELS = ["Dense_0/kernel", "Dense_1/kernel"]
SPEC = Thor(
    lr=0.05,
    momentum=0.9,
    nesterov=False,
    weight_decay=0.1,
    decay_rules=(),
    damping=DampingSpec(initial=0.2, decay_rate=0.5, decay_steps=3),
    frequency=2,
    split_dim=128,
    split_indices=(),
    clip_norm=None,
)


class TwoLayers(nn.Module):
    """Dense, ReLU, dense: small enough to be worked out by hand."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        flat = images.reshape(images.shape[0], -1)
        hidden = nn.relu(nn.Dense(HIDDEN)(flat))
        return nn.Dense(CLASSES)(hidden)


class Scaled(nn.Module):
    """A layer that is observed after parameters that are not."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        flat = images.reshape(images.shape[0], -1)
        return nn.Dense(CLASSES)(nn.LayerNorm()(flat))


def make_config(spec: Thor = SPEC, **changed: Any) -> StepConfig:
    loss = CrossEntropy(reduction="mean", smoothing=0.0, smoothing_convention="mindspore")
    parts = StepConfig(
        network=TwoLayers(),
        inputs=read_image(SHAPE),
        targets=Targets(tuple(map(str, range(CLASSES)))),
        train_ops=(),
        eval_ops=(),
        objective=TrainingObjective(loss.build()),
        optimizer=spec.build(),
        features=(
            ScaledLoss(Fixed(scale=1.0, drop_overflow_update=False)),
            LayerCurvature(spec.curvature(), is_mean=True),
        ),
    )
    return change_config(parts, **changed)


def make_step(spec: Thor = SPEC, **changed: Any) -> TrainStep:
    """The functions, compiled, but not well."""
    step = make_train_step(make_config(spec, **changed))
    quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    return replace(step, init=quick(step.init), step=quick(step.step))


def make_batch(number: int, count: int = BATCH) -> Batch:
    rng = np.random.default_rng(number)
    return Batch(
        columns={
            "image": rng.normal(size=(BATCH, *SHAPE)).astype(np.float32),
            "label": rng.integers(0, CLASSES, BATCH, np.int32),
        },
        seed=seed_words(7),
        epoch=np.int32(0),
        sample=np.arange(BATCH, dtype=np.int32),
        count=np.int32(count),
    )


def trained(step: TrainStep, batches: list[Batch]) -> Iterator[TrainState]:
    """The state after each batch."""
    state = step.init(seed_words(7))
    for batch in batches:
        state, _ = step.step(state, batch, RATES)
        yield state


def leaves(params: Any) -> dict[str, np.ndarray]:
    """Parameters by path, float64."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree.leaves_with_path(params)
    }


def by_hand(params: dict[str, np.ndarray], batch: Batch, count: int) -> tuple[Any, Any]:
    """Gradients of the mean loss, and (A, G) of both kernels, by the chain rule on paper."""
    x = np.asarray(batch.columns["image"][:count], np.float64).reshape(count, -1)
    y = np.eye(CLASSES)[batch.columns["label"][:count]]
    z = x @ params["Dense_0/kernel"] + params["Dense_0/bias"]
    h = np.maximum(z, 0)
    e = np.exp(h @ params["Dense_1/kernel"] + params["Dense_1/bias"])
    d2 = e / e.sum(axis=1, keepdims=True) - y
    d1 = d2 @ params["Dense_1/kernel"].T * (z > 0)
    gradients, factors = {}, {}
    for layer, inputs, outputs in (("Dense_0", x, d1), ("Dense_1", h, d2)):
        gradients[f"{layer}/kernel"] = inputs.T @ outputs / count
        gradients[f"{layer}/bias"] = outputs.mean(axis=0)
        factors[f"{layer}/kernel"] = inputs.T @ inputs / count, outputs.T @ outputs / count
    return gradients, factors


def expected_run(spec: Thor, start: Any, batches: list[Batch]) -> Iterator[dict[str, np.ndarray]]:
    """The parameters after each batch, in float64, each kernel's system solved in full."""
    params = leaves(start)
    velocity = {path: np.zeros_like(value) for path, value in params.items()}
    systems: dict[str, np.ndarray] = {}
    for t, batch in enumerate(batches):
        gradients, factors = by_hand(params, batch, int(batch.count))
        if t % spec.frequency == 0:
            root = np.sqrt(spec.damping.initial * spec.damping.decay_rate ** (t / 3))
            systems = {
                path: np.kron(a + root * np.eye(len(a)), g + root * np.eye(len(g)))
                for path, (a, g) in factors.items()
            }
        for path, value in params.items():
            direction = gradients[path]
            if path in systems:
                direction = np.linalg.solve(systems[path], direction.ravel()).reshape(value.shape)
            velocity[path] = spec.momentum * velocity[path] + direction + spec.weight_decay * value
            params[path] = value - RATES[t] * velocity[path]
        yield dict(params)


@pytest.mark.slow
@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_five_steps_match_hand_computed_steps(frequency: int) -> None:
    """L-06: inverses of the first batch and of every `frequency`-th after it, stale between."""
    spec = SPEC.model_copy(update={"frequency": frequency})
    step, batches = make_step(spec), [make_batch(number) for number in range(STEPS)]
    start = step.init(seed_words(7)).params
    expected = expected_run(spec, start, batches)
    for state, params in zip(trained(step, batches), expected, strict=True):
        result = leaves(state.params)
        assert result.keys() == params.keys()
        for path, value in params.items():
            np.testing.assert_allclose(result[path], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_short_batch_counts_its_valid_samples() -> None:
    batches = [make_batch(0, count=4), make_batch(1, count=2)]
    step = make_step()
    expected = list(expected_run(SPEC, step.init(seed_words(7)).params, batches))[-1]
    result = leaves(list(trained(step, batches))[-1].params)
    for path, value in expected.items():
        np.testing.assert_allclose(result[path], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", [2.0**-6, 1024.0])
def test_loss_scale_does_not_change_the_update(loss_scale: float) -> None:
    """Powers of two, so that scaling rounds nothing."""
    batches = [make_batch(number) for number in range(3)]
    scales = (Fixed(scale=scale, drop_overflow_update=False) for scale in (1.0, loss_scale))
    states = [list(trained(make_step(loss_scale=scale), batches))[-1] for scale in scales]
    for one, other in zip(*(leaves(state.params).values() for state in states), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_sum_reduction_has_the_curvature_of_a_mean() -> None:
    """The gradient is that of the whole batch, but the Fisher matrix is one sample's."""
    mean, total = (
        list(trained(make_step(reduction=reduction), [make_batch(0)]))[-1].opt_state[0]
        for reduction in ("mean", "sum")
    )
    for one, other in zip(jax.tree.leaves(mean), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.mark.slow
def test_inverses_change_only_at_a_refresh() -> None:
    batches = [make_batch(number) for number in range(STEPS)]
    states = [state.opt_state[0].inverses for state in trained(make_step(), batches)]
    assert [sorted(state) for state in states] == [KERNELS] * STEPS
    same = [
        all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
        for pair in pairwise(states)
    ]
    assert same == [True, False, True, False]


@pytest.mark.slow
def test_factors_are_computed_only_in_a_branch() -> None:
    """The expensive part is not in the steps between: no inverse but inside a conditional."""
    parts = make_config()
    step = make_train_step(parts)
    state = jax.eval_shape(step.init, seed_words(7))
    traced = jax.make_jaxpr(make_estimated_step(parts, 0.1))(
        state, (jnp.zeros((BATCH, *SHAPE)), jnp.zeros(BATCH, jnp.int32))
    )
    outside = list(primitives(traced.jaxpr, into_branches=False))
    assert outside.count("cond") == 2
    assert "rsqrt" not in outside
    sizes = {prod(SHAPE), HIDDEN, CLASSES}
    assert list(primitives(traced.jaxpr, into_branches=True)).count("rsqrt") == len(sizes)


def primitives(jaxpr: Jaxpr, *, into_branches: bool) -> Iterator[str]:
    """The names of all operations, those of calls within included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name == "cond" and not into_branches:
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from primitives(getattr(value, "jaxpr", value), into_branches=into_branches)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


@pytest.mark.slow
def test_parameters_without_factors_are_updated_by_momentum() -> None:
    """Biases and the scale of a norm: v <- 0.9 v + g + 0.1 p, in the first step g + 0.1 p."""
    parts = make_config(network=Scaled())
    step = make_train_step(parts)
    before = step.init(seed_words(7))
    plain = change_config(parts, optimizer=scale_by_nothing(), curvature=None)
    gradients = leaves(
        jax.tree.map(
            lambda p, q: p - q,
            before.params,
            make_train_step(plain).step(before, make_batch(0), np.float32([1.0]))[0].params,
        )
    )
    after, _ = step.step(before, make_batch(0), np.float32([1.0]))
    start, end = leaves(before.params), leaves(after.params)
    assert sorted(after.opt_state[0].inverses) == ["Dense_0/kernel"]
    for path in ("Dense_0/bias", "LayerNorm_0/bias", "LayerNorm_0/scale"):
        direction = gradients[path] + 0.1 * start[path]
        np.testing.assert_allclose(start[path] - end[path], direction, rtol=1e-4, atol=1e-6)
    kernel = "Dense_0/kernel"
    direction = gradients[kernel] + 0.1 * start[kernel]
    assert not np.allclose(start[kernel] - end[kernel], direction, rtol=0.1)


def scale_by_nothing() -> Any:
    import optax

    def keep(params: Any) -> Any:
        return SPEC.build().init(params)

    return optax.GradientTransformation(keep, lambda updates, state, params: (updates, state))


@pytest.mark.slow
def test_unobserved_kernels_keep_empty_inverses() -> None:
    """A transposed convolution has a kernel like a convolution's, but none of its factors."""
    transform = scale_by_thor(lambda count: jnp.float32(0.1), split_dim=4)
    params = {
        "conv_transpose_0": {"kernel": jnp.ones((2, 2, 3, 5))},
        "dense_0": {"kernel": jnp.ones((3, 2))},
    }
    state = transform.init(params)
    assert state.inverses["conv_transpose_0/kernel"].inputs.shape == (3, 4, 4)
    assert state.inverses["conv_transpose_0/kernel"].outputs.shape == (2, 3, 3)
    layer = LayerCapture(jnp.ones((4, 3)), jnp.ones((4, 2)), None, "nhwc")
    due = jnp.bool(True)
    sums = sum_layers(SPEC.curvature(), {"dense_0": layer}, jnp.ones(4, bool), due)
    curvature = Curvature(sums, 4, 1.0, due)
    directions, after = transform.update(params, state, params, curvature=curvature)
    np.testing.assert_array_equal(directions["conv_transpose_0"]["kernel"], 1.0)
    assert not np.any(after.inverses["conv_transpose_0/kernel"].inputs)
    assert np.any(after.inverses["dense_0/kernel"].inputs)


def test_update_without_observations_is_refused() -> None:
    params = {"dense_0": {"kernel": jnp.ones((3, 2))}}
    optimizer = SPEC.build()
    with pytest.raises(ValueError, match="thor needs sums of layers"):
        optimizer.update(params, optimizer.init(params), params)


@pytest.mark.medium
def test_arrays_are_clipped_separately() -> None:
    updates = {"long": jnp.float32([3.0, 4.0]), "short": jnp.float32([0.3]), "none": jnp.zeros(2)}
    clip = clip_each_by_norm(0.5)
    clipped, _ = clip.update(updates, clip.init(updates))
    np.testing.assert_allclose(clipped["long"], [0.3, 0.4], rtol=1e-6)
    np.testing.assert_array_equal(clipped["short"], updates["short"])
    np.testing.assert_array_equal(clipped["none"], updates["none"])
