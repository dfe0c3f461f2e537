"""Launches are counted from XLA's lists, whose lines stand here as XLA writes them."""

from __future__ import annotations

from pipeline.backends.gpu.program_figures import (
    Launches,
    count_launches,
    find_outer_loops,
    parse_thunks,
)

PARTS = """\
000: kCommandBuffer [source       | next=002 (1)]
    001: kCopy [source | sink] kCopy
002: kWhile         [prev=000 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=006 (1)]
        004: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
        005: kCustomKernel [source | sink] loop_convert_fusion grid: [288, 1, 1]
    006: kConvolution   [prev=000 (1) | next=000 (1)] kConvolution
    007: kCublasLtMatmul [prev=006 (1) | sink] kCublasLtMatmul
"""

ONE_GRAPH = """\
000: kCommandBuffer [source | sink]
    001: kCopy  [source       | next=002 (1)] kCopy
    002: kWhile [prev=001 (1) | sink        ]
condition:
        003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        004: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
        005: kConvolution  [prev=004 (1) | sink] kConvolution
"""


def test_loop_with_graphs_in_its_body_is_parsed() -> None:
    thunks = parse_thunks(PARTS)
    ((loop, in_graph),) = find_outer_loops(thunks)
    body = [one for one in loop.inner_thunks if one.part == "body"]
    assert not in_graph
    assert [one.part for one in loop.inner_thunks] == ["condition", "body", "body", "body"]
    assert count_launches(body) == Launches(kernels=2, cudnn=1, gemm=1, graphs=1, alone=2)
    assert count_launches(thunks).loops == 1


def test_loop_in_one_graph_is_parsed() -> None:
    thunks = parse_thunks(ONE_GRAPH)
    ((loop, in_graph),) = find_outer_loops(thunks)
    body = [one for one in loop.inner_thunks if one.part == "body"]
    assert in_graph
    assert count_launches(body, in_graph=in_graph) == Launches(kernels=1, cudnn=1)
    assert count_launches(thunks).graphs == 1


def test_unrecognised_lines_are_ignored() -> None:
    assert parse_thunks("nothing\n  here: 3\n\n") == ()
    assert count_launches(()) == Launches()
