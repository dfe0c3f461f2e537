"""The drawn arguments of all operators: importing this module fills the table."""

from __future__ import annotations

from tests.models.torch_graph.operators import core_index_cases as core_index_cases
from tests.models.torch_graph.operators import core_layer_cases as core_layer_cases
from tests.models.torch_graph.operators import usual_cases as usual_cases
from tests.models.torch_graph.operators import usual_layer_cases as usual_layer_cases
from tests.models.torch_graph.operators.core_cases import CASES as CASES
from tests.models.torch_graph.operators.core_cases import draw_case as draw_case

NOT_COMPARED = {
    "aten.gru_reset_first.input": "of ONNX; PyTorch has no such operator",
    "aten.to.device": "its argument is a device of torch",
    "transformers.grouped_mm_fallback.default": "of transformers; is aten._grouped_mm.default",
    "pipeline.cotangent.default": "of this project",
    "pipeline.custom_gradient.default": "of this project",
}
"""Operators of the table that aren't compared with torch's, and why; besides those of sizes."""
