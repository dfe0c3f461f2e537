"""Layers of PyTorch: adaptive pools, convolutions of 1 and 3 dimensions, a grouped transposed
convolution, LSTM and GRU, written to layers.npz.

    python tests/golden/make_layers.py            with torch 2.13.0 (CPU)

Each case has inputs `x`, the parameters by PyTorch's names, the result `y`, and the gradient `dx`
of the sum of y * cos(y's positions) with respect to the inputs, in PyTorch's order of axes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "layers.npz"
SIZES = {"even": (2, 3), "uneven": (5, 4), "more": (7, 11), "one": (1, 1)}


def make_cases() -> dict[str, np.ndarray]:
    import torch
    from torch import nn

    torch.manual_seed(11)
    images = torch.randn(2, 3, 8, 9)
    tokens = torch.randn(3, 7, 5)
    cases = {
        **{f"adaptive_avg_pool/{n}": (nn.AdaptiveAvgPool2d(s), images) for n, s in SIZES.items()},
        **{f"adaptive_max_pool/{n}": (nn.AdaptiveMaxPool2d(s), images) for n, s in SIZES.items()},
        "conv1d/plain": (nn.Conv1d(6, 4, 3, padding=1), torch.randn(2, 6, 10)),
        "conv1d/strided": (nn.Conv1d(6, 4, 4, 2, 3, 2, 2), torch.randn(2, 6, 13)),
        "conv3d/plain": (nn.Conv3d(2, 4, 3, padding=1), torch.randn(2, 2, 4, 5, 6)),
        "conv3d/strided": (
            nn.Conv3d(4, 6, (2, 3, 1), (1, 2, 2), groups=2, bias=False),
            torch.randn(2, 4, 4, 7, 6),
        ),
        "conv_transpose/grouped": (
            nn.ConvTranspose2d(4, 6, 3, 2, groups=2),
            torch.randn(2, 4, 3, 4),
        ),
        "conv_transpose/depthwise": (
            nn.ConvTranspose2d(4, 4, 2, 2, groups=4),
            images[:, :1].repeat(1, 4, 1, 1),
        ),
        "lstm/plain": (nn.LSTM(5, 4, batch_first=True), tokens),
        "lstm/bidirectional": (nn.LSTM(5, 3, batch_first=True, bidirectional=True), tokens),
        "gru/plain": (nn.GRU(5, 4, batch_first=True), tokens),
        "gru/bidirectional": (nn.GRU(5, 3, batch_first=True, bidirectional=True), tokens),
        "lstm/without_bias": (nn.LSTM(5, 4, batch_first=True, bias=False), tokens),
    }
    arrays = {}
    for name, (module, values) in cases.items():
        x = values.clone().requires_grad_()
        result = module(x)
        y = result[0] if isinstance(result, tuple) else result
        weights = torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape)
        (y * weights).sum().backward()
        arrays[f"{name}/x"] = x.detach().numpy()
        arrays[f"{name}/y"] = y.detach().numpy()
        arrays[f"{name}/dx"] = x.grad.numpy()
        for key, parameter in module.named_parameters():
            arrays[f"{name}/{key}"] = parameter.detach().numpy()
            arrays[f"{name}/d_{key}"] = parameter.grad.numpy()
        if isinstance(result, tuple):
            state = result[1][0] if isinstance(result[1], tuple) else result[1]
            arrays[f"{name}/last"] = np.concatenate(list(state.detach().numpy()), -1)
    return arrays


if __name__ == "__main__":
    np.savez_compressed(FILE, **make_cases())
