"""Which samples MindSpore gives to each shard, written to sharding/mindspore.json.

    python tests/golden/make_sharding.py          with mindspore 2.10.0

Samples tell their own index. NumpySlicesDataset holds it as its value; CIFAR-10's binary files are
made up, with the index in the first two pixels of each image.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import mindspore
import mindspore.dataset as ds
import numpy as np

FILE = Path(__file__).parent / "sharding" / "mindspore.json"
SEED = 4321
SIZES = [(12, 4), (12, 1), (13, 4), (14, 4), (15, 4), (10, 3), (7, 7), (3, 5), (1, 3)]
CIFAR_RECORDS, PIXELS, CIFAR_SHARDS = 10_000, 3072, 7


def rows_of(samples: int) -> np.ndarray:
    """Samples as rows of one value, int32 (samples, 1): scalars trip MindSpore on NumPy 2."""
    return np.arange(samples, dtype=np.int32)[:, np.newaxis]


def slices(samples: int, **options: Any) -> list[int]:
    """The samples of one reading, in order."""
    ds.config.set_seed(SEED)
    data = ds.NumpySlicesDataset(rows_of(samples), ["index"], **options)
    rows = data.create_dict_iterator(num_epochs=1, output_numpy=True)
    return [int(row["index"][0]) for row in rows]


def cifar(folder: str, shard: int) -> dict[str, Any]:
    """The same of CIFAR-10 files: how many there are, the first and the last."""
    ds.config.set_seed(SEED)
    data = ds.Cifar10Dataset(
        folder, usage="test", shuffle=False, num_shards=CIFAR_SHARDS, shard_id=shard
    )
    rows = data.create_dict_iterator(num_epochs=1, output_numpy=True)
    numbers = [int(row["image"][0, 0, 0]) * 256 + int(row["image"][0, 1, 0]) for row in rows]
    return {"samples": len(numbers), "first": numbers[:4], "last": numbers[-4:]}


def write_cifar(folder: str) -> None:
    """A test split, of 10,000 records as MindSpore asks for."""
    records = np.zeros((CIFAR_RECORDS, 1 + PIXELS), np.uint8)
    records[:, 1], records[:, 2] = np.divmod(np.arange(CIFAR_RECORDS), 256)
    records.tofile(Path(folder) / "test_batch.bin")


def whole(samples: int) -> list[int]:
    """The shuffled order that the shards are dealt from: that of a single shard."""
    return slices(samples, shuffle=True, num_shards=1, shard_id=0)


def read_windowed(samples: int, shards: int, shard: int, window: int) -> list[int]:
    """A shard, shuffled behind the reader as `shuffle(buffer_size)` does."""
    ds.config.set_seed(SEED)
    data = ds.NumpySlicesDataset(
        rows_of(samples),
        ["index"],
        shuffle=False,
        num_shards=shards,
        shard_id=shard,
    ).shuffle(window)
    rows = data.create_dict_iterator(num_epochs=1, output_numpy=True)
    return [int(row["index"][0]) for row in rows]


def main() -> None:
    """Ask MindSpore for every case."""
    in_order, shuffled, behind = [], [], []
    for samples, shards in SIZES:
        case = {"samples": samples, "num_shards": shards}
        shares = [
            slices(samples, shuffle=False, num_shards=shards, shard_id=i) for i in range(shards)
        ]
        in_order.append({**case, "shards": shares})
        shares = [
            slices(samples, shuffle=True, num_shards=shards, shard_id=i) for i in range(shards)
        ]
        shuffled.append({**case, "whole": whole(samples), "shards": shares})
        shares = [read_windowed(samples, shards, i, 3) for i in range(shards)]
        behind.append({**case, "buffer_size": 3, "shards": shares})
    with tempfile.TemporaryDirectory() as folder:
        write_cifar(folder)
        files = [cifar(folder, shard) for shard in range(CIFAR_SHARDS)]
    golden = {
        "mindspore": mindspore.__version__,
        "in_order": in_order,
        "shuffled": shuffled,
        "shuffled_behind_the_reader": behind,
        "cifar10": {"samples": CIFAR_RECORDS, "num_shards": CIFAR_SHARDS, "shards": files},
    }
    text = json.dumps(golden, indent=1)
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
