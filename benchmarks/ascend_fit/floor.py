"""How far pages about the same network differ: `python -m benchmarks.ascend_fit.floor`.

Rows outside the sealed part are of the same network if model, size, kind of mode and kind of
precision (float32 or mixed) are equal, and the largest batch is at most twice the smallest. A page
is a file of a repository. Its time of a sample is the median over its rows. The spread between
pages is the floor of any model that knows a network alone. Prices nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pipeline.backends.ascend.published.scores import load_classes
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
    DESCRIBED_LATER,
    PUBLISHED,
    Published,
    load_published_steps,
)

LOCATION = re.compile(r":~?L\d.*$|:fig.*$")
"""Line and version behind the path of a row's source."""
QUANTILES = (np.arange(10_000) + 0.5) / 10_000


@dataclass(frozen=True)
class Pages:
    """A network's time of a sample in ms on each of two pages or more."""

    model: str
    sample_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The slowest over the fastest page."""
        return max(self.sample_ms) / min(self.sample_ms)


def group_pages(rows: Sequence[Published]) -> list[Pages]:
    """Return the networks that have several pages, in the order of the rows."""
    same: dict[tuple[object, ...], list[Published]] = defaultdict(list)
    for row in rows:
        same[row.model, row.pixels, row.mode == "op_by_op", row.precision == "O0"].append(row)
    groups = []
    for members in same.values():
        for batches in _split_by_batch(members):
            pages: dict[str, list[float]] = defaultdict(list)
            for row in batches:
                pages[LOCATION.sub("", row.source)].append(row.ms / row.batch)
            if len(pages) > 1:
                medians = tuple(float(np.median(each)) for each in pages.values())
                groups.append(Pages(batches[0].model, medians))
    return groups


def _split_by_batch(rows: Sequence[Published]) -> list[list[Published]]:
    """Return rows in groups, from the smallest batch up, whose batches differ at most by two."""
    groups: list[list[Published]] = []
    for row in sorted(rows, key=lambda row: row.batch):
        if groups and row.batch <= 2 * groups[-1][0].batch:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def measure_spread(groups: Sequence[Pages]) -> float:
    """Return the standard deviation of the log between pages of one network, over all networks."""
    logs = [np.log(group.sample_ms) for group in groups]
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in logs)
    return float(np.sqrt(squares / sum(len(each) - 1 for each in logs)))


def compute_errors(log_sd: float, log_centre: float = 0.0) -> tuple[float, float]:
    """Return the mean and the median of |t / x - 1|, where x is log-normal around 1.

    `log_centre` is the log of t: 0, or -log_sd ** 2, which makes the mean the smallest.
    """
    normal = NormalDist(0.0, log_sd)
    times = np.exp([normal.inv_cdf(float(share)) for share in QUANTILES])
    errors = np.abs(np.exp(log_centre) / times - 1)
    return float(errors.mean()), float(np.median(errors))


def main() -> None:
    """Print the networks with several pages, their spread, and the errors that it alone makes."""
    classes = load_classes()
    tables = (PUBLISHED, DESCRIBED, DESCRIBED_LATER)
    rows = [row for table in tables for row in load_published_steps(table)]
    rows = [r for r in rows if classes[r.id].part != "seal" and classes[r.id].row_class == "device"]
    groups = group_pages(rows)
    for group in sorted(groups, key=lambda group: -group.ratio):
        times = ", ".join(f"{ms:.3f}" for ms in group.sample_ms)
        print(f"{group.model:22} {len(group.sample_ms)} pages, x{group.ratio:.2f}: {times} ms")
    spread = measure_spread(groups)
    ratios = [group.ratio for group in groups]
    print(
        f"{len(groups)} networks; slowest over fastest page: median {np.median(ratios):.2f}, "
        f"largest {max(ratios):.2f}; log spread between pages {spread:.2f}"
    )
    for name, centre in (("median", 0.0), ("best constant", -(spread**2))):
        mean, median = compute_errors(spread, centre)
        print(f"error of a known {name}: mean {mean:.0%}, median {median:.0%}")


if __name__ == "__main__":
    main()
