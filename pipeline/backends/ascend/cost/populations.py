"""How much slower steps run than modelled, in code tuned for benchmarks and in the community's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.core.files.safe_yaml import parse_written_yaml

POPULATIONS_FILE = Path(__file__).with_name("populations.yaml")
NORMAL_90 = 1.2816
"""The 90th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Population:
    """Published over modelled times of a population: its factor, and its mechanisms' factors.

    The `_log_sd` are spreads of the log from mechanism to mechanism, from network to network, and
    from row to row of a network. `rows` and `networks` count what the fit read.
    """

    factor: float
    mechanism_graph: float
    mechanism_eager: float
    mechanism_log_sd: float
    network_log_sd: float
    row_log_sd: float
    rows: int
    networks: int

    def get_mechanism(self, *, eager: bool) -> float:
        """Return the factor of eager or graph mode beyond the population's."""
        return self.mechanism_eager if eager else self.mechanism_graph

    def interval_ms(
        self, step_ms: float, *, eager: bool, chip_log_sd: float = 0.0
    ) -> tuple[float, float]:
        """Return the 80 % interval of the time in ms of a new network's step.

        `chip_log_sd` is the spread of the log on a chip that the fit doesn't have.
        """
        centre = step_ms * self.factor * self.get_mechanism(eager=eager)
        spread = math.exp(NORMAL_90 * math.hypot(self.network_log_sd, self.row_log_sd, chip_log_sd))
        return centre / spread, centre * spread


@dataclass(frozen=True)
class FittedPopulations:
    """The fitted populations by name, and the number of fits that were tried to get them."""

    fits_tried: int
    by_name: Mapping[str, Population]


@cache
def load_populations(path: Path = POPULATIONS_FILE) -> FittedPopulations:
    """Return the populations of a file that `benchmarks.ascend_fit.populations` wrote."""
    document: Any = parse_written_yaml(path.read_text(encoding="utf-8"))
    by_name = {name: Population(**entry) for name, entry in document["populations"].items()}
    return FittedPopulations(document["fits_tried"], by_name)
