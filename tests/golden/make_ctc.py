"""CTC losses and gradients of PyTorch, written to ctc.npz.

    python tests/golden/make_ctc.py   with torch 2.13.0 (CPU)

Logits of four samples over ten positions and four classes, of which 0 is the blank, and labels
filled with it: with a repetition, empty, the longest that fits, and one that doesn't fit. `losses`
are divided by the number of symbols, `gradients` are of their mean.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "ctc.npz"
LABELS = np.array(
    [
        [1, 1, 2, 3, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 2, 2, 2, 3, 3, 1],
        [1, 1, 1, 1, 1, 1, 0],
    ]
)


def make_case() -> dict[str, np.ndarray]:
    import torch
    from torch.nn.functional import ctc_loss, log_softmax

    torch.manual_seed(2)
    logits = torch.randn(len(LABELS), 10, 4, requires_grad=True)
    lengths = torch.tensor((LABELS > 0).sum(axis=1))
    losses = ctc_loss(
        log_softmax(logits, -1).transpose(0, 1),
        torch.tensor(LABELS),
        torch.full((len(LABELS),), logits.shape[1]),
        lengths,
        reduction="none",
        zero_infinity=True,
    ) / lengths.clamp(min=1)
    losses.mean().backward()
    return {
        "logits": logits.detach().numpy(),
        "losses": losses.detach().numpy(),
        "gradients": logits.grad.numpy(),
    }


if __name__ == "__main__":
    np.savez_compressed(FILE, **make_case())
