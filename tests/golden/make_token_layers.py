"""Results and gradients of layers of transformers that mix tokens, written to token_layers.npz.

    python tests/golden/make_token_layers.py   with torch 2.13.0 (CPU) and transformers 5.23.0

The block of experts of Qwen3-MoE with its balance loss, which is summed over the chosen experts
there, and the mixer of Mamba-2, which computes in chunks. Each case has an input
`x`, the parameters by their names there, the result `y`, and the gradient `d_<name>` of the sum of
y * cos(y's positions).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "token_layers.npz"
FEATURES, EXPERTS, HIDDEN, TOP = 6, 5, 4, 2
MAMBA = {"state": 5, "head": 4, "heads": 3, "groups": 1, "kernel": 4, "chunk": 4}


def _run(name: str, module: Any, x: Any, arrays: dict[str, np.ndarray]) -> None:
    import torch

    y = module(x)
    weights = torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape)
    (y * weights).sum().backward()
    arrays[f"{name}/x"], arrays[f"{name}/y"] = x.detach().numpy(), y.detach().numpy()
    arrays[f"{name}/d_x"] = x.grad.numpy()
    for key, parameter in module.named_parameters():
        arrays[f"{name}/{key}"] = parameter.detach().numpy()
        arrays[f"{name}/d_{key}"] = parameter.grad.numpy()


def make_cases() -> dict[str, np.ndarray]:
    import torch
    from transformers import Mamba2Config, Qwen3MoeConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    torch.manual_seed(5)
    arrays: dict[str, np.ndarray] = {}
    config = Qwen3MoeConfig(
        hidden_size=FEATURES,
        moe_intermediate_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        norm_topk_prob=True,
        experts_implementation="eager",
    )
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape)
    x = torch.randn(2, 7, FEATURES, requires_grad=True)
    _run("experts", block, x, arrays)
    logits = x.detach() @ block.gate.weight.detach().T
    balance = [
        modeling_qwen3_moe.load_balancing_loss_func((sample,), EXPERTS, TOP) for sample in logits
    ]
    arrays["experts/balance"] = torch.stack(balance).numpy()

    size = MAMBA["head"] * MAMBA["heads"]
    mixer = Mamba2Mixer(
        Mamba2Config(
            hidden_size=FEATURES,
            expand=size // FEATURES,
            state_size=MAMBA["state"],
            head_dim=MAMBA["head"],
            num_heads=MAMBA["heads"],
            n_groups=MAMBA["groups"],
            conv_kernel=MAMBA["kernel"],
            chunk_size=MAMBA["chunk"],
            use_bias=False,
        ),
        layer_idx=0,
    )
    for parameter in mixer.parameters():
        parameter.data = parameter.data * 0 + 0.5 * torch.randn(parameter.shape)
    x = torch.randn(2, 10, FEATURES, requires_grad=True)
    _run("mamba2", mixer, x, arrays)
    return arrays


if __name__ == "__main__":
    np.savez_compressed(FILE, **make_cases())
