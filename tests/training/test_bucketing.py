"""Batches without buckets; tests/stages/test_sample_sizes.py runs buckets."""

from __future__ import annotations

from pipeline.data.padding.buckets import NO_PADDING
from pipeline.training.bucketing import apply_in_bucket
from tests.training.test_step import make_batch


def test_batch_without_buckets_is_unchanged() -> None:
    batch = make_batch()
    assert apply_in_bucket(NO_PADDING, batch, lambda cut: cut) is batch
