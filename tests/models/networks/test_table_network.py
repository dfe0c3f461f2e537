"""The network of tables: what it is made of, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.columns import Targets
from pipeline.data.tables.encode_table import TableLayout
from pipeline.models.layers.tables import MemberHead
from pipeline.models.networks.table_network import TableModel
from tests.models.build import conf_model

LAYOUT = TableLayout(2, (2, 5))
NUMBERS = Targets(("y",), "regression", (6.0,), (3.0,))


def make_model(targets: Targets | None = None, **changes: Any) -> TableModel:
    model = conf_model("table", **{"hidden": [4], "members": 3, **changes})
    assert isinstance(model, TableModel)
    fitted = model.fit_to_table(LAYOUT)
    return fitted if targets is None else fitted.fit_to_targets(targets)


@pytest.mark.parametrize(
    ("targets", "average", "ratios"),
    [
        (Targets(("a", "b")), "probabilities", ()),
        (Targets(("a", "b"), "multi_label"), "labels", ()),
        (NUMBERS, "numbers", ()),
        (NUMBERS.with_distribution("tails"), "numbers", ()),
        (NUMBERS.with_distribution("gamma"), "numbers", (2.0,)),
    ],
)
def test_head_suits_the_targets(targets: Targets, average: str, ratios: tuple[float]) -> None:
    head = make_model(targets).layers_for(len(targets))[-1]
    assert isinstance(head, MemberHead)
    assert (head.average, head.ratios) == (average, ratios)


@pytest.mark.medium
def test_training_returns_each_member_and_evaluation_their_average() -> None:
    module = make_model(Targets(("a", "b", "c"))).build(3, "float32")
    rows = jnp.array([[0.3, -1.0, 1, 5], [2.0, 0.0, 0, 0]])
    variables = module.init(jax.random.key(0), rows, train=False)
    keys = {"dropout": jax.random.key(1)}
    assert module.apply(variables, rows, train=True, rngs=keys).shape == (2, 3, 3)
    assert module.apply(variables, rows, train=False).shape == (2, 3)


def test_loss_is_the_mean_of_the_members() -> None:
    def loss(logits: Any, labels: Any) -> Any:
        return (logits[:, 0] - labels) ** 2

    wrapped = make_model().wrap_loss(loss)
    outputs = jnp.array([[[1.0], [2.0], [6.0]], [[0.0], [0.0], [3.0]]])
    labels = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(wrapped(outputs, labels), [(0 + 1 + 25) / 3, (9 + 9 + 0) / 3])
    np.testing.assert_array_equal(wrapped(outputs[:, 0], labels), loss(outputs[:, 0], labels))


def test_data_that_are_no_table_are_refused() -> None:
    with pytest.raises(ValueError, match="reads the rows of a table, of dataset=csv"):
        conf_model("table").build(10, "float32")
