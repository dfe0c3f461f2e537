"""What is read off the text of a compiled program, against programs whose operations are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends.graph.hlo_program import HloProgram, parse_program

TEXT = """
HloModule jit_loop, is_scheduled=true

%fused (param_0: bf16[4,8], param_1: f32[8]) -> f32[4,8] {
  %param_0 = bf16[4,8]{1,0} parameter(0)
  %param_1 = f32[8]{0} parameter(1)
  %convert.1 = f32[4,8]{1,0} convert(%param_0)
  %spread = f32[4,8]{1,0} broadcast(%param_1), dimensions={1}
  ROOT %mul.1 = f32[4,8]{1,0} multiply(%convert.1, %spread)
}

%sums (p: f32[4,8], q: f32[]) -> f32[8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[8]{0} reduce(%p, %q), dimensions={0}, to_apply=%add
}

%slices (p.1: f32[100,8], q.1: s32[]) -> f32[1,8] {
  %p.1 = f32[100,8]{1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  ROOT %piece = f32[1,8]{1,0} dynamic-slice(%p.1, %q.1, %q.1), dynamic_slice_sizes={1,8}
}

ENTRY %main (x: bf16[4,8], w: f32[8], zero: f32[], table: f32[100,8], i: s32[]) -> f32[8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = f32[8]{0} parameter(1)
  %scaled = f32[4,8]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused, metadata={op_name="mul"}
  %total.2 = f32[8]{0} fusion(%scaled, %zero), kind=kLoop, calls=%sums
  %taken = f32[1,8]{1,0} fusion(%table, %i), kind=kLoop, calls=%slices
  %dot.1 = f32[4,4]{1,0} dot(%scaled, %scaled), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %loop = (f32[4,8]{1,0}, s32[]) while(%tuple), condition=%cond, body=%body
  %flat = f32[32]{0} copy(%scaled)
  ROOT %ffi_call.3 = f32[8]{0} custom-call(%scaled), custom_call_target="__onednn$matmul"
}
"""
PROGRAM = parse_program(TEXT)


@pytest.mark.parametrize(
    ("name", "kind", "nbytes"),
    [
        ("scaled", "element by element", 4 * 8 * 2 + 8 * 4 + 4 * 8 * 4),
        ("total.2", "sums and maxima", 4 * 8 * 4 + 8 * 4),
        ("taken", "moves and conversions", 2 * 8 * 4),
        ("dot.1", "matrix products, by XLA", 2 * 4 * 8 * 4 + 4 * 4 * 4),
        ("loop", None, None),
        ("flat", "moves and conversions", 2 * 32 * 4),
        ("ffi_call.3__onednn$matmul", "matrix products, by oneDNN", 4 * 8 * 4 + 8 * 4),
        ("ffi_call.9__onednn$convolution", "convolutions, by oneDNN", 0),
        ("nothing", None, 0),
    ],
)
def test_every_operation_has_a_kind_and_its_bytes(
    name: str, kind: str | None, nbytes: int | None
) -> None:
    assert PROGRAM.find_kind(name) == kind
    if nbytes is not None:
        operation = PROGRAM.find(name)
        assert (operation.moved_bytes if operation else 0) == nbytes


def test_compiled_program_is_classified() -> None:
    """A compiled program has a product and a sum, and no name is left without its opcode."""

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum(0)

    operands = np.ones((64, 32), np.float32), np.ones((32, 16), np.float32)
    text = jax.jit(function).lower(*operands).compile().as_text()
    assert text is not None
    program: HloProgram = parse_program(text)
    kinds = {program.find_kind(name) for name in program.instructions}
    assert {"matrix products, by XLA", "sums and maxima"} <= kinds
