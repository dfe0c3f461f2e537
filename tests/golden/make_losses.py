"""Losses over labels that are left out and over the hardest samples, written to losses/.

    python tests/golden/make_losses.py            with mindspore 2.10.0 and torch 2.13.0 (CPU)

Inputs come from `cases`, which the test calls too, so that the files hold results alone: losses
and gradients by PyTorch, and the losses that MindSpore gives for the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "losses"
CLASSES = 5
SHARE = 0.7
SHAPES = {"image": (), "tokens": (6,), "pixels": (3, 4)}
SMOOTHINGS = {"plain": 0.0, "smoothed": 0.1}
IGNORED = {"image": -100, "tokens": -100, "pixels": 255}


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Logits (B, ..., C) float32 and labels (B, ...) int64, a third of them left out."""
    rng = np.random.default_rng(9)
    made = {}
    for name, shape in SHAPES.items():
        logits = 2 * rng.standard_normal((10, *shape, CLASSES)).astype(np.float32)
        labels = rng.integers(0, CLASSES, (10, *shape))
        made[name] = logits, np.where(rng.random(labels.shape) < 1 / 3, IGNORED[name], labels)
    return made


def main() -> None:
    """Ask both for every case."""
    import mindspore
    import torch

    losses: dict[str, dict[str, float]] = {"torch": {}, "mindspore": {}}
    gradients = {}
    for name, (logits, labels) in cases().items():
        for kind, smoothing in SMOOTHINGS.items():
            case, options = f"{name}_{kind}", (IGNORED[name], smoothing)
            losses["torch"][case], gradients[case] = torch_loss(logits, labels, *options)
            losses["mindspore"][case] = mindspore_loss(logits, labels, *options)
    logits, labels = cases()["image"]
    labels = labels % CLASSES
    losses["torch"]["hardest"], gradients["hardest"] = torch_hardest(logits, labels)
    losses["mindspore"]["hardest"] = mindspore_hardest(logits, labels)
    versions = {"torch": torch.__version__, "mindspore": mindspore.__version__}
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"versions": versions, "losses": losses}, indent=1)
    (FOLDER / "losses.json").write_text(text + "\n")
    np.savez_compressed(FOLDER / "gradients.npz", **gradients)


def torch_loss(
    values: np.ndarray, labels: np.ndarray, ignored: int, smoothing: float
) -> tuple[float, np.ndarray]:
    """PyTorch's loss and its gradient."""
    import torch
    from torch.nn import functional

    logits = torch.tensor(values, requires_grad=True)
    loss = functional.cross_entropy(
        logits.movedim(-1, 1),
        torch.tensor(labels),
        ignore_index=ignored,
        label_smoothing=smoothing,
    )
    loss.backward()
    return loss.item(), logits.grad.numpy()


def mindspore_loss(logits: np.ndarray, labels: np.ndarray, ignored: int, smoothing: float) -> float:
    """The loss that MindSpore gives for the same."""
    import mindspore

    loss = mindspore.ops.cross_entropy(
        mindspore.Tensor(np.moveaxis(logits, -1, 1).copy()),
        mindspore.Tensor(labels.astype(np.int32)),
        ignore_index=ignored,
        label_smoothing=smoothing,
    )
    return float(loss.asnumpy())


def torch_hardest(values: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean of the largest losses, and its gradient."""
    import torch
    from torch.nn import functional

    logits = torch.tensor(values, requires_grad=True)
    sample_losses = functional.cross_entropy(logits, torch.tensor(labels), reduction="none")
    loss = torch.topk(sample_losses, int(SHARE * len(sample_losses))).values.mean()
    loss.backward()
    return loss.item(), logits.grad.numpy()


def mindspore_hardest(logits: np.ndarray, labels: np.ndarray) -> float:
    """The same by a mask of what is at least the smallest of the largest losses."""
    import mindspore

    sample_losses = mindspore.ops.cross_entropy(
        mindspore.Tensor(logits), mindspore.Tensor(labels.astype(np.int32)), reduction="none"
    )
    least = sample_losses.sort(descending=True)[0][int(SHARE * len(sample_losses)) - 1]
    mask = (sample_losses >= least).astype(mindspore.float32)
    return float(((sample_losses * mask).sum() / mask.sum()).asnumpy())


if __name__ == "__main__":
    main()
