"""Launches are counted from XLA's lists, whose lines stand here as XLA writes them.

Facts of a program for a GPU, from text of the form that XLA writes.
"""

from __future__ import annotations

from pipeline.backends.gpu.program_figures import (
    Launches,
    count_launches,
    find_outer_loops,
    parse_thunks,
    read_hlo,
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
CONVOLUTION = (
    "%cudnn-conv.1 = (bf16[8,8]{1,0}, u8[0]{0}) custom-call(%w.1, %w.1), "
    'custom_call_target="__cudnn$convForward"'
)


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


def program(entry: str, *, body: str = "", trips: str = "") -> str:
    """A program with a loop over (s32, f32[8,8])."""
    return f"""\
HloModule jit_f, \
input_output_alias={{ {{0}}: (0, {{}}, may-alias), {{1}}: (1, {{}}, may-alias) }}, \
entry_computation_layout={{(s32[], f32[8,8])->(s32[], f32[8,8])}}

%fused_transpose (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %t = f32[8,8]{{0,1}} transpose(%p), dimensions={{1,0}}
}}

%body (b: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %b = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %w.1 = f32[8,8]{{1,0}} get-tuple-element(%b), index=1
  {CONVOLUTION}
  {body}
  ROOT %r = (s32[], f32[8,8]{{1,0}}) tuple(%w.1, %w.1)
}}

%cond (c: (s32[], f32[8,8])) -> pred[] {{
  %c = (s32[], f32[8,8]{{1,0}}) parameter(0)
  ROOT %less = pred[] compare(%c, %c), direction=LT
}}

ENTRY %main (i: s32[], w: f32[8,8]) -> (s32[], f32[8,8]) {{
  %i = s32[] parameter(0)
  %w = f32[8,8]{{1,0}} parameter(1)
  {entry}
  %while = (s32[], f32[8,8]{{1,0}}) while(%tuple), condition=%cond, body=%body{trips}
  ROOT %out = (s32[], f32[8,8]{{1,0}}) tuple(%while, %while)
}}
"""


PLAIN = "%tuple = (s32[], f32[8,8]{1,0}) tuple(%i, %w)"
TURNED = """%turned = f32[8,8]{0,1} fusion(%w), kind=kInput, calls=%fused_transpose
  %tuple = (s32[], f32[8,8]{1,0}) tuple(%i, %turned)"""


def test_loop_of_fixed_length_without_copies() -> None:
    trips = ', backend_config={"known_trip_count":{"n":"64"}}'
    facts = read_hlo(program(PLAIN, trips=trips))
    assert (facts.known_steps, facts.donated, facts.callbacks) == (64, 2, 0)
    assert (facts.body_moves, facts.state_moves) == (0, 0)
    assert facts.calls_by_library == {"cudnn$convForward bf16": 1}


def test_weight_transposes_at_the_input_are_counted() -> None:
    facts = read_hlo(program(TURNED))
    assert facts.known_steps is None
    assert (facts.state_moves, facts.state_moved_bytes) == (1, 256)


def test_copies_and_callbacks_in_the_loop_are_counted() -> None:
    body = """%copied = f32[8,8]{0,1} copy(%w.1)
  %called = f32[8,8]{1,0} custom-call(%w.1), custom_call_target="xla_ffi_python_gpu_callback"
  %tri = f32[8,8]{1,0} fusion(%w.1), calls=%g, backend_config={"kind":"__triton_gemm"}"""
    facts = read_hlo(program(PLAIN, body=body))
    assert (facts.body_moves, facts.callbacks) == (1, 1)
    assert facts.triton == {"__triton_gemm": 1}
    assert facts.state_moves == 0
