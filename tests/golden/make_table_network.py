"""Values of torch 2.15.0, tabm 0.0.3, pytabkit 1.8.0 and scikit-learn 1.9.1 for the network of
tables, its losses and the temperature.

    pip install torch==2.15.0 tabm==0.0.3 pytabkit==1.8.0 scikit-learn==1.9.1
    python -m tests.golden.make_table_network

writes table_network.npz: TabM's outputs with its weights, PBLD features, the schedule coslog4,
deviances, the ranges of scikit-learn's RobustScaler, and a temperature.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from pytabkit.models.nn_models.nn import PLREmbeddingsLayerCosBias
from pytabkit.models.training.scheduling import CoslogFunc
from sklearn.calibration import _TemperatureScaling
from sklearn.metrics import (
    mean_gamma_deviance,
    mean_poisson_deviance,
    mean_squared_log_error,
)
from sklearn.preprocessing import RobustScaler
from tabm import TabM

FILE = Path(__file__).parent / "table_network.npz"
MEMBERS, NUMBERS, CATEGORIES, WIDTH, OUTPUTS = 5, 3, 4, 8, 2


def compute_tabm() -> dict[str, np.ndarray]:
    """Return TabM's inputs, parameters and the members' outputs."""
    torch.manual_seed(0)
    model = TabM.make(
        n_num_features=NUMBERS,
        cat_cardinalities=[CATEGORIES],
        d_out=OUTPUTS,
        k=MEMBERS,
        n_blocks=2,
        d_block=WIDTH,
        dropout=0.0,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        numbers = torch.randn(6, NUMBERS)
        codes = torch.arange(6)[:, None] % CATEGORIES
        outputs = model(numbers, codes)
    values = {f"tabm/{name}": array.numpy() for name, array in model.state_dict().items()}
    inputs = {"tabm_numbers": numbers.numpy(), "tabm_codes": codes.numpy()}
    return {**values, **inputs, "tabm_outputs": outputs.numpy()}


def compute_pbld(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the parameters of 2 columns with 4 frequencies and 3 features, and their features."""
    shapes = {
        "weight_1": (2, 1, 4),
        "bias_1": (2, 1, 4),
        "weight_2": (2, 4, 3),
        "bias_2": (2, 1, 3),
    }
    arrays = {name: generator.normal(size=shape) for name, shape in shapes.items()}
    numbers = generator.normal(size=(5, 2))
    layer = SimpleNamespace(
        **{name: torch.tensor(array) for name, array in arrays.items()},
        plr_act_name="linear",
        plr_use_densenet=True,
    )
    features = PLREmbeddingsLayerCosBias.forward_cont(layer, torch.tensor(numbers)).numpy()
    named = {f"pbld_{name}": array for name, array in arrays.items()}
    return {**named, "pbld_numbers": numbers, "pbld_features": features}


def compute_deviances(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Return numbers, means, and each loss of scikit-learn of every pair."""
    numbers, means = generator.gamma(2.0, 3.0, 7), generator.gamma(2.0, 3.0, 7)
    counts = np.array([0.0, 0, 1, 2, 5, 17, 3])

    def each(function: object, actual: np.ndarray) -> np.ndarray:
        pairs = zip(actual, means, strict=True)
        return np.array([function([t], [m]) for t, m in pairs])  # type: ignore[operator]

    return {
        "numbers": numbers,
        "counts": counts,
        "means": means,
        "poisson": each(mean_poisson_deviance, counts),
        "gamma": each(mean_gamma_deviance, numbers),
        "squared_log": each(mean_squared_log_error, counts),
    }


def compute_temperature(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Return logits, classes, and the temperature that scikit-learn fits to them."""
    logits = generator.normal(0, 3, (200, 3))
    shares = np.exp(logits / 2.5)
    labels = np.array([generator.choice(3, p=row / row.sum()) for row in shares])
    scaling = _TemperatureScaling().fit(logits, labels)
    return {"logits": logits, "labels": labels, "temperature": np.array(1 / scaling.beta_)}


def main() -> None:
    """Write the file."""
    generator = np.random.default_rng(3)
    column = generator.gamma(1.0, 2.0, (41, 1))
    scaler = RobustScaler().fit(column)
    np.savez_compressed(
        FILE,
        **compute_tabm(),
        **compute_pbld(generator),
        **compute_deviances(generator),
        **compute_temperature(generator),
        coslog4=np.array([CoslogFunc(4)(t) for t in np.arange(100) / 100]),
        column=column[:, 0],
        centre=scaler.center_,
        scale=scaler.scale_,
    )


if __name__ == "__main__":
    main()
