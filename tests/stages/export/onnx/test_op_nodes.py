"""Nodes of map ops, against the values of another library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.ops.series import LogMel
from pipeline.stages.export.onnx.graph_builder import IR_VERSION, OPSET, GraphBuilder, NodeOutput
from pipeline.stages.export.onnx.op_nodes import add_ops

onnx = pytest.importorskip("onnx", reason="not installed: pip install '.[onnx]'")
ort = pytest.importorskip(
    "onnxruntime", reason="not installed: pip install '.[onnx]'", exc_type=ImportError
)

with np.load(Path(__file__).parents[3] / "golden/log_mel.npz") as stored:
    GOLDEN = dict(stored)
SOUND = GOLDEN["sound"]


@pytest.mark.medium
@pytest.mark.parametrize("case", [key for key in GOLDEN if key != "sound"])
def test_golden_spectrograms_of_librosa_in_onnx(case: str) -> None:
    op = LogMel(rate_hz=8000, **json.loads(case))
    graph = GraphBuilder({})
    shape = SOUND.shape[1:]
    result = add_ops([op], {"audio": NodeOutput("audio", shape)}, graph)["audio"]
    kind = onnx.TensorProto.FLOAT
    inputs, outputs = (
        [onnx.helper.make_tensor_value_info(value.name, kind, [None, *value.shape])]
        for value in (NodeOutput("audio", shape), result)
    )
    constants = [
        onnx.numpy_helper.from_array(array, name) for name, array in graph.constants.items()
    ]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "ops", inputs, outputs, constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"audio": SOUND})
    # ONNX Runtime's transform of other sizes than powers of 2 is less accurate.
    tolerance = 1e-4 if op.fft_size in (256, 512) else 5e-3
    np.testing.assert_allclose(found[..., 0], GOLDEN[case], atol=tolerance)
