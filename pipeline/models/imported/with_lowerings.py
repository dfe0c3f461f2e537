"""Convolutions, dense products and max pooling of any JAX function, computed as a policy chooses.

The function is traced to a jaxpr, which is evaluated equation by equation. The package's lowerings
compute the equations that they can, and JAX computes the others. So the function may use any
framework: linen, nnx, Keras or `jax.lax` itself.

The loss of a recipe's step is rewritten before it is differentiated, and so is an evaluation
(`StepConfig.lower`). A custom step computes gradients, which are recognised (`GradientTable`).
A network whose layers call the policy (`lowers_itself`) isn't rewritten.

Named scopes, loops, branches and `jax.checkpoint` stay, and equations inside of them are replaced.
Nothing is replaced inside of functions with rules of `jax.custom_jvp` and `jax.custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import jax
from jax.extend import core

from pipeline.core.host.jaxpr import (
    FLOW,
    bind_equation,
    compute_flow,
    enter_scope,
    evaluate_traced,
    find_called_jaxpr,
    interpret_jaxpr,
    iterate_equations,
    iterate_inner_jaxprs,
    join_scope,
)
from pipeline.models.imported.replaced_equations import (
    CONVOLUTION,
    MAXIMA,
    REPLACED,
    Gradient,
    GradientTable,
    RolePolicy,
    compute_replaced,
    explain_no_lowering,
    find_gradients,
)
from pipeline.models.lowerings.problem import Layout, LoweringPolicy

Function = TypeVar("Function", bound=Callable[..., Any])

CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")
"""Primitives with a custom rule for derivatives."""
CHECKPOINTS = ("checkpoint", "remat2")
"""Primitives of `jax.checkpoint`."""


@dataclass(frozen=True)
class UnreplacedOperation:
    """A convolution or max pooling that is left to XLA."""

    primitive: str
    scope: str
    """Path of the operation's layer; empty outside of layers."""
    why: str
    """A clause without its subject, such as "is 3-D"."""

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution, which is slow in a loop on the CPU."""
        return self.primitive == CONVOLUTION

    def __str__(self) -> str:
        kind = "convolution" if self.is_convolution else "max pooling"
        return f"{self.scope or 'a function'}: {kind} {self.why}"


def scope_root(network: Any) -> str:
    """Return the scopes around all layers of a network, joined by slashes."""
    return str(getattr(network, "scope_root", type(network).__name__))


def with_lowerings(
    function: Function,
    policy: LoweringPolicy,
    root: str = "",
    *,
    differentiated: bool = False,
    layout: Layout = "nhwc",
) -> Function:
    """Return a function with the same results, except last digits, computed as the policy chooses.

    `root` has the scopes around the network, joined by slashes. Of these scopes, equations of the
    result have only the outermost. Equal maxima of a pooling window share its gradient. The result
    can't be differentiated in forward mode.

    If `differentiated`, the function computes gradients, as a training step does. They are replaced
    too, and the policy chooses only the roles that the function computes. `layout` is the order of
    axes in which images are convolved and pooled. In CHWN convolutions without groups have one
    formula, so the policy doesn't choose it.
    """

    def evaluate(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        gradients = find_gradients(closed.jaxpr) if differentiated else None
        return _Evaluation(policy, gradients, layout, root).evaluate(closed, operands)

    def call(*arguments: Any) -> Any:
        return evaluate_traced(function, arguments, evaluate)

    return cast(Function, call)


def list_unreplaced(
    traced: core.ClosedJaxpr, *, root: str = "", differentiated: bool = False
) -> tuple[UnreplacedOperation, ...]:
    """List convolutions and max pooling of a function that `with_lowerings` leaves to XLA."""
    gradients = find_gradients(traced.jaxpr) if differentiated else None
    return tuple(dict.fromkeys(_find_unreplaced(traced.jaxpr, gradients, root)))


def _find_unreplaced(
    jaxpr: core.Jaxpr, gradients: GradientTable | None, root: str
) -> Iterator[UnreplacedOperation]:
    for equation, outer in iterate_equations(jaxpr):
        name = equation.primitive.name
        if name not in (CONVOLUTION, MAXIMA):
            continue
        has_rule = any(call.primitive.name in CUSTOM_RULES for call in outer)
        if has_rule or not _is_replaced(equation, gradients):
            why = "has its own derivative" if has_rule else explain_no_lowering(equation)
            nested = [*outer, equation]
            scopes = (_replace_root(nested[0], root, ""), *map(join_scope, nested[1:]))
            yield UnreplacedOperation(name, "/".join(filter(None, scopes)), why)


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs with the lowerings that a policy chooses."""

    policy: LoweringPolicy
    gradients: GradientTable | None
    """Gradients in a function that computes them; None for other functions."""
    layout: Layout
    root: str = ""

    def evaluate(self, jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr for its operands."""
        return interpret_jaxpr(
            jaxpr, operands, self._compute_in_scope, lambda _, constant: constant
        )

    def _compute_in_scope(self, equation: Any, operands: list[Any]) -> list[Any]:
        scope = _replace_root(equation, self.root, self.root.partition("/")[0])
        with enter_scope(scope), equation.ctx.manager:
            return self._compute(equation, operands)

    def _compute(self, equation: Any, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        params = equation.params
        gradient = _find_gradient(equation, self.gradients)
        if gradient is not None:
            return [gradient.compute(operands, self.policy, self.layout)]
        if name in REPLACED and not explain_no_lowering(equation):
            has_gradients = self.gradients is not None
            policy = RolePolicy(self.policy, "forward") if has_gradients else self.policy
            return [compute_replaced(equation, operands, policy, self.layout)]
        if not _has_replaced(equation, self.gradients):
            return bind_equation(equation, operands)
        called = find_called_jaxpr(equation)
        if called is None:
            return compute_flow(equation, operands, self._run_inner)
        if name not in CHECKPOINTS:
            return self._run_inner(called, operands)
        body = partial(self._run_inner, called)
        recomputed = jax.checkpoint(
            body, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return recomputed(operands)

    def _run_inner(self, jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr inside an equation, whose scopes don't begin with the root."""
        return _Evaluation(self.policy, self.gradients, self.layout).evaluate(jaxpr, operands)


def _find_gradient(equation: core.JaxprEqn, gradients: GradientTable | None) -> Gradient | None:
    return None if gradients is None else gradients.find(equation)


def _is_replaced(equation: core.JaxprEqn, gradients: GradientTable | None) -> bool:
    is_forward = equation.primitive.name in REPLACED and not explain_no_lowering(equation)
    return is_forward or _find_gradient(equation, gradients) is not None


def _has_replaced(equation: core.JaxprEqn, gradients: GradientTable | None) -> bool:
    """Return whether an equation that is entered has inner equations that are replaced."""
    return _is_entered(equation) and any(
        all(map(_is_entered, outer)) and _is_replaced(inner, gradients)
        for jaxpr in iterate_inner_jaxprs(equation)
        for inner, outer in iterate_equations(jaxpr)
    )


def _is_entered(equation: core.JaxprEqn) -> bool:
    """Return whether an equation is a call without a custom rule, a loop or a branch."""
    name = equation.primitive.name
    return name not in CUSTOM_RULES and (name in FLOW or find_called_jaxpr(equation) is not None)


def _replace_root(equation: Any, root: str, replacement: str) -> str:
    """Return the named scopes around an equation, with the scopes of the root replaced."""
    scope = join_scope(equation)
    if root and f"{scope}/".startswith(f"{root}/"):
        return f"{replacement}{scope[len(root) :]}".removeprefix("/")
    return scope
