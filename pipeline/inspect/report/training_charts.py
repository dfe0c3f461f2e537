"""Charts of a run's logs: loss, main metric and learning rate over the steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.core.pages.charts import Curve, draw_curves
from pipeline.core.pages.page import HEADS, Drawing

HEADLINES = ("accuracy", "micro_f1", "r2")
"""Metrics for the chart, by priority: the first that the run logged is drawn."""

Log = Mapping[str, np.ndarray]
"""The columns of metrics.jsonl or evals.jsonl by name, one of which is `step`."""


def draw_training_charts(steps: Log, evaluations: Log) -> dict[str, Drawing]:
    """Return the charts that the logs have values for, by the names of the report's files."""
    charts = {"loss.svg": draw_curves("loss", _list_both_curves("loss", steps, evaluations))}
    headlines = [name for name in HEADLINES if name in evaluations]
    for name in headlines[:1]:
        title = HEADS.get(name, name.replace("_", " "))
        charts["metric.svg"] = draw_curves(title, _list_both_curves(name, steps, evaluations))
    rates = _list_curves("rate", steps, "learning_rate")
    charts["learning_rate.svg"] = draw_curves("learning rate", rates)
    return {name: chart for name, chart in charts.items() if chart is not None}


def _list_both_curves(name: str, steps: Log, evaluations: Log) -> list[Curve]:
    """Return the curves of a metric in training and in evaluation."""
    train = _list_curves("train", steps, name)
    from_evaluations = _list_curves("train", evaluations, f"train_{name}", marked=True)
    return [*(train or from_evaluations), *_list_curves("eval", evaluations, name, marked=True)]


def _list_curves(label: str, log: Log, name: str, *, marked: bool = False) -> list[Curve]:
    return [Curve(label, log["step"], log[name], marked)] if name in log else []
