"""Numbers of samples without a row in a table of a graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec, Split
from pipeline.data.inputs import DOCUMENT, NetworkInput, NetworkInputs
from pipeline.models.torch_graph.computation import table_lookups
from pipeline.models.torch_graph.computation.table_lookups import list_lookups
from pipeline.models.torch_graph.computation.torch_network import OnnxFile, TorchNetwork
from pipeline.models.torch_graph.graph import SampleSpec, TorchGraph
from tests.models.torch_graph.onnx.golden_onnx import encode, model, node, signature, tensor

TABLE = np.ones((20, 3), np.float32)
WHOLE = node("Cast", ["x"], "i", attribute=encode({1: "to", 3: 7, 20: 2}))
AXIS = encode({1: "axis", 3: 1, 20: 2})


def make_network(folder: Path, *nodes: bytes, **arrays: np.ndarray) -> TorchNetwork:
    """A network of samples (6,), from nodes that compute `y`, and arrays besides `table`."""
    tensors = [tensor(name, array) for name, array in {"table": TABLE, **arrays}.items()]
    file = folder / "net.onnx"
    file.write_bytes(model([WHOLE, *nodes], tensors))
    return TorchNetwork(OnnxFile(file, None), "float32")


def make_tokens(samples: int, **changed: int) -> np.ndarray:
    """Tokens int32 (samples, 6) from 0 to 19, but for `s3_t2=25`: token 2 of sample 3."""
    tokens = np.random.default_rng(0).integers(0, 20, (samples, 6)).astype(np.int32)
    for place, value in changed.items():
        sample, position = place[1:].split("_t")
        tokens[int(sample), int(position)] = value
    return tokens


def check(
    network: TorchNetwork, tokens: np.ndarray, vocabulary: int | None = None, **fields: Any
) -> None:
    spec = ColumnSpec((6,), "int32")
    inputs = NetworkInputs((NetworkInput("tokens", "tokens", spec),))
    network.require_rows(inputs, Split({"tokens": tokens}, **fields), vocabulary)


DIRECT = node("Gather", ["table", "i"], "y")


def test_first_token_without_a_row_is_named(tmp_path: Path) -> None:
    network = make_network(tmp_path, DIRECT)
    check(network, make_tokens(9))
    problem = (
        r"table table of .*Gather.* has 20 rows, and sample 7 has the token 20; must be "
        "from 0 to 19"
    )
    with pytest.raises(ValueError, match=problem):
        check(network, make_tokens(9, s7_t5=20, s8_t0=99))
    with pytest.raises(ValueError, match=r"sample 2 has the token -1; must"):
        check(network, make_tokens(9, s2_t3=-1))


def test_place_is_the_row_as_it_was_read(tmp_path: Path) -> None:
    rows = np.array([4, 2, 9])
    with pytest.raises(ValueError, match=r"and rows\.csv, line 4 has the"):
        check(
            make_network(tmp_path, DIRECT),
            make_tokens(3, s1_t1=31),
            locate=lambda row: f"rows.csv, line {row + 2}",
            original_rows=rows,
        )


@pytest.mark.parametrize("size", [1, 50, 1 << 22])
def test_all_chunks_are_read(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk is as long as the others, and repeats its last sample."""
    monkeypatch.setattr(table_lookups, "CHUNK_BYTES", size)
    network = make_network(tmp_path, DIRECT)
    check(network, make_tokens(7))
    for sample in range(7):
        with pytest.raises(ValueError, match=f"sample {sample} has the"):
            check(network, make_tokens(7, **{f"s{sample}_t0": 20}))


@pytest.mark.parametrize("length", [4, 9])
def test_samples_are_padded_or_cut_as_the_network_reads_them(length: int, tmp_path: Path) -> None:
    tokens = np.pad(make_tokens(5), ((0, 0), (0, 3)))[:, :length]
    check(make_network(tmp_path, DIRECT), tokens)
    tokens[2, -1] = 20
    if length > 6:
        check(make_network(tmp_path, DIRECT), tokens)
    else:
        with pytest.raises(ValueError, match="sample 2 has the token 20"):
            check(make_network(tmp_path, DIRECT), tokens)


def test_numbers_are_computed_as_in_the_network(tmp_path: Path) -> None:
    offset = np.array([0, 0, 0, 0, 0, 5], np.int64)
    nodes = node("Add", ["i", "offset"], "j"), node("Gather", ["table", "j"], "y")
    network = make_network(tmp_path, *nodes, offset=offset)
    tokens = np.minimum(make_tokens(5), 14)
    check(network, tokens)
    tokens[3, 5] = 15
    with pytest.raises(ValueError, match="sample 3 has the number 20; must be from 0 to 19"):
        check(network, tokens)


def test_each_column_has_its_own_table(tmp_path: Path) -> None:
    nodes = (
        node("Gather", ["i", "first"], "a", attribute=AXIS),
        node("Gather", ["i", "second"], "b", attribute=AXIS),
        node("Gather", ["table", "a"], "c"),
        node("Gather", ["small", "b"], "d"),
        node("Add", ["c", "d"], "y"),
    )
    arrays = {"first": np.array([0]), "second": np.array([1])}
    network = make_network(tmp_path, *nodes, small=TABLE[:4], **arrays)
    tokens = np.full((5, 6), 3, np.int32)
    tokens[:, 0] = 19
    check(network, tokens)
    tokens[4, 1] = 4
    with pytest.raises(ValueError, match=r"table small of .* has 4 rows, and sample 4 has the"):
        check(network, tokens)


def test_numbers_that_parameters_decide_are_not_checked(tmp_path: Path) -> None:
    nodes = (
        node("MatMul", ["x", "w"], "scores"),
        node("ArgMax", ["scores"], "code", attribute=AXIS),
        node("Gather", ["table", "code"], "y"),
    )
    network = make_network(tmp_path, *nodes, w=np.ones((6, 30), np.float32))
    assert list_lookups(network.source.graph_for(SampleSpec((6,)))) == ()
    check(network, make_tokens(4, s0_t0=10_000))


def test_all_tokens_of_texts_need_a_row(tmp_path: Path) -> None:
    """Also those that the splits don't have, since other texts may."""
    network = make_network(tmp_path, DIRECT)
    check(network, make_tokens(4), vocabulary=20)
    with pytest.raises(
        ValueError, match="has 20 rows, and the texts have 21 tokens; must be at least as many"
    ):
        check(network, make_tokens(4), vocabulary=21)


def test_numbers_of_documents_need_no_row_by_token(tmp_path: Path) -> None:
    spec = ColumnSpec((6,), "int32")
    inputs = NetworkInputs((NetworkInput(DOCUMENT, DOCUMENT, spec),))
    network = make_network(tmp_path, DIRECT)
    network.require_rows(inputs, Split({DOCUMENT: make_tokens(4)}), 21)


def test_indices_of_a_table_count_from_both_ends(tmp_path: Path) -> None:
    nodes = node("Unsqueeze", ["i", "last"], "j"), node("GatherND", ["table", "j"], "y")
    network = make_network(tmp_path, *nodes, last=np.array([-1]))
    check(network, make_tokens(4, s1_t1=-20))
    for number in (-21, 20):
        problem = f"sample 1 has the token {number}; must be from -20 to 19"
        with pytest.raises(ValueError, match=problem):
            check(network, make_tokens(4, s1_t1=number))


def make_lookup_graph(folder: Path, batch: int | str, *nodes: bytes, **arrays: Any) -> TorchGraph:
    """A network of a batch, from nodes that compute `y`."""
    tensors = [tensor(name, array) for name, array in {"table": TABLE, **arrays}.items()]
    file = folder / "net.onnx"
    file.write_bytes(model([WHOLE, *nodes], tensors, input=[signature("x", batch, 6)]))
    return OnnxFile(file, None).graph_for(SampleSpec((6,)))


def test_samples_of_a_fixed_batch_are_along_any_axis(tmp_path: Path) -> None:
    turned = node("Transpose", ["i"], "j"), node("Gather", ["table", "j"], "y")
    (lookup,) = list_lookups(make_lookup_graph(tmp_path, 4, *turned))
    assert lookup.batch_axis == 1
    most = node("ReduceMax", ["i"], "j", attribute=encode({1: "keepdims", 3: 0, 20: 2}))
    graph = make_lookup_graph(tmp_path, 4, most, node("Gather", ["table", "j"], "y"))
    assert list_lookups(graph) == ()


def test_rows_are_along_the_first_axis_however_it_is_counted(tmp_path: Path) -> None:
    graph = make_lookup_graph(tmp_path, "batch", DIRECT)
    (read,) = (node for node in graph.evaluation.nodes if node.op == "aten.embedding.default")
    for axis, count in ((-2, 1), (0, 1), (-1, 0), (1, 0)):
        args = (read.args[0], axis, read.args[1])
        node = replace(read, op="aten.index_select.default", args=args)
        nodes = tuple(node if other is read else other for other in graph.evaluation.nodes)
        changed = replace(graph, evaluation=replace(graph.evaluation, nodes=nodes))
        assert len(list_lookups(changed)) == count
