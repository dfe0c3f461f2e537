"""Compute what MindSpore's batch norm makes of two training steps, and keep it in `networks/`.

    python tests/golden/make_batch_norm.py        with mindspore 2.10.0

The running statistics follow the batch's mean and its unbiased variance.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import mindspore as ms
import numpy as np

FILE = Path(__file__).parent / "networks" / "batch_norm.json"
SHAPE = (2, 3, 2, 4)
"""Batch, height, width, channels: 12 values a channel."""


def main() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    norm = ms.nn.BatchNorm2d(SHAPE[-1], eps=1e-5, momentum=0.9)
    norm.set_train()
    generator = np.random.default_rng(0)
    steps = []
    for _ in range(2):
        x = generator.normal(2, 3, SHAPE).astype(np.float32)
        y = norm(ms.Tensor(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))).asnumpy()
        steps.append(
            {
                "x": x.astype(float).tolist(),
                "y": y.transpose(0, 2, 3, 1).astype(float).tolist(),
                "mean": norm.moving_mean.asnumpy().astype(float).tolist(),
                "var": norm.moving_variance.asnumpy().astype(float).tolist(),
            }
        )
    result = {"definition": f"mindspore {version('mindspore')}, nn.BatchNorm2d", "steps": steps}
    FILE.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
