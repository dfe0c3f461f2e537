"""Logits of the networks against definitions by others, with the same weights."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from tests.golden.network_cases import CASES, EVEN, Case, drawn, samples
from tests.models.build import QUICK, Variables, conf_model, count, shapes
from tests.models.conftest import GOLDEN

TOLERANCE = 1e-4


def kept(case: Case) -> dict[str, Any]:
    return json.loads((GOLDEN / "networks" / f"{case.kept}.json").read_text())


def filled(case: Case, variables: Variables) -> Variables:
    """Every parameter and statistic as the other definition was given it."""
    leaves = flatten_dict(variables, sep="/")
    return unflatten_dict(
        {
            path: drawn(path.partition("/")[2], leaf.shape, case.gain)
            for path, leaf in leaves.items()
        },
        sep="/",
    )


@pytest.mark.parametrize("case", [*CASES, *EVEN], ids=lambda case: case.kept)
def test_parity_of_logits_and_parameters(case: Case) -> None:
    module = conf_model(case.model, **case.changes).build(case.classes, "float32")
    variables = shapes(module, case.image)
    expected = np.array(kept(case)["logits"], np.float32)
    compute = jax.jit(lambda v, x: module.apply(v, x, train=False), compiler_options=QUICK)
    logits = np.asarray(compute(filled(case, variables), samples(case)))
    assert count(variables) == kept(case)["parameters"] - case.without
    assert np.abs(expected[0] - expected[1]).max() > 10 * TOLERANCE
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
