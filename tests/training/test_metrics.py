"""Evaluation metrics against loops over samples (E-01)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.training import metrics
from pipeline.training.metrics import add_batch, summarize, zero_sums

CLASSES, BATCH = 7, 4
NAMES = tuple("abcdefg")
add = jax.jit(add_batch)


def evaluated(logits, labels, classes=CLASSES):
    """The summary of one batch without padding, losses all 1."""
    logits, labels = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    ones = jnp.ones(len(logits))
    sums = add_batch(zero_sums(classes), logits, labels, ones, ones > 0)
    return summarize(sums, NAMES[:classes])


def ratio(part, whole):
    return part / whole if whole else 0.0


def reference(samples):
    """Figures of (logits, label, loss) samples, one sample at a time."""
    ranked = [sorted(range(CLASSES), key=lambda c, x=x: (-x[c], c)) for x, _, _ in samples]
    pairs = [(label, order[0]) for (_, label, _), order in zip(samples, ranked, strict=True)]
    precision, recall, f1 = {}, {}, {}
    for index, name in enumerate(NAMES):
        hits = sum(true == index == guess for true, guess in pairs)
        precision[name] = ratio(hits, sum(guess == index for _, guess in pairs))
        recall[name] = ratio(hits, sum(true == index for true, _ in pairs))
        both = precision[name] + recall[name]
        f1[name] = ratio(2 * precision[name] * recall[name], both)
    accuracy = sum(true == guess for true, guess in pairs) / len(pairs)
    return {
        "accuracy": accuracy,
        "top5": sum(s[1] in order[:5] for s, order in zip(samples, ranked, strict=True))
        / len(samples),
        "loss": sum(loss for _, _, loss in samples) / len(samples),
        "count": len(samples),
    } | {
        key: {"macro": sum(of.values()) / CLASSES, "micro": accuracy, "per_class": of}
        for key, of in (("precision", precision), ("recall", recall), ("f1", f1))
    }


def flattened(figures, prefix=""):
    """Nested figures as one level of dotted keys."""
    flat = {}
    for key, value in figures.items():
        name = f"{prefix}{key}"
        flat |= flattened(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


# Few distinct logits, so that ties are common.
samples_of_batches = st.lists(
    st.tuples(
        st.lists(st.integers(-1, 2), min_size=CLASSES, max_size=CLASSES),
        st.integers(0, CLASSES - 1),
        st.floats(0, 8, width=32),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
).filter(lambda samples: any(valid for *_, valid in samples))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(samples_of_batches, st.booleans())
def test_metrics_match_loops_over_the_valid_samples(samples, one_hot):
    sums = zero_sums(CLASSES)
    for start in range(0, len(samples), BATCH):
        padding = [([math.nan] * CLASSES, 3, math.nan, False)] * BATCH
        batch = (samples[start : start + BATCH] + padding)[:BATCH]
        logits, labels, losses, valid = (np.array(column) for column in zip(*batch, strict=True))
        labels = np.eye(CLASSES, dtype=np.float32)[labels] if one_hot else labels.astype(np.int32)
        sums = add(sums, logits.astype(np.float32), labels, losses.astype(np.float32), valid)
    expected = reference([sample for *sample, valid in samples if valid])
    assert flattened(summarize(sums, NAMES)) == pytest.approx(flattened(expected), rel=1e-6)


@pytest.mark.slow
def test_confusion_has_true_rows_and_predicted_columns():
    logits = jnp.eye(3)[jnp.array([1, 1, 2, 0])]
    true, ones = jnp.array([0, 1, 1, 0]), jnp.ones(4)
    sums = add_batch(zero_sums(3), logits, true, ones, ones > 0)
    np.testing.assert_array_equal(sums.classes.confusion, [[1, 1, 0], [0, 1, 1], [0, 0, 0]])


@pytest.mark.medium
def test_metrics_of_a_hand_computed_confusion():
    """True 0 0 1 1, predicted 0 1 1 2: class 2 has no sample, so its recall and f1 are 0."""
    summary = evaluated(np.eye(3)[[0, 1, 1, 2]], np.array([0, 0, 1, 1]), classes=3)
    assert summary["accuracy"] == 0.5
    assert summary["precision"]["per_class"] == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert summary["recall"]["per_class"] == {"a": 0.5, "b": 0.5, "c": 0.0}
    assert summary["f1"]["per_class"] == pytest.approx({"a": 2 / 3, "b": 0.5, "c": 0.0})
    assert summary["precision"]["macro"] == 0.5
    assert summary["f1"]["micro"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("label", "hit"), [(0, 1.0), (4, 1.0), (5, 0.0), (6, 0.0)])
def test_ties_rank_the_lower_class_first(label, hit):
    summary = evaluated(np.zeros((1, CLASSES)), np.array([label]))
    assert summary["top5"] == hit
    assert summary["accuracy"] == float(label == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "there"), [(2, False), (5, False), (6, True)])
def test_top5_requires_more_than_five_classes(classes, there):
    names = evaluated(np.eye(classes), np.arange(classes), classes=classes)
    assert ("top5" in names) is there


@pytest.mark.slow
def test_nan_logits_are_not_top5_hits():
    logits = np.full((CLASSES, CLASSES), np.nan)
    assert evaluated(logits, np.arange(CLASSES))["top5"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [32, 1000])
@pytest.mark.parametrize("constant", [True, False])
def test_loss_over_sixty_thousand_samples_keeps_six_digits(batch, constant):
    losses = np.random.default_rng(0).exponential(size=60_000).astype(np.float32)
    losses = np.full_like(losses, 0.1) if constant else losses

    @jax.jit
    def summed(batches):
        def body(sums, values):
            zeros = jnp.zeros(batch, jnp.int32)
            logits = jnp.zeros((batch, 2))
            return add_batch(sums, logits, zeros, values, zeros == 0), None

        return jax.lax.scan(body, zero_sums(2), batches)[0]

    whole = losses[: 60_000 // batch * batch]
    summary = summarize(summed(whole.reshape(-1, batch)), "ab")
    assert summary["count"] == len(whole)
    assert summary["loss"] == pytest.approx(whole.mean(dtype=np.float64), rel=1e-6)


@pytest.mark.slow
def test_sums_keep_their_dtypes_for_any_inputs():
    ones = jnp.ones(BATCH)
    sums = add(
        zero_sums(CLASSES),
        jnp.ones((BATCH, CLASSES), jnp.bfloat16),
        jnp.zeros(BATCH, jnp.uint8),
        ones.astype(jnp.bfloat16),
        ones > 0,
    )
    dtypes = jax.tree.map(lambda leaf: str(leaf.dtype), sums)
    assert dtypes == jax.tree.map(lambda leaf: str(leaf.dtype), zero_sums(CLASSES))


def test_summary_of_no_samples_is_refused():
    with pytest.raises(ValueError, match="no samples were evaluated"):
        summarize(zero_sums(2), "ab")


@pytest.mark.slow
@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", "b", "b")])
def test_wrong_class_names_are_refused(names):
    ones = jnp.ones(1)
    sums = add_batch(zero_sums(2), jnp.eye(2)[:1], jnp.zeros(1, jnp.int32), ones, ones > 0)
    with pytest.raises(ValueError, match="2 classes need 2 different names, not "):
        summarize(sums, names)


@pytest.mark.slow
@pytest.mark.parametrize("one_hot", [False, True])
def test_labels_of_a_sample_are_all_counted(one_hot):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(BATCH, 2, 3, CLASSES)).astype(np.float32)
    labels = generator.integers(0, CLASSES, (BATCH, 2, 3))
    losses, mask = np.arange(BATCH, dtype=np.float32), np.arange(BATCH) < 3
    given = np.eye(CLASSES, dtype=np.float32)[labels] if one_hot else labels
    together = add(zero_sums(CLASSES), logits, given, losses, mask)
    one_by_one = zero_sums(CLASSES)
    for row, column in np.ndindex(2, 3):
        at = np.s_[:, row, column]
        one_by_one = add(one_by_one, logits[at], given[at], losses, mask)
    assert summarize(together, NAMES) == summarize(one_by_one, NAMES)
    assert int(together.count) == 3 * 6


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(samples_of_batches, st.lists(st.booleans(), min_size=BATCH, max_size=BATCH))
def test_ignored_labels_equal_padding(samples, counted):
    padding = [([math.nan] * CLASSES, 3, math.nan, False)] * BATCH
    logits, labels, losses, valid = (
        np.array(column) for column in zip(*(samples[:BATCH] + padding)[:BATCH], strict=True)
    )
    logits, losses, counted = (
        logits.astype(np.float32),
        losses.astype(np.float32),
        np.array(counted),
    )
    given = np.where(counted, labels, -100).astype(np.int32)
    ignored = add(zero_sums(CLASSES), logits, given, losses, valid, counted)
    padded = add(zero_sums(CLASSES), logits, labels.astype(np.int32), losses, valid & counted)
    assert int(ignored.samples) == valid.sum()
    for name in ("loss_sum", "count"):
        np.testing.assert_array_equal(getattr(ignored, name), getattr(padded, name))
    for name in ("top5", "confusion"):
        np.testing.assert_array_equal(getattr(ignored.classes, name), getattr(padded.classes, name))


@pytest.mark.slow
def test_many_classes_have_the_same_metrics_without_a_matrix(monkeypatch):
    generator = np.random.default_rng(0)
    batches = [
        (
            generator.normal(size=(BATCH, CLASSES)).astype(np.float32),
            generator.integers(0, CLASSES, BATCH).astype(np.int32),
            generator.random(BATCH).astype(np.float32),
            np.arange(BATCH) < 3,
        )
        for _ in range(5)
    ]
    figures = []
    for most in (CLASSES, CLASSES - 1):
        monkeypatch.setattr(metrics, "MAX_CONFUSION_CLASSES", most)
        sums = zero_sums(CLASSES)
        for batch in batches:
            sums = add_batch(sums, *batch)
        figures.append((sums, summarize(sums, NAMES)))
    (few, with_classes), (many, without) = figures
    assert (few.classes.by_class, many.classes.confusion) == (None, None)
    for name in ("precision", "recall", "f1"):
        del with_classes[name]["per_class"]
    assert without == with_classes
