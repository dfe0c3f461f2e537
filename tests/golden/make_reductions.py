"""Steps of a loss that is not reduced, and of learning rates in lists, written to reductions.json.

    python tests/golden/make_reductions.py            with mindspore 2.10.0 (CPU)

A dense layer is trained by MindSpore's `Model`: with `reduction="none"`, what `LossMonitor` prints
and the weights after each update; with a list of rates for each group of parameters, the weights
too. Inputs come from `batches` and `WEIGHT`, which the test reads too.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "reductions.json"
STEPS, SAMPLES, FEATURES, CLASSES = 3, 8, 4, 5
RATES = [0.5, 0.25, 0.125]
BIAS_RATES = [1.0, 0.0, 2.0]
WEIGHT = np.linspace(-1, 1, CLASSES * FEATURES).reshape(CLASSES, FEATURES).astype(np.float32)
"""Weights at the start, MindSpore's order (outputs, inputs); the bias starts at 0."""


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (B, FEATURES) float32 and labels (B,) int32 of each step."""
    rng = np.random.default_rng(3)
    return [
        (
            rng.standard_normal((SAMPLES, FEATURES)).astype(np.float32),
            rng.integers(0, CLASSES, SAMPLES).astype(np.int32),
        )
        for _ in range(STEPS)
    ]


def main() -> None:
    """Train with each reduction, and with rates by group."""
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    results: dict[str, Any] = {"versions": {"mindspore": mindspore.__version__}}
    for reduction in ("none", "sum", "mean"):
        results[reduction] = train_with(reduction, 0.5)
    results["groups"] = train_with("mean", RATES, BIAS_RATES)
    FILE.write_text(json.dumps(results, indent=1) + "\n")


def train_with(
    reduction: str, rates: float | list[float], bias_rates: list[float] | None = None
) -> dict[str, Any]:
    """Losses that LossMonitor prints, and weight and bias after each step."""
    import mindspore
    from mindspore import nn

    net = nn.Dense(FEATURES, CLASSES)
    net.weight.set_data(mindspore.Tensor(WEIGHT))
    net.bias.set_data(mindspore.Tensor(np.zeros(CLASSES, np.float32)))
    groups: Any = net.trainable_params()
    if bias_rates is not None:
        groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": bias_rates}]
    optimizer = nn.Momentum(groups, learning_rate=rates, momentum=0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction=reduction)
    data = mindspore.dataset.GeneratorDataset(batches(), ["data", "label"], shuffle=False)
    seen, output = Weights(net), io.StringIO()
    callbacks = [mindspore.LossMonitor(), seen.callback()]
    with contextlib.redirect_stdout(output):
        mindspore.Model(net, loss, optimizer).train(1, data, callbacks, dataset_sink_mode=False)
    losses = [float(text) for text in re.findall(r"loss is ([-\d.e]+)", output.getvalue())]
    return {"losses": losses, "weights": seen.weights, "biases": seen.biases}


class Weights:
    """The weights of a layer after each step."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.weights: list[Any] = []
        self.biases: list[Any] = []

    def callback(self) -> Any:
        """A callback that keeps them."""
        import mindspore

        seen = self

        class Keep(mindspore.Callback):
            def on_train_step_end(self, run_context: Any) -> None:
                seen.weights.append(seen.net.weight.asnumpy().tolist())
                seen.biases.append(seen.net.bias.asnumpy().tolist())

        return Keep()


if __name__ == "__main__":
    main()
