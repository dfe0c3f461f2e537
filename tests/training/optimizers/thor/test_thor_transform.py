"""THOR's steps against a float64 loop with numpy.linalg, and what they leave alone.

Factors, inverses and preconditioned gradients against loops and numpy.linalg in float64.
Inverses of stacks of matrices against numpy.linalg in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Jaxpr

from pipeline.data.batch import Batch
from pipeline.data.columns import Targets
from pipeline.data.random import seed_words
from pipeline.models.lowerings.formulas.matmuls import make_patches
from pipeline.models.lowerings.problem import ConvWindow, make_window
from pipeline.models.modules.apply_layers import to_nhwc
from pipeline.models.modules.layer_capture import LayerCapture
from pipeline.training.estimated_step import make_estimated_step
from pipeline.training.features.curvature import (
    Curvature,
    LayerCurvature,
    count_positions,
    sum_layers,
)
from pipeline.training.features.loss_scales import Fixed, ScaledLoss
from pipeline.training.losses import CrossEntropy, TrainingObjective
from pipeline.training.optimizers.thor.thor_spec import DampingSpec, Thor
from pipeline.training.optimizers.thor.thor_transform import (
    Factors,
    clip_each_by_norm,
    compute_factors,
    invert_by_cholesky,
    invert_by_elimination,
    invert_damped,
    invert_stacks,
    make_blocks,
    precondition,
    scale_by_thor,
    sum_moments,
)
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep, make_train_step
from pipeline.training.step_config import StepConfig
from tests.models.build import QUICK
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
MODULE = "pipeline.training.optimizers.thor.thor_transform"
WHOLE = 10**6
"""A limit that splits nothing."""
NUMBERS_AND_SIZES = [(2, 3), (1, 128), (3, 1), (1, 3), (2, 75), (9, 128)]
"""Some sizes twice; of 128 there are more than are worked on at once."""


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


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def dense(inputs: np.ndarray, cotangents: np.ndarray) -> LayerCapture:
    return LayerCapture(jnp.float32(inputs), jnp.float32(cotangents), None, "nhwc")


def convolution(images: np.ndarray, cotangents: np.ndarray, layout: str = "nhwc") -> LayerCapture:
    """A 3x2 kernel with stride 2, padded by a row above and a column after."""
    window = make_window(images.shape[1:3], (3, 2), (2, 2), ((1, 0), (0, 1)), (1, 1), 1)
    if layout == "chwn":
        images, cotangents = images.transpose(3, 1, 2, 0), cotangents.transpose(3, 1, 2, 0)
    return LayerCapture(jnp.float32(images), jnp.float32(cotangents), window, layout)


def patches_of(images: np.ndarray) -> np.ndarray:
    """The inputs of `convolution` at its 2 x 2 positions of each 5 x 4 image."""
    padded = np.pad(images, ((0, 0), (1, 0), (0, 1), (0, 0)))
    rows = [
        padded[sample, 2 * y : 2 * y + 3, 2 * x : 2 * x + 2].ravel()
        for sample in range(len(images))
        for y in range(2)
        for x in range(2)
    ]
    return np.array(rows)


def factors_of(seen: LayerCapture, count: int, scale: float, split_dim: int) -> Factors:
    """A and G of the first `count` samples of a batch."""
    mask = jnp.arange(to_nhwc(seen.inputs, seen.layout).shape[0]) < count
    rows = jnp.int32(count * count_positions(seen))
    return compute_factors(sum_moments(seen, mask, split_dim), rows, scale)


def inverted(factors: Factors, damping: float, positions: int) -> Factors:
    """The damped inverses of one layer alone."""

    def invert(factors: Factors, damping: jax.Array) -> dict[str, Factors]:
        return invert_damped({"layer": factors}, damping, {"layer": positions})

    return jax.jit(invert, compiler_options=QUICK)(factors, jnp.float32(damping))["layer"]


def second_moment(rows: np.ndarray) -> np.ndarray:
    """The mean of r r', one row after the other."""
    return sum(np.outer(row, row) for row in rows) / len(rows)


@given(features=st.integers(1, 5000), split_dim=st.integers(1, 600))
def test_blocks_cover_all_features_in_minimal_number(features: int, split_dim: int) -> None:
    blocks = make_blocks(features, split_dim)
    assert blocks.size <= split_dim
    assert blocks.number * blocks.size >= features
    assert (blocks.number - 1) * split_dim < features
    assert (blocks.size - 1) * blocks.number < features


@pytest.mark.slow
def test_dense_factors_are_second_moments_of_inputs_and_gradients() -> None:
    """L-06: for one sample's gradients, the cotangents of a mean times the batch."""
    x, d = draw(5, 4), draw(5, 3, seed=1)
    factors = factors_of(dense(x, d / 5), 5, 5.0, WHOLE)
    np.testing.assert_allclose(factors.inputs[0], second_moment(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(factors.outputs[0], second_moment(d), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_tokens_count_as_positions() -> None:
    x, d = draw(5, 6, 4), draw(5, 6, 3, seed=1)
    seen = dense(x, d)
    factors = factors_of(seen, 5, 1.0, WHOLE)
    assert count_positions(seen) == 6
    np.testing.assert_allclose(
        factors.inputs[0], second_moment(x.reshape(30, 4)), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        factors.outputs[0], second_moment(d.reshape(30, 3)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_convolution_factors_are_second_moments_of_patches(layout: str) -> None:
    images, d = draw(2, 5, 4, 2), draw(2, 2, 2, 3, seed=1)
    seen = convolution(images, d, layout)
    factors = factors_of(seen, 2, 1.0, WHOLE)
    assert count_positions(seen) == 4
    np.testing.assert_allclose(
        factors.inputs[0], second_moment(patches_of(images)), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        factors.outputs[0], second_moment(d.reshape(8, 3)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
@pytest.mark.parametrize("samples", [1, 2, 4, 6])
def test_rows_are_written_in_portions_of_samples(
    samples: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the limit lets in, or less, to divide the batch: 2 x 2 patches of 12 values."""
    images, d = draw(6, 5, 4, 2), draw(6, 2, 2, 3, seed=1)
    whole = factors_of(convolution(images, d, layout), 5, 2.0, 7)
    written: list[int] = []

    def counted(window: ConvWindow, images: jax.Array) -> jax.Array:
        written.append(images.shape[0])
        return make_patches(window, images)

    monkeypatch.setattr(f"{MODULE}.MAX_CHUNK_BYTES", samples * 4 * 2 * 2 * 12)
    monkeypatch.setattr(f"{MODULE}.make_patches", counted)
    split = factors_of(convolution(images, d, layout), 5, 2.0, 7)
    assert written[-1] == {4: 3}.get(samples, samples)
    for one, other in zip(whole, split, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_padding_does_not_count_as_a_sample() -> None:
    """With batch norm it has cotangents too, since it changes the statistics of other samples."""
    x, d = draw(5, 4), draw(5, 3, seed=1)
    factors = factors_of(dense(x, d), 3, 1.0, WHOLE)
    np.testing.assert_allclose(factors.inputs[0], second_moment(x[:3]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(factors.outputs[0], second_moment(d[:3]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_blocks_are_on_the_diagonal() -> None:
    """7 features by at most 3: blocks of 3, 3 and 1, the last filled up with 0."""
    x = draw(5, 7)
    whole = second_moment(x)
    blocks = factors_of(dense(x, x), 5, 1.0, 3).inputs
    assert blocks.shape == (3, 3, 3)
    for number, block in enumerate(blocks):
        rows = slice(3 * number, min(3 * number + 3, 7))
        expected = np.zeros((3, 3))
        size = rows.stop - rows.start
        expected[:size, :size] = whole[rows, rows]
        np.testing.assert_allclose(block, expected, rtol=1e-5, atol=1e-6)


def block_diagonal(matrix: np.ndarray, split_dim: int) -> np.ndarray:
    """The matrix with all but its blocks on the diagonal put to 0."""
    size = make_blocks(len(matrix), split_dim).size
    number = np.arange(len(matrix)) // size
    return np.where(number[:, None] == number[None, :], matrix, 0)


@pytest.mark.slow
@pytest.mark.parametrize("split_dim", [WHOLE, 4, 3, 1])
@pytest.mark.parametrize("positions", [1, 9])
def test_direction_solves_the_damped_kronecker_system(split_dim: int, positions: int) -> None:
    """numpy.linalg on T * (A + r) (x) (G + r), r = sqrt(damping / T), written out in full."""
    x, d, gradient, damping = draw(20, 7), draw(20, 5, seed=1), draw(7, 5, seed=2), 0.3
    factors = factors_of(dense(x, d), 20, 1.0, split_dim)
    direction = precondition(
        jnp.float32(gradient), inverted(factors, damping, positions), positions
    )
    share = np.sqrt(damping / positions)
    a = block_diagonal(second_moment(x), split_dim) + share * np.eye(7)
    g = block_diagonal(second_moment(d), split_dim) + share * np.eye(5)
    expected = np.linalg.solve(positions * np.kron(a, g), gradient.ravel())
    np.testing.assert_allclose(direction, expected.reshape(7, 5), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_convolution_kernel_is_preconditioned_as_a_patch_matrix() -> None:
    gradient = draw(3, 2, 2, 5)
    inverses = Factors(
        *(jnp.float32(np.linalg.inv(second_moment(draw(40, n)))[None]) for n in (12, 5))
    )
    direction = jax.jit(precondition, static_argnums=2)(jnp.float32(gradient), inverses, 4)
    expected = inverses.inputs[0] @ gradient.reshape(12, 5) @ inverses.outputs[0] / 4
    np.testing.assert_allclose(direction.reshape(12, 5), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("split_dim", "blocks"), [(5, (3, 1)), (2, (6, 2))])
def test_split_convolution_solves_the_system_of_its_patches(
    split_dim: int, blocks: tuple[int, int]
) -> None:
    """As for a dense layer: 12 inputs of a patch and 3 outputs in blocks, at 4 positions."""
    images, d, gradient = draw(5, 5, 4, 2), draw(5, 2, 2, 3, seed=1), draw(3, 2, 2, 3, seed=2)
    factors = factors_of(convolution(images, d), 5, 1.0, split_dim)
    assert (len(factors.inputs), len(factors.outputs)) == blocks
    direction = precondition(jnp.float32(gradient), inverted(factors, 0.3, 4), 4)
    share = np.sqrt(0.3 / 4)
    a = block_diagonal(second_moment(patches_of(images)), split_dim) + share * np.eye(12)
    g = block_diagonal(second_moment(d.reshape(20, 3)), split_dim) + share * np.eye(3)
    expected = np.linalg.solve(4 * np.kron(a, g), gradient.ravel())
    np.testing.assert_allclose(direction, expected.reshape(gradient.shape), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_direction_without_curvature_is_gradient_over_damping() -> None:
    """A and G of 0: the direction is gradient / damping whatever the positions."""
    zero = Factors(jnp.zeros((2, 2, 2)), jnp.zeros((1, 3, 3)))
    gradient = jnp.float32(draw(4, 3))
    for positions in (1, 16):
        inverses = inverted(zero, 0.04, positions)
        np.testing.assert_allclose(
            precondition(gradient, inverses, positions), gradient / 0.04, rtol=1e-5
        )


def positive_definite(number: int, size: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(number, 2 * size, size))
    return rows.mT @ rows / (2 * size) + 0.2 * np.eye(size)


@pytest.mark.slow
def test_matrices_of_a_stack_are_inverted_in_order() -> None:
    stacks = [positive_definite(*shape, seed) for seed, shape in enumerate(NUMBERS_AND_SIZES)]
    inverses = jax.jit(invert_stacks, compiler_options=QUICK)(
        [jnp.float32(stack) for stack in stacks]
    )
    for stack, inverse in zip(stacks, inverses, strict=True):
        np.testing.assert_allclose(inverse, np.linalg.inv(stack), rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(inverse, inverse.mT)


@pytest.mark.slow
@pytest.mark.parametrize("invert", [invert_by_elimination, invert_by_cholesky])
@pytest.mark.parametrize("share", [1e-2, 1e-4])
def test_low_rank_matrix_is_inverted_to_float32_accuracy(
    share: float, invert: Callable[[jax.Array], jax.Array]
) -> None:
    """8 rows of 64 and a small damping: the error is within float32's rounding of the matrix."""
    rows = np.random.default_rng(0).normal(size=(8, 64))
    system = rows.T @ rows / 8 + share * np.eye(64)
    exact = np.linalg.inv(system)
    inverse = jax.jit(invert, compiler_options=QUICK)(jnp.float32(system)[None])[0]
    bound = np.finfo(np.float32).eps * np.linalg.cond(system) * np.linalg.norm(exact, 2)
    assert np.linalg.norm(inverse - exact, 2) < bound
    assert np.linalg.eigvalsh(np.float64(inverse)).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 75])
def test_cholesky_inverse_matches_numpy(size: int) -> None:
    """As other devices than the CPU compute it: sizes that are powers of two and others."""
    stack = positive_definite(2, size, seed=3)
    inverse = jax.jit(invert_by_cholesky, compiler_options=QUICK)(jnp.float32(stack))
    np.testing.assert_allclose(inverse, np.linalg.inv(stack), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_indefinite_matrix_becomes_nan() -> None:
    (inverse,) = invert_stacks([jnp.float32([[[1.0, 2.0], [2.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]]])])
    assert np.isnan(inverse[0]).all()
    np.testing.assert_allclose(inverse[1], [[0.5, 0.0], [0.0, 1.0]], rtol=1e-6)


@pytest.mark.medium
def test_inversion_does_not_call_lapack() -> None:
    """No call of LAPACK: its batches wait for the threads that they run on."""
    shapes = [jax.ShapeDtypeStruct((number, 20, 20), jnp.float32) for number in (3, 4)]
    lowered = jax.jit(invert_stacks).trace(shapes).lower(lowering_platforms=("cpu",))
    assert "custom_call" not in lowered.as_text()
