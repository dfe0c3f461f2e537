"""Writes adapters.npz: fine-tunings by low-rank adapters in PyTorch, by the papers' formulas.

    python tests/golden/make_adapters.py        with torch 2.13.0 (CPU)

Two dense layers with a ReLU between them, whose weights W (out, in) and biases are frozen. LoRA
replaces W by W + alpha / rank * B A (arXiv 2106.09685, section 4.1); DoRA by m V / |V|, in which V
is that sum, |V| the norm of each row, which has no gradient, and m begins with |W| (arXiv
2402.09353, equations 5 and 11). All is trained by SGD with momentum. Arrays have this project's
order of axes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

FILE = Path(__file__).parent / "adapters.npz"
BATCH, INPUTS, HIDDEN, CLASSES, STEPS, RANK, ALPHA = 4, 4, 5, 3, 6, 2, 3.0
RATE, MOMENTUM = 0.1, 0.9
SIZES = {"Dense_0": (HIDDEN, INPUTS), "Dense_1": (CLASSES, HIDDEN)}


def train(
    start: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor, *, dora: bool
) -> dict[str, np.ndarray]:
    """Losses, and the adapters at the end."""
    a = {name: start[f"{name} A"].clone().requires_grad_() for name in SIZES}
    b = {name: torch.zeros(size[0], RANK).requires_grad_() for name, size in SIZES.items()}
    lengths = {name: start[f"{name} W"].norm(dim=1) for name in SIZES}
    m = {name: lengths[name].clone().requires_grad_() for name in SIZES}
    trained = [*a.values(), *b.values(), *(m.values() if dora else ())]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = start[f"{name} W"] + ALPHA / RANK * b[name] @ a[name]
        if dora:
            weight = (m[name] / weight.norm(dim=1).detach())[:, None] * weight
        return functional.linear(x, weight, start[f"{name} bias"])

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = multiply("Dense_1", functional.relu(multiply("Dense_0", images[step])))
        loss = functional.cross_entropy(logits, labels[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results = {"losses": np.array(losses)}
    for name in SIZES:
        results[f"{name} lora_down"] = a[name].detach().numpy().T
        results[f"{name} lora_up"] = b[name].detach().numpy().T
        results[f"{name} lora_magnitude"] = (m[name] - lengths[name]).detach().numpy()
    return results


def main() -> None:
    """Write the file."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (STEPS, BATCH, 2, 2, 1), np.uint8)
    labels = random.integers(0, CLASSES, (STEPS, BATCH))
    torch.manual_seed(0)
    start = {}
    for name, (outputs, inputs) in SIZES.items():
        start[f"{name} W"] = torch.randn(outputs, inputs)
        start[f"{name} bias"] = 0.1 * torch.randn(outputs)
        start[f"{name} A"] = (2 * torch.rand(RANK, inputs) - 1) / inputs**0.5
    results: dict[str, np.ndarray] = {"images": images, "labels": labels.astype(np.int32)}
    results |= {f"start {name}": tensor.numpy().T for name, tensor in start.items()}
    flat = torch.from_numpy((images.reshape(STEPS, BATCH, INPUTS) / 255).astype(np.float32))
    for name, dora in {"lora": False, "dora": True}.items():
        found = train(start, flat, torch.from_numpy(labels), dora=dora)
        results |= {f"{name} {key}": array for key, array in found.items()}
    np.savez_compressed(FILE, **results)


if __name__ == "__main__":
    main()
