"""The network beside scikit-learn's classifiers, on tables that it never saw.

    python examples/prior_fitted/evaluate.py RUN_DIR        # pip install scikit-learn

Every classification set of scikit-learn, each class against the rest; 10 splits of 96 rows, of
which 48 are shown. The score is the area under the curve of true against false positives. Rule and
sets were written down before the first result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean, median

import numpy as np
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

sys.path.insert(0, str(Path(__file__).parent))
from components import make_network

import pipeline

SETS = ("breast_cancer", "digits", "iris", "wine")
SPLITS, ROWS = 10, 96
Predict = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(rows, classes, new rows) -> scores of the new rows."""


def list_tasks() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name, rows (n, columns) and classes (n,) of each task."""
    for name in SETS:
        rows, classes = getattr(datasets, f"load_{name}")(return_X_y=True)
        numbers = np.unique(classes)
        for number in numbers if len(numbers) > 2 else numbers[1:]:
            yield f"{name}, class {number}", rows, (classes == number).astype(int)


def list_methods(run_dir: str) -> Mapping[str, Predict]:
    """Return the run's network and scikit-learn's classifiers with their defaults."""
    import jax
    from flax import traverse_util

    run = pipeline.load_run(run_dir)
    weights = traverse_util.unflatten_dict(dict(run.parameters), sep="/")
    model = run.recipe.model
    network = make_network(model.size, model.heads, model.blocks, 2)
    apply = jax.jit(lambda cells: network.apply({"params": weights}, cells, train=False))

    def read_table(rows: np.ndarray, classes: np.ndarray, new: np.ndarray) -> np.ndarray:
        shown = np.concatenate([classes, np.full(len(new), -1)])
        cells = np.concatenate([np.concatenate([rows, new]), shown[:, None]], axis=1)
        logits = apply(cells[None, :, None].astype(np.float32))[0, len(rows) :, 0]
        return np.asarray(logits[:, 1] - logits[:, 0])

    def fit(make: Callable[[], object]) -> Predict:
        def predict(rows: np.ndarray, classes: np.ndarray, new: np.ndarray) -> np.ndarray:
            return make().fit(rows, classes).predict_proba(new)[:, 1]

        return predict

    return {
        "prior_fitted": read_table,
        "random forest": fit(lambda: RandomForestClassifier(random_state=0)),
        "logistic": fit(lambda: make_pipeline(StandardScaler(), LogisticRegression())),
        "5 neighbours": fit(lambda: make_pipeline(StandardScaler(), KNeighborsClassifier())),
        "tree": fit(lambda: DecisionTreeClassifier(random_state=0)),
    }


def main() -> None:
    """Print the mean over splits of each task, and over tasks."""
    methods = list_methods(sys.argv[1])
    print(f"{'':24}", *(f"{name:>14}" for name in methods))
    means = []
    for name, rows, classes in list_tasks():
        scores: dict[str, list[float]] = {method: [] for method in methods}
        for seed in range(SPLITS):
            kept, _ = train_test_split(
                np.arange(len(rows)), train_size=ROWS, stratify=classes, random_state=seed
            )
            shown, hidden = train_test_split(
                kept, train_size=0.5, stratify=classes[kept], random_state=seed
            )
            for method, predict in methods.items():
                predicted = predict(rows[shown], classes[shown], rows[hidden])
                scores[method].append(float(roc_auc_score(classes[hidden], predicted)))
        means.append([mean(scores[method]) for method in methods])
        print(f"{name:24}", *(f"{value:14.3f}" for value in means[-1]), flush=True)
    columns = list(zip(*means, strict=True))
    print(f"{'mean':24}", *(f"{mean(column):14.3f}" for column in columns))
    print(f"{'median':24}", *(f"{median(column):14.3f}" for column in columns))


if __name__ == "__main__":
    main()
