"""Logits of the networks against definitions by others, with the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from pipeline.config.renames import RenameSpec
from pipeline.data.columns import ColumnSpec
from pipeline.data.inputs import NetworkInput, NetworkInputs
from pipeline.stages.export.matching import match_weights
from pipeline.stages.export.network import trace_model_arrays
from tests.golden.network_cases import CASES, EVEN, Case, draw_arrays, samples
from tests.models.build import QUICK, ZEROS, Variables, conf_model, count, split_fields
from tests.models.conftest import GOLDEN

TOLERANCE = 1e-4


def kept(case: Case) -> dict[str, Any]:
    return json.loads((GOLDEN / "networks" / f"{case.file_stem}.json").read_text())


def filled(case: Case, golden: Mapping[str, Any]) -> Variables:
    """The weights that the other definition was given, as they come out of a file of them."""
    arrays = samples(case)
    columns = split_fields(arrays) if case.model == "wide_deep" else {"image": arrays}
    inputs = tuple(
        NetworkInput(name, name, ColumnSpec(array.shape[1:], array.dtype.name))
        for name, array in columns.items()
    )
    model = conf_model(case.model, **case.changes, init=ZEROS)
    network = trace_model_arrays(
        model, case.classes, NetworkInputs(inputs, is_named=len(inputs) > 1)
    )
    renames = [RenameSpec.model_validate({"match": a, "to": b}) for a, b in case.renames]
    matching = match_weights(case.file, draw_arrays(case, golden["arrays"]), network, renames)
    matching.require(partial=False)
    assert set(matching.arrays) == set(network.shapes)
    return unflatten_dict(matching.arrays, sep="/")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *EVEN], ids=lambda case: case.file_stem)
def test_parity_of_logits_and_parameters(case: Case) -> None:
    golden = kept(case)
    module = conf_model(case.model, **case.changes).build(case.classes, "float32")
    variables = filled(case, golden)
    expected = np.array(golden["logits"], np.float32)
    compute = jax.jit(lambda v, x: module.apply(v, x, train=False), compiler_options=QUICK)
    inputs = split_fields(samples(case)) if case.model == "wide_deep" else samples(case)
    logits = np.asarray(compute(variables, inputs))
    assert count(variables) == golden["parameters"] - case.without
    assert np.abs(expected[0] - expected[1]).max() > 10 * TOLERANCE
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
