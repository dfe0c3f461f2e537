"""Custom backward passes of PyTorch modules, which torch.export leaves out without a word.

While a module is exported, every `torch.autograd.Function` also computes its backward pass, so the
program has the operators of both. `graph` describes the result. Hooks on gradients have
no such form and are refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.models.torch_graph.conversion.program_nodes import is_users_file

NAMESPACE = "pipeline"
"""Namespace of the operators that connect a forward pass with its backward pass."""
_INSTEAD = "write a torch.autograd.Function instead"
_PARAMETER_HOOKS: Mapping[str, str] = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_MODULE_HOOKS: Mapping[str, str] = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
"""Attributes with hooks on gradients, and the methods that fill them."""


def refuse_gradient_hooks(torch: Any, module: Any) -> None:
    """Raise ValueError if a parameter or a module has a hook that reads or changes gradients."""
    for name, parameter in module.named_parameters():
        for attribute, method in _PARAMETER_HOOKS.items():
            if getattr(parameter, attribute, None):
                raise ValueError(_describe_hook(f"parameter {name}", method))
    for name, part in module.named_modules():
        for attribute, method in _MODULE_HOOKS.items():
            if getattr(part, attribute, None):
                subject = f"module {name}" if name else "the network"
                raise ValueError(_describe_hook(subject, method))
    shared = torch.nn.modules.module
    if shared._global_backward_hooks or shared._global_backward_pre_hooks:
        raise ValueError(_describe_hook("torch.nn", "register_module_full_backward_hook"))


def _describe_hook(subject: str, method: str) -> str:
    return f"{subject} has a hook on gradients, by {method}, which isn't supported; {_INSTEAD}"


@contextmanager
def record_backward_passes(torch: Any) -> Iterator[None]:
    """Make calls of `torch.autograd.Function`s in the block compute their backward pass too.

    In the block, ValueError is raised for what changes gradients in another way: hooks on tensors,
    gradients that are computed in a forward pass, and saved tensors that are packed.
    """
    function = torch.autograd.Function
    graph = torch.autograd.graph
    run = function.__dict__["apply"]
    recorder = _make_recorder(torch)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            # Recomputation has the gradients of the function that is recomputed.
            run_function, _, *operands = args
            return run_function(*operands)
        if torch._C._are_functorch_transforms_active():
            raise ValueError(
                f"{cls.__name__}.apply{_find_line()}: a torch.autograd.Function inside of a "
                "transform of torch.func isn't supported; call it outside"
            )
        if _has_context_method(cls):
            bound = inspect.signature(cls.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        if kwargs:
            raise TypeError(f"{cls.__name__}.apply() takes no keyword arguments")
        return run.__func__(recorder, cls, *args)

    def refuse(what: str, *_: Any, **__: Any) -> Any:
        raise ValueError(f"{what}{_find_line()} isn't supported; {_INSTEAD}")

    def compute_gradients(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("create_graph") or _RECORDING:
            return gradients_of(outputs, *args, **kwargs)
        return refuse("torch.autograd.grad without create_graph=True in a forward pass")

    def pack_tensors(self: Any) -> Any:
        # Recomputation and saving on the host use subclasses, which change no value.
        if type(self) is graph.saved_tensors_hooks:
            refuse("torch.autograd.graph.saved_tensors_hooks")
        return enter(self)

    gradients_of = torch.autograd.grad
    enter = graph.saved_tensors_hooks.__enter__
    hook = "a hook on the gradient of a tensor, by {},".format
    replacements: list[tuple[Any, str, Any]] = [
        (function, "apply", classmethod(apply)),
        (torch.Tensor, "register_hook", partial(refuse, hook("register_hook"))),
        (torch.Tensor, "backward", partial(refuse, "Tensor.backward in a forward pass")),
        (torch.autograd, "backward", partial(refuse, "torch.autograd.backward in a forward pass")),
        (torch.autograd, "grad", compute_gradients),
        (graph.saved_tensors_hooks, "__enter__", pack_tensors),
    ]
    with _replace_attributes(replacements):
        yield


@contextmanager
def _replace_attributes(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, and restore them at the end of the block."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


_RECORDING: list[str] = []
"""Names of the functions whose passes are being recorded."""


def _has_context_method(cls: Any) -> bool:
    """Return whether a function has the form with a separate `setup_context`."""
    return cls.setup_context is not _base_function(cls).setup_context


def _base_function(cls: Any) -> Any:
    """Return torch.autograd.Function, of which cls is a subclass."""
    return next(base for base in cls.__mro__ if base.__module__ == "torch.autograd.function")


@cache
def _define_operators(torch: Any) -> Any:
    """Define the operators `cotangent` and `custom_gradient` for programs, and return them."""
    from torch import library as operators

    library = operators.Library(NAMESPACE, "DEF")
    library.define("cotangent(Tensor output) -> Tensor")
    library.define(
        "custom_gradient(Tensor[] inputs, Tensor[] outputs, Tensor[] cotangents, "
        "Tensor?[] gradients) -> Tensor[]"
    )
    key = "CompositeExplicitAutograd"
    library.impl("cotangent", lambda output: torch.zeros_like(output), key)
    library.impl(
        "custom_gradient",
        lambda inputs, outputs, cotangents, gradients: [output.clone() for output in outputs],
        key,
    )
    return library, getattr(torch.ops, NAMESPACE)


@cache
def _make_recorder(torch: Any) -> Any:
    """Return the function of torch that calls any function, and records its backward pass.

    Torch computes its forward pass as the recorded function does, without gradients.
    """

    class Context(torch.autograd.function.FunctionCtx):  # type: ignore[misc]
        """The context of a recorded function, whose saved tensors can be read at once."""

        @property
        def saved_tensors(self) -> Any:
            return tuple(getattr(self, "to_save", None) or ())

        saved_variables = saved_tensors

    class Recorder(torch.autograd.Function):  # type: ignore[misc]
        """A call of another function."""

        @staticmethod
        def forward(outer: Any, cls: Any, *args: Any) -> Any:
            context = Context()
            context.needs_input_grad = tuple(
                map(partial(_needs_gradient, torch), args, outer.needs_input_grad[1:])
            )
            _RECORDING.append(cls.__name__)
            try:
                # Modes of gradients and autocast inside of the function aren't part of the program.
                with torch._C.DisableTorchFunction():
                    return _record(torch, outer, context, cls, args)
            finally:
                _RECORDING.pop()

        @staticmethod
        def backward(outer: Any, *gradients: Any) -> Any:
            raise AssertionError("an export computes no gradients")

    return Recorder


def _needs_gradient(torch: Any, value: Any, requires_grad: bool) -> bool:
    """Return whether a gradient is computed for an argument.

    Attacks need gradients of images, which don't require them when a module is exported.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return requires_grad or not isinstance(value, torch.nn.Parameter)


def _record(torch: Any, outer: Any, context: Any, cls: Any, args: tuple[Any, ...]) -> Any:
    """Compute a function's forward pass and its backward pass, and return connected outputs."""
    _, operators = _define_operators(torch)
    name = cls.__name__
    versions = [arg._version for arg in args if isinstance(arg, torch.Tensor)]
    if _has_context_method(cls):
        result = cls.forward(*args)
        cls.setup_context(context, args, result)
    else:
        result = cls.forward(context, *args)
    if getattr(context, "dirty_tensors", None) or versions != [
        arg._version for arg in args if isinstance(arg, torch.Tensor)
    ]:
        raise ValueError(
            f"{name}.forward{_find_line()} changes its input in place, which isn't supported; "
            "must return a new tensor"
        )
    results = result if isinstance(result, tuple) else (result,)
    constant = {id(tensor) for tensor in getattr(context, "non_differentiable", None) or ()}

    def is_differentiable(value: Any) -> bool:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return is_float and id(value) not in constant

    outer.mark_non_differentiable(
        *(x for x in results if isinstance(x, torch.Tensor) and not is_differentiable(x))
    )
    outputs = [value for value in results if is_differentiable(value)]
    is_nested = len(_RECORDING) > 1
    is_constant = not any(outer.needs_input_grad) and _find_backward(cls) is None
    if is_nested or is_constant or not outputs or not any(context.needs_input_grad):
        # Inside of another function torch computes no gradients.
        connected = iter([output.detach() for output in outputs])
    else:
        cotangents = [operators.cotangent(output) for output in outputs]
        remaining = iter(cotangents)
        arguments = [
            next(remaining) if is_differentiable(value) else _make_zeros(torch, value)
            for value in results
        ]
        gradients = _call_backward(torch, cls, context, args, arguments)
        inputs = [arg for arg, needs in zip(args, context.needs_input_grad, strict=True) if needs]
        connected = iter(operators.custom_gradient(inputs, outputs, cotangents, gradients))
    values = tuple(
        next(connected)
        if is_differentiable(value)
        else value.detach()
        if isinstance(value, torch.Tensor)
        else value
        for value in results
    )
    return values if isinstance(result, tuple) else values[0]


def _find_backward(cls: Any) -> Callable[..., Any] | None:
    """Return the method of a function that computes gradients, or None if it has none."""
    base = _base_function(cls)
    if cls.vjp is not base.vjp:
        return cls.vjp  # type: ignore[no-any-return]
    return None if cls.backward is base.backward else cls.backward


def _make_zeros(torch: Any, value: Any) -> Any:
    """Return the gradient of an output without one: zeros of a tensor, None of another value."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def _call_backward(
    torch: Any, cls: Any, context: Any, args: tuple[Any, ...], cotangents: list[Any]
) -> list[Any]:
    """Return the gradients of the inputs that need one, in their shape and dtype; None for zeros.

    Raises ValueError if the function has no backward pass or returns other gradients.
    """
    name = cls.__name__
    backward = _find_backward(cls)
    if backward is None:
        raise ValueError(f"{name}{_find_line()} has no backward pass; must have a method backward")
    gradients = backward(context, *cotangents)
    gradients = gradients if isinstance(gradients, tuple | list) else (gradients,)
    extra = gradients[len(args) :]
    if len(gradients) < len(args) or any(gradient is not None for gradient in extra):
        raise ValueError(
            f"{name}.backward returns {len(gradients)} gradients; must return {len(args)}, one for "
            "each argument of forward"
        )
    fitted = []
    for number, (arg, gradient) in enumerate(zip(args, gradients, strict=False)):
        if gradient is not None and not isinstance(arg, torch.Tensor):
            raise ValueError(
                f"{name}.backward returns a gradient of argument {number}, which isn't a tensor; "
                "must return None"
            )
        if context.needs_input_grad[number]:
            fitted.append(_fit_gradient(torch, name, number, arg, gradient))
    return fitted


def _fit_gradient(torch: Any, name: str, number: int, x: Any, gradient: Any) -> Any:
    """Return a gradient summed over broadcast axes and cast, as torch does; None for None.

    Sizes that depend on the batch are compared when JAX computes the gradient.
    """
    if gradient is None:
        return None
    is_known = torch.fx.experimental.symbolic_shapes.statically_known_true
    num_new = gradient.ndim - x.ndim
    old_sizes = tuple(gradient.shape)[max(num_new, 0) :]
    broadcast = [
        axis
        for axis, (size, old_size) in enumerate(zip(x.shape, old_sizes, strict=False))
        if type(size) is int and size == 1 and not is_known(old_size == 1)
    ]
    summed = [*range(num_new), *(num_new + axis for axis in broadcast)]
    if summed and num_new >= 0:
        gradient = gradient.sum(summed, keepdim=True)
        for _ in range(num_new):
            gradient = gradient.squeeze(0)
    if gradient.ndim != x.ndim or any(
        is_known(size != old_size) for size, old_size in zip(x.shape, gradient.shape, strict=True)
    ):
        raise ValueError(
            f"{name}.backward returns a gradient of shape {_show_shape(gradient)} of argument "
            f"{number}, whose shape is {_show_shape(x)}"
        )
    return gradient if gradient.dtype == x.dtype else gradient.to(x.dtype)


def _show_shape(x: Any) -> str:
    """Return the shape of a tensor for messages, its batch by name."""
    return f"({', '.join(str(s) if type(s) is int else 'batch' for s in x.shape)})"


def _find_line() -> str:
    """Return the innermost line of the user's code that is running, as text for messages."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file):
            return f" ({Path(file).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
