"""Writes estimators.npz: linear models and trees of scikit-learn as ONNX, and what they compute.

    python tests/golden/make_onnx_estimators.py

Needs scikit-learn 1.9.1, skl2onnx 1.20.0 and onnxruntime 1.32.0.

For each estimator: `<name>.onnx`, the bytes of the file; `<name>.y`, probabilities, or predictions
or scores of estimators without probabilities, by scikit-learn, -y and y for scores y of two
classes; `<name>.scores`, what ONNX Runtime computes for the file's only node of an estimator. `x`
are the samples of all.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from skl2onnx import to_onnx
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.svm import LinearSVC

FILE = Path(__file__).parent / "estimators.npz"
SAMPLES = 8


def main() -> None:
    """Write the file."""
    warnings.simplefilter("ignore")
    random = np.random.default_rng(3)
    x = random.normal(size=(200, 6)).astype(np.float32)
    z = x @ random.normal(size=(6, 3))
    classes, is_positive = z.argmax(1), (z[:, 0] > 0).astype(int)
    small = {"n_estimators": 3, "max_depth": 3, "random_state": 0}
    estimators: dict[str, tuple[Any, np.ndarray]] = {
        "logistic_2": (LogisticRegression(), is_positive),
        "logistic_3": (LogisticRegression(), classes),
        "logistic_texts": (
            make_pipeline(StandardScaler(), LogisticRegression()),
            np.array(["a", "b", "c"])[classes],
        ),
        "linear": (LinearRegression(), z[:, 0]),
        "linear_2": (Ridge(), z[:, :2]),
        "support_vectors": (LinearSVC(random_state=0), classes),
        "forest_2": (RandomForestClassifier(**small), is_positive),
        "forest_3": (RandomForestClassifier(**small), classes),
        "trees": (ExtraTreesRegressor(**small), z[:, 0]),
        "boosting_2": (GradientBoostingClassifier(**small), is_positive),
        "boosting_3": (GradientBoostingClassifier(**small), classes),
        "boosting": (GradientBoostingRegressor(**small), z[:, 0]),
        "rest_2": (OneVsRestClassifier(LogisticRegression()), is_positive),
        "rest_3": (OneVsRestClassifier(LogisticRegression()), classes),
        "rest_forests": (OneVsRestClassifier(RandomForestClassifier(**small)), classes),
        "rest_vectors": (OneVsRestClassifier(LinearSVC(random_state=0)), classes),
        "ridge_classes": (RidgeClassifier(), is_positive),
        "columns": (
            make_pipeline(
                make_column_transformer((StandardScaler(), [4, 0]), (Normalizer(), [5, 1, 2])),
                LogisticRegression(),
            ),
            classes,
        ),
    }
    arrays: dict[str, np.ndarray] = {"x": x[:SAMPLES]}
    for name, (estimator, y) in estimators.items():
        estimator.fit(x, y)
        model = to_onnx(estimator, x[:1], target_opset=15)
        arrays[f"{name}.onnx"] = np.frombuffer(model.SerializeToString(), np.uint8)
        compute = estimator.predict
        for method in ("decision_function", "predict_proba"):
            compute = getattr(estimator, method, compute)
        result = compute(x[:SAMPLES])
        is_pair = hasattr(estimator, "decision_function") and result.ndim == 1
        arrays[f"{name}.y"] = np.stack([-result, result], 1) if is_pair else result
        if not name.startswith("rest_"):
            arrays[f"{name}.scores"] = compute_scores(model, x[:SAMPLES])
    np.savez_compressed(FILE, **arrays)


def compute_scores(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Return the scores of the only estimator among the nodes."""
    (node,) = (n for n in model.graph.node if n.op_type.startswith(("Linear", "TreeEnsemble")))
    model.graph.output.append(onnx.helper.make_tensor_value_info(node.output[-1], 1, None))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run([node.output[-1]], {model.graph.input[0].name: x})[0]


if __name__ == "__main__":
    main()
