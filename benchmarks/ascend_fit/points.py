"""Which figure to show for a step: `python -m benchmarks.ascend_fit.points`.

Candidates for the time of a step of a network from outside, on the described rows. On the part
`fit` a family's rows have a population that was fitted to the others, so the choice is made there.
The part `look` has the population of populations.yaml. Takes ten minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.ascend_fit.populations import (
    WITH_FIXED_TIME,
    Deviation,
    fit_population,
    measure_deviations,
)
from pipeline.backends.ascend.cost.efficiency import NORMAL_90
from pipeline.backends.ascend.published.scores import Part, PricedRow, load_classes
from pipeline.backends.ascend.published.workloads import DESCRIBED, load_published_steps
from pipeline.backends.ascend.validate import price_rows

CANDIDATES = (
    "as modelled",
    "times the population's factor",
    "times its factor and the mechanism's, after the fixed time",
    "times the root of both",
    "times the median ratio",
    "least expected relative error",
)
"""All that were compared. The interval is around the third."""
DRAWS = 10_000


@dataclass(frozen=True)
class Prediction:
    """A row's log of (published / modelled), and what each candidate expects of it.

    `log_sd` is the spread of the population that was fitted without the row's family.
    """

    network: str
    log_ratio: float
    expected: Mapping[str, float]
    log_sd: float

    def measure_error(self, candidate: str) -> float:
        """Return the relative error of the candidate's time, without sign."""
        return abs(math.expm1(self.expected[candidate] - self.log_ratio))

    @property
    def inside(self) -> bool:
        """Whether the published time is in the 80 % interval."""
        deviation = self.log_ratio - self.expected[CANDIDATES[2]]
        return abs(deviation) <= NORMAL_90 * self.log_sd


def predict(
    train: Sequence[Deviation], rows: Sequence[Deviation], *, fixed: bool = False
) -> list[Prediction]:
    """Return what the candidates expect of rows by a population that is fitted to `train`."""
    fitted = fit_population(train, fixed=fixed)
    factor = math.log(fitted["factor"])
    median = float(np.median([row.log_ratio for row in train]))
    log_sd = math.hypot(fitted["network_log_sd"], fitted["row_log_sd"])
    predictions = []
    for row in rows:
        start = row.log_ratio - row.add_fixed_ms(fitted["fixed_ms"])
        both = (
            start + factor + math.log(fitted["mechanism_eager" if row.eager else "mechanism_graph"])
        )
        figures = (0.0, factor, both, both / 2, median, both - log_sd**2)
        expected = dict(zip(CANDIDATES, figures, strict=True))
        predictions.append(Prediction(row.network, row.log_ratio, expected, log_sd))
    return predictions


def cross_validate(
    rows: Sequence[Deviation], families: Sequence[str], *, fixed: bool = False
) -> list[Prediction]:
    """Return predictions of the rows of each family by a fit to all other rows."""
    predictions = []
    for family in dict.fromkeys(families):
        pairs = list(zip(rows, families, strict=True))
        train = [row for row, other in pairs if other != family]
        own = [row for row, other in pairs if other == family]
        predictions += predict(train, own, fixed=fixed)
    return predictions


def compare_networks(predictions: Sequence[Prediction], first: str, second: str) -> float:
    """Return the share of draws of networks in which `first` has the smaller median error."""
    rng = np.random.default_rng(0)
    names = sorted({prediction.network for prediction in predictions})
    errors = [
        np.array(
            [
                [p.measure_error(first), p.measure_error(second)]
                for p in predictions
                if p.network == name
            ]
        )
        for name in names
    ]
    wins = 0
    for _ in range(DRAWS):
        drawn = rng.integers(len(names), size=len(names))
        medians = np.median(np.concatenate([errors[place] for place in drawn]), axis=0)
        wins += bool(medians[0] < medians[1])
    return wins / DRAWS


def format_scores(title: str, predictions: Sequence[Prediction]) -> str:
    """Return a table of the candidates' errors, and a line about the interval."""
    networks = len({prediction.network for prediction in predictions})
    lines = [
        f"## {title}: {len(predictions)} rows of {networks} networks",
        "",
        "| figure | median error | mean error | mean of the log's error |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in CANDIDATES:
        errors = [prediction.measure_error(name) for prediction in predictions]
        logs = [abs(p.expected[name] - p.log_ratio) for p in predictions]
        lines.append(
            f"| {name} | {np.median(errors):.1%} | {np.mean(errors):.1%} | {np.mean(logs):.3f} |"
        )
    inside = sum(prediction.inside for prediction in predictions)
    share = compare_networks(predictions, CANDIDATES[0], CANDIDATES[2])
    lines += [
        "",
        f"{inside} of {len(predictions)} rows are inside the 80 % interval. The modelled time has "
        f"the smaller median error than the interval's centre in {share:.0%} of draws of networks.",
    ]
    return "\n".join(lines)


def predict_part(priced_rows: Sequence[PricedRow], part: Part) -> dict[str, list[Prediction]]:
    """Return the predictions of a part's rows by population."""
    classes = load_classes()
    predictions = {}
    for name in ("tuned", "community"):
        train = measure_deviations(priced_rows, name)
        rows = measure_deviations(priced_rows, name, part)
        if part == "fit":
            families = [
                each.row.family
                for each in priced_rows
                if (classes[each.row.id].part, classes[each.row.id].population) == (part, name)
            ]
            predictions[name] = cross_validate(train, families, fixed=name in WITH_FIXED_TIME)
        else:
            predictions[name] = predict(train, rows, fixed=name in WITH_FIXED_TIME)
    return predictions


def describe_parts(priced_rows: Sequence[PricedRow]) -> str:
    """Return the tables of both parts, all rows and by population."""
    tables = []
    titles: dict[Part, str] = {"fit": "fit, each family left out", "look": "look"}
    for part, title in titles.items():
        by_name = predict_part(priced_rows, part)
        tables.append(format_scores(title, [p for each in by_name.values() for p in each]))
        tables += [format_scores(f"{title}, {name}", each) for name, each in by_name.items()]
    return "\n\n".join(tables)


def main() -> None:
    """Price the described rows and print the tables."""
    print(describe_parts(price_rows(load_published_steps(DESCRIBED))))


if __name__ == "__main__":
    main()
