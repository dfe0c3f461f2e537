"""Reading of jaxprs with their calls, loops and branches, in all tested versions of JAX.

`interpret_jaxpr` evaluates a jaxpr with values of any kind in place of arrays, `iterate_equations`
lists its equations. Parameters of equations are a `ClosedJaxpr` or a `Jaxpr` before JAX 0.12. Since
then, a `ClosedJaxpr` is a `Jaxpr` with constants.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

T = TypeVar("T")

CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "composite"),
        *("checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"),
    }
)
"""Primitives that call a jaxpr once. In JAX 0.12, `eval_jaxpr` replaces `closed_call`."""
RECOMPUTATIONS = ("checkpoint", "remat2")
"""Primitives of `jax.checkpoint`."""
PACKAGE = Path(__file__).parents[2]
"""Folder of the package as frames name it: links are kept, unlike in `paths.PACKAGE`."""
NOT_CUSTOM = (f"{PACKAGE}/", f"{sysconfig.get_path('stdlib')}/", "<")
"""Starts of the paths of the package's modules, of Python's own and of code without a file."""
INSTALLED = frozenset(("site-packages", "dist-packages"))
TRACERS = f"{PACKAGE}/backends/"
"""Folder of the code that traces a step. Its callers aren't part of the step."""
FLOW = ("scan", "while", "cond")
"""Primitives of loops and branches."""
ELEMENTWISE = frozenset(
    {
        *("abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy"),
        *("cos", "div", "eq", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow"),
        *("is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg"),
        *("not", "one_minus_square", "or", "pow", "round", "rsqrt", "select_n", "sign", "sin"),
        *("sqrt", "square", "sub", "tanh", "xor"),
    }
)
"""Frequent primitives whose results at an index depend on the operands there, and on scalars."""

Evaluate = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]
"""Function from a jaxpr and its operands to its results."""
Compute = Callable[[JaxprEqn, list[T]], Sequence[T]]
"""Function from an equation and its operands to its results."""
ReadConstant = Callable[[Any, Any], T]
"""Function from a literal or a constant variable, and its array, to its value."""


@dataclass(frozen=True)
class Scan:
    """A `scan`. Its operands are constants, the carry and sliced arrays, in this order."""

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    def split_operands(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Return the constants, the carry and the sliced arrays."""
        return _split_operands(operands, self.num_consts, self.num_carry)


@dataclass(frozen=True)
class While:
    """A `while`. Its operands are the condition's and the body's constants, and the carry."""

    condition: ClosedJaxpr
    body: ClosedJaxpr
    num_condition_consts: int
    num_body_consts: int

    def split_operands(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Return the constants of the condition and of the body, and the carry."""
        return _split_operands(operands, self.num_condition_consts, self.num_body_consts)


def _split_operands(
    operands: Sequence[T], first: int, second: int
) -> tuple[list[T], list[T], list[T]]:
    """Split off the first `first` operands, the next `second` operands, and the remaining ones."""
    end = first + second
    return list(operands[:first]), list(operands[first:end]), list(operands[end:])


def interpret_jaxpr(
    jaxpr: ClosedJaxpr, operands: Sequence[T], compute: Compute[T], read_constant: ReadConstant[T]
) -> list[T]:
    """Evaluate a jaxpr on operands of any kind; return its results.

    `compute` is called for each equation. A value is deleted after the last equation that reads it.
    """
    body = jaxpr.jaxpr
    values = bind_variables(jaxpr, operands, read_constant)

    def read(atom: Any) -> T:
        return read_constant(atom, atom.val) if isinstance(atom, Literal) else values[atom]

    for equation, last_read in zip(body.eqns, _list_last_reads(body), strict=True):
        results = compute(equation, [read(atom) for atom in equation.invars])
        values |= dict(zip(equation.outvars, results, strict=True))
        for var in last_read:
            del values[var]
    return [read(atom) for atom in body.outvars]


def bind_variables(
    jaxpr: ClosedJaxpr, operands: Sequence[T], read_constant: ReadConstant[T]
) -> dict[Var, T]:
    """Return the values of a jaxpr's constants and inputs by variable."""
    body = jaxpr.jaxpr
    values = {
        var: read_constant(var, constant)
        for var, constant in zip(body.constvars, jaxpr.consts, strict=True)
    }
    return values | dict(zip(body.invars, operands, strict=True))


def _list_last_reads(jaxpr: Jaxpr) -> list[list[Var]]:
    """Return for each equation its operands and results that nothing reads later."""
    read_later = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    last_reads: list[list[Var]] = []
    for equation in reversed(jaxpr.eqns):
        atoms = (*equation.invars, *equation.outvars)
        last_read = {atom for atom in atoms if not isinstance(atom, Literal)} - read_later
        read_later |= last_read
        last_reads.append(list(last_read))
    return last_reads[::-1]


def iterate_equations(
    jaxpr: Jaxpr, outer: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[JaxprEqn, tuple[JaxprEqn, ...]]]:
    """Yield every equation with the equations that contain it, the outermost first."""
    for equation in jaxpr.eqns:
        yield equation, outer
        for inner_jaxpr in iterate_inner_jaxprs(equation):
            yield from iterate_equations(inner_jaxpr, (*outer, equation))


def iterate_inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs among the parameters of an equation: of calls, loops, branches and rules."""
    for value in equation.params.values():
        items = value if isinstance(value, tuple | list) else (value,)
        for item in items:
            inner_jaxpr = getattr(item, "jaxpr", item)
            if isinstance(inner_jaxpr, Jaxpr):
                yield inner_jaxpr


def join_scope(equation: JaxprEqn, outer: str = "") -> str:
    """Return `outer` and the named scopes of an equation inside it, separated by slashes."""
    return "/".join(filter(None, (outer, str(equation.source_info.name_stack))))


@contextmanager
def enter_scope(scope: str) -> Iterator[None]:
    """Enter named scopes that are separated by slashes."""
    # One by one, since transformations mark the outermost scope only: `jvp(Net)/conv`.
    with ExitStack() as stack:
        for name in filter(None, scope.split("/")):
            stack.enter_context(jax.named_scope(name))
        yield


def find_source_line(equation: JaxprEqn) -> str:
    """Return the innermost line of custom code that made an equation, such as `train.py, line 12`.

    Code of Python, of this package and of installed packages isn't custom; "" without custom code.
    """
    traceback = equation.source_info.traceback
    frames: Sequence[Any] = [] if traceback is None else traceback.frames
    for frame in frames:
        if _is_custom(frame.file_name):
            return f"{frame.file_name.rpartition('/')[2]}, line {frame.line_num}"
    return ""


def find_source_call(equation: JaxprEqn) -> tuple[tuple[int, int], ...]:
    """Return the calls that made an equation, from the innermost up to the one in custom code.

    A call is the identity of a function's code and a place in it. Equations of a gradient have the
    calls of the forward pass. () if no custom code of the step made the equation.
    """
    traceback = equation.source_info.traceback
    if traceback is None:
        return ()
    codes, places = traceback.raw_frames()
    for depth, code in enumerate(codes):
        if code.co_filename.startswith(TRACERS):
            return ()
        if _is_custom(code.co_filename):
            frames = zip(codes[: depth + 1], places[: depth + 1], strict=True)
            return tuple((id(code), place) for code, place in frames)
    return ()


@lru_cache(maxsize=4096)
def _is_custom(path: str) -> bool:
    return not path.startswith(NOT_CUSTOM) and INSTALLED.isdisjoint(path.split("/"))


def is_library_call(equation: JaxprEqn) -> bool:
    """Return whether an equation calls one of JAX's functions, such as `jax.nn.silu`."""
    callee = find_called_jaxpr(equation)
    return callee is not None and "/jax/_src/" in callee.jaxpr.debug_info.func_src_info


def find_called_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls once; None if it isn't a call."""
    if equation.primitive.name not in CALLS:
        return None
    params = equation.params
    return as_closed(params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"])


def find_inner_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr of a call, or of each device in a `shard_map`; None for other equations."""
    is_sharded = equation.primitive.name == "shard_map"
    return as_closed(equation.params["jaxpr"]) if is_sharded else find_called_jaxpr(equation)


def as_closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr as a `ClosedJaxpr`, without constants if it isn't one yet."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def read_scan(equation: JaxprEqn) -> Scan:
    """Return the parameters of a `scan`."""
    params = equation.params
    if "ft_in" in params:
        # Since JAX 0.11 the operands are a tree of three groups.
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts = params["num_consts"]
        num_carry = params["num_carry"]
    settings = (params[name] for name in ("length", "reverse", "unroll"))
    return Scan(params["jaxpr"], num_consts, num_carry, *settings)


def read_while(equation: JaxprEqn) -> While:
    """Return the parameters of a `while`."""
    names = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    return While(*(equation.params[name] for name in names))


def evaluate_traced(
    function: Callable[..., Any], arguments: Sequence[Any], evaluate: Evaluate
) -> Any:
    """Trace a function on its arguments, and compute the jaxpr by `evaluate`.

    The results have the tree structure of the function's results.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    results = evaluate(closed, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def inline_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` without calls: its results are computed by the equations of the callees.

    `jax.checkpoint` remains, since it keeps XLA from storing what it computes again. The result
    must not be differentiated: it lacks the rules of `custom_jvp` and `custom_vjp`.
    """

    def evaluate(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        return interpret_jaxpr(jaxpr, operands, compute, lambda _, constant: constant)

    def compute(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        called = None if name in RECOMPUTATIONS else find_called_jaxpr(equation)
        with enter_scope(join_scope(equation)), equation.ctx.manager:
            if called is not None:
                return evaluate(called, operands)
            if name in FLOW:
                return compute_flow(equation, operands, evaluate)
            return bind_equation(equation, operands)

    return lambda *arguments: evaluate_traced(function, arguments, evaluate)


def bind_equation(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Compute an equation of any kind by its primitive."""
    primitive = equation.primitive
    result = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return list(result) if primitive.multiple_results else [result]


def compute_flow(equation: JaxprEqn, operands: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """Compute a loop or branches, by calls of `evaluate` for the jaxprs inside."""
    match equation.primitive.name:
        case "scan":
            return _compute_scan(read_scan(equation), operands, evaluate)
        case "while":
            return _compute_while(read_while(equation), operands, evaluate)
        case _:
            branches = [
                partial(lambda branch, *operands: evaluate(branch, operands), branch)
                for branch in equation.params["branches"]
            ]
            platforms = equation.params.get("branches_platforms")
            if platforms is None:
                return list(lax.switch(operands[0], branches, *operands[1:]))
            branch_by_platform = {
                name: branch
                for names, branch in zip(platforms, branches, strict=True)
                for name in names or ("default",)
            }
            return list(lax.platform_dependent(*operands[1:], **branch_by_platform))


def _compute_scan(scan: Scan, operands: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    consts, initial, sliced = scan.split_operands(operands)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = evaluate(scan.body, [*consts, *carry, *slices])
        return results[: scan.num_carry], results[scan.num_carry :]

    carry, stacked = lax.scan(
        step, initial, sliced, length=scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    return [*carry, *stacked]


def _compute_while(loop: While, operands: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    condition_consts, body_consts, initial = loop.split_operands(operands)
    return list(
        lax.while_loop(
            lambda carry: evaluate(loop.condition, [*condition_consts, *carry])[0],
            lambda carry: evaluate(loop.body, [*body_consts, *carry]),
            initial,
        )
    )
