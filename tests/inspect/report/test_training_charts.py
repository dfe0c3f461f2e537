from __future__ import annotations

import numpy as np

from pipeline.inspect.report.training_charts import draw_training_charts

STEPS = np.arange(1, 4)


def test_charts_are_of_the_logged_values_and_the_first_headline() -> None:
    log = {"step": STEPS, "loss": np.array([3.0, 2.0, 1.0]), "learning_rate": np.ones(3)}
    evaluations = {"step": STEPS, "r2": np.ones(3), "micro_f1": np.zeros(3), "loss": np.ones(3)}
    charts = draw_training_charts(log, evaluations)
    labels = {name: chart.label for name, chart in charts.items()}
    titles = {"loss.svg": "loss", "metric.svg": "micro f1", "learning_rate.svg": "learning rate"}
    assert labels == titles
    assert len(list(charts["loss.svg"].marks.iter("polyline"))) == 2


def test_empty_logs_have_no_charts() -> None:
    assert draw_training_charts({}, {}) == {}
