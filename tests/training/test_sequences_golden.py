"""Connectionist temporal classification against PyTorch, all paths, and edits against a table."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.sequences import Ctc, LabelErrorRate, count_edits
from tests.golden.make_ctc import FILE, LABELS

with np.load(FILE) as stored:
    GOLDEN = dict(stored)
LOSS = Ctc(reduction="mean").build()


@pytest.mark.medium
def test_losses_and_gradients_have_parity_with_pytorch() -> None:
    logits = jnp.asarray(GOLDEN["logits"])
    np.testing.assert_allclose(LOSS(logits, LABELS), GOLDEN["losses"], rtol=1e-5)
    found = jax.grad(lambda logits: LOSS(logits, LABELS).mean())(logits)
    np.testing.assert_allclose(found, GOLDEN["gradients"], atol=1e-6)
    # The logits of a sequence that doesn't fit may have any value.
    wild = logits.at[3].set(jnp.where(logits[3] > 0, 80.0, -80.0))
    np.testing.assert_array_equal(
        jax.grad(lambda logits: LOSS(logits, LABELS).sum())(wild)[3], np.zeros_like(logits[3])
    )


def collapse(path: tuple[int, ...]) -> list[int]:
    return [symbol for symbol, _ in itertools.groupby(path) if symbol]


@pytest.mark.medium
def test_probability_is_the_sum_over_all_paths() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 5, 3)).astype(np.float32)
    shares = np.exp(logits[0]) / np.exp(logits[0]).sum(-1, keepdims=True)
    total = sum(
        np.prod([shares[place, symbol] for place, symbol in enumerate(path)])
        for path in itertools.product(range(3), repeat=5)
        if collapse(path) == [2, 2, 1]
    )
    found = LOSS(jnp.asarray(logits), jnp.array([[2, 2, 1, 0, 0]]))
    np.testing.assert_allclose(found, [-np.log(total) / 3], rtol=1e-5)


def count_by_table(one: list[int], other: list[int]) -> int:
    table = np.zeros((len(one) + 1, len(other) + 1), int)
    table[:, 0], table[0] = range(len(one) + 1), range(len(other) + 1)
    for i, j in itertools.product(range(len(one)), range(len(other))):
        table[i + 1, j + 1] = min(
            table[i, j + 1] + 1, table[i + 1, j] + 1, table[i, j] + (one[i] != other[j])
        )
    return int(table[-1, -1])


def test_edits_are_those_of_a_table() -> None:
    rng = np.random.default_rng(1)
    paths = rng.integers(0, 3, (40, 7))
    lengths = rng.integers(0, 6, 40)
    labels = np.where(np.arange(6) < lengths[:, None], rng.integers(1, 3, (40, 6)), 0)
    is_new = np.diff(paths, axis=1, prepend=0) != 0
    found = count_edits(jnp.asarray(paths), jnp.asarray(is_new & (paths > 0)), jnp.asarray(labels))
    predicted = [collapse(tuple(path)) for path in paths.tolist()]
    true = [row[:n].tolist() for row, n in zip(labels, lengths, strict=True)]
    expected = [count_by_table(one, other) for one, other in zip(predicted, true, strict=True)]
    np.testing.assert_array_equal(found, expected)
    metric = LabelErrorRate()
    logits = jax.nn.one_hot(paths, 3)
    mask = jnp.arange(40) < 30
    sums = metric.sums(logits, jnp.asarray(labels), mask)
    assert metric.value(sums) == pytest.approx(sum(expected[:30]) / lengths[:30].sum())


def test_one_label_for_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="must be whole numbers"):
        LOSS(jnp.zeros((2, 4, 3)), jnp.zeros(2, jnp.int32))
