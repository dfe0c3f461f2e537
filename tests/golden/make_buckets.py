"""Which samples MindSpore batches together by length, written to buckets/mindspore.json.

    python tests/golden/make_buckets.py           with mindspore 2.10.0

A sample is its own number, from 1, repeated as often as it is long; padding is 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore
import mindspore.dataset as ds
import numpy as np

FILE = Path(__file__).parent / "buckets" / "mindspore.json"
BUCKETS = (3, 5, 8)


def read(lengths: list[int], batch_size: int, drop_remainder: bool) -> list[list[list[int]]]:
    """The batches of one reading, padded to their bucket."""

    def samples() -> Iterator[tuple[np.ndarray]]:
        for number, length in enumerate(lengths, start=1):
            yield (np.full(length, number, np.int32),)

    data = ds.GeneratorDataset(samples, ["tokens"], shuffle=False)
    # A boundary is the first length that is too long; the bucket behind the last stays empty.
    data = data.bucket_batch_by_length(
        ["tokens"],
        [bucket + 1 for bucket in BUCKETS],
        [batch_size] * (len(BUCKETS) + 1),
        pad_info={"tokens": ([None], 0)},
        pad_to_bucket_boundary=True,
        drop_remainder=drop_remainder,
    )
    rows = data.create_dict_iterator(num_epochs=1, output_numpy=True)
    return [row["tokens"].tolist() for row in rows]


def main() -> None:
    """Ask MindSpore for every case."""
    rng = np.random.default_rng(18)
    cases: list[dict[str, Any]] = []
    for samples, batch_size in ((12, 2), (23, 3), (10, 3), (31, 4)):
        lengths = [*BUCKETS, *rng.integers(1, BUCKETS[-1] + 1, samples - len(BUCKETS)).tolist()]
        for drop_remainder in (True, False):
            batches = read(lengths, batch_size, drop_remainder)
            case = {"lengths": lengths, "batch_size": batch_size, "drop_remainder": drop_remainder}
            cases.append({**case, "batches": batches})
    golden = {"mindspore": mindspore.__version__, "buckets": BUCKETS, "cases": cases}
    FILE.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
