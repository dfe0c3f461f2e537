"""Modules of PyTorch are exported for the shape and dtype of the samples."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pipeline.models.torch_graph.computation import torch_network
from pipeline.models.torch_graph.computation.torch_network import ImportedModule, TorchNetwork
from tests.models.build import QUICK

torch = pytest.importorskip("torch")
draw = np.random.default_rng(0)


class Rows(torch.nn.Module):  # type: ignore[misc]
    """A product of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.dense(x)


class Tokens(Rows):
    """A product of the mean of embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 6)

    def forward(self, x: Any) -> Any:
        return self.dense(self.embed(x).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "samples"),
    [
        (Rows, draw.normal(size=(2, 6)).astype(np.float32)),
        (Tokens, draw.integers(0, 9, (2, 5), np.int32)),
    ],
)
def test_rows_and_tokens_reach_a_module_without_more_axes(
    module: type[Any], samples: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    own = module()
    monkeypatch.setattr(torch_network, "find_object", lambda reference: lambda: own)
    source = ImportedModule(f"nets:{module.__name__}", "{}", 1, None, None, None)
    network = TorchNetwork(source, "float32")

    @jax.jit
    def compute(key: jax.Array) -> jax.Array:
        return network.init_with_output(key, samples, train=False)[0]

    logits = compute.lower(jax.random.key(0)).compile(QUICK)(jax.random.key(0))
    given = torch.from_numpy(samples)
    expected = own.eval()(given.long() if samples.dtype == np.int32 else given)
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-5)
