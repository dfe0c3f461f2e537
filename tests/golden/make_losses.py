"""Losses over labels that are left out and over the hardest samples, written to losses/.

    python tests/golden/make_losses.py            in an environment with torch and mindspore

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
    from torch.nn import functional

    losses: dict[str, dict[str, float]] = {"torch": {}, "mindspore": {}}
    gradients = {}
    for name, (values, labels) in cases().items():
        order = (0, values.ndim - 1, *range(1, values.ndim - 1))
        for kind, smoothing in SMOOTHINGS.items():
            logits = torch.tensor(values, requires_grad=True)
            options = {"ignore_index": IGNORED[name], "label_smoothing": smoothing}
            loss = functional.cross_entropy(logits.permute(order), torch.tensor(labels), **options)
            loss.backward()
            losses["torch"][f"{name}_{kind}"] = loss.item()
            gradients[f"{name}_{kind}"] = logits.grad.numpy()
            theirs = mindspore.ops.cross_entropy(
                mindspore.Tensor(values.transpose(order)),
                mindspore.Tensor(labels.astype(np.int32)),
                **options,
            )
            losses["mindspore"][f"{name}_{kind}"] = float(theirs.asnumpy())
    values, labels = cases()["image"]
    logits = torch.tensor(values, requires_grad=True)
    each = functional.cross_entropy(logits, torch.tensor(labels % CLASSES), reduction="none")
    loss = torch.topk(each, int(SHARE * len(each))).values.mean()
    loss.backward()
    losses["torch"]["hardest"], gradients["hardest"] = loss.item(), logits.grad.numpy()
    each = mindspore.ops.cross_entropy(
        mindspore.Tensor(values),
        mindspore.Tensor((labels % CLASSES).astype(np.int32)),
        reduction="none",
    )
    least = each.sort(descending=True)[0][int(SHARE * len(each)) - 1]
    mask = (each >= least).astype(mindspore.float32)
    losses["mindspore"]["hardest"] = float(((each * mask).sum() / mask.sum()).asnumpy())
    versions = {"torch": torch.__version__, "mindspore": mindspore.__version__}
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"versions": versions, "losses": losses}, indent=1)
    (FOLDER / "losses.json").write_text(text + "\n")
    np.savez_compressed(FOLDER / "gradients.npz", **gradients)


if __name__ == "__main__":
    main()
