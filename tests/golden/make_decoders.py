"""Logits and gradients of small decoders of transformers, written to decoders.npz.

    python tests/golden/make_decoders.py   with torch 2.13.0 (CPU) and transformers 5.23.0

Qwen3 has grouped queries with a norm, and a sliding window; Llama's rotary embeddings are scaled by
Llama 3.1's rule, or linearly with GELU in place of SiLU; Bloom has ALiBi, with six heads. Each case
has token ids `x` of two texts, the second with padding at its end, the parameters by their names
there, the logits `y`, and the gradient `d_<name>` of the sum of y * cos(y's positions) over tokens
that aren't padding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "decoders.npz"
LENGTHS = (9, 6)
VOCABULARY = 20


def make_cases() -> dict[str, np.ndarray]:
    import torch
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    configs = {
        "qwen3": transformers.Qwen3Config(
            **sizes,
            head_dim=4,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=3,
            layer_types=["sliding_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
        "llama3": transformers.LlamaConfig(
            **{**sizes, "num_attention_heads": 2, "num_key_value_heads": 1},
            rms_norm_eps=1e-5,
            rope_parameters=llama3,
        ),
        "linear": transformers.LlamaConfig(
            **sizes, rms_norm_eps=1e-5, hidden_act="gelu_pytorch_tanh", rope_parameters=linear
        ),
        "bloom": transformers.BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            n_layer=1,
            n_head=6,
            attn_implementation="eager",
            bos_token_id=None,
            eos_token_id=None,
        ),
    }
    torch.manual_seed(12)
    ids = torch.randint(VOCABULARY, (2, max(LENGTHS)))
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    arrays = {}
    for name, config in configs.items():
        network = transformers.AutoModelForCausalLM.from_config(config).float()
        for parameter in network.parameters():
            parameter.data = parameter.data + 0.3 * torch.randn(parameter.shape)
        y = network(ids, attention_mask=mask.long(), use_cache=False).logits
        weights = torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape)
        (y * weights * mask[..., None]).sum().backward()
        arrays[f"{name}/x"] = ids.numpy().astype(np.int32)
        arrays[f"{name}/y"] = y.detach().numpy()
        for key, parameter in network.named_parameters():
            arrays[f"{name}/{key}"] = parameter.detach().numpy()
            arrays[f"{name}/d_{key}"] = parameter.grad.numpy()
    return arrays


if __name__ == "__main__":
    np.savez_compressed(FILE, **make_cases())
