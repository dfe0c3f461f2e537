"""The order of samples where no batch may mix buckets."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.data.order import Batches, SampleOrder


@dataclass(frozen=True, kw_only=True)
class BucketedOrder(SampleOrder):
    """The endless order of a split whose batches are each of one bucket.

    Samples come in the order of their pass and wait in their bucket; when a batch is full, it is
    next. Samples that wait at the end are dropped, or come last, bucket by bucket, as in
    MindSpore's `bucket_batch_by_length`; here the batches of a pass are a pure function of
    (seed, pass), computed with one permutation.
    """

    buckets: np.ndarray = field(compare=False)
    """The bucket of each sample, int32 (samples,)."""

    def __post_init__(self) -> None:
        if len(self.buckets) != self.samples:
            raise ValueError(f"{len(self.buckets)} samples have a bucket, of {self.samples}")
        if self.num_shards > 1:
            raise ValueError("shards of a bucketed split would differ in their number of batches")
        if self.batches_per_repetition == 0:
            most = int(np.bincount(self.buckets).max())
            raise ValueError(
                f"a batch of {self.batch_size} can't be filled from any bucket, and drop_remainder "
                f"drops what is not full; the batch size can be {most} at most"
            )
        super().__post_init__()

    @property
    def batches_per_repetition(self) -> int:
        """Batches in one repetition of the dataset: those of each bucket."""
        full, rest = np.divmod(np.bincount(self.buckets), self.batch_size)
        return int(full.sum()) + (0 if self.drop_remainder else int((rest > 0).sum()))

    @property
    def short_batch(self) -> int:
        """The size of the shortest batch, where one is not full; else 0."""
        rests = np.bincount(self.buckets) % self.batch_size
        return 0 if self.drop_remainder or not rests.any() else int(rests[rests > 0].min())

    def batches(self, first_step: int, count: int) -> Batches:
        """The `count` batches that begin with global step `first_step`, the first step being 0."""
        steps = np.arange(first_step, first_step + count)
        passes, batch = np.divmod(steps, self.batches_per_repetition)
        indices = np.empty((count, self.batch_size), np.int32)
        counts = np.empty(count, np.int32)
        for pass_ in np.unique(passes):
            rows = passes == pass_
            of_pass, valid = self._batches_of(int(pass_))
            indices[rows], counts[rows] = of_pass[batch[rows]], valid[batch[rows]]
        return Batches(indices, passes.astype(np.int32), counts)

    def _batches_of(self, pass_: int) -> tuple[np.ndarray, np.ndarray]:
        """All batches of a pass: samples (batches, batch size), and their numbers of valid ones."""
        order = self._pass_order(pass_)
        bucket_at = self.buckets[order]
        rows, counts, complete_at = [], [], []
        for bucket in range(int(self.buckets.max()) + 1):
            waiting = np.flatnonzero(bucket_at == bucket)
            whole = len(waiting) // self.batch_size * self.batch_size
            full, rest = waiting[:whole].reshape(-1, self.batch_size), waiting[whole:]
            rows.append(full)
            counts.append(np.full(len(full), self.batch_size))
            complete_at.append(full[:, -1])
            if len(rest) and not self.drop_remainder:
                padding = np.repeat(rest[:1], self.batch_size - len(rest))
                rows.append(np.concatenate([rest, padding])[None])
                counts.append(np.array([len(rest)]))
                complete_at.append(np.array([self.samples + bucket]))
        by_time = np.argsort(np.concatenate(complete_at))
        return order[np.concatenate(rows)[by_time]], np.concatenate(counts)[by_time]
