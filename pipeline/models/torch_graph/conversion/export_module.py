"""Export of a PyTorch module into a graph: the one place that imports torch."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import first_line
from pipeline.core.plugins.loading import INSTALL
from pipeline.models.torch_graph.array_paths import order_of, path_of
from pipeline.models.torch_graph.conversion.functional_form import Draft, draft_of
from pipeline.models.torch_graph.graph import (
    ArraySpec,
    Order,
    Role,
    TensorSpec,
    TorchGraph,
)
from pipeline.models.torch_graph.operators.known_operators import require_computable

MOST_BATCH = 1 << 20
"""Limit of the batch size that torch.export assumes."""
CONSTANT_BYTES = 1 << 20
"""Buffers that never change and are larger than this are kept with the weights, so that programs
read them instead of holding them."""
_TO_AXES: Mapping[Order, tuple[int, ...]] = {"hwio": (2, 3, 1, 0), "io": (1, 0)}


def import_torch() -> Any:
    """Import torch. Raises ValueError that says how to install it."""
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"torch is not installed ({first_line(error)}): {INSTALL['torch']}"
        ) from error
    return torch


def make_module(origin: str, found: Any, arguments: Mapping[str, Any], seed: int) -> Any:
    """Return the torch module that an object makes: itself, or what it returns for arguments.

    Its weights are drawn from the seed; the state of torch's generator is left as it was. Raises
    ValueError where it fails or gives something else.
    """
    torch = import_torch()
    if isinstance(found, torch.nn.Module):
        if arguments:
            raise ValueError(f"{origin} is a module already; it takes no arguments")
        return found
    if not callable(found):
        raise ValueError(f"{origin} is a {type(found).__name__}; must be a torch.nn.Module class")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = found(**arguments)
        except Exception as error:
            raise ValueError(f"{origin} can't be made: {_told(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"{origin} gives a {type(module).__name__}; must be a torch.nn.Module")
    return module


def export_module(
    module: Any,
    shape: Sequence[int],
    *,
    origin: str = "",
    dtype: str = "float32",
    batch: int | None = None,
) -> TorchGraph:
    """Export a torch module for samples of a shape, in training and in evaluation.

    The batch size stays open, unless one is given, which the graph is then limited to. The module
    is left in the mode that it was in. Raises ValueError in one line for a module that torch.export
    refuses, as for control flow that depends on data, and for operators that are not known here.
    """
    torch = import_torch()
    origin = origin or type(module).__name__
    was_training = module.training
    example = torch.zeros((batch or 2, *shape), dtype=getattr(torch, dtype))
    try:
        drafts = []
        for train in (True, False):
            module.train(train)
            drafts.append(_exported(torch, origin, module, example, batch))
    finally:
        module.train(was_training)
    sizes = tuple(None if batch is None and at == 0 else n for at, n in enumerate(example.shape))
    graph = _joined(torch, module, drafts[0], drafts[1], origin, TensorSpec(sizes, dtype))
    require_computable(graph)
    return graph


def _exported(torch: Any, origin: str, module: Any, example: Any, batch: int | None) -> Draft:
    """Export the module in the mode that it is in."""
    dims = None
    if batch is None:
        dims = ({0: torch.export.Dim("batch", min=1, max=MOST_BATCH)},)
    with _one_line(torch, origin, module.training, tuple(example.shape[1:])):
        with _same_attributes(torch, module):
            program = torch.export.export(module, (example,), dynamic_shapes=dims, strict=False)
        draft = draft_of(torch, program)
        if draft is None:
            # Something is changed in place through a view: torch rewrites that itself, in seconds.
            draft = draft_of(torch, program.run_decompositions({}))
    assert draft is not None, "after decomposition nothing is changed in place"
    return draft


@contextmanager
def _same_attributes(torch: Any, module: Any) -> Iterator[None]:
    """Raise ValueError where a tensor among a module's attributes is replaced as it is traced.

    torch.export warns of that, and takes the tensor for a constant. An attribute that is new is
    no state that was read.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        found = re.search(r"attributes? self\.([\w.]+).* assigned during", str(warning.message))
        try:
            value = attrgetter(found[1])(module) if found else None
        except AttributeError:
            continue
        if isinstance(value, torch.Tensor) and found:
            raise ValueError(
                f"the tensor self.{found[1]} is replaced in the forward pass; a tensor that "
                "changes must be a buffer, by register_buffer"
            )


@contextmanager
def _one_line(torch: Any, origin: str, train: bool, shape: tuple[int, ...]) -> Iterator[None]:
    """Turn what torch.export raises into a ValueError of one line."""
    mode = "training" if train else "evaluation"
    try:
        with warnings.catch_warnings(), _silent_log():
            warnings.simplefilter("ignore")
            yield
    except ValueError as error:
        if type(error) is ValueError and not _is_of_torch(error):
            raise
        raise ValueError(_export_problem(origin, mode, shape, error)) from error
    except Exception as error:
        raise ValueError(_export_problem(origin, mode, shape, error)) from error


@contextmanager
def _silent_log() -> Iterator[None]:
    """Keep torch from printing the graph and the traceback of an error that is reported in one
    line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def _is_of_torch(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/torch/" in frames[-1].filename


def _export_problem(origin: str, mode: str, shape: tuple[int, ...], error: BaseException) -> str:
    message, name = str(error), type(error).__name__
    if "Constraint" in name or "Constraints violated" in message:
        return (
            f"{origin}: its code fixes the batch size in {mode}, which must stay open, as in "
            "x.flatten(1) instead of a fixed size; or set model.batch to the size that it computes"
        )
    data = "data-dependent" in message or name.startswith("GuardOnDataDependent")
    hint = "; its control flow must not depend on the values of tensors" if data else ""
    return (
        f"{origin}: torch.export for samples of shape {shape} fails in {mode}: {_told(error)}{hint}"
    )


def _told(error: BaseException) -> str:
    """Return an error of user's code in one line: the message, and the user's last line."""
    lines = [line.strip(" -\t") for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Caused by", "Suggested"))]
    message = " ".join(telling[:2]).partition(" (unhinted")[0][:400] or type(error).__name__
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not re.search(r"/torch/|/pipeline/models/torch_graph/", frame.filename):
            place = f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return f"{message}{place}"


@dataclass(frozen=True)
class _Held:
    """A tensor of the module, and how the forms use it."""

    tensor: Any
    uses: frozenset[tuple[str, int]]
    is_parameter: bool
    changes: bool


def _joined(
    torch: Any, module: Any, train: Draft, evaluate: Draft, origin: str, spec: TensorSpec
) -> TorchGraph:
    """Join two forms and the module's tensors into a graph."""
    names = _first_names(module)
    train, evaluate = train.renamed(names), evaluate.renamed(names, suffix="@eval")
    changing = train.changed_arrays()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    arrays: list[ArraySpec] = []
    values: dict[str, np.ndarray] = {}
    for name in tensors:
        uses = train.uses_of(name) | evaluate.uses_of(name)
        if not uses and name not in changing:
            continue
        tensor = tensors[name]
        held = _Held(tensor, uses, isinstance(tensor, torch.nn.Parameter), name in changing)
        arrays.append(_spec_of(name, held))
        values[name] = _in_own_order(_as_numpy(torch, tensor), arrays[-1].order)
    for name, constant in {**train.constants, **evaluate.constants}.items():
        array = _as_numpy(torch, constant)
        path = f"constants/{name}"
        arrays.append(ArraySpec(name, path, "constant", "torch", array.shape, str(array.dtype)))
        values[name] = array
    return TorchGraph(
        origin, torch.__version__, spec, tuple(arrays), train.form, evaluate.form, values
    )


def _first_names(module: Any) -> dict[str, str]:
    """Return, for each name of a tensor, the first name of the same tensor: weights may be tied."""
    first: dict[int, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _spec_of(name: str, held: _Held) -> ArraySpec:
    tensor = held.tensor
    is_float = tensor.is_floating_point()
    if held.changes and not is_float:
        raise ValueError(
            f"buffer {name} of {tensor.dtype} changes in training; only buffers of floating-point "
            "numbers can"
        )
    large = is_float and tensor.numel() * tensor.element_size() > CONSTANT_BYTES
    role: Role = "buffer" if held.changes or large else "constant"
    if held.is_parameter:
        # What the module does not train itself is kept, never updated.
        role = "parameter" if tensor.requires_grad else "buffer"
    order = order_of(held.uses, tensor.ndim)
    path = path_of(name, order, held.uses, tensor.ndim)
    shape = tuple(tensor.shape)
    if order in _TO_AXES:
        shape = tuple(shape[axis] for axis in _TO_AXES[order])
    dtype = "float32" if is_float else str(tensor.dtype).removeprefix("torch.")
    return ArraySpec(name, path, role, order, shape, dtype)


def _in_own_order(array: np.ndarray, order: Order) -> np.ndarray:
    axes = _TO_AXES.get(order)
    return array if axes is None else np.ascontiguousarray(array.transpose(axes))


def _as_numpy(torch: Any, tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    return np.array(tensor.numpy(), order="C")
