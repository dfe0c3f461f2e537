"""Eight sets of the UCR and UEA archives, within the package aeon, by one convolution network.

    pip install aeon==1.6.0
    python -m benchmarks.public ucr --save
    python -m benchmarks.public ucr --sets GunPoint,ArrowHead

Decided before the first run: the archive's own split, the accuracy after the last epoch, and the
seeds 1 to 5. The recipe `fcn_series` is the same for all sets; series of several lengths are
padded to the longest. A set is one sweep, which a single program computes. Published values are of
that split too: InceptionTime is an ensemble of five networks, MultiRocket random convolutions and a
ridge classifier.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
from benchmarks.public.figures import (
    CACHE,
    Published,
    SeedRuns,
    compute_p,
    describe_published,
    format_p,
    read_seeds,
    require_versions,
    train_seeds,
)

VERSIONS = {"aeon": "1.6.0"}
PACKAGES = ("jax", "jaxlib", "aeon")
SEEDS = 5
INCEPTION = "results-InceptionTime-128.csv of hfawaz/InceptionTime"
ROCKET = "results.csv of MSD-IRIMAS/LITE"
MULTIVARIATE = "results_multivariate.csv of MSD-IRIMAS/LITE"
FCN = "results-ucr-128.csv of hfawaz/dl-4-tsc"
FCN_MULTIVARIATE = "results-mts.csv of hfawaz/dl-4-tsc"


@dataclass(frozen=True)
class SeriesSet:
    """A set, its files, and what others published for it."""

    samples: str
    """Training and test series, steps, classes."""
    sha256: str
    """Of the training file and the test file, one after the other."""
    inception: float
    rocket: float | None
    fcn: tuple[float, float | None, int]
    """Mean, deviation and number of runs."""
    length: int | None = None
    """Steps to which series of several lengths are padded."""
    is_multivariate: bool = False

    def list_published(self) -> tuple[Published, ...]:
        """Return the figures, the best known first."""
        sources = (MULTIVARIATE, FCN_MULTIVARIATE) if self.is_multivariate else (INCEPTION, FCN)
        value, deviation, runs = self.fcn
        figures = [Published("InceptionTime", self.inception, sources[0])]
        if self.rocket is not None:
            figures.append(Published("MultiRocket", self.rocket, ROCKET))
        return (*figures, Published("FCN", value, sources[1], deviation, runs))


SETS: Mapping[str, SeriesSet] = {
    "ItalyPowerDemand": SeriesSet(
        "67 + 1,029 of 24 steps, 2 classes",
        "760ffbf403b5ade773b653b7f67e33b5753f96cbff502723f5c61bd5999b9233",
        *(0.9650, 0.9679, (0.9629, 0.001, 5)),
    ),
    "GunPoint": SeriesSet(
        "50 + 150 of 150 steps, 2 classes",
        "56e2a7020f4619179d741ee07df97215192dc1b692e7dde2125189ca6e0facd6",
        *(1.0, 1.0, (1.0, 0.0, 5)),
    ),
    "ArrowHead": SeriesSet(
        "36 + 175 of 251 steps, 3 classes",
        "1940040a412b55f77ad84c803acc68cb22f1bf3320bf2df096de60a25f460b56",
        *(0.846, 0.869, (0.843, 0.011, 5)),
    ),
    "BasicMotions": SeriesSet(
        "40 + 40 of 100 steps, 6 channels, 4 classes",
        "02492b25cf1523f36f414296656fe1f7ee5f31c0e9b3cda3d1a7450d7d6e1e93",
        *(1.0, None, (1.0, None, 1)),
        is_multivariate=True,
    ),
    "JapaneseVowels": SeriesSet(
        "270 + 370 of 7 to 29 steps, 12 channels, 9 classes",
        "c755c99a2ac227123c34966a41b7940e802cdd6c360f7915e7c37cb8a781e821",
        *(0.970, None, (0.993, 0.002, 10)),
        length=29,
        is_multivariate=True,
    ),
    "PickupGestureWiimoteZ": SeriesSet(
        "50 + 50 of up to 361 steps, 10 classes",
        "451d38618f3407048a62f1bfbbf26fefde4d21d6ec077c6c242cd0ae2d589737",
        *(0.76, 0.84, (0.744, 0.027, 5)),
        length=361,
    ),
    "OSULeaf": SeriesSet(
        "200 + 242 of 427 steps, 6 classes",
        "47256f1e08e6af092823b340bcfd4b68c4adf962114dc13107825fdf9019001d",
        *(0.942, 0.955, (0.979, 0.005, 5)),
    ),
    "ACSF1": SeriesSet(
        "100 + 100 of 1,460 steps, 10 classes",
        "c0e65a73bc2a4344891e77fec8478980c540401b88a63e68d13ebd3c68a350e7",
        *(0.92, 0.92, (0.898, 0.015, 5)),
    ),
}
HEADER = ["set", "ours", "seeds", "s a seed", "InceptionTime", "p", "MultiRocket", "p", "FCN", "p"]


def check_files(names: Sequence[str]) -> None:
    """Exit with 1 and the names of sets whose files in aeon have another checksum."""
    spec = find_spec("aeon")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    data = folder / "datasets" / "data"
    changed = []
    for name in names:
        digest = hashlib.sha256()
        for part in ("TRAIN", "TEST"):
            file = data / name / f"{name}_{part}.ts"
            digest.update(file.read_bytes() if file.is_file() else b"")
        if digest.hexdigest() != SETS[name].sha256:
            changed.append(name)
    if changed:
        print(f"{', '.join(changed)}: not the series of aeon 1.6.0 (sha256)", file=sys.stderr)
        raise SystemExit(1)


def list_rows(results: Mapping[str, SeedRuns]) -> Iterator[list[str]]:
    """Yield a row of the table for each set."""
    for name, runs in results.items():
        figures = {figure.method: figure for figure in SETS[name].list_published()}
        count = len(runs.accuracies)
        row = [name, runs.describe(), str(count), f"{runs.train_s / count:.0f}"]
        for method in ("InceptionTime", "MultiRocket", "FCN"):
            figure = figures.get(method)
            if figure is None:
                row += ["", ""]
            else:
                p = format_p(compute_p(runs.accuracies, figure))
                row += [describe_published(figure), p]
        yield row


def main() -> None:
    """Train what is missing, set by set, and print the table of what is done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public ucr",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sets", default=",".join(SETS), help="names, by comma")
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(1, 101), metavar="1..100")
    parser.add_argument("--cache", type=Path, default=CACHE / "ucr")
    parser.add_argument("--show", action="store_true", help="print the table of what is done")
    add_save(parser, "public_ucr.md")
    arguments = parser.parse_args()
    names = arguments.sets.split(",")
    unknown = [name for name in names if name not in SETS]
    if unknown:
        parser.error(f"--sets {','.join(unknown)}: must be of {','.join(SETS)}")
    require_versions(VERSIONS)
    check_files(names)
    results = {}
    for name in names:
        folder = arguments.cache / name
        if arguments.show:
            try:
                results[name] = read_seeds(folder / "sweep.csv")
            except (FileNotFoundError, ValueError) as error:
                print(f"{name}: left out; {error}", file=sys.stderr)
            continue
        words = ["+recipe=fcn_series", f"dataset.root=datasets/data/{name}"]
        length = SETS[name].length
        words += [] if length is None else [f"dataset.length={length}"]
        results[name] = train_seeds(words, arguments.seeds, folder)
    command = f"python -m benchmarks.public ucr --sets {','.join(results)}"
    command += "" if arguments.seeds == SEEDS else f" --seeds {arguments.seeds}"
    parts = [
        heading("Series of the UCR and UEA archives", command, PACKAGES),
        "Accuracy on the archive's test series: mean (lowest to highest) of seeds here; p is of "
        "the hypothesis that ours is at least as good.\n",
        table(HEADER, list_rows(results)),
        f"Sources: InceptionTime {INCEPTION} (several channels: {MULTIVARIATE}); MultiRocket "
        f"{ROCKET}; FCN {FCN} (several channels: {FCN_MULTIVARIATE}).\n",
    ]
    publish("\n".join(parts), arguments.save)


if __name__ == "__main__":
    main()
