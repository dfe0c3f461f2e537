"""Writes onnx/operators.npz: networks of one or two operators, and what ONNX Runtime computes.

    python tests/golden/make_onnx_operators.py        with onnx and onnxruntime 1.32.0

The arrays are joined, which makes a small file: `names`; `models`, the bytes of all files, with
their `lengths`; and `values`, of each case the three samples and then the result in float32, with
`shapes` as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FILE = Path(__file__).parent / "onnx" / "operators.npz"
IMAGE, ROW, TOKENS, VOLUME = (2, 5, 6), (6,), (4, 6), (2, 3, 4, 5)
Case = tuple[str, int, tuple[int, ...], list[Any], dict[str, Any]]
random = np.random.default_rng(3)


def weight(*shape: int) -> np.ndarray:
    """A weight of a shape."""
    return random.normal(size=shape).astype(np.float32)


def whole(*numbers: int) -> np.ndarray:
    """Whole numbers."""
    return np.array(numbers, np.int64)


def case(op: str, shape: tuple[int, ...], *inputs: Any, opset: int = 17, **attributes: Any) -> Case:
    """One operator on x and other inputs: arrays, or "" for one that is left out."""
    return op, opset, shape, list(inputs), attributes


def cases() -> list[Case]:
    """Every case."""
    same = [
        *("Abs", "Atan", "Ceil", "Cos", "Erf", "Exp", "Floor", "IsInf", "IsNaN", "Neg"),
        *("Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Tan"),
        *("Tanh", "HardSwish", "LeakyRelu", "Elu", "HardSigmoid", "Identity"),
    ]
    some = random.random(ROW) > 0.5
    return [
        *(case(op, ROW) for op in same),
        case("Gelu", ROW, opset=20),
        case("Gelu", ROW, opset=20, approximate="tanh"),
        case("Mish", ROW, opset=18),
        case("LeakyRelu", ROW, alpha=0.3),
        case("Selu", ROW, alpha=1.2, gamma=0.9),
        case("Elu", ROW, alpha=0.7),
        case("HardSigmoid", ROW, alpha=0.3, beta=0.4),
        case("Clip", ROW, np.float32(-0.5), np.float32(0.5), opset=11),
        case("Clip", ROW, "", np.float32(0.5)),
        case("PRelu", IMAGE, weight(2, 1, 1), opset=11),
        case("Softmax", TOKENS, opset=11),
        case("Softmax", TOKENS),
        case("LogSoftmax", TOKENS, axis=1),
        *(case(op, ROW, weight(*ROW)) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")),
        *(case(op, TOKENS, weight(4, 1)) for op in ("Mean", "Add", "PRelu")),
        case("Pow", ROW, np.float32(2)),
        case("Mod", ROW, np.float32([0.7]), fmod=1),
        *(case(op, ROW, np.float32(0.1)) for op in ("Less", "LessOrEqual", "Greater")),
        case("GreaterOrEqual", ROW, np.float32(0.1)),
        case("Equal", ROW, np.float32(0.1)),
        *(
            case(op, IMAGE, opset=13, axes=[2, 3], keepdims=0)
            for op in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1")
        ),
        *(case(op, IMAGE, axes=[1]) for op in ("ReduceL2", "ReduceSumSquare", "ReduceLogSumExp")),
        case("ReduceSum", IMAGE, whole(-1), keepdims=0),
        case("ReduceMean", IMAGE, whole(1, 2), opset=18),
        case("ArgMax", TOKENS, axis=2, keepdims=0),
        case("ArgMin", TOKENS, axis=1),
        case("MatMul", TOKENS, weight(6, 5)),
        case("MatMul", ROW, weight(6, 5)),
        case("Gemm", ROW, weight(6, 5), weight(5)),
        case("Gemm", ROW, weight(5, 6), weight(1, 5), transB=1, alpha=0.5, beta=2.0),
        case("Conv", IMAGE, weight(4, 2, 3, 3), weight(4), pads=[1, 1, 1, 1], strides=[2, 2]),
        case("Conv", IMAGE, weight(4, 1, 3, 2), group=2, pads=[0, 1, 2, 0]),
        case("Conv", IMAGE, weight(3, 2, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
        case("Conv", IMAGE, weight(3, 2, 2, 2), auto_pad="SAME_LOWER"),
        case("Conv", IMAGE, weight(3, 2, 2, 2), dilations=[2, 3], auto_pad="VALID"),
        case("Conv", TOKENS, weight(3, 4, 3), weight(3), pads=[1, 1]),
        case("Conv", (2, 3, 5, 6), weight(3, 2, 2, 3, 3), weight(3), pads=[0, 1, 1, 1, 1, 1]),
        case("ConvTranspose", IMAGE, weight(2, 3, 3, 3), weight(3), strides=[2, 2]),
        case("ConvTranspose", IMAGE, weight(2, 1, 3, 3), group=2, pads=[1, 1, 1, 1]),
        case("ConvTranspose", IMAGE, weight(2, 3, 2, 2), strides=[2, 2], pads=[0, 1, 1, 0]),
        case("ConvTranspose", IMAGE, weight(2, 3, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER"),
        case("ConvTranspose", IMAGE, weight(2, 3, 3, 3), strides=[2, 2], output_shape=[10, 12]),
        case("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        case("MaxPool", IMAGE, kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
        case("MaxPool", IMAGE, kernel_shape=[2, 2], dilations=[2, 2]),
        case("MaxPool", TOKENS, kernel_shape=[2], strides=[2]),
        case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
        case("AveragePool", IMAGE, kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
        case("AveragePool", IMAGE, kernel_shape=[2, 2], pads=[0, 0, 1, 1], count_include_pad=1),
        case("GlobalAveragePool", IMAGE),
        case("GlobalMaxPool", IMAGE),
        case("BatchNormalization", IMAGE, weight(2), weight(2), weight(2), weight(2) ** 2),
        case("InstanceNormalization", IMAGE, weight(2), weight(2)),
        case("LayerNormalization", TOKENS, weight(6), weight(6)),
        case("LayerNormalization", TOKENS, weight(4, 6), axis=1, epsilon=1e-3),
        case("GroupNormalization", (4, 3, 3), weight(2), weight(2), opset=18, num_groups=2),
        case("GroupNormalization", (4, 3, 3), weight(4), weight(4), opset=21, num_groups=2),
        case("Dropout", ROW, np.float32(0.3)),
        case("Reshape", TOKENS, whole(0, -1, 3)),
        case("Reshape", TOKENS, whole(-1, 24)),
        case("Flatten", IMAGE),
        case("Flatten", TOKENS, axis=2),
        case("Transpose", IMAGE, perm=[0, 2, 3, 1]),
        case("Squeeze", (1, 6), opset=11, axes=[1]),
        case("Squeeze", (1, 6), whole(1)),
        case("Unsqueeze", ROW, opset=11, axes=[1, 3]),
        case("Unsqueeze", ROW, whole(-1)),
        case("Split", TOKENS, axis=2),
        case("Split", TOKENS, whole(1, 3), axis=1),
        case("Slice", TOKENS, whole(1), whole(2**63 - 1), whole(1)),
        case("Slice", TOKENS, whole(-1, 0), whole(-(2**63), 4), whole(1, 2), whole(-1, 2)),
        case("Gather", TOKENS, np.array(-1), axis=1),
        case("Gather", TOKENS, whole(2, 0, -1), axis=2),
        case("Gather", TOKENS, np.array([[0, 1], [2, 3]]), axis=1),
        case("Pad", IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), np.float32(0.5)),
        case("Pad", IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), mode="reflect"),
        case("Pad", IMAGE, whole(1, 1), "", whole(2), mode="edge", opset=18),
        case("Expand", (1, 6), whole(1, 4, 1)),
        case("Tile", TOKENS, whole(1, 2, 1)),
        case("Where", ROW, weight(*ROW), some),
        case("Trilu", TOKENS, np.array(1), upper=0),
        case("DepthToSpace", (8, 2, 3), blocksize=2),
        case("DepthToSpace", (8, 2, 3), blocksize=2, mode="CRD"),
        case("Einsum", TOKENS, weight(6, 3), equation="bij,jk->bik"),
        case("Resize", IMAGE, "", SCALES, **NEAREST),
        case("Resize", IMAGE, np.zeros(0, np.float32), SCALES, mode="linear", opset=11),
        case("Resize", IMAGE, "", np.float32([1, 1, 1.5, 2]), **CORNERS),
        case("Resize", IMAGE, "", SCALES, mode="cubic"),
        case("MaxPool", VOLUME, kernel_shape=[2, 3, 3], strides=[1, 2, 2], pads=[0, 1, 1, 1, 1, 1]),
        case("MaxPool", VOLUME, kernel_shape=[2, 2, 2], strides=[2, 2, 2], ceil_mode=1),
        case("MaxPool", VOLUME, kernel_shape=[2, 2, 2], dilations=[1, 2, 2]),
        case("AveragePool", VOLUME, kernel_shape=[2, 3, 3], pads=[1, 1, 1, 1, 1, 1]),
        case("AveragePool", VOLUME, kernel_shape=[2, 2, 3], strides=[2, 2, 2], ceil_mode=1),
        case("AveragePool", VOLUME, kernel_shape=[1, 2, 2], pads=[0, 0, 1, 0, 1, 1]),
        case("GlobalAveragePool", VOLUME),
        *recurrent_cases(),
        *(case(op, ROW) for op in ("Asinh", "Atanh", "Cosh", "Sinh")),
        case("CumSum", TOKENS, np.array(1)),
        case("CumSum", TOKENS, np.array(-1), exclusive=1, reverse=1),
        case("TopK", TOKENS, whole(2), axis=1),
        case("TopK", TOKENS, whole(3), largest=0),
        case("GatherElements", TOKENS, whole(2), axis=1),
        case("GatherND", ROW, whole(2), whole(-1), batch_dims=1),
        case("GatherND", TOKENS, np.array([[0, 1], [-1, 2]])),
        *(case(op, ROW) for op in ("Acos", "Acosh", "Asin")),
    ]


def recurrent_cases() -> list[Case]:
    """Recurrent layers of six features, with and without biases and initial states."""
    cases = []
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        for direction in ("forward", "reverse", "bidirectional"):
            count = 2 if direction == "bidirectional" else 1
            options = {"hidden_size": 6, "direction": direction}
            rows = gates * 6
            weights = [weight(count, rows, 6) / 2, weight(count, rows, 6) / 2]
            bias = weight(count, 2 * rows) / 2
            cases.append(case(op, TOKENS, *weights, bias, **options))
            states = [STATE] * (2 if op == "LSTM" else 1)
            if op == "GRU":
                options["linear_before_reset"] = 1
            cases.append(case(op, TOKENS, *weights, "", "", *states, **options))
            cases.append(case(op, TOKENS, *weights, bias, "", *states, **options))
    relu = {"hidden_size": 6, "activations": ["Relu"]}
    return [*cases, case("RNN", TOKENS, weight(1, 6, 6) / 4, weight(1, 6, 6) / 4, **relu)]


STATE = "state"
"""An initial state: the mean of x over time."""


SCALES = np.float32([1, 1, 2, 2])
NEAREST = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
CORNERS = {"coordinate_transformation_mode": "align_corners", "mode": "linear"}


def build(op: str, opset: int, shape: tuple[int, ...], operands: list[Any], options: Any) -> Any:
    """A model of one operator, with a cast of its result."""
    names, constants = ["x"], []
    for place, other in enumerate(operands):
        names.append(other if isinstance(other, str) else f"w{place}")
        if not isinstance(other, str):
            constants.append(numpy_helper.from_array(np.asarray(other), names[-1]))
    if op == "Where":
        names = ["w1", "x", "w0"]
    count = 2 if op in ("Split", "TopK") else 1
    outputs = [f"r{place}" for place in range(count)]
    if op.startswith("Gather") and op != "Gather":
        return make_model(build_gather(op, options), opset, shape, constants)
    if op in ("LSTM", "GRU", "RNN"):
        return build_recurrent(opset, (op, names, options), shape, constants)
    nodes = [
        helper.make_node(op, names, outputs, **options),
        helper.make_node("Cast", [outputs[-1]], ["y"], to=TensorProto.FLOAT),
    ]
    return make_model(nodes, opset, shape, constants)


def build_gather(op: str, options: Any) -> list[Any]:
    """Nodes that gather values of x at computed indices, or at constants of its later axes."""
    if op == "GatherND" and not options:
        return [
            helper.make_node("Transpose", ["x"], ["last"], perm=[1, 2, 0]),
            helper.make_node(op, ["last", "w0"], ["parts"]),
            helper.make_node("Transpose", ["parts"], ["y"], perm=[1, 0]),
        ]
    axis = options.get("axis", -1)
    nodes = [helper.make_node("TopK", ["x", "w0"], ["values", "indices"], axis=axis)]
    if op == "GatherND":
        nodes.append(helper.make_node("Unsqueeze", ["indices", "w1"], ["tuples"]))
    indices = "tuples" if op == "GatherND" else "indices"
    nodes.append(helper.make_node(op, ["x", indices], ["y"], **options))
    return nodes


def build_recurrent(opset: int, call: Any, shape: tuple[int, ...], constants: list[Any]) -> Any:
    """A model of one layer over time, which returns the sum of its outputs and last states."""
    op, names, options = call
    outputs = ["r0", "r1", "r2"][: 3 if op == "LSTM" else 2]
    copies = 2 if options.get("direction") == "bidirectional" else 1
    nodes = [
        helper.make_node("Transpose", ["x"], ["time"], perm=[1, 0, 2]),
        helper.make_node("ReduceMean", ["time"], ["mean"], axes=[0]),
        helper.make_node("Concat", ["mean"] * copies, [STATE], axis=0),
        helper.make_node(op, ["time", *names[1:]], outputs, **options),
        helper.make_node("Sum", outputs, ["y"]),
    ]
    return make_model(nodes, opset, shape, constants)


def make_model(nodes: list[Any], opset: int, shape: tuple[int, ...], constants: list[Any]) -> Any:
    """A model from x (batch, *shape) to y."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "operator", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 9
    return model


def main() -> None:
    """Write the file."""
    names, models, values, shapes = [], [], [], []
    for number, (op, opset, shape, operands, options) in enumerate(cases()):
        content = build(op, opset, shape, operands, options).SerializeToString()
        x = random.normal(size=(3, *shape)).astype(np.float32)
        try:
            session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
            y = session.run(None, {"x": x})[0]
        except Exception as error:
            print(op, opset, options, str(error)[:200])
            continue
        names.append(f"{number:03} {op}")
        models.append(np.frombuffer(content, np.uint8))
        values += [x.ravel(), y.ravel()]
        shapes.append([x.shape, y.shape])
    np.savez_compressed(
        FILE,
        names=names,
        models=np.concatenate(models),
        lengths=[len(model) for model in models],
        values=np.concatenate(values),
        shapes=json.dumps(shapes),
    )


if __name__ == "__main__":
    main()
