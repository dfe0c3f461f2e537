"""Samples that weigh nothing: the step is that of a batch of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.ops.together import CutMix
from pipeline.data.ops.values import Rescale
from pipeline.models.layers.standard import Dense, Reshape
from pipeline.models.layers.token_mixers import MixtureOfExperts
from pipeline.models.layers.tokens import MeanToken
from pipeline.training.features.components.leave_out import (
    LeaveOut,
    LeaveOutSpec,
    format_ranges,
    parse_ranges,
)
from tests.models.build import network
from tests.training.test_step import BATCH, RATES, flat, make_batch, make_config, make_step, start


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("3,17, 40-42", [3, 17, 40, 41, 42]), ("5-6,4-5", [4, 5, 6]), ("0-0", [0])],
)
def test_ranges_are_read_ascending_and_once(text: str, numbers: list[int]) -> None:
    assert parse_ranges(text).tolist() == numbers
    assert parse_ranges(format_ranges(numbers)).tolist() == numbers


@pytest.mark.parametrize("text", ["", "a", "-1", "3-", "5-4", "1.5", "3;4", "0-99999999999"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_ranges(text)


EXPERTS = network(
    *(Reshape(shape=(4, 1)), Dense(features=6)),
    MixtureOfExperts(experts=4, hidden=5, capacity_factor=0.5, balance=0.5, z_loss=0.5),
    *(MeanToken(), Dense(features=3)),
)
"""A network that adds losses to those of the samples."""


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, {"network": EXPERTS}], ids=["plain", "experts"])
def test_step_is_that_of_the_other_samples(changed: dict[str, Any]) -> None:
    """A batch whose last sample weighs nothing is a short batch without it."""
    samples = 100
    batch = make_batch(1)
    last = int(np.asarray(batch.sample)[-1])
    features = make_config().features
    step = make_step(features=(*features, LeaveOut((last % samples,), samples)), **changed)
    after, record = step.step(start(step), batch, jnp.asarray(RATES))
    short = make_batch(1, count=np.int32(BATCH - 1))
    plain = make_step(**changed)
    expected, expected_record = plain.step(start(plain), short, jnp.asarray(RATES))
    np.testing.assert_allclose(flat(after.params), flat(expected.params), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(record.loss, expected_record.loss, rtol=1e-6)


@pytest.mark.slow
def test_batch_without_samples_has_no_gradient() -> None:
    samples = 100
    batch = make_batch(1)
    rows = tuple(sorted({int(sample) % samples for sample in np.asarray(batch.sample)}))
    features = make_config().features
    step = make_step(features=(*features, LeaveOut(rows, samples)))
    after, record = step.step(start(step), batch, jnp.asarray(RATES))
    assert (float(record.loss), float(record.grad_norm)) == (0, 0)
    np.testing.assert_array_equal(flat(after.params), flat(start(step).params))


def make_recipe(**changes: Any) -> Any:
    """A stand-in for a recipe, with what the check reads."""
    loss = SimpleNamespace(name="cross_entropy", compares_samples=False)
    optimizer = SimpleNamespace(name="momentum", observes_layers=False)
    settings = {"privacy": None, "ops": (), "loss": loss, "optimizer": optimizer, **changes}
    precision = settings.get("precision", "O0")
    train = SimpleNamespace(
        loss=settings["loss"], optimizer=settings["optimizer"], precision=precision
    )
    dataset = SimpleNamespace(train=SimpleNamespace(ops=settings["ops"]))
    return SimpleNamespace(privacy=settings["privacy"], train=train, dataset=dataset)


def test_recipes_that_need_every_sample_are_refused() -> None:
    spec = LeaveOutSpec(samples="3")
    assert list(spec.check(make_recipe())) == []
    refused: list[tuple[dict[str, Any], str]] = [
        ({"privacy": object()}, "privacy"),
        ({"loss": SimpleNamespace(name="contrastive", compares_samples=True)}, "train.loss"),
        ({"ops": (Rescale(factor=1.0, shift=0.0), CutMix())}, "dataset.train.ops.1 (cut_mix)"),
        ({"optimizer": SimpleNamespace(name="thor", observes_layers=True)}, "train.optimizer"),
        ({"precision": "fp8"}, "train.precision = fp8"),
    ]
    for changes, key in refused:
        (problem,) = spec.check(make_recipe(**changes))
        assert problem.startswith(key)


def test_sample_beyond_the_data_is_refused() -> None:
    context: Any = SimpleNamespace(samples=4)
    assert LeaveOutSpec(samples="3").build(context) == LeaveOut((3,), 4)
    with pytest.raises(ValueError, match="samples = 3-4: must be from 0 to 3"):
        LeaveOutSpec(samples="3-4").build(context)
