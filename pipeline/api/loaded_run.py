"""A saved run, read from its directory: parameters, predictions, history and a plot."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pipeline.api.trainer import Trainer
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.inspect.report.pictures import HEADLINES, draw_training_charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURED_WIDTH = 400
"""Width of a chart in a notebook, in pixels."""


@dataclass(frozen=True)
class RunHistory:
    """The logs of a run as arrays by name. NaN stands for a value that is missing or not finite."""

    steps: Mapping[str, np.ndarray]
    """Numbers of every step: step, loss, learning_rate, grad_norm, ..."""
    evaluations: Mapping[str, np.ndarray]
    """Step and metrics of every evaluation. Precision, recall and f1 are macro averages."""


class LoadedRun:
    """A run that has saved a checkpoint; `load_run` reads it.

    run = load_run("outputs/2026-11-21/14-46-29_lenet5_digits")
    run.parameters["conv_0/kernel"], run.history.steps["loss"]
    run.predict(images).argmax(axis=-1)
    run.plot().savefig("curves.png")
    """

    def __init__(self, run_dir: Path) -> None:
        self._trainer = Trainer.load(run_dir)
        trained = self._trainer._make_snapshot()
        self.recipe: Recipe = trained.recipe
        self.step: int = trained.step
        """The number of training steps before the checkpoint that is read."""
        self._targets = trained.samples.targets
        self.parameters: Mapping[str, np.ndarray] = MappingProxyType(dict(self._trainer.parameters))
        """The parameters by path, such as `conv_0/kernel`."""
        self.history = RunHistory(self._trainer.steps, self._trainer.evaluations)

    def __repr__(self) -> str:
        """Return recipe, step, the last evaluation's main metric and loss, and the directory."""
        parts = [f"{self.recipe.name} of step {self.step:,}"]
        for name in (*HEADLINES, "loss"):
            values = self.history.evaluations.get(name)
            if values is not None and len(values):
                parts.append(f"{name} {values[-1]:.4g}")
        return f"<LoadedRun {', '.join(parts)}; {self._trainer.run_dir}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the run: its `repr`, and charts of its metrics.

        Each chart is an image, so that its style doesn't apply to the notebook.
        """
        charts = draw_training_charts(self.history.steps, self.history.evaluations).values()
        images = []
        for chart in charts:
            data = base64.b64encode(chart.to_file_text().encode()).decode("ascii")
            images.append(
                f'<img alt="{escape(chart.label)}" width="{PICTURED_WIDTH}" '
                f'style="max-width: 100%" src="data:image/svg+xml;base64,{data}">'
            )
        return f"<div>{escape(repr(self))}</div><div>{''.join(images)}</div>"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the network's outputs, in order. They name classes, numbers or labels."""
        return self._targets.names

    def predict(self, samples: np.ndarray | Mapping[str, np.ndarray]) -> np.ndarray:
        """Return logits, float32 (n, ...), of samples in the dataset's shape and type.

        A regression returns numbers in the units of the data. Raises DataError for samples of
        another shape or type.
        """
        outputs = self._trainer.predict(samples)
        return self._targets.to_data_units(outputs).astype(np.float32)

    def plot(self) -> Figure:
        """Return a figure of the loss, one of `HEADLINES` and the learning rate over the steps.

        Raises RunError if matplotlib isn't installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            message = "plot() needs matplotlib: pip install 'recipe-pipeline[plot]'"
            raise RunError(message) from error
        steps = self.history.steps
        evaluations = self.history.evaluations
        headlines = [name for name in HEADLINES if name in evaluations]
        names = ("loss", *headlines[:1], "learning_rate")
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        for axis, name in zip(figure.subplots(1, len(names)), names, strict=True):
            axis.set_title(name.replace("_", " "))
            axis.set_xlabel("step")
            if name in steps:
                axis.plot(steps["step"], steps[name], linewidth=0.8, label="train")
            if name in evaluations:
                axis.plot(evaluations["step"], evaluations[name], marker="o", label="eval")
            if axis.lines:
                axis.legend()
        return figure


def load_run(run_dir: Path | str) -> LoadedRun:
    """Read a run from its directory, or from one of its checkpoints.

    Raises DataError if `run_dir` isn't a run, is damaged or has no checkpoint, RecipeError if its
    recipe isn't valid any more.
    """
    return LoadedRun(Path(run_dir))
