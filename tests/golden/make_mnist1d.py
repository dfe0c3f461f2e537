"""Series of the package mnist1d 0.0.2.post1.

    pip install mnist1d==0.0.2.post1 && python -m tests.golden.make_mnist1d

writes mnist1d.npz: all labels, the first and last series, and sums of all series, of the package's
defaults.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mnist1d.data import get_dataset_args, make_dataset

GOLDEN = Path(__file__).with_name("mnist1d.npz")

if __name__ == "__main__":
    made = make_dataset(get_dataset_args())
    series = np.concatenate([made["x"], made["x_test"]])
    labels = np.concatenate([made["y"], made["y_test"]]).astype(np.uint8)
    ends = np.concatenate([series[:20], series[-20:]])
    np.savez_compressed(GOLDEN, ends=ends, label=labels, sums=series.sum(axis=1))
