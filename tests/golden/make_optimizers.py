"""Writes optimizers.json: twelve steps of optimizers of PyTorch and MindSpore, in float32.

    python tests/golden/make_optimizers.py        with mindspore 2.10.0 and torch 2.13.0 (CPU)

Both start from `START` and follow the gradient sin(3 p) + 0.2.
"""

from __future__ import annotations

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import torch
from mindspore import nn

LR, STEPS = 0.05, 12
START = np.linspace(-1.5, 1.7, 9).astype(np.float32)


def train_torch(kind: type[torch.optim.Optimizer], **settings: object) -> list[list[float]]:
    """The parameters after each step."""
    p = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = kind([p], lr=LR, **settings)
    weights = []
    for _ in range(STEPS):
        p.grad = torch.sin(3 * p.detach()) + 0.2
        optimizer.step()
        weights.append(p.detach().numpy().astype(float).round(7).tolist())
    return weights


def train_mindspore(kind: type[nn.Optimizer], **settings: object) -> list[list[float]]:
    """The parameters after each step."""
    p = ms.Parameter(ms.Tensor(START.copy()), name="p")
    optimizer = kind([p], learning_rate=LR, **settings)
    weights = []
    for _ in range(STEPS):
        optimizer((ms.ops.sin(3 * p) + 0.2,))
        weights.append(p.asnumpy().astype(float).round(7).tolist())
    return weights


def main() -> None:
    """Both, under the names of the test."""
    optim = torch.optim
    decay = {"weight_decay": 0.1}
    trajectories = {
        "torch momentum": train_torch(optim.SGD, momentum=0.9, **decay),
        "torch nesterov": train_torch(optim.SGD, momentum=0.9, nesterov=True, **decay),
        "torch adam": train_torch(optim.Adam, betas=(0.9, 0.8), eps=1e-4, **decay),
        "torch adamw": train_torch(optim.AdamW, betas=(0.9, 0.8), eps=1e-4, **decay),
        "torch radam": train_torch(optim.RAdam, betas=(0.9, 0.8), eps=1e-8, **decay),
        "torch adamax": train_torch(optim.Adamax, betas=(0.9, 0.8), eps=1e-4, **decay),
        "mindspore momentum": train_mindspore(nn.Momentum, momentum=0.9, **decay),
        "mindspore adamax": train_mindspore(nn.AdaMax, beta1=0.9, beta2=0.8, eps=1e-8, **decay),
        "mindspore adagrad": train_mindspore(nn.Adagrad, accum=0.1, **decay),
        "mindspore rmsprop": train_mindspore(
            nn.RMSProp, decay=0.8, momentum=0.5, epsilon=1e-4, centered=False, **decay
        ),
        "mindspore rmsprop centered": train_mindspore(
            nn.RMSProp, decay=0.8, momentum=0.5, epsilon=1e-4, centered=True, **decay
        ),
    }
    file = Path(__file__).parent / "optimizers.json"
    lines = (f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in trajectories.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
