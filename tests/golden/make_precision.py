"""What MindSpore's amp levels and loss scales do, written to precision/.

    python tests/golden/make_precision.py         with mindspore 2.10.0

levels.npz has, by level/cell, what a cell makes of one input in eval mode, NHWC, under
`amp.build_train_network`'s own conversion; and by level/net what a small network makes of it.
loss_scale.json has the scales that DynamicLossScaleUpdateCell goes through.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import amp

FOLDER = Path(__file__).parent / "precision"
RNG = np.random.default_rng(4)
IMAGES = RNG.normal(size=(2, 4, 4, 3)).astype(np.float32)
ROWS = RNG.normal(size=(4, 6)).astype(np.float32)
CONV = RNG.normal(size=(3, 3, 3, 5)).astype(np.float32)
TRANSPOSED = RNG.normal(size=(2, 2, 3, 5)).astype(np.float32)
DENSE = RNG.normal(size=(6, 5)).astype(np.float32)
BIAS = RNG.normal(size=5).astype(np.float32)
CHANNELS = {
    "scale": RNG.uniform(0.5, 2, 3).astype(np.float32),
    "bias": RNG.normal(size=3).astype(np.float32),
    "mean": RNG.normal(size=3).astype(np.float32),
    "var": RNG.uniform(0.5, 2, 3).astype(np.float32),
}
HEAD = RNG.normal(size=(80, 4)).astype(np.float32)
LEVELS = ("O0", "O1", "O2", "O3")
CASES = [(1024.0, 2.0, 3), (2.0, 2.0, 2), (65536.0, 4.0, 5), (100.0, 3.0, 1)]


class Wrapped(nn.Cell):
    """A network of one cell: levels look at the cells inside of a network."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.cell(x)


class Net(nn.Cell):
    """Convolution, batch norm, ReLU, the input of a residual, flatten, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = batch_norm()
        self.conv = conv(3)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten()
        self.head = nn.Dense(80, 4, weight_init=ms.Tensor(HEAD.T), has_bias=False)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        y = self.relu(self.conv(self.norm(x)))
        # As NHWC flattens.
        return self.head(self.flatten(y.transpose(0, 2, 3, 1)))


def conv(channels: int) -> nn.Cell:
    weight = ms.Tensor(CONV[:, :, :channels].transpose(3, 2, 0, 1))
    return nn.Conv2d(
        channels,
        5,
        3,
        pad_mode="same",
        has_bias=True,
        weight_init=weight,
        bias_init=ms.Tensor(BIAS),
    )


def batch_norm() -> nn.Cell:
    tensors = {name: ms.Tensor(values) for name, values in CHANNELS.items()}
    return nn.BatchNorm2d(
        3,
        gamma_init=tensors["scale"],
        beta_init=tensors["bias"],
        moving_mean_init=tensors["mean"],
        moving_var_init=tensors["var"],
    )


def cells() -> dict[str, tuple[nn.Cell, np.ndarray]]:
    """A cell of each kind, and what it reads."""
    return {
        "conv": (conv(3), IMAGES),
        "conv_transpose": (
            nn.Conv2dTranspose(
                3,
                5,
                2,
                stride=2,
                pad_mode="valid",
                weight_init=ms.Tensor(TRANSPOSED[::-1, ::-1].transpose(2, 3, 0, 1).copy()),
            ),
            IMAGES,
        ),
        "dense": (
            nn.Dense(6, 5, weight_init=ms.Tensor(DENSE.T), bias_init=ms.Tensor(BIAS)),
            ROWS,
        ),
        "relu": (nn.ReLU(), IMAGES),
        "relu6": (nn.ReLU6(), IMAGES),
        "sigmoid": (nn.Sigmoid(), IMAGES),
        "tanh": (nn.Tanh(), IMAGES),
        "gelu": (nn.GELU(), IMAGES),
        "max_pool": (nn.MaxPool2d(2, 2), IMAGES),
        "avg_pool": (nn.AvgPool2d(2, 2), IMAGES),
        "batch_norm": (batch_norm(), IMAGES),
        "layer_norm": (nn.LayerNorm((6,), epsilon=1e-5), ROWS),
        "group_norm": (nn.GroupNorm(1, 3, eps=1e-5), IMAGES),
    }


def convert_to_level(level: str, network: nn.Cell) -> nn.Cell:
    """The network as `build_train_network(..., level=level)` converts it."""
    config = dict(amp._config_level[level])
    return amp._auto_mixed_precision_process(network, config, level)


def evaluate(level: str, network: nn.Cell, values: np.ndarray) -> np.ndarray:
    """What it gives, as NHWC; the loss would read it in float32."""
    cell = convert_to_level(level, network).set_train(False)
    is_image = values.ndim == 4
    inputs = ms.Tensor(values.transpose(0, 3, 1, 2).copy() if is_image else values)
    result = cell(inputs).asnumpy().astype(np.float32)
    return result.transpose(0, 2, 3, 1) if result.ndim == 4 else result


def levels() -> dict[str, np.ndarray]:
    """Everything that levels.npz holds."""
    golden: dict[str, np.ndarray] = {
        "images": IMAGES,
        "rows": ROWS,
        "conv": CONV,
        "transposed": TRANSPOSED,
        "dense": DENSE,
        "bias": BIAS,
        "head": HEAD,
        **{f"norm/{name}": values for name, values in CHANNELS.items()},
    }
    for level in LEVELS:
        for kind, (cell, values) in cells().items():
            golden[f"{level}/{kind}"] = evaluate(level, Wrapped(cell), values)
        golden[f"{level}/net"] = evaluate(level, Net(), IMAGES)
    return golden


def scales(init: float, factor: float, window: int, overflows: np.ndarray) -> list[float]:
    """The scale after each step."""
    cell = nn.DynamicLossScaleUpdateCell(init, factor, window)
    scale = ms.Parameter(ms.Tensor(init, ms.float32), name="scale")
    messages = []
    for overflow in overflows:
        cell(scale, ms.Tensor(bool(overflow)))
        messages.append(float(scale.asnumpy()))
    return messages


def loss_scales() -> dict[str, Any]:
    """Everything that loss_scale.json holds."""
    cases = []
    for init, factor, window in CASES:
        overflows = RNG.random(40) < 0.2
        case = {"init": init, "factor": factor, "window": window}
        after = scales(init, factor, window, overflows)
        cases.append({**case, "overflows": overflows.tolist(), "scales": after})
    return {"mindspore": ms.__version__, "cases": cases}


def main() -> None:
    """Ask MindSpore on the CPU."""
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    FOLDER.mkdir(exist_ok=True)
    # MindSpore leaves the source of the cells that it rewrites in the working directory.
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        np.savez_compressed(FOLDER / "levels.npz", **levels())
    text = json.dumps(loss_scales(), indent=1)
    (FOLDER / "loss_scale.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
