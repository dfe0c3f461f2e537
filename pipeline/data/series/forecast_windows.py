"""Windows of a series for forecasts, split in time, and the seasonal naive forecast."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.core.host.memory import require_room


@dataclass(frozen=True)
class WindowSizes:
    """Sizes of windows, in steps."""

    inputs: int
    """Steps that a network reads."""
    horizon: int
    """Steps after them that it predicts."""
    stride: int
    """Steps from one training window to the next."""

    @property
    def length(self) -> int:
        """Steps of a window."""
        return self.inputs + self.horizon


def split_time(rows: int, share: float, sizes: WindowSizes) -> int:
    """Return the number of rows of the training part, which precedes the evaluation part.

    `share` of the rows is evaluated. Raises ValueError if a part is shorter than a window.
    """
    train_rows = rows - round(rows * share)
    for name, count in (("training", train_rows), ("evaluation", rows - train_rows)):
        if count < sizes.length:
            raise ValueError(
                f"has {rows:,} rows, of which dataset.eval_fraction = {share:g} leaves {count:,} "
                f"for {name}; a window has dataset.input_length + dataset.horizon = "
                f"{sizes.length:,}"
            )
    return train_rows


def cut_windows(
    inputs: np.ndarray, targets: np.ndarray, sizes: WindowSizes, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return all windows inside of one part of a series, in the order of time.

    `inputs` are (rows, channels) and `targets` (rows, columns). The windows' inputs are (n, inputs,
    channels), and their targets (n, horizon * columns), step after step. Raises ValueError for too
    little memory.
    """
    starts = np.arange(0, len(inputs) - sizes.length + 1, stride)
    values = sizes.inputs * inputs.shape[1] + sizes.horizon * targets.shape[1]
    require_room(inputs.dtype.itemsize * len(starts) * values, f"{len(starts):,} windows")
    read = starts[:, None] + np.arange(sizes.inputs)
    predicted = starts[:, None] + sizes.inputs + np.arange(sizes.horizon)
    return inputs[read], targets[predicted].reshape(len(starts), -1)


def forecast_seasonal_naive(targets: np.ndarray, sizes: WindowSizes, period: int) -> np.ndarray:
    """Return the values of one season before, for the windows of `cut_windows` with stride 1.

    `targets` are (rows, columns). A step that is further away than one `period` gets the value of
    the last season that the window's inputs have. The result is (n, horizon * columns).
    """
    starts = np.arange(len(targets) - sizes.length + 1)
    steps = np.arange(sizes.horizon)
    seasons = steps // period + 1
    rows = starts[:, None] + sizes.inputs + steps - seasons * period
    return targets[rows].reshape(len(starts), -1)
