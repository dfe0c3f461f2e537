"""Calls, loops and branches in jaxprs are read alike in all versions of JAX."""

from __future__ import annotations

import sysconfig
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from pipeline.core.host import jaxpr
from pipeline.core.host.jaxpr import (
    CALLS,
    compute_flow,
    find_called_jaxpr,
    find_inner_jaxpr,
    inline_calls,
    interpret_jaxpr,
    iterate_equations,
    join_scope,
    read_scan,
    read_while,
)

X = np.float32(1.5)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def only_equation(function: Callable[..., Any], primitive: str, *args: Any) -> JaxprEqn:
    equations = jax.make_jaxpr(function)(*args).jaxpr.eqns
    (equation,) = (equation for equation in equations if equation.primitive.name == primitive)
    return equation


def scanned(x: Any, rows: Any) -> Any:
    scale = jnp.sin(x)

    def step(carry: Any, row: Any) -> Any:
        total, count = carry
        return (total * scale + row.sum(), count + 1), (row * x, total)

    return lax.scan(step, (x, 0), rows, reverse=True, unroll=2)


def looped(x: Any, rows: Any) -> Any:
    def step(carry: Any) -> Any:
        return carry[0] + 1, carry[1] * rows

    return lax.while_loop(lambda carry: carry[0] < x, step, (0.0, rows))


def branching(x: Any, rows: Any) -> Any:
    return lax.cond(x > 1, lambda: rows * 2, lambda: rows - x)


def by_platform(x: Any, rows: Any) -> Any:
    return lax.platform_dependent(x, rows, cpu=jnp.add, cuda=jnp.add, default=jnp.subtract)


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return jnp.cos(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return jnp.cos(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, gradient: (gradient * x,))


def test_scan_is_split_into_constants_carry_and_slices() -> None:
    scan = read_scan(only_equation(scanned, "scan", X, ROWS))
    operands = list(range(len(scan.body.jaxpr.invars)))
    consts, carry, sliced = scan.split_operands(operands)
    assert (len(consts), len(carry), len(sliced)) == (2, 2, 1)
    assert consts + carry + sliced == operands
    assert (scan.length, scan.reverse, scan.unroll) == (3, True, 2)


def test_gradient_scan_is_split_into_its_operands() -> None:
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: scanned(x, ROWS)[0][0]))(X)
    scans = [equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(scans) == 2
    for equation in scans:
        scan = read_scan(equation)
        consts, carry, sliced = scan.split_operands(equation.invars)
        assert [atom.aval for atom in carry] == scan.body.out_avals[: len(carry)]
        assert [atom.aval for atom in consts] == scan.body.in_avals[: len(consts)]
        assert all(atom.aval.shape[0] == scan.length for atom in sliced)


def test_while_is_split_into_condition_body_and_carry() -> None:
    equation = only_equation(looped, "while", X, ROWS)
    loop = read_while(equation)
    of_condition, of_body, carry = loop.split_operands(equation.invars)
    assert [len(atoms) for atoms in (of_condition, of_body, carry)] == [1, 1, 2]
    assert [atom.aval for atom in [*of_condition, *carry]] == loop.condition.in_avals
    assert [atom.aval for atom in [*of_body, *carry]] == loop.body.in_avals


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("function", "primitive"),
    [(scanned, "scan"), (looped, "while"), (branching, "cond"), (by_platform, "cond")],
)
def test_loops_and_branches_match_jax(
    function: Callable[..., Any], primitive: str, seed: int
) -> None:
    equation = only_equation(function, primitive, X, ROWS)
    random = np.random.default_rng(seed)
    operands = [
        random.integers(0, 2, var.aval.shape).astype(var.aval.dtype) for var in equation.invars
    ]
    ran: list[ClosedJaxpr] = []

    def run(jaxpr: ClosedJaxpr, operands: Any) -> list[Any]:
        ran.append(jaxpr)
        return list(jaxpr_as_fun(jaxpr)(*operands))

    params = equation.primitive.get_bind_params(equation.params)
    expected = jax.jit(lambda *args: equation.primitive.bind(*args, **params))(*operands)
    computed = jax.jit(lambda *args: compute_flow(equation, args, run))(*operands)
    np.testing.assert_equal([*map(np.asarray, computed)], [*map(np.asarray, expected)])
    assert ran


@pytest.mark.parametrize(
    "function", [jax.jit(jnp.cos), jax.checkpoint(jnp.cos), with_jvp, with_vjp]
)
def test_called_jaxpr_is_returned(function: Callable[..., Any]) -> None:
    (equation,) = jax.make_jaxpr(function)(X).jaxpr.eqns
    called = find_called_jaxpr(equation)
    assert called is not None
    assert equation.primitive.name in CALLS
    np.testing.assert_allclose(jaxpr_as_fun(called)(X), [np.cos(X)], rtol=1e-6)


def test_operations_and_loops_have_no_called_jaxpr() -> None:
    for function, primitive in ((scanned, "scan"), (looped, "while"), (branching, "cond")):
        assert find_called_jaxpr(only_equation(function, primitive, X, ROWS)) is None
    assert find_called_jaxpr(only_equation(jnp.sin, "sin", X)) is None


def test_interpretation_accepts_values_of_any_type() -> None:
    scale = np.arange(3, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x) * scale + 2, y))(X, X)

    def compute(equation: JaxprEqn, operands: list[str]) -> list[str]:
        return [f"{equation.primitive.name}({', '.join(operands)})"]

    def read_constant(atom: Any, value: Any) -> str:
        return f"{value}" if np.ndim(value) == 0 else "scale"

    results = interpret_jaxpr(closed, ["x", "y"], compute, read_constant)
    assert results[1] == "y"
    assert "sin(x)" in results[0]
    assert "scale" in results[0]
    assert "2.0" in results[0]


def test_interpretation_drops_values_after_their_last_use() -> None:
    class Value:
        pass

    alive: list[int] = []
    values: weakref.WeakSet[Value] = weakref.WeakSet()

    def make() -> Value:
        value = Value()
        values.add(value)
        return value

    def compute(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        alive.append(len(values))
        return [make() for _ in equation.outvars]

    closed = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.tan(jnp.exp(x)))))(X)
    interpret_jaxpr(closed, [make()], compute, lambda *_: make())
    # The operand of each; of the first one the argument is held by the caller's list.
    assert max(alive) <= 2


def test_operand_and_result_counts_must_match_the_jaxpr() -> None:
    closed = jax.make_jaxpr(jnp.sin)(X)
    with pytest.raises(ValueError, match="zip"):
        interpret_jaxpr(closed, [], lambda *_: [0], lambda *_: 0)
    with pytest.raises(ValueError, match="zip"):
        interpret_jaxpr(closed, [0], lambda *_: [0, 0], lambda *_: 0)


def test_inner_equations_are_listed_with_enclosing_equations() -> None:
    def function(x: Any) -> Any:
        with jax.named_scope("outer"):
            return lax.scan(lambda c, _: (branching(c, c), None), x, None, length=2)[0]

    found = {
        equation.primitive.name: [call.primitive.name for call in outer]
        for equation, outer in iterate_equations(jax.make_jaxpr(function)(X).jaxpr)
    }
    assert found["scan"] == []
    assert found["cond"][0] == "scan"
    assert found["sub"][-1] == "cond"
    scan = only_equation(function, "scan", X)
    assert join_scope(scan) == "outer"
    assert join_scope(scan, "a/b") == "a/b/outer"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("path", "is_custom"),
    [
        ("/home/me/train.py", True),
        ("/home/me/site-packages-of-mine/train.py", True),
        (f"{sysconfig.get_path('stdlib')}-mine/train.py", True),
        (f"{sysconfig.get_path('stdlib')}/functools.py", False),
        ("/home/me/.venv/lib/python3/site-packages/flax/linen.py", False),
        ("/usr/lib/python3/dist-packages/flax/linen.py", False),
        ("<string>", False),
        (jaxpr.__file__, False),
    ],
)
def test_code_of_python_and_of_packages_is_not_custom(path: str, is_custom: bool) -> None:
    assert jaxpr._is_custom(path) == is_custom


def test_composite_is_read_as_a_call() -> None:
    equation = only_equation(lambda x: lax.composite(jnp.sin, "p.sine")(x), "composite", X)
    called = find_called_jaxpr(equation)
    assert called is not None
    assert jaxpr_as_fun(called)(X)[0] == jnp.sin(X)


def test_shard_map_is_not_a_call() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    equation = only_equation(sharded, "shard_map", X)
    assert find_called_jaxpr(equation) is None
    assert find_inner_jaxpr(equation) is not None


def test_calls_are_inlined_in_loops_and_branches_too() -> None:
    def nested(x: Any, rows: Any) -> Any:
        called = jax.jit(jnp.add)(x, 1)
        computed_again = jax.checkpoint(jnp.sin)(called)
        branched = lax.cond(x > 1, lambda: jnp.where(rows > 2, rows, 0), lambda: rows)
        return {"sum": with_jvp(computed_again), "rows": scanned(x, branched)}

    inlined = inline_calls(nested)
    names = {
        equation.primitive.name
        for equation, _ in iterate_equations(jax.make_jaxpr(inlined)(X, ROWS).jaxpr)
    }
    assert names & CALLS <= {"checkpoint", "remat2"}
    assert names & {"checkpoint", "remat2"}
    assert jax.tree.all(jax.tree.map(np.array_equal, inlined(X, ROWS), nested(X, ROWS)))
