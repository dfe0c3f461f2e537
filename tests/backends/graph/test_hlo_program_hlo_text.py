"""Programs as XLA writes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.backends.graph.hlo_program import HloArray, read_hlo_text

TEXT = """HloModule jit_f, is_scheduled=true

%fused (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  ROOT %sine.1 = f32[8]{0:T(256)} sine(%p.0), metadata={op_name="jit(f)/sin(x)"}
}

ENTRY %main.2 (x: f32[8]) -> (f32[8], pred[]) {
  %x = f32[8]{0} parameter(0)
  %fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %call = (f8e4m3fn[2,3]{1,0}, pred[]) custom-call(%fusion, %x), custom_call_target="__cudnn$conv"
  not an instruction
  ROOT %tuple = (f32[8]{0}, pred[]) tuple(%fusion, %call)
}
"""


def test_instructions_are_grouped_by_computation() -> None:
    program = read_hlo_text(TEXT)
    assert program.header == "HloModule jit_f, is_scheduled=true"
    assert program.entry == "main.2"
    assert list(program.computations["fused"]) == ["p.0", "sine.1"]
    sine, main = program.computations["fused"]["sine.1"], program.computations["main.2"]
    assert (sine.opcode, sine.is_root, sine.operands, sine.nbytes) == ("sine", True, ("p.0",), 32)
    assert main["fusion"].called_computation == "fused"
    assert main["fusion"].target == ""
    assert main["call"].operands == ("fusion", "x")
    assert main["call"].target == "__cudnn$conv"
    assert main["call"].arrays == (HloArray("f8", (2, 3)), HloArray("pred", ()))
    assert (main["call"].elements, main["call"].nbytes) == (7, 7)
    assert len(list(program.parse_lines())) == 6


def test_instructions_outside_of_a_computation_are_read() -> None:
    program = read_hlo_text("  %a = bf16[3]{0} add(%b, %c)")
    assert list(program.computations[""]) == ["a"]
    assert program.entry == ""


def test_instructions_of_a_compiled_program_are_all_read() -> None:
    def function(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x).astype(jnp.bfloat16)

    shape = jax.ShapeDtypeStruct((4, 4), np.float32)
    text = jax.jit(function).lower(shape, shape).compile().as_text()
    written = sum(" = " in line for line in text.splitlines() if line.startswith("  "))
    program = read_hlo_text(text)
    assert len(list(program.parse_lines())) == written
    assert program.entry in program.computations
