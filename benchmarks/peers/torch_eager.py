"""PyTorch, eagerly: forward, backward and optimizer call by call, as most training loops are.

Timed is, per step: a slice of the normalised images in memory, zero_grad, forward (under autocast
for bf16), backward, SGD. Losses are left on the device until the round ends. With `device=gpu`
images and network lie on the GPU, and a round ends when it has done all of it.

A strided convolution pads both sides alike, as PyTorch networks do; our `same` puts the odd row
behind. It is the same work, but other losses, so the steps that prove that all train the same pad
as ours do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, singledispatch

import numpy as np
import torch
from torch import nn

from benchmarks.contestant import PROOF_STEPS, Result
from benchmarks.tasks import (
    Task,
    load_batches,
    load_weights,
    named_layers,
    rows_channel_first,
    window_of,
)
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec

Weights = dict[str, np.ndarray]
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def enter(task: Task) -> TorchTraining:
    """Eager PyTorch."""
    return TorchTraining(task, compiled=False)


class TorchTraining:
    """A training loop, the network and loss of which may be compiled."""

    def __init__(self, task: Task, *, compiled: bool) -> None:
        torch.set_num_threads(task.threads)
        self._device = _device(task)
        batches = load_batches(task)
        # A slice in channel-first order has the strides of channels_last.
        images = torch.from_numpy(batches.images).to(self._device)
        self._images = images.permute(0, 1, 4, 2, 3)
        self._labels = torch.from_numpy(batches.labels).long().to(self._device)
        network = _Stack(task.layers, load_weights(task), channels=self._images.shape[2])
        self._network = network.to(self._device, memory_format=torch.channels_last)
        self._forward = torch.compile(self._loss) if compiled else self._loss
        self._bf16 = task.precision == "bf16"
        self._optimizer = torch.optim.SGD(
            network.parameters(),
            lr=task.optimizer.lr,
            momentum=task.optimizer.momentum,
            nesterov=task.optimizer.nesterov,
            weight_decay=task.optimizer.weight_decay,
            fused=True,
        )
        self._step = 0
        self.sizes = tuple(sorted(p.numel() for p in network.parameters()))

    def _loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self._network(images), labels)

    def run(self, steps: int) -> Result:
        """Train so many steps more."""
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
            # The last update, too, is part of the round.
            torch.cuda.synchronize()
        return Result(mean)


def _device(task: Task) -> torch.device:
    """The GPU where ours has it, with the products that XLA's default precision allows: TF32."""
    if not task.on_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch sees no GPU; device=gpu needs a build with CUDA")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda")


class _Stack(nn.Sequential):
    """Layers one after the other, with their weights; `features` come out of the last."""

    def __init__(
        self, stack: tuple[LayerSpec, ...], weights: Weights, channels: int, scope: str = ""
    ) -> None:
        modules = []
        for path, layer in named_layers(stack, scope):
            module = _module(layer, path, weights, channels)
            channels = getattr(module, "features", channels)
            modules.append(module)
        super().__init__(*modules)
        self.features = channels


class _Residual(nn.Module):
    def __init__(
        self, layer: standard.Residual, path: str, weights: Weights, channels: int
    ) -> None:
        super().__init__()
        self.body = _Stack(layer.body, weights, channels, path)
        self.shortcut = _Stack(layer.shortcut, weights, channels, f"{path}/shortcut")
        self.features = self.body.features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.shortcut(x)


class _GlobalAvgPool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@singledispatch
def _module(layer: LayerSpec, path: str, weights: Weights, channels: int) -> nn.Module:
    raise TypeError(f"{path}: the PyTorch peer has no layer {layer.name}")


@_module.register
def _(layer: standard.Conv, path: str, weights: Weights, channels: int) -> nn.Module:
    kernel = torch.from_numpy(weights[f"{path}/kernel"]).permute(3, 2, 0, 1)
    size, stride, padding = window_of(layer)
    both = size // 2 if padding == "same" else 0
    module = nn.Conv2d(channels, len(kernel), size, stride, both, bias=False)
    _put(module.weight, kernel)
    module.features = len(kernel)
    return module


@_module.register
def _(layer: standard.Dense, path: str, weights: Weights, channels: int) -> nn.Module:
    kernel = weights[f"{path}/kernel"]
    # Behind a flattened image there are more rows than channels.
    rows = torch.from_numpy(rows_channel_first(kernel, channels))
    module = nn.Linear(*kernel.shape)
    _put(module.weight, rows.T)
    _put(module.bias, torch.from_numpy(weights[f"{path}/bias"]))
    module.features = module.out_features
    return module


@_module.register
def _(layer: standard.BatchNorm, path: str, weights: Weights, channels: int) -> nn.Module:
    module = nn.BatchNorm2d(channels, eps=layer.epsilon, momentum=1 - layer.momentum)
    _put(module.weight, torch.from_numpy(weights[f"{path}/scale"]))
    _put(module.bias, torch.from_numpy(weights[f"{path}/bias"]))
    return module


@_module.register
def _(layer: standard.MaxPool, path: str, weights: Weights, channels: int) -> nn.Module:
    size, stride, padding = window_of(layer)
    return nn.MaxPool2d(size, stride, size // 2 if padding == "same" else 0)


@_module.register
def _(layer: standard.Residual, path: str, weights: Weights, channels: int) -> nn.Module:
    return _Residual(layer, path, weights, channels)


@_module.register
def _(layer: standard.Relu, path: str, weights: Weights, channels: int) -> nn.Module:
    return nn.ReLU(inplace=True)


@_module.register
def _(layer: standard.Flatten, path: str, weights: Weights, channels: int) -> nn.Module:
    return nn.Flatten()


@_module.register
def _(layer: standard.GlobalAvgPool, path: str, weights: Weights, channels: int) -> nn.Module:
    return _GlobalAvgPool()


@contextmanager
def _same_padding(network: nn.Module) -> Iterator[None]:
    """Meanwhile, strided layers pad as `same` does."""
    strided = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.MaxPool2d)]
    for module in strided:
        module.forward = partial(_padded, module)
    try:
        yield
    finally:
        for module in strided:
            del module.forward


def _padded(module: nn.Conv2d | nn.MaxPool2d, x: torch.Tensor) -> torch.Tensor:
    """A layer with its padding as we have it: ceil(size / stride) positions, the odd row behind."""
    convolves = isinstance(module, nn.Conv2d)
    kernel, stride, padding = (
        size[0] if isinstance(size, tuple) else size
        for size in (module.kernel_size, module.stride, module.padding)
    )
    if padding:
        size = x.shape[-1]
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads = 2 * (total // 2, total - total // 2)
        x = nn.functional.pad(x, pads, value=0.0 if convolves else -torch.inf)
    if convolves:
        return nn.functional.conv2d(x, module.weight, None, stride)
    return nn.functional.max_pool2d(x, kernel, stride)


def _put(parameter: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)
