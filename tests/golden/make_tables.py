"""Tables of scikit-learn 1.9.1, its figures on them, and its encoding of a table with gaps.

    pip install scikit-learn==1.9.1 && python -m tests.golden.make_tables

writes the CSV files beside pipeline/data/sources/tabular.py, and tables.json here: each estimator
is fitted on the training rows that `split_rows` draws and scored on the others, those with a seed
as the median of five.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pipeline.data.held_out import split_rows

GOLDEN = Path(__file__).parent
SHIPPED = GOLDEN.parents[1] / "pipeline" / "data" / "sources"
SEEDS = range(5)
CULTIVARS, DIAGNOSES = ("1", "2", "3"), ("malignant", "benign")


def write_table(name: str, columns: list[str], rows: np.ndarray, target: list[str]) -> None:
    """Write a table, the target last, with the shortest texts of its numbers."""
    with (SHIPPED / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row, label in zip(rows.tolist(), target, strict=True):
            writer.writerow([*(f"{value:.12g}" for value in row), label])


def regressions() -> dict[str, dict[str, float]]:
    """Errors of regressors on the diabetes table, in its units; its sex is 1 or 2."""
    table = load_diabetes(scaled=False)
    names = ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6", "progression"]
    write_table("diabetes", names, table.data, [f"{y:g}" for y in table.target])
    train, test = split_rows(len(table.target), 0.2, 0)

    def scores(make: Any) -> dict[str, float]:
        scores = []
        for seed in SEEDS:
            estimator = make_pipeline(StandardScaler(), make(seed))
            estimator.fit(table.data[train], table.target[train])
            predictions = estimator.predict(table.data[test])
            scores.append(
                [
                    s(table.target[test], predictions)
                    for s in (mean_absolute_error, root_mean_squared_error, r2_score)
                ]
            )
        return {
            name: round(median(column), 6)
            for name, column in zip(("mae", "rmse", "r2"), zip(*scores, strict=True), strict=True)
        }

    return {
        "LinearRegression": scores(lambda seed: LinearRegression()),
        "Ridge": scores(lambda seed: Ridge()),
        "MLPRegressor": scores(
            lambda seed: MLPRegressor(
                hidden_layer_sizes=(32, 32), max_iter=500, early_stopping=True, random_state=seed
            )
        ),
    }


def classifications(name: str, table: Any, classes: tuple[str, ...]) -> dict[str, float]:
    """Accuracies of classifiers on a table."""
    column = "diagnosis" if name == "breast_cancer" else "cultivar"
    names = [text.replace(" ", "_").replace("/", "_") for text in table.feature_names]
    labels = np.array([classes[label] for label in table.target])
    write_table(name, [*names, column], table.data, labels.tolist())
    strata = np.unique(labels, return_inverse=True)[1]
    train, test = split_rows(len(labels), 0.2, 0, strata)

    def accuracy(make: Any) -> float:
        scores = []
        for seed in SEEDS:
            estimator = make_pipeline(StandardScaler(), make(seed))
            estimator.fit(table.data[train], labels[train])
            scores.append(float(np.mean(estimator.predict(table.data[test]) == labels[test])))
        return round(median(scores), 6)

    return {
        "LogisticRegression": accuracy(lambda seed: LogisticRegression()),
        "MLPClassifier": accuracy(
            lambda seed: MLPClassifier(hidden_layer_sizes=(32,), max_iter=500, random_state=seed)
        ),
    }


def encoding() -> dict[str, Any]:
    """A table with gaps, and values of the last rows that the first 30 lack, as encoded."""
    draw = np.random.default_rng(0)
    numbers = np.round(draw.normal(100, 30, (40, 2)), 3)
    numbers[draw.random((40, 2)) < 0.2] = np.nan
    colours = draw.choice(["red", "green", "blue"], 40).astype(object)
    colours[35:] = ["violet", "red", "violet", "blue", "green"]
    scaler, imputer = StandardScaler().fit(numbers[:30]), SimpleImputer(strategy="mean")
    imputer.fit(scaler.transform(numbers[:30]))
    onehot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    onehot.fit(colours[:30, None])
    encoded = [
        imputer.transform(scaler.transform(numbers)),
        np.isnan(numbers).astype(float),
        onehot.transform(colours[:, None]),
    ]
    return {
        "rows": [
            ["" if value != value else value for value in (*pair, colour)]
            for pair, colour in zip(numbers.tolist(), colours.tolist(), strict=True)
        ],
        "training": 30,
        "encoded": np.round(np.concatenate(encoded, axis=1), 6).tolist(),
    }


def main() -> None:
    """Write the tables and the figures."""
    figures = {
        "diabetes": regressions(),
        "breast_cancer": classifications("breast_cancer", load_breast_cancer(), DIAGNOSES),
        "wine": classifications("wine", load_wine(), CULTIVARS),
        "encoding": encoding(),
    }
    text = json.dumps(figures, indent=1)
    (GOLDEN / "tables.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
