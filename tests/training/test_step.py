from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from pipeline.data.batch import Batch, read_chunks
from pipeline.data.columns import Split, Targets
from pipeline.data.ops.values import Hwc2Chw, Rescale
from pipeline.data.random import seed_words
from pipeline.training.features.loss_scales import (
    Dynamic,
    Fixed,
    LossScaleState,
    LossScaling,
    ScaledLoss,
    get_loss_scale_state,
)
from pipeline.training.forward_pass import ForwardPass
from pipeline.training.losses import CrossEntropy, TrainingObjective
from pipeline.training.metrics import summarize
from pipeline.training.optimizers.first_order import ClipSpec, Momentum
from pipeline.training.state import MappedBatch, TrainState
from pipeline.training.step import TrainStep, get_loss_scale, make_train_step
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import StepFeature
from tests.step_rows import NAMES
from tests.training.step_configs import change_config, read_image

HIDDEN, CLASSES, BATCH = 5, 3, 4
SHAPE = (2, 2, 1)
RATES = np.array([0.5, 0.25], np.float32)
SCALE = 1 / 255


class TwoLayers(nn.Module):
    """Dense, ReLU, dense: small enough to be worked out by hand."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        flat = images.reshape(images.shape[0], -1)
        hidden = nn.relu(nn.Dense(HIDDEN)(flat))
        return nn.Dense(CLASSES)(hidden)


class Noisy(nn.Module):
    """Everything that a step must hand over: batch statistics and random draws."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        flat = images.reshape(images.shape[0], -1)
        normal = nn.BatchNorm(use_running_average=not train)(flat)
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=not train)(normal))


def make_config(**changed: Any) -> StepConfig:
    rescale = Rescale(factor=SCALE, shift=0.0)
    parts = StepConfig(
        network=TwoLayers(),
        inputs=read_image(SHAPE),
        targets=Targets(tuple(map(str, range(CLASSES)))),
        train_ops=(rescale,),
        eval_ops=(rescale,),
        objective=TrainingObjective(
            CrossEntropy(reduction="mean", smoothing=0.0, smoothing_convention="mindspore").build()
        ),
        optimizer=Momentum(
            lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0, decay_rules=()
        ).build(),
        features=(ScaledLoss(Fixed(scale=1.0, drop_overflow_update=False)),),
    )
    return change_config(parts, **changed)


@functools.cache
def plain() -> TrainStep:
    """The step of `make_config()`, compiled once for all tests."""
    return make_step()


def make_step(**changed: Any) -> TrainStep:
    """The three functions, compiled, but not well: each is called once or twice."""
    step = make_train_step(make_config(**changed))
    quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    compiled = {name: quick(getattr(step, name)) for name in ("init", "step", "evaluate")}
    return replace(step, **compiled)


def make_batch(number: int = 0, samples: int = BATCH, **changed: Any) -> Batch:
    """Some uint8 images and labels, all of them valid."""
    rng = np.random.default_rng(number)
    batch = Batch(
        columns={
            "image": rng.integers(0, 256, (samples, *SHAPE), np.uint8),
            "label": rng.integers(0, CLASSES, samples, np.int32),
        },
        seed=seed_words(7),
        epoch=np.int32(0),
        sample=np.arange(samples, dtype=np.int32),
        count=np.int32(samples),
    )
    return replace(batch, **changed)


def rows_of(batch: Batch, *, first: int) -> Batch:
    """The first samples of a batch, as a batch of its own."""
    columns = {name: column[:first] for name, column in batch.columns.items()}
    sample = batch.sample[:first]
    return replace(batch, columns=columns, sample=sample, count=np.int32(first))


def start(step: TrainStep) -> TrainState:
    return step.init(seed_words(7))


def flat(tree: Any) -> np.ndarray:
    """All numbers of a tree in a row, float64."""
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def assert_same(one: Any, other: Any) -> None:
    """Two trees, bit for bit."""
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(leaves) == len(others) > 0
    for leaf, other_leaf in zip(leaves, others, strict=True):
        assert np.array_equal(leaf, other_leaf, equal_nan=True)


def by_hand(params: Any, batch: Batch, samples: int) -> tuple[float, Any]:
    """Mean cross-entropy and its gradient in float64, by the chain rule on paper."""
    x = batch.columns["image"][:samples].reshape(samples, -1).astype(np.float64) * SCALE
    y = np.eye(CLASSES)[batch.columns["label"][:samples]]
    (w1, b1), (w2, b2) = (
        (np.float64(params[name]["kernel"]), np.float64(params[name]["bias"]))
        for name in ("Dense_0", "Dense_1")
    )
    z = x @ w1 + b1
    h = np.maximum(z, 0)
    e = np.exp(h @ w2 + b2)
    p = e / e.sum(axis=1, keepdims=True)
    d_logits = (p - y) / samples
    d_z = d_logits @ w2.T * (z > 0)
    gradients = {
        "Dense_0": {"bias": d_z.sum(axis=0), "kernel": x.T @ d_z},
        "Dense_1": {"bias": d_logits.sum(axis=0), "kernel": h.T @ d_logits},
    }
    return -np.log(p[y == 1]).mean(), gradients


@pytest.mark.medium
def test_two_steps_match_hand_computed_steps() -> None:
    """Loss, rate, gradient norm, and p <- p - lr * v with v <- 0.9 v + g."""
    step = plain()
    state = start(step)
    params, velocity = flat(state.params), 0.0
    for number, rate in enumerate(RATES):
        loss, gradients = by_hand(state.params, make_batch(number), BATCH)
        velocity = 0.9 * velocity + flat(gradients)
        params = params - rate * velocity
        state, record = step.step(state, make_batch(number), RATES)
        norm = np.linalg.norm(flat(gradients))
        numbers = [getattr(record, name) for name in NAMES]
        np.testing.assert_allclose(numbers, [loss, rate, norm, 1.0, 0.0], rtol=1e-5)
        np.testing.assert_allclose(flat(state.params), params, rtol=1e-5, atol=1e-6)
        assert int(state.step) == number + 1


@pytest.mark.medium
def test_records_are_float32_scalars() -> None:
    step = plain()
    _, record = step.step(start(step), make_batch(), RATES)
    assert {(x.dtype, x.shape) for x in record[:5]} == {(np.dtype(np.float32), ())}


def test_learning_rate_repeats_the_end_of_its_table() -> None:
    step = plain()
    state = replace(start(step), step=np.int32(9))
    _, record = step.step(state, make_batch(), RATES)
    assert record.learning_rate == RATES[-1]


@pytest.mark.slow
def test_sum_reduction_is_not_divided() -> None:
    step = make_step(reduction="sum")
    state = start(step)
    loss, gradients = by_hand(state.params, make_batch(), BATCH)
    _, record = step.step(state, make_batch(), RATES)
    np.testing.assert_allclose(record.loss, BATCH * loss, rtol=1e-5)
    np.testing.assert_allclose(record.grad_norm, BATCH * np.linalg.norm(flat(gradients)), rtol=1e-5)


def test_short_batch_is_the_mean_over_its_valid_samples() -> None:
    """D-09: the last batch of an epoch with drop_remainder false."""
    step = plain()
    state = start(step)
    padded = make_batch(count=np.int32(3))
    loss, gradients = by_hand(state.params, padded, samples=3)
    after, record = step.step(state, padded, RATES)
    np.testing.assert_allclose(record.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(
        flat(after.params), flat(state.params) - RATES[0] * flat(gradients), rtol=1e-5, atol=1e-6
    )


def test_padding_values_do_not_matter() -> None:
    step = plain()
    images = make_batch().columns["image"].copy()
    images[3] = 255 - images[3]
    labels = np.array([*make_batch().columns["label"][:3], 0], np.int32)
    other = make_batch(columns={"image": images, "label": labels}, count=np.int32(3))
    outcomes = [step.step(start(step), batch, RATES) for batch in (rows_padded(), other)]
    assert_same(*outcomes)


def rows_padded() -> Batch:
    """Three samples and the first once more."""
    rows = [0, 1, 2, 0]
    columns = {name: column[rows] for name, column in make_batch().columns.items()}
    return make_batch(columns=columns, count=np.int32(3))


@pytest.mark.parametrize("loss_scale", [2.0, 1024.0, 2.0**-10])
def test_loss_scale_does_not_change_the_update(loss_scale: float) -> None:
    """P-01 (4) and (6); a power of two costs no rounding, so bit for bit."""
    step = plain()
    scaled = start(step).replace_part("loss_scale", LossScaleState(np.float32(loss_scale), None))
    after, record = step.step(start(step), make_batch(), RATES)
    after_scaled, record_scaled = step.step(scaled, make_batch(), RATES)
    assert_same(after.params, after_scaled.params)
    assert_same(record[:3], record_scaled[:3])
    assert (record.loss_scale, record_scaled.loss_scale) == (1.0, loss_scale)


LOUD = (Rescale(factor=100.0, shift=0.0),)


@pytest.mark.slow
def test_overflow_without_drop_leaves_the_state_unchanged() -> None:
    """P-01 (7): the loss is a number, the scaled gradient is not; the record ends the run."""
    step = make_step(loss_scale=Fixed(scale=1e36, drop_overflow_update=False), train_ops=LOUD)
    before = start(step)
    after, record = step.step(before, make_batch(), RATES)
    assert np.isfinite(record.loss)
    assert not np.isfinite(record.grad_norm)
    assert (record.skipped, bool(record.should_continue)) == (0, False)
    assert_same(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", [Fixed(scale=1e36), Dynamic(init=1e36, factor=4.0)])
def test_skipped_overflow_changes_only_scale_and_counts(loss_scale: LossScaling) -> None:
    step = make_step(loss_scale=loss_scale, train_ops=LOUD)
    before = start(step)
    after, record = step.step(before, make_batch(), RATES)
    assert (record.skipped, bool(record.should_continue)) == (1, True)
    assert_same((before.params, before.opt_state), (after.params, after.opt_state))
    factor = 4 if isinstance(loss_scale, Dynamic) else 1
    part = get_loss_scale_state(after)
    assert part.scale == np.float32(1e36) * (1 / np.float32(factor))
    assert part.overflows is not None
    counts = part.overflows
    assert (int(after.step), int(counts.skipped_steps), int(counts.bad_steps)) == (1, 1, 1)
    _, again = step.step(after, make_batch(), RATES)
    assert again.learning_rate == record.learning_rate == RATES[0]


class Doubled(StepFeature):
    name = "doubled"

    def get_loss_scale(self, state: Any) -> float:
        return 2.0


def test_loss_scales_of_several_features_are_multiplied() -> None:
    for features, scale in (([Doubled()] * 3, 8), ([], 1)):
        config: Any = SimpleNamespace(list_acting=lambda _, listed=features: listed)
        state: Any = None
        assert get_loss_scale(config, state) == scale


@pytest.mark.slow
def test_thousand_consecutive_overflows_end_training() -> None:
    """DynamicLossScaleManager's `bad_step_max`."""
    step = make_step(loss_scale=Fixed(scale=1e36), train_ops=LOUD)
    state = start(step)
    part = get_loss_scale_state(state)
    assert part.overflows is not None
    for so_far, should_continue in ((999, True), (1000, False)):
        overflows = part.overflows._replace(bad_steps=np.int32(so_far))
        before = state.replace_part("loss_scale", part._replace(overflows=overflows))
        after, record = step.step(before, make_batch(), RATES)
        assert bool(record.should_continue) == should_continue
        assert int(after.step) == should_continue


@pytest.mark.slow
def test_non_finite_loss_is_not_skipped() -> None:
    step = make_step(loss_scale=Dynamic())
    before = start(step)
    after, record = step.step(before, make_batch(count=np.int32(0)), RATES)
    assert np.isnan(record.loss)
    assert not bool(record.should_continue)
    assert_same(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("network", [TwoLayers(), Noisy()], ids=["plain", "with statistics"])
def test_non_finite_step_leaves_the_state_unchanged(network: nn.Module) -> None:
    step = make_step(network=network)
    before, _ = step.step(start(step), make_batch(1), RATES)
    images = make_batch().columns["image"].astype(np.float32)
    images[0, 0, 0] = np.nan
    spoilt = make_batch(columns={**make_batch().columns, "image": images})
    after, record = step.step(before, spoilt, RATES)
    assert np.isnan(record.loss)
    assert int(after.step) == 1
    assert_same(before, after)


@pytest.mark.slow
def test_select_instead_of_branch_has_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(*operands: Any, cpu: Any, default: Callable[..., Any]) -> Any:
        return default(*operands)

    step, empty = plain(), make_batch(count=np.int32(0))
    before = start(step)
    expected, _ = step.step(before, make_batch(), RATES)
    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    chosen = make_step()
    after, _ = chosen.step(before, make_batch(), RATES)
    np.testing.assert_allclose(flat(after), flat(expected), rtol=1e-6)
    stopped, record = chosen.step(after, empty, RATES)
    assert np.isnan(record.loss)
    assert_same(after, stopped)


@pytest.mark.slow
def test_gradient_norm_is_recorded_before_clipping() -> None:
    clip = ClipSpec(norm=1e-3, value=None).build()
    clipped = make_step(optimizer=optax.chain(clip, make_config().optimizer))
    _, record = plain().step(start(plain()), make_batch(), RATES)
    after, record_clipped = clipped.step(start(clipped), make_batch(), RATES)
    assert record_clipped.grad_norm == record.grad_norm > 1e-3
    shifted = flat(after.params) - flat(start(clipped).params)
    assert np.linalg.norm(shifted) == pytest.approx(RATES[0] * 1e-3, rel=1e-3)


@pytest.mark.slow
def test_chw_images_reach_the_network_as_nhwc() -> None:
    """D-16: a recipe may move the axes as the documents do."""
    shape = (4, 3, 2)
    image = np.random.default_rng(0).integers(0, 256, (BATCH, *shape), np.uint8)
    batch = make_batch(columns={**make_batch().columns, "image": image})
    hwc = make_step(inputs=read_image(shape))
    ops = (*make_config().train_ops, Hwc2Chw())
    chw = make_step(inputs=read_image((2, 4, 3), layout="chw"), train_ops=ops)
    outcomes = [step.step(start(step), batch, RATES) for step in (hwc, chw)]
    assert_same(*outcomes)


def test_initial_weights_depend_on_all_bits_of_the_seed() -> None:
    step = plain()
    again, other, high = (step.init(seed_words(seed)) for seed in (7, 8, 7 + 2**32))
    assert_same(start(step), again)
    for state in (other, high):
        assert not np.array_equal(flat(start(step).params), flat(state.params))
    assert int(again.step) == 0


@pytest.mark.slow
def test_dropout_depends_only_on_step_and_seed() -> None:
    step = make_step(network=Noisy())
    state = start(step)
    losses = [
        float(step.step(replace(state, step=np.int32(number)), batch, RATES)[1].loss)
        for number, batch in [
            (0, make_batch()),
            (0, make_batch(epoch=np.int32(3))),
            (1, make_batch()),
            (0, make_batch(seed=seed_words(8))),
        ]
    ]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_batch_statistics_change_only_in_training() -> None:
    step = make_step(network=Noisy())
    before = start(step)
    after, _ = step.step(before, make_batch(), RATES)
    x = make_batch().columns["image"].reshape(BATCH, -1) * SCALE
    mean = after.collections["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * x.mean(axis=0), rtol=1e-4)
    assert_same(
        step.evaluate(after, make_batch(), step.zero_sums()),
        step.evaluate(after, make_batch(), step.zero_sums()),
    )


@pytest.mark.slow
def test_evaluation_uses_valid_samples_and_eval_ops() -> None:
    """The evaluation's ops, not training's; loss and hits as on paper."""
    step = make_step(train_ops=(Rescale(factor=9.0, shift=1.0),))
    state = start(step)
    batch = make_batch(count=np.int32(3))
    sums = step.evaluate(state, make_batch(1), step.evaluate(state, batch, step.zero_sums()))
    metrics = summarize(sums, ("a", "b", "c"))
    losses = [by_hand(state.params, b, n)[0] * n for b, n in ((batch, 3), (make_batch(1), 4))]
    assert metrics["count"] == 7
    assert metrics["loss"] == pytest.approx(sum(losses) / 7, rel=1e-5)


@pytest.mark.parametrize("samples", [1, 4, 7, 8])
def test_chunks_have_each_sample_once(samples: int) -> None:
    rows = np.arange(20)[::-1][:samples]
    split = Split({"image": np.arange(40).reshape(20, 2)})
    chunks = list(read_chunks(split, rows, seed=3, size=4))
    assert {len(batch.sample) for batch, _ in chunks} == {4}
    read = [np.asarray(batch.sample)[:new] for batch, new in chunks]
    np.testing.assert_array_equal(np.concatenate(read), rows)
    for batch, _ in chunks:
        np.testing.assert_array_equal(batch.columns["image"], split.columns["image"][batch.sample])


class Watcher(StepFeature):
    """Notes the samples with a label, and the parameters that its gradients could depend on."""

    name = "watcher"

    def __init__(self) -> None:
        self.valid: Any = None
        self.params: Any = None

    def read_samples(self, outputs: Any, batch: Any, valid: Any) -> Any:
        self.valid = valid
        return None

    def change_gradients(self, state: TrainState, gradients: Any) -> Any:
        self.params = state.params
        return gradients.values


def test_samples_with_a_label_at_any_position_are_read() -> None:
    watcher = Watcher()
    config = make_config(ignore_index=-1, loss=lambda logits, labels, where: where.sum(1) * 1.0)
    config = replace(config, features=(*config.features, watcher))
    labels = np.array([[-1, -1], [-1, 2], [1, -1], [0, 0]])
    inputs = np.zeros((4, *SHAPE), np.float32)
    batch = MappedBatch(inputs, labels, np.array([1, 1, 1, 0], bool), jax.random.key(0))
    state = start(plain())
    ForwardPass(config, state, {}, batch, 4, 1.0)(state.params)
    assert watcher.valid.tolist() == [False, True, True, False]


@dataclass(frozen=True)
class Sharing:
    """A sharing of the state that gathers `whole`."""

    state: TrainState
    whole: TrainState
    gathered: list[str]

    def gather_weights(self, parts: TrainState, features: list[str]) -> TrainState:
        self.gathered.extend(features)
        return self.whole

    def update(self, function: Any, state: TrainState, gradients: Any) -> TrainState:
        return function(state, gradients)


def test_gradients_are_changed_by_whole_parameters() -> None:
    watcher = Watcher()
    config = make_config()
    state = start(plain())
    whole = replace(state, params=jax.tree.map(np.asarray, state.params))
    sharing: Any = Sharing(state, whole, [])
    config = replace(config, features=(*config.features, watcher), sharing=sharing)
    make_train_step(config).step(state, make_batch(), RATES)
    assert watcher.params is whole.params
    assert sharing.gathered == ["loss_scale", "watcher"]
