"""Facts of a program for a GPU, from text of the form that XLA writes."""

from __future__ import annotations

from pipeline.backends.gpu.optimized_hlo import read_hlo

CONVOLUTION = (
    "%cudnn-conv.1 = (bf16[8,8]{1,0}, u8[0]{0}) custom-call(%w.1, %w.1), "
    'custom_call_target="__cudnn$convForward"'
)


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
