"""Writes torch_graphs/: small networks as graphs, and what PyTorch computes with them.

    python tests/golden/make_torch_graphs.py        with torch 2.13.0 (CPU) and this project

For each network: its graph and initial arrays; and in `<name>.npz` images NCHW, logits in
evaluation, and of one step in training with cross entropy and nothing random: the loss, the
gradient of every parameter, and the buffers that it leaves, under PyTorch's names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeline.models.torch_graph.computation.graph_file import SUFFIX, write_graph
from pipeline.models.torch_graph.conversion.export_module import export_module

FOLDER = Path(__file__).parent / "torch_graphs"
CLASSES, BATCH = 3, 4


class Residual(nn.Module):
    """A basic block, which adds in place, between a stem with max pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8, momentum=0.2)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(self.relu(self.bn(self.stem(x))))
        y = self.bn1(self.conv1(x))
        y += self.down(x)
        y = self.relu(y)
        return self.fc(functional.adaptive_avg_pool2d(y, 1).flatten(1))


class Mobile(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard swish, and a block that is dropped."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.depthwise = nn.Conv2d(8, 8, 5, 1, 2, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.hardswish, self.gate = nn.Hardswish(inplace=True), nn.Hardsigmoid()
        self.head = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.hardswish(self.stem(x))
        y = functional.silu(self.depthwise(x), inplace=True)
        scale = functional.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = y * self.gate(self.excite(scale))
        if self.training and self.p:
            noise = torch.empty([x.shape[0], 1, 1, 1]).bernoulli_(1 - self.p)
            y = y * noise.div_(1 - self.p)
        return self.head((x + y).mean([2, 3]))


class Shuffle(nn.Module):
    """Channels that are split, shuffled and joined, average pooling, and a flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding="same")
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU6())
        self.fc = nn.Linear(8 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = functional.avg_pool2d(self.stem(x), 3, 2, padding=1, ceil_mode=True)
        one, other = x.chunk(2, 1)
        x = torch.cat([one, self.branch(other)], 1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        x = functional.max_pool2d(x.view(batch, channels, height, width), 2, ceil_mode=True)
        x = functional.adaptive_avg_pool2d(x, (3, 3))
        return self.fc(torch.flatten(x, 1))


class Patches(nn.Module):
    """Patches as tokens after a class token, one block of attention, and layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 10, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8, eps=1e-6), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.position
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.scale * self.mlp(self.norm2(x))
        return self.head(x[:, 0])


class Windows(nn.Module):
    """Attention in shifted windows: rolls, a mask that is made in place, a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 3, 3)
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(9, 2) * 0.1)
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij"))
        flat = places.flatten(1)
        apart = (flat[:, :, None] - flat[:, None, :] + 1).permute(1, 2, 0)
        self.register_buffer("places", (apart[..., 0] * 3 + apart[..., 1]).flatten())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.norm(self.patch(x).permute(0, 2, 3, 1))
        batch = x.shape[0]
        mask = x.new_zeros((4, 4))
        mask[:-1, -1:] = 1
        mask[-1:, :-1] = 2
        mask[-1:, -1:] = 3
        regions = mask.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)
        apart = (regions[:, None] - regions[:, :, None]).ne(0)
        bias = torch.zeros(4, 4, 4).masked_fill(apart, -100.0)
        y = torch.roll(x, (-1, -1), (1, 2)).view(batch, 2, 2, 2, 2, 8)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch * 4, 4, 8)
        q, k, v = self.qkv(y).reshape(batch * 4, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (q * 0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.places].view(4, 4, 2).permute(2, 0, 1)
        scores = scores.view(batch, 4, 2, 4, 4) + bias[None, :, None]
        y = functional.softmax(scores.view(-1, 2, 4, 4), -1) @ v
        y = self.out(y.transpose(1, 2).reshape(batch * 4, 4, 8))
        y = y.view(batch, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(batch, 4, 4, 8)
        x = x + torch.roll(y, (1, 1), (1, 2))
        return self.head(x.mean((1, 2)))


class Recurrent(nn.Module):
    """A two-layer LSTM in both directions, and a GRU on top."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 4, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 4, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y, _ = self.lstm(x.mean(1))
        _, last = self.gru(y.transpose(0, 1))
        return self.head(last[0])


class Encoder(nn.Module):
    """torch.nn.TransformerEncoderLayer on the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.encoder(x[:, 0]).mean(1))


class Buffers(nn.Module):
    """A running mean of its own, a frozen weight, a transposed convolution, and norms of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, dilation=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 3, 2, padding=1, output_padding=1, groups=2)
        self.last = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, CLASSES)
        self.register_buffer("seen", torch.zeros(4))
        self.fc.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.up(functional.leaky_relu(self.norm(self.conv(x)), 0.1))
        y = y.amax((2, 3)).clamp(-2, 2) + y.var((2, 3)).sqrt()
        if self.training:
            self.seen.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return self.fc(self.last(y) - self.seen)


class TwoConvs(nn.Module):
    """Two convolutions with max pooling, and a dense layer, as `imported_networks.TwoConvs`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 3 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for conv in (self.first, self.second):
            x = functional.max_pool2d(torch.relu(conv(x)), 2)
        return self.fc(x.flatten(1))


FunctionCtx = torch.autograd.function.FunctionCtx


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is reversed and clipped."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: float) -> Tensor:
        """The same values."""
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, None]:
        """The gradient, times a negative number."""
        return (-ctx.scale * g).clamp_(-0.02, 0.02), None


class Round(torch.autograd.Function):
    """Rounded numbers with the gradient of numbers inside of a range, and which are outside."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers, and a mask."""
        return torch.round(x * scale) / scale, (x.abs() > 0.3).float()

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]
    ) -> None:
        """Keep the mask."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of both inputs."""
        x, outside = ctx.saved_tensors
        return g * (1 - outside), (g * x).sum(0, keepdim=True) if ctx.needs_input_grad[1] else None


class Custom(nn.Module):
    """Custom backward passes: of activations, of a rounded weight, and values without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.full((1, 8), 8.0))
        self.hidden = nn.Linear(8, 8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = functional.silu(self.conv(x)).mean((2, 3))
        with torch.no_grad():
            largest = y.abs().amax(1, keepdim=True)
        weight, outside = Round.apply(self.hidden.weight, self.scale)
        y = functional.linear(Reverse.apply(y / largest, 0.5), weight * (1 + outside))
        return self.fc(y)


NETWORKS = (Residual, Mobile, Shuffle, Patches, Windows, Recurrent, Encoder, Buffers, Custom)


def main() -> None:
    """Write every network."""
    FOLDER.mkdir(exist_ok=True)
    for kind in NETWORKS:
        name = kind.__name__.lower()
        torch.manual_seed(3)
        module = kind()
        module.train()
        with torch.no_grad():
            module(torch.randn(BATCH, 3, 12, 12))
        graph = export_module(module, (3, 12, 12), origin=f"make_torch_graphs:{kind.__name__}")
        write_graph(FOLDER / f"{name}{SUFFIX}", graph)
        write_results(FOLDER / f"{name}.npz", module)
    torch.manual_seed(3)
    dropped = export_module(Mobile(p=0.5), (3, 12, 12), origin="make_torch_graphs:Mobile")
    write_graph(FOLDER / f"dropped{SUFFIX}", dropped)
    torch.manual_seed(3)
    convs = export_module(TwoConvs(), (3, 12, 12), origin="make_torch_graphs:TwoConvs")
    write_graph(FOLDER / f"twoconvs{SUFFIX}", convs)


def write_results(file: Path, module: nn.Module) -> None:
    """Write images, logits, and loss, gradients and buffers of a step."""
    images, labels = torch.randn(BATCH, 3, 12, 12), torch.arange(BATCH) % CLASSES
    with torch.no_grad():
        logits = module.eval()(images).numpy()
    loss = functional.cross_entropy(module.train()(images), labels)
    loss.backward()
    gradients = {
        f"gradient {name}": parameter.grad.numpy()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    buffers = {
        f"buffer {name}": buffer.numpy()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point()
    }
    np.savez_compressed(
        file, images=images.numpy(), logits=logits, loss=loss.item(), **gradients, **buffers
    )


if __name__ == "__main__":
    main()
