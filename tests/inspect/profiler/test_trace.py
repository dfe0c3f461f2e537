"""Operations of a trace, divided among phases, layers and iterations, against worked examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.graph.hlo_program import parse_program
from pipeline.inspect.profiler.trace import (
    COPIES,
    TracedOp,
    compute_iteration_times,
    describe_operation,
    phase_of,
    share_clock,
    split_trace,
)

LOOP = "jit(loop)/while/body"
TEXT = f"""
HloModule jit_loop, is_scheduled=true

%body (s: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %gather.1 = f32[8,4]{{1,0}} copy(%x), metadata={{op_name="{LOOP}/step.data/gather"}}
  %dot.1 = f32[8,2]{{1,0}} dot(%gather.1, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{LOOP}/jvp(Network)/dense_0/dot_general"}}
  %dot.2 = f32[4,2]{{1,0}} dot(%gather.1, %dot.1), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, metadata={{op_name="{LOOP}/transpose(jvp(Network))/dense_0/dot_general"}}
  %add.1 = f32[4,2]{{1,0}} add(%dot.2, %dot.2), metadata={{op_name="{LOOP}/step.update/cond/branch_1_fun/add"}}
  %copy.9 = f32[4,2]{{1,0}} copy(%add.1)
  %copy.8 = f32[4,2]{{1,0}} copy(%unknown)
  %call.1 = f32[4,2]{{1,0}} call(%add.1), to_apply=%f
}}
"""  # noqa: E501
PROGRAM = parse_program(TEXT)


def traced(*spans: tuple[str, float, float]) -> list[TracedOp]:
    """Operations of one thread, in ns."""
    return [TracedOp(name, "jit_loop", 1, begin, end) for name, begin, end in spans]


STEP = [("gather.1", 0, 10), ("dot.1", 12, 32), ("dot.2", 32, 72), ("add.1", 72, 80)]


def test_phases_are_read_from_the_scopes_of_a_step() -> None:
    assert phase_of(f"{LOOP}/step.data/while/body/gather") == "data"
    assert phase_of(f"{LOOP}/jvp(Network)/conv_0/conv") == "forward"
    assert phase_of(f"{LOOP}/transpose(jvp(Network))/conv_0/conv") == "backward"
    # An optimizer may differentiate, too.
    assert phase_of(f"{LOOP}/step.update/transpose(jvp(f))/mul") == "update"
    assert phase_of(f"{LOOP}/add") == "other"


def test_operations_have_a_layer_or_a_phase() -> None:
    found = {name: describe_operation(name, "jit_loop", PROGRAM) for name in PROGRAM.instructions}
    assert (found["dot.1"].layer, found["dot.1"].phase) == ("dense_0", "forward")
    assert (found["dot.2"].layer, found["dot.2"].phase) == ("dense_0", "backward")
    assert (found["add.1"].layer, found["add.1"].phase) == ("", "update")
    # A copy that the compiler added has the scope of what it copies; one of nothing known has none.
    assert found["copy.9"].phase == "update"
    assert (found["copy.8"].layer, found["copy.8"].is_named) == (COPIES, True)
    assert found["dot.1"].instruction.flops == 2 * 8 * 2 * 4


def test_iterations_have_the_documented_points_and_tails() -> None:
    later = [(name, begin + 100, end + 100) for name, begin, end in STEP]
    found = split_trace(traced(*STEP, *later), PROGRAM, 2)
    first, second = found.iterations
    assert (first.fp_begin, first.bp_end, first.end) == (12, 72, 80)
    (times,) = compute_iteration_times((first, second))
    assert times.iteration == pytest.approx(100e-6)
    assert times.data_tail == pytest.approx(32e-6)
    assert times.fp_bp == pytest.approx(60e-6)
    assert times.update_tail == pytest.approx(8e-6)
    assert times.data_tail + times.fp_bp + times.update_tail == pytest.approx(times.iteration)


def test_named_points_move_begin_and_end() -> None:
    found = split_trace(traced(*STEP), PROGRAM, 1, fp_point="gather.1", bp_point="add.1")
    (point,) = found.iterations
    assert (point.fp_begin, point.bp_end) == (0, 80)


def test_container_operations_are_not_counted_twice() -> None:
    found = split_trace(traced(("call.1", 70, 90), *STEP), PROGRAM, 1)
    assert "call.1" not in found.times
    assert sum(time.busy_ns for time in found.times.values()) == 78


def test_branch_operations_belong_to_their_first_step() -> None:
    later = [(name, begin + 100, end + 100) for name, begin, end in STEP]
    found = split_trace(traced(*STEP, *later, ("copy.9", 180, 185)), PROGRAM, 2)
    assert [point.end for point in found.iterations] == [80, 180]
    assert found.times["copy.9"].calls == 1


def test_operations_of_other_programs_have_their_module() -> None:
    other = describe_operation("dot.1", "jit_norm", PROGRAM)
    assert (other.kind, other.is_named) == ("program jit_norm", False)


def test_evaluation_between_steps_is_excluded() -> None:
    later = [(name, begin + 900, end + 900) for name, begin, end in STEP]
    evaluation = [TracedOp("dot.1", "jit_loop", 1, 100 + 9 * n, 105 + 9 * n, 7) for n in range(3)]
    found = split_trace([*traced(*STEP), *evaluation, *traced(*later)], PROGRAM, 2)
    assert found.times["dot.1"].calls == 2
    assert found.span_ns == 160
    assert found.gap_ns == 4


spans = st.tuples(st.sampled_from("abc"), st.integers(0, 1000), st.integers(0, 100))


@pytest.mark.medium
@given(st.lists(spans, min_size=1, max_size=30))
def test_clock_shares_add_up_to_the_span(given: list[tuple[str, int, int]]) -> None:
    events = [TracedOp(name, "m", 1, begin, begin + length) for name, begin, length in given]
    wall, gap, left_out = share_clock(events)
    assert left_out == 0
    span = max(e.end_ns for e in events) - min(e.begin_ns for e in events)
    assert sum(wall.values()) + gap == pytest.approx(span)
    assert all(wall[name] <= sum(e.ns for e in events if e.name == name) + 1e-6 for name in wall)
