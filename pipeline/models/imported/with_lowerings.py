"""Any JAX function with its convolutions, dense products and max pooling computed as a policy says.

The function is traced to a jaxpr, which is evaluated equation by equation; those that the package
can lower are replaced by its own functions, all others repeated. So it does not matter what wrote
them: linen, nnx, Keras or `jax.lax` itself. To intercept calls of modules would reach `nn.Conv` and
`nn.Dense` alone, since `nn.max_pool` is a function, and need other code for each framework.

Named scopes are kept. Loops, branches and `jax.checkpoint` stay, around a replaced body. Rules of
`jax.custom_jvp` and `jax.custom_vjp` stay, and what these functions compute is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend import core

from pipeline.models.imported.replaced_equations import (
    CONVOLUTION,
    MAXIMA,
    REPLACED,
    compute_replaced,
    why_kept,
)
from pipeline.models.lowerings.problem.lowering import LoweringPolicy
from pipeline.models.modules.control_flow import FLOW, called_jaxpr, compute_flow

RULED = ("custom_jvp_call", "custom_vjp_call")
"""Primitives with a rule of their own for derivatives."""
CHECKPOINTS = ("checkpoint", "remat2")
"""Primitives of `jax.checkpoint`."""


@dataclass(frozen=True)
class KeptOperation:
    """A convolution or max pooling that nothing replaces."""

    primitive: str
    scope: str
    """The layer that it is in; empty outside of all."""
    why: str
    """A clause without its subject, such as "is 3-D"."""

    @property
    def is_convolution(self) -> bool:
        """Whether it is slow in a loop on the CPU, where XLA derives its gradients."""
        return self.primitive == CONVOLUTION

    def __str__(self) -> str:
        kind = "convolution" if self.is_convolution else "max pooling"
        return f"{self.scope or 'a function'}: {kind} {self.why}"


def with_lowerings(
    function: Callable[..., Any], policy: LoweringPolicy, root: str = ""
) -> Callable[..., Any]:
    """Return a function of the same arrays with the same results, but for the last digits.

    The outermost scope is dropped where it is called `root`. Tied values of max pooling share its
    gradient. The result is differentiable in reverse mode only.
    """

    def call(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = jax.tree.leaves(arguments)
        results = _Evaluation(policy, root).run(closed.jaxpr, closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def list_kept(
    function: Callable[..., Any], *arguments: Any, root: str = ""
) -> tuple[KeptOperation, ...]:
    """List the convolutions and max pooling that `with_lowerings` does not replace, by tracing."""
    closed = jax.make_jaxpr(function)(*arguments)
    return tuple(dict.fromkeys(_kept_in(closed.jaxpr, "", root)))


def _kept_in(jaxpr: Any, around: str, root: str, ruled: bool = False) -> Iterator[KeptOperation]:
    for equation in jaxpr.eqns:
        name, scope = equation.primitive.name, _scope(equation, root)
        scope = "/".join(part for part in (around, scope) if part)
        if name in (CONVOLUTION, MAXIMA):
            why = "has its own derivative" if ruled else why_kept(equation)
            if why:
                yield KeptOperation(name, scope, why)
        for inner in _inner_jaxprs(equation):
            yield from _kept_in(inner, scope, "", ruled or name in RULED)


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs with the lowerings of a policy."""

    policy: LoweringPolicy
    root: str = ""

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr for its operands."""
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            with _in_scope(_scope(equation, self.root)), equation.ctx.manager:
                results = self._compute(equation, [read(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _compute(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in REPLACED and not why_kept(equation):
            return [compute_replaced(equation, operands, self.policy)]
        if not _has_replaced(equation):
            bound = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
            return list(bound) if equation.primitive.multiple_results else [bound]
        called = called_jaxpr(equation)
        if called is None:
            return compute_flow(equation, operands, self._run_inner)
        body = partial(self._call_inner, called)
        if name in CHECKPOINTS:
            settings = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
            return list(jax.checkpoint(body, **settings)(*operands))
        return body(*operands)

    def _run_inner(self, jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr that an equation holds, whose scopes don't begin with the root."""
        return _Evaluation(self.policy).run(jaxpr.jaxpr, jaxpr.consts, operands)

    def _call_inner(self, jaxpr: core.ClosedJaxpr, *operands: Any) -> list[Any]:
        return self._run_inner(jaxpr, operands)


def _has_replaced(equation: Any) -> bool:
    """Whether an equation holds others that are replaced, and is no function with its own rule."""
    name = equation.primitive.name
    if name in RULED or (name not in FLOW and called_jaxpr(equation) is None):
        return False
    return any(
        (inner.primitive.name in REPLACED and not why_kept(inner)) or _has_replaced(inner)
        for jaxpr in _inner_jaxprs(equation)
        for inner in jaxpr.eqns
    )


def _inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(each, "jaxpr", each)
            if isinstance(inner, core.Jaxpr):
                yield inner


def _scope(equation: Any, root: str) -> str:
    """The named scopes around an equation, joined by slashes."""
    scope = str(equation.source_info.name_stack)
    first, _, rest = scope.partition("/")
    return rest if root and first == root else scope


def _in_scope(scope: str) -> AbstractContextManager[Any]:
    return jax.named_scope(scope) if scope else nullcontext()
