"""Other packages' methods on a table, each with its defaults: (train, test, task) -> predictions.

Frames have the target as their last column. Columns of texts are categories. A network that reads
no gaps has the training rows' medians instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

SEED = 0
Fit = Callable[[Any, Any, str], np.ndarray]


def _split(frame: Any) -> tuple[Any, Any]:
    return frame.iloc[:, :-1], frame.iloc[:, -1]


def _list_categories(inputs: Any) -> list[str]:
    import pandas as pd

    return [name for name in inputs if not pd.api.types.is_numeric_dtype(inputs[name])]


def _with_categories(train: Any, test: Any) -> tuple[Any, Any]:
    """Return both inputs with columns of texts as categories of the training rows."""
    import pandas as pd

    inputs, others = _split(train)[0].copy(), _split(test)[0].copy()
    for name in _list_categories(inputs):
        kind = pd.CategoricalDtype(sorted(inputs[name].dropna().astype(str).unique()))
        inputs[name] = inputs[name].astype(str).where(inputs[name].notna()).astype(kind)
        others[name] = others[name].astype(str).where(others[name].notna()).astype(kind)
    return inputs, others


def _without_gaps(train: Any, test: Any) -> tuple[Any, Any]:
    """Return both inputs with categories, and the training rows' medians for missing numbers, which
    pytabkit's networks refuse."""
    inputs, others = _with_categories(train, test)
    medians = inputs.select_dtypes("number").median()
    return inputs.fillna(medians), others.fillna(medians)


def _encode(train: Any, scale: bool) -> Any:
    """Return a transformer: medians for missing numbers, one-hot categories."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    inputs, _ = _split(train)
    texts = _list_categories(inputs)
    numbers = [name for name in inputs if name not in texts]
    steps = [SimpleImputer(strategy="median"), *([StandardScaler()] if scale else [])]
    return make_column_transformer(
        (make_pipeline(*steps), numbers),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), texts),
    )


def fit_hist_boosting(train: Any, test: Any, task: str) -> np.ndarray:
    """HistGradientBoosting of scikit-learn."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = (
        HistGradientBoostingClassifier
        if task == "classification"
        else HistGradientBoostingRegressor
    )
    inputs, others = _with_categories(train, test)
    model = kind(random_state=SEED, categorical_features="from_dtype")
    return model.fit(inputs, _split(train)[1]).predict(others)


def fit_forest(train: Any, test: Any, task: str) -> np.ndarray:
    """Random forest of scikit-learn, 100 trees."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.pipeline import make_pipeline

    kind = RandomForestClassifier if task == "classification" else RandomForestRegressor
    model = make_pipeline(_encode(train, scale=False), kind(random_state=SEED, n_jobs=1))
    inputs, target = _split(train)
    return model.fit(inputs, target).predict(_split(test)[0])


def fit_linear(train: Any, test: Any, task: str) -> np.ndarray:
    """Logistic or ridge regression of scikit-learn on standardised numbers."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline

    model = LogisticRegression(max_iter=2000) if task == "classification" else Ridge()
    inputs, target = _split(train)
    return (
        make_pipeline(_encode(train, scale=True), model)
        .fit(inputs, target)
        .predict(_split(test)[0])
    )


def fit_lightgbm(train: Any, test: Any, task: str) -> np.ndarray:
    """LightGBM, 100 trees."""
    from lightgbm import LGBMClassifier, LGBMRegressor

    kind = LGBMClassifier if task == "classification" else LGBMRegressor
    inputs, others = _with_categories(train, test)
    model = kind(random_state=SEED, n_jobs=1, verbose=-1)
    return model.fit(inputs, _split(train)[1]).predict(others)


def fit_catboost(train: Any, test: Any, task: str) -> np.ndarray:
    """CatBoost, 1,000 trees."""
    from catboost import CatBoostClassifier, CatBoostRegressor

    kind = CatBoostClassifier if task == "classification" else CatBoostRegressor
    inputs, others = _split(train)[0].copy(), _split(test)[0].copy()
    texts = _list_categories(inputs)
    for name in texts:
        inputs[name], others[name] = (
            part[name].astype(str).where(part[name].notna(), "missing") for part in (inputs, others)
        )
    model = kind(random_seed=SEED, thread_count=1, verbose=0, allow_writing_files=False)
    return model.fit(inputs, _split(train)[1], cat_features=texts).predict(others).ravel()


def fit_realmlp(train: Any, test: Any, task: str) -> np.ndarray:
    """RealMLP-TD of pytabkit."""
    from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

    kind = RealMLP_TD_Classifier if task == "classification" else RealMLP_TD_Regressor
    inputs, others = _without_gaps(train, test)
    model = kind(random_state=SEED, device="cpu", n_threads=1)
    return model.fit(inputs, _split(train)[1]).predict(others)


def fit_tabm(train: Any, test: Any, task: str) -> np.ndarray:
    """TabM-D of pytabkit."""
    from pytabkit import TabM_D_Classifier, TabM_D_Regressor

    kind = TabM_D_Classifier if task == "classification" else TabM_D_Regressor
    inputs, others = _without_gaps(train, test)
    model = kind(random_state=SEED, device="cpu", n_threads=1)
    return model.fit(inputs, _split(train)[1]).predict(others)


VERSIONS: Mapping[str, Mapping[str, str]] = {
    "LightGBM": {"lightgbm": "4.7.0"},
    "CatBoost": {"catboost": "1.2.10"},
    "RealMLP-TD": {"pytabkit": "1.8.0"},
    "TabM-D": {"pytabkit": "1.8.0", "tabm": "0.0.3"},
}
"""Packages besides scikit-learn that a method needs, with the versions of the board."""

METHODS: dict[str, Fit] = {
    "HistGradientBoosting": fit_hist_boosting,
    "random forest": fit_forest,
    "logistic or ridge": fit_linear,
    "LightGBM": fit_lightgbm,
    "CatBoost": fit_catboost,
    "RealMLP-TD": fit_realmlp,
    "TabM-D": fit_tabm,
}
