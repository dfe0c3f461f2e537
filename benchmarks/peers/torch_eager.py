"""Eager PyTorch: forward, backward and optimizer call by call, as in most training loops.

Timed is, per step: a slice of the normalised images in memory, zero_grad, forward (under autocast
for bf16), backward, SGD. Losses stay on the device until the round ends. With `device=gpu` images
and network are on the GPU, and a round ends when the GPU is done.

A strided convolution pads both sides alike, as in PyTorch networks; our `same` puts the odd row
last. The work is the same, but the losses differ, so the steps that are compared with ours pad as
ours do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from benchmarks.contestant import PROOF_STEPS, Result
from benchmarks.peers import torch_tokens as torch_tokens
from benchmarks.peers.torch_layers import Stack
from benchmarks.tasks import Task, load_batches, load_weights
from pipeline.training.optimizers.first_order import AdamW, Momentum

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def enter(task: Task) -> TorchTraining:
    """Make the training with eager PyTorch."""
    return TorchTraining(task, compiled=False)


class TorchTraining:
    """A training loop whose network and loss may be compiled."""

    def __init__(self, task: Task, *, compiled: bool) -> None:
        torch.set_num_threads(task.threads)
        self._device = _find_device(task)
        batches = load_batches(task)
        images = torch.from_numpy(batches.images).to(self._device)
        # A slice in channel-first order has the strides of channels_last.
        self._images = images if task.spec.reads_text else images.permute(0, 1, 4, 2, 3)
        self._labels = torch.from_numpy(batches.labels).long().to(self._device)
        network = Stack(task.layers, load_weights(task), channels=self._images.shape[2])
        self._network = network.to(self._device, memory_format=torch.channels_last)
        self._forward = torch.compile(self._loss) if compiled else self._loss
        self._bf16 = task.precision == "bf16"
        self._optimizer = _make_optimizer(task.optimizer, network)
        self._step = 0
        self.sizes = tuple(sorted(p.numel() for p in network.parameters()))

    def _loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self._network(images)
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def run(self, steps: int) -> Result:
        """Train `steps` more steps."""
        if self._step >= PROOF_STEPS:
            return self._run(steps, self._forward)
        with _same_padding(self._network):
            return self._run(steps, self._loss)

    def _run(self, steps: int, forward: Forward) -> Result:
        losses = []
        for _ in range(steps):
            position = self._step % len(self._labels)
            self._optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                loss = forward(self._images[position], self._labels[position])
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
            self._step += 1
        mean = float(torch.stack(losses).float().mean())
        if self._device.type == "cuda":
            # The last update is part of the round too.
            torch.cuda.synchronize()
        return Result(mean)


def _make_optimizer(settings: Momentum | AdamW, network: nn.Module) -> torch.optim.Optimizer:
    if isinstance(settings, AdamW):
        return torch.optim.AdamW(
            network.parameters(),
            lr=settings.lr,
            betas=(settings.b1, settings.b2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        network.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _find_device(task: Task) -> torch.device:
    """Return the GPU if ours uses it, with the products of XLA's default precision: TF32."""
    if not task.on_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch sees no GPU; device=gpu needs a build with CUDA")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda")


@contextmanager
def _same_padding(network: nn.Module) -> Iterator[None]:
    """Let layers with a padding pad as `same` does meanwhile."""
    windows = (m for m in network.modules() if isinstance(m, nn.Conv2d | nn.MaxPool2d))
    padded = [window for window in windows if window.padding not in (0, (0, 0))]
    for module in padded:
        module.forward = partial(_apply_padded, module)
    try:
        yield
    finally:
        for module in padded:
            del module.forward


def _apply_padded(module: nn.Conv2d | nn.MaxPool2d, x: torch.Tensor) -> torch.Tensor:
    """Apply a layer with our padding: ceil(size / stride) positions, the odd row last."""
    convolves = isinstance(module, nn.Conv2d)
    kernel, stride = (
        size[0] if isinstance(size, tuple) else size for size in (module.kernel_size, module.stride)
    )
    size = x.shape[-1]
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    pads = 2 * (total // 2, total - total // 2)
    x = nn.functional.pad(x, pads, value=0.0 if convolves else -torch.inf)
    if convolves:
        return nn.functional.conv2d(x, module.weight, None, stride)
    return nn.functional.max_pool2d(x, kernel, stride)
