"""Export of a PyTorch module into a graph. No other code of graphs imports torch."""

from __future__ import annotations

import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.core.errors import first_line
from pipeline.core.plugins.loading import INSTALL
from pipeline.models.imported.calls import list_inputs, list_parameters
from pipeline.models.torch_graph.conversion.custom_functions import (
    record_backward_passes,
    refuse_gradient_hooks,
)
from pipeline.models.torch_graph.conversion.functional_form import (
    Draft,
    find_array_uses,
    read_program,
)
from pipeline.models.torch_graph.conversion.layer_list import make_plain
from pipeline.models.torch_graph.conversion.program_nodes import inline_regions, is_users_file
from pipeline.models.torch_graph.graph import (
    INPUT,
    KERNEL_AXES,
    ArraySpec,
    Order,
    Role,
    TensorSpec,
    TorchGraph,
)
from pipeline.models.torch_graph.operators.known_operators import require_computable

MAX_BATCH = 1 << 20
"""Largest batch size for which torch.export makes a program."""
MAX_CONSTANT_BYTES = 1 << 20
"""Larger constant buffers of floating-point numbers are stored with the weights, not compiled."""
_KERNEL_ORDERS: Mapping[tuple[str, int], Order] = {
    ("aten.conv2d", 1): "hwio",
    ("aten.linear", 1): "io",
}
"""Order of the axes of a kernel by the operator and the kernel's index among its arguments."""
_PACKED = re.compile(r"in_proj_(weight|bias)$")
"""Names of a projection of torch.nn.MultiheadAttention, whose paths are as of a module in_proj."""
_LEAVES = {"running_mean": "mean", "running_var": "var"}
"""Last parts of paths by the arrays' names in PyTorch, for those that differ."""
Uses = Set[tuple[str, int]]
"""Uses of an array: an operator, and the array's index among its arguments."""


def import_torch() -> Any:
    """Import torch. Raises ValueError with the command that installs it."""
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"torch isn't installed ({first_line(error)}): {INSTALL['torch']}"
        ) from error
    return torch


def make_module(origin: str, maker: Any, arguments: Mapping[str, Any], seed: int) -> Any:
    """Return a torch module: `maker` if it is a module, else the result of calling it.

    The call draws weights from the seed, and doesn't change the state of torch's generator. Raises
    ValueError if it fails or doesn't return a module, and for a module with arguments.
    """
    torch = import_torch()
    if isinstance(maker, torch.nn.Module):
        if arguments:
            raise ValueError(f"{origin} is a module already; must have no arguments")
        return maker
    if not callable(maker):
        raise ValueError(f"{origin} is a {type(maker).__name__}; must be a torch.nn.Module class")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = maker(**arguments)
        except Exception as error:
            raise ValueError(f"{origin} can't be made: {_describe_error(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"{origin} returns a {type(module).__name__}; must be a torch.nn.Module")
    return module


def export_module(
    module: Any,
    samples: Sequence[int] | Mapping[str, TensorSpec],
    *,
    origin: str = "",
    dtype: str = "float32",
    batch: int | None = None,
    output: str | None = None,
) -> TorchGraph:
    """Export a torch module for samples, in training and in evaluation.

    `samples` is the shape of the samples of an only input, whose type is `dtype`, or the samples of
    several inputs by name. `forward` gets several by name if it has parameters of these names, as a
    dictionary if it has one parameter, else by position.

    `output` names the logits if the module returns several tensors: a key, a field or a position;
    None for `logits`, or the only tensor.

    The graph accepts any batch size, or only `batch` if that isn't None. The module's mode isn't
    changed. Raises ValueError of one line for an unknown operator, and if torch.export fails, for
    example since control flow depends on values of tensors.
    """
    torch = import_torch()
    origin = origin or type(module).__name__
    refuse_gradient_hooks(torch, module)
    if not isinstance(samples, Mapping):
        samples = {INPUT: TensorSpec(tuple(samples), dtype)}
    examples = {
        name: torch.zeros((batch or 2, *sample.shape), dtype=getattr(torch, sample.dtype))
        for name, sample in samples.items()
    }
    call = _bind_inputs(origin, module, examples)
    by_id = {id(example): name for name, example in examples.items()}
    # The inputs of a program are the tensors of the call in their order.
    ordered = [
        by_id[id(leaf)] for leaf in torch.utils._pytree.tree_leaves((call.args, call.kwargs))
    ]
    train, evaluate = _export_modes(torch, origin, module, call, batch, output)
    names = _choose_names(module)
    train = train.rename_arrays(names)
    evaluate = evaluate.rename_arrays(names, constant_suffix="@eval")
    arrays = dict(_read_arrays(torch, module, train, evaluate))
    graph = TorchGraph(
        origin=origin,
        torch_version=torch.__version__,
        inputs={
            name: TensorSpec((batch, *samples[name].shape), samples[name].dtype) for name in ordered
        },
        arrays=tuple(arrays),
        training=train.form,
        evaluation=evaluate.form,
        values={spec.name: array for spec, array in arrays.items()},
    )
    require_computable(graph)
    return graph


def _bind_inputs(origin: str, module: Any, examples: Mapping[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of the module's `forward` for its inputs by name. Raises ValueError if
    it has other parameters."""
    forward = module.forward
    names = list(examples)
    args: tuple[Any, ...] = tuple(examples.values())
    kwargs: Mapping[str, Any] = {}
    if len(examples) > 1:
        if set(examples) <= set(list_parameters(forward)):
            args, kwargs = (), examples
        elif len(list_inputs(forward)) == 1:
            args = (dict(examples),)
    try:
        return inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        inputs = "one array" if names == [INPUT] else ", ".join(names)
        raise ValueError(
            f"{origin}: its forward can't be called with {inputs}: {error}; model.inputs must name "
            "a column for each of its inputs"
        ) from error


def _export_modes(
    torch: Any,
    origin: str,
    module: Any,
    call: inspect.BoundArguments,
    batch: int | None,
    output: str | None,
) -> tuple[Draft, Draft]:
    """Export the module in training and in evaluation; its mode is the same afterwards."""
    was_training = module.training
    try:
        module.train()
        train = _export_draft(torch, origin, module, call, batch, output)
        module.eval()
        return train, _export_draft(torch, origin, module, call, batch, output)
    finally:
        module.train(was_training)


def _export_draft(
    torch: Any,
    origin: str,
    module: Any,
    call: inspect.BoundArguments,
    batch: int | None,
    output: str | None,
) -> Draft:
    """Export the module in its current mode, to a form with torch's names of arrays."""
    dims = None
    if batch is None:
        axes = {0: torch.export.Dim("batch", min=1, max=MAX_BATCH)}
        dims = jax.tree.map(lambda _: axes, dict(call.arguments))
    with _report_error(torch, origin, module.training, _describe_inputs(call)):
        plain = module.register_forward_hook(
            lambda _, inputs, result: make_plain(torch, result, output)
        )
        with plain, _refuse_new_tensors(torch, module), record_backward_passes(torch):
            program = torch.export.export(
                module, call.args, call.kwargs, dynamic_shapes=dims, strict=False
            )
        inline_regions(torch, program.graph_module)
        return read_program(torch, program, output)


def _describe_inputs(call: inspect.BoundArguments) -> str:
    """Return the shapes of the samples of a call, and the names of those in a dictionary."""
    arguments = (call.args, call.kwargs)
    text = " and ".join(str(tuple(leaf.shape[1:])) for leaf in jax.tree.leaves(arguments))
    named = [(name, value) for name, value in call.arguments.items() if isinstance(value, dict)]
    for name, value in named:
        text += f" (its {name} is a dictionary of {', '.join(value)}; model.inputs=[COLUMN] or "
        text += "parameters of these names change that)"
    return text


@contextmanager
def _refuse_new_tensors(torch: Any, module: Any) -> Iterator[None]:
    """Raise ValueError if the block's export assigns a new tensor to an attribute of the module.

    torch.export only warns, and makes the tensor a constant. An attribute that the module didn't
    have before the export is harmless.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        match = re.search(r"attributes? self\.([\w.]+).* assigned during", str(warning.message))
        if match is None:
            continue
        try:
            value = attrgetter(match[1])(module)
        except AttributeError:
            continue
        if isinstance(value, torch.Tensor):
            raise ValueError(
                f"the tensor self.{match[1]} is replaced in the forward pass; a tensor that "
                "changes must be a buffer, by register_buffer"
            )


@contextmanager
def _report_error(torch: Any, origin: str, train: bool, shapes: str) -> Iterator[None]:
    """Raise errors of torch.export as a ValueError of one line, and suppress its other output."""
    mode = "training" if train else "evaluation"
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # For an error torch prints the graph and the traceback.
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Others are of this package, or of the module, and are raised unchanged.
        package = Path(torch.__path__[0])
        is_raised_in_torch = bool(frames) and Path(frames[-1].filename).is_relative_to(package)
        if type(error) is ValueError and not is_raised_in_torch:
            raise
        raise ValueError(_describe_failure(origin, mode, shapes, error)) from error
    finally:
        logging.disable(disabled)


def _describe_failure(origin: str, mode: str, shapes: str, error: BaseException) -> str:
    message = str(error)
    name = type(error).__name__
    if "Constraint" in name or "Constraints violated" in message:
        return (
            f"{origin}: its code fixes the batch size in {mode}; use x.flatten(1) or the like "
            "instead of a fixed size, or set model.batch to this size"
        )
    depends_on_data = "data-dependent" in message or name.startswith("GuardOnDataDependent")
    hint = "; its control flow must not depend on values of tensors" if depends_on_data else ""
    text = f"fails in {mode}: {_describe_error(error)}{hint}"
    return f"{origin}: torch.export for samples of shape {shapes} after map ops {text}"


def _describe_error(error: BaseException) -> str:
    """Return an error in one line: the start of its message, and the user's line that raised it."""
    lines = [line.strip(" -\t") for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("Caused by", "Suggested"))]
    # Torch repeats an expression as `(unhinted: ...)`.
    message = " ".join(lines[:2]).partition(" (unhinted")[0][:400] or type(error).__name__
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if is_users_file(frame.filename):
            place = f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return f"{message}{place}"


def _read_arrays(
    torch: Any, module: Any, train: Draft, evaluate: Draft
) -> Iterator[tuple[ArraySpec, np.ndarray]]:
    """Yield the module's tensors and the constants that the forms read or change."""
    changing = train.find_changed_arrays()
    train_uses = find_array_uses(train.form)
    evaluation_uses = find_array_uses(evaluate.form)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        uses = train_uses.get(name, set()) | evaluation_uses.get(name, set())
        if uses or name in changing:
            role = _choose_role(torch, name, tensor, changes=name in changing)
            yield place_array(name, _to_numpy(torch, tensor), role, uses)
    for name, constant in {**train.constants, **evaluate.constants}.items():
        array = _to_numpy(torch, constant)
        path = f"constants/{name}"
        yield ArraySpec(name, path, "constant", "torch", array.shape, str(array.dtype)), array


def _choose_names(module: Any) -> dict[str, str]:
    """Return the name to use for each name of a tensor; a tensor with several names has one."""
    first_names: dict[int, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first_names.setdefault(id(tensor), name) for name, tensor in named}


def _choose_role(torch: Any, name: str, tensor: Any, changes: bool) -> Role:
    is_float = tensor.is_floating_point()
    if changes and not is_float and not tensor.is_complex():
        raise ValueError(
            f"buffer {name} of {tensor.dtype} changes in training; only buffers of floating-point "
            "numbers can"
        )
    if tensor.is_complex() and (changes or isinstance(tensor, torch.nn.Parameter)):
        raise ValueError(
            f"{name} of {tensor.dtype} is trained or changes; must be two real tensors, joined by "
            "torch.complex"
        )
    if isinstance(tensor, torch.nn.Parameter):
        # Parameters that the module doesn't train become buffers, which no node updates.
        return "parameter" if tensor.requires_grad else "buffer"
    is_large = is_float and tensor.nbytes > MAX_CONSTANT_BYTES
    return "buffer" if changes or is_large else "constant"


def place_array(
    name: str, array: np.ndarray, role: Role, uses: Uses
) -> tuple[ArraySpec, np.ndarray]:
    """Return the spec of an array, and the array in the order of the spec."""
    order = _choose_order(uses, array.ndim)
    path = _choose_path(name, order, uses, array.ndim)
    if order in KERNEL_AXES:
        array = np.ascontiguousarray(array.transpose(KERNEL_AXES[order]))
    return ArraySpec(name, path, role, order, array.shape, str(array.dtype)), array


def _choose_order(uses: Uses, ndim: int) -> Order:
    """Return the order of an array's axes in the graph.

    It is PyTorch's, except for an array that is always the kernel of convolutions or always the
    kernel of dense layers.
    """
    orders = {_KERNEL_ORDERS.get((op.rpartition(".")[0], index), "torch") for op, index in uses}
    order = orders.pop() if len(orders) == 1 else "torch"
    has_kernel_rank = order in KERNEL_AXES and ndim == len(KERNEL_AXES[order])
    return order if has_kernel_rank else "torch"


def _choose_path(name: str, order: Order, uses: Uses, ndim: int) -> str:
    """Return the path of an array, such as `layer1/0/conv1/kernel` for `layer1.0.conv1.weight`.

    `pipeline.models.weights` makes the same paths from PyTorch's weight files, which can therefore
    be restored.
    """
    module, _, leaf = _PACKED.sub(r"in_proj.\1", name).rpartition(".")
    ops = {op.split(".")[1] for op, _ in uses if "." in op}
    if leaf == "weight" and order != "torch":
        leaf = "kernel"
    elif leaf == "weight" and ndim == 1:
        leaf = "scale"
    elif leaf == "weight" and ops == {"embedding"}:
        leaf = "table"
    return "/".join([*filter(None, module.split(".")), _LEAVES.get(leaf, leaf)])


def _to_numpy(torch: Any, tensor: Any) -> np.ndarray:
    """Return a copy of a tensor, floating-point numbers as float32."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    return np.array(tensor.numpy(), order="C")
