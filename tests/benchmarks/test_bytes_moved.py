"""Bytes that a program moves, and the least that a step needs, of small programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.bytes_moved import (
    CHUNKS,
    CONVERSIONS,
    COPIES,
    ELEMENTS,
    OTHER_MOVES,
    PRODUCT,
    Figures,
    count_moved_bytes,
    format_report,
)
from benchmarks.least_bytes import find_kept
from pipeline.backends.graph.tracing import make_graph

PROGRAM = """HloModule jit_loop

%sliced (p0: f32[8,100], p1: s32[]) -> f32[100] {
  %p0 = f32[8,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,100}
  ROOT %flat = f32[100]{0} bitcast(%row)
}

%updated (q0: f32[8,100], q1: f32[1,100], q2: s32[]) -> f32[8,100] {
  %q0 = f32[8,100]{1,0} parameter(0)
  %q1 = f32[1,100]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %put = f32[8,100]{1,0} dynamic-update-slice(%q0, %q1, %q2, %none)
}

%chunk (c: (s32[], f32[100])) -> (s32[], f32[100]) {
  %c = (s32[], f32[100]{0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = f32[100]{0} get-tuple-element(%c), index=1
  %doubled = f32[100]{0} add(%x, %x)
  %result = f32[100]{0} multiply(%doubled, %doubled)
  ROOT %out = (s32[], f32[100]{0}) tuple(%n, %result)
}

%small (s: f32[100]) -> f32[100] {
  %s = f32[100]{0} parameter(0)
  ROOT %neg = f32[100]{0} negate(%s)
}

%large (l: f32[100]) -> f32[100] {
  %l = f32[100]{0} parameter(0)
  %a = f32[100]{0} copy(%l)
  ROOT %b = f32[100]{0} negate(%a)
}

%step (state: (s32[], f32[8,100], f32[100])) -> (s32[], f32[8,100], f32[100]) {
  %state = (s32[], f32[8,100]{1,0}, f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = f32[8,100]{1,0} get-tuple-element(%state), index=1
  %w = f32[100]{0} get-tuple-element(%state), index=2
  %row_fusion = f32[100]{0} fusion(%rows, %i), kind=kLoop, calls=%sliced
  %short = bf16[100]{0} convert(%row_fusion)
  %dot = f32[] dot(%row_fusion, %w), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %start = (s32[], f32[100]{0}) tuple(%i, %row_fusion)
  %chunks = (s32[], f32[100]{0}) while(%start), condition=%cond, body=%chunk, THREE_TIMES
  %squared = f32[100]{0} get-tuple-element(%chunks), index=1
  %chosen = f32[100]{0} conditional(%i, %w, %w), branch_computations={%small, %large}
  %view = f32[1,100]{1,0} bitcast(%squared)
  %put_fusion = f32[8,100]{1,0} fusion(%rows, %view, %i), kind=kLoop, calls=%updated
  ROOT %after = (s32[], f32[8,100]{1,0}, f32[100]{0}) tuple(%i, %put_fusion, %chosen)
}

ENTRY %main (arg: (s32[], f32[8,100], f32[100])) -> (s32[], f32[8,100], f32[100]) {
  %arg = (s32[], f32[8,100]{1,0}, f32[100]{0}) parameter(0)
  %before = f32[8,100]{1,0} copy(%arg)
  ROOT %loop = (s32[], f32[8,100]{1,0}, f32[100]{0}) while(%arg), condition=%cond, body=%step
}
""".replace("THREE_TIMES", 'backend_config={"known_trip_count":{"n":"3"}}')


def test_bytes_of_a_step_are_counted_by_hand() -> None:
    moved = count_moved_bytes(PROGRAM)
    assert moved == {
        # A row of 400 bytes is read and written, and a row is updated, with the step's number.
        OTHER_MOVES: (400 + 4 + 400) + (400 + 4 + 400),
        CONVERSIONS: 400 + 200,
        PRODUCT: 400 + 400 + 4,
        # The addition reads an array from outside of the chunk. What it writes, and the next
        # operation reads, stays in the chunk. The result is carried.
        ELEMENTS: 3 * (400 + 400) + (400 + 400),
        CHUNKS: 3 * (400 + 400),
        # Of two branches the larger one.
        COPIES: 400 + 400,
    }


def test_corrections_of_batch_norm_are_seldom() -> None:
    scope = 'metadata={op_name="jit(loop)/while/body/jvp(Network)/batch_norm_0/cond"}'
    branches = "branch_computations={%small, %large}"
    assert branches in PROGRAM
    moved = count_moved_bytes(PROGRAM.replace(branches, f"{branches}, {scope}"))
    assert COPIES not in moved
    assert moved[ELEMENTS] == 3 * (400 + 400) + (400 + 400)


@pytest.mark.parametrize(
    ("network", "kept"),
    [
        # Bias, activation function and conversion are computed again.
        (lambda x, w: jnp.tanh(x @ w + 1.0) @ w, [(4, 8), (4, 8)]),
        # A sum of two activations contains the two products that only it reads, not the third.
        (lambda x, w: (jnp.tanh(x @ w) + (x @ w) @ w) @ w, [(4, 8)] * 3),
        # Batch norm's statistics read the product, so it is kept beside the sum.
        (lambda x, w: norm(x @ w) + norm((x @ w) @ w), [(4, 8)] * 4),
        # Scores of attention stay in the cache, their product with values doesn't.
        (lambda x, w: attend(x @ w) @ w, [(4, 8), (4, 8), (4, 8)]),
        # Pooling contains the product.
        (lambda x, w: pool(jax.nn.relu(x @ w)) @ w[:4], [(4, 4), (4, 8)]),
    ],
)
def test_kept_activations_are_those_that_cannot_be_computed_again(
    network: Callable[[Any, Any], Any], kept: list[tuple[int, ...]]
) -> None:
    shapes = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = make_graph(jax.jit(network).trace(*shapes))
    found = find_kept(graph, {graph.inputs[0]})
    assert [graph.values[index].shape for index in found] == kept
    assert sum(found.values()) == sum(4 * rows * columns for rows, columns in kept)


def norm(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


def attend(x: Any) -> Any:
    return jax.nn.softmax(x @ x.T) @ x


def pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "valid")


def test_short_activations_have_short_bytes() -> None:
    """A product in float32 that is rounded is kept as it is rounded."""

    def network(x: Any, w: Any) -> Any:
        product = lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return product.astype(jnp.bfloat16) @ w

    shapes = (jax.ShapeDtypeStruct((4, 8), "bfloat16"), jax.ShapeDtypeStruct((8, 8), "bfloat16"))
    graph = make_graph(jax.jit(network).trace(*shapes))
    assert list(find_kept(graph, {graph.inputs[0]}).values()) == [64, 64]


def test_report_has_ratios_with_and_without_chunks() -> None:
    figures = Figures({PRODUCT: 3_000_000, CHUNKS: 5_000_000}, {"activations": 2_000_000}, 1e6)
    lines = format_report({("lenet5", "bf16"): figures}, "python -m it").splitlines()
    assert "| lenet5 | bf16 | 8.0 | 5.0 | 1.0 | 2.0 | 4.0x | 1.5x |" in lines
    assert f"| {CHUNKS} | 5.0 |" in lines
    assert "| activations | 2.0 |" in lines
