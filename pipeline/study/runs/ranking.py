"""The figure that runs are ranked by, and whether a larger or a smaller value is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.core.registry import list_components
from pipeline.training.component_specs import Direction, list_metric_directions

TRAIN_LOSS = "train_loss"
SMALLER_IS_BETTER = frozenset({TRAIN_LOSS, "step_ms", "train_s", "parameters"})
_SIZES = frozenset({"train_samples", "eval_samples", "parameters", "steps", "count"})
_NOT_METRICS = _SIZES | {"step_ms", "median_step_ms", "train_s"}
_PREFERRED = ("accuracy", "rmse", "mean_iou", "loss", "train_loss")


def directions() -> Mapping[str, Direction]:
    """Return the metrics that a study can optimize, and whether larger or smaller is better."""
    return {**list_metric_directions(list_components("metric")), TRAIN_LOSS: "min"}


def main_metric(runs: Sequence[Mapping[str, float]]) -> str | None:
    """Return the metric to rank runs by; None without metrics. `runs` has the figures of each run.

    A metric of evaluations comes before a loss, and an evaluation loss before a training loss, even
    if few runs have it. Of several such metrics, the one that most runs have is returned.
    """
    names = [name for figures in runs for name in figures if name not in _NOT_METRICS]
    if not names:
        return None
    order = {name: number for number, name in enumerate(_PREFERRED)}

    def rank(name: str) -> tuple[bool, bool, int, int]:
        """Return the criteria by which metrics are compared, the most important first."""
        is_evaluated = not name.startswith("train_")
        num_runs = names.count(name)
        return is_evaluated and name != "loss", is_evaluated, num_runs, -order.get(name, len(order))

    return max(dict.fromkeys(names), key=rank)


def is_larger_better(figure: str) -> bool:
    """Return whether a larger figure is better, for figures of training and of evaluation."""
    if figure in SMALLER_IS_BETTER:
        return False
    metrics = list_metric_directions(list_components("metric"))
    return metrics.get(figure, metrics.get(figure.removeprefix("train_"), "max")) == "max"
