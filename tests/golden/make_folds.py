"""Folds of scikit-learn 1.9.1 on its shipped sets, without shuffling.

    pip install scikit-learn==1.9.1 && python -m tests.golden.make_folds

writes folds.json: for each set its labels, a digit each, and for 3, 5 and 10 folds the number of
samples of each class in each fold of `StratifiedKFold`; for the regression the sizes of `KFold`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    load_wine,
)
from sklearn.model_selection import KFold, StratifiedKFold

GOLDEN = Path(__file__).parent
COUNTS = (3, 5, 10)
SETS = {
    "breast_cancer": load_breast_cancer,
    "digits": load_digits,
    "iris": load_iris,
    "wine": load_wine,
}


def main() -> None:
    """Write folds.json."""
    sets: dict[str, Any] = {}
    for name, load in SETS.items():
        labels = load().target
        folds = {}
        for count in COUNTS:
            splits = StratifiedKFold(count).split(np.zeros(len(labels)), labels)
            folds[str(count)] = [np.bincount(labels[rows]).tolist() for _, rows in splits]
        sets[name] = {"labels": "".join(map(str, labels.tolist())), "folds": folds}
    rows = np.zeros(len(load_diabetes().target))
    sizes = {str(n): [len(part) for _, part in KFold(n).split(rows)] for n in COUNTS}
    tree = {**sets, "diabetes": {"rows": len(rows), "folds": sizes}}
    (GOLDEN / "folds.json").write_text(json.dumps(tree) + "\n")


if __name__ == "__main__":
    main()
