"""A form of a graph from a program of torch.export: without changes in place, constants computed.

`torch.export` gives what Python called, in-place operators among it. Here the result of such a call
takes the place of its operand in what follows. That is the same as long as nothing else sees the
operand's memory; where something does, torch's own, slower rewriting is needed, unless all of it is
constant, which torch then computes as it stands.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.models.torch_graph.graph import (
    INPUT,
    ArrayOf,
    Form,
    GraphNode,
    TensorSpec,
    TypeOf,
    ValueOf,
    references_of,
)

_VIEWS = frozenset(
    [
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "flatten",
        "getitem",
        "movedim",
        "mT",
        "narrow",
        "numpy_T",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "t",
        "to",
        "contiguous",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
        "swapdims",
        "type_as",
        "reshape_as",
    ]
)
"""Operators whose result may share the memory of their first argument."""
_MADE = frozenset(
    ["new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "empty_like"]
)
"""Operators that take from their first argument its type, or its shape, alone."""
_RANDOM = re.compile(r"bernoulli|dropout|rand|normal|uniform|multinomial|exponential|lstm|gru|rnn")
_IGNORED_KEYWORDS = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "generator", "non_blocking", "copy"}
)
_IGNORED_OPS = re.compile(
    r"_assert_|sym_constrain_range|_check|is_nonzero|_guard|assert_tensor_metadata"
)
_SIZES = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.floordiv: "floordiv",
    operator.truediv: "truediv", operator.mod: "mod", operator.neg: "neg",
}  # fmt: skip
_FUNCTIONAL = {"bernoulli.float": "bernoulli.p", "normal.default": "normal_functional.default"}
"""Names without the underscore that are not simply the in-place name without it."""


@dataclass(frozen=True)
class Draft:
    """A form whose arrays have the names that torch.export found, and its constants."""

    form: Form
    constants: Mapping[str, Any]
    """Tensors of torch by name."""

    def uses_of(self, name: str) -> frozenset[tuple[str, int]]:
        """Return the uses of an array: the operator, and the place among its arguments."""
        return self._uses.get(name, frozenset())

    @cached_property
    def _uses(self) -> dict[str, frozenset[tuple[str, int]]]:
        found: dict[str, set[tuple[str, int]]] = {}
        for node in self.form.nodes:
            for place, argument in enumerate(node.args):
                if isinstance(argument, ArrayOf):
                    found.setdefault(argument.name, set()).add((node.op, place))
            direct = {a.name for a in node.args if isinstance(a, ArrayOf)}
            for reference in references_of(node):
                if isinstance(reference, ArrayOf) and reference.name not in direct:
                    found.setdefault(reference.name, set()).add((node.op, -1))
        return {name: frozenset(uses) for name, uses in found.items()}

    def changed_arrays(self) -> frozenset[str]:
        """Return the arrays that this form changes: those of updates, and batch statistics."""
        changed = {name for name, _ in self.form.updates}
        for node in self.form.nodes:
            if node.op == "aten.batch_norm.default" and node.args[5] is True:
                changed |= {each.name for each in node.args[3:5] if isinstance(each, ArrayOf)}
        return frozenset(changed)

    def renamed(self, names: Mapping[str, str], suffix: str = "") -> Draft:
        """Return the draft with other names of arrays, and a suffix to those of constants."""

        def name_of(name: str) -> str:
            return f"{name}{suffix}" if name in self.constants else names.get(name, name)

        def rename(argument: Any) -> Any:
            if isinstance(argument, ArrayOf):
                return ArrayOf(name_of(argument.name))
            return tuple(map(rename, argument)) if isinstance(argument, tuple) else argument

        nodes = tuple(
            replace(
                node,
                args=tuple(map(rename, node.args)),
                kwargs=tuple((key, rename(value)) for key, value in node.kwargs),
            )
            for node in self.form.nodes
        )
        updates = tuple((name_of(name), value) for name, value in self.form.updates)
        constants = {name_of(name): tensor for name, tensor in self.constants.items()}
        return Draft(replace(self.form, nodes=nodes, updates=updates), constants)


def draft_of(torch: Any, program: Any) -> Draft | None:
    """Return the form of an exported program.

    None where something is changed in place that other values share. Raises ValueError for outputs
    that are not one tensor, and for nodes that are no call of an operator.
    """
    return _Reading(torch, program).draft()


@dataclass
class _Reading:
    """The state of reading one program, node by node."""

    torch: Any
    program: Any
    nodes: list[GraphNode] = field(default_factory=list)
    now: dict[str, Any] = field(default_factory=dict)
    """The meaning of each fx node now: a reference, a tuple of them, or a number."""
    known: dict[str, Any] = field(default_factory=dict)
    """Values of fx nodes that depend on constants alone: tensors, computed by torch."""
    same: dict[str, str] = field(default_factory=dict)
    """The fx node whose tensor, changed in place, another one returns."""
    roots: dict[str, str] = field(default_factory=dict)
    """The fx node whose memory another one shares."""
    constants: dict[str, Any] = field(default_factory=dict)
    updates: dict[str, ValueOf] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    """Names of buffers by the fx node of their placeholder."""

    def draft(self) -> Draft | None:
        """Read all nodes; None where a change in place is seen through other values."""
        graph = self.program.graph
        order = {node: number for number, node in enumerate(graph.nodes)}
        output: Any = None
        for node in graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                if not self._call(node, order):
                    return None
            elif node.op == "output":
                output = self._output(node)
            elif node.op != "get_attr":
                raise ValueError(
                    f"{node.op} {node.target} is no operator; the network is too dynamic"
                )
        form = _needed(tuple(self.nodes), output, self.updates)
        used = {r.name for n in form.nodes for r in references_of(n) if isinstance(r, ArrayOf)}
        return Draft(form, {k: tensor for k, tensor in self.constants.items() if k in used})

    def _placeholder(self, node: Any) -> None:
        signature = self.program.graph_signature
        if node.name in signature.inputs_to_parameters:
            self.now[node.name] = ArrayOf(signature.inputs_to_parameters[node.name])
        elif node.name in signature.inputs_to_buffers:
            name = signature.inputs_to_buffers[node.name]
            self.now[node.name], self.buffers[node.name] = ArrayOf(name), name
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            name = signature.inputs_to_lifted_tensor_constants[node.name]
            self.known[node.name] = self.program.constants[name].clone()
        else:
            self.now[node.name] = ValueOf(INPUT)

    def _output(self, node: Any) -> ValueOf:
        signature = self.program.graph_signature
        mutated = signature.buffers_to_mutate
        for name in getattr(signature, "parameters_to_mutate", {}).values():
            raise ValueError(_changed_parameter(name))
        results = [result for result in node.args[0] if result is not None]
        outputs = []
        for result in results:
            if result.name in mutated:
                self._update(mutated[result.name], self._reference(result))
            elif result.name not in signature.user_inputs_to_mutate:
                # A batch is a value here: what the network writes into it, it alone sees.
                outputs.append(result)
        if len(outputs) != 1:
            raise ValueError(
                f"the network gives {len(outputs)} tensors; it must give one, the logits"
            )
        value = self._reference(outputs[0])
        if not isinstance(value, ValueOf):
            raise ValueError("the network's output does not depend on its input")
        return value

    def _update(self, name: str, value: Any) -> None:
        if isinstance(value, ValueOf):
            self.updates[name] = value

    def _call(self, node: Any, order: Mapping[Any, int]) -> bool:
        """Read a call. Return False where it changes memory that other values share."""
        target = node.target
        if target is operator.getitem:
            self._item(node)
            return True
        if target in _SIZES or getattr(target, "__name__", "") in ("sym_max", "sym_min"):
            name = _SIZES.get(target) or target.__name__
            self._append(node, f"sym.{name}", node.args, {})
            return True
        full = str(target)
        if _IGNORED_OPS.search(full):
            return True
        name = _base_name(full)
        in_place = full.startswith("aten.") and name.endswith("_") and not name.startswith("__")
        shared = name in _VIEWS and node.args and hasattr(node.args[0], "name")
        if shared:
            self.roots[node.name] = self._root(node.args[0])
        if self._is_known(node, name, in_place):
            self._evaluate(node, in_place)
            return True
        if not full.startswith("aten."):
            raise ValueError(f"operator {full} of {_where(node)} is not computed here")
        if not in_place:
            self._append(node, full, node.args, node.kwargs)
            return True
        return self._replace(node, full, order)

    def _replace(self, node: Any, full: str, order: Mapping[Any, int]) -> bool:
        """Append a call in place as one that is not; its result is what the operand is from now."""
        operand = node.args[0]
        root, changed = self._root(operand), self._same(operand)
        if root in self.program.graph_signature.inputs_to_parameters:
            raise ValueError(
                _changed_parameter(self.program.graph_signature.inputs_to_parameters[root])
            )
        if self._is_seen_later(root, changed, node, order):
            return False
        name, _, overload = full.removeprefix("aten.").partition(".")
        plain = f"{name[:-1]}.{overload}"
        self._append(node, f"aten.{_FUNCTIONAL.get(plain, plain)}", node.args, node.kwargs)
        self.now[changed] = self.now.pop(node.name)
        self.known.pop(changed, None)
        self.roots[node.name], self.same[node.name] = root, changed
        if root in self.buffers:
            self._update(self.buffers[root], self.now[changed])
        return True

    def _is_seen_later(self, root: str, changed: str, node: Any, order: Mapping[Any, int]) -> bool:
        """Return whether another value of the same memory is used after a node."""
        if root in self.buffers and changed != root:
            return True
        for other in self.program.graph.nodes:
            shares = other.name == root or self.roots.get(other.name) == root
            if not shares or self._same(other) == changed or other is node:
                continue
            if any(order[user] > order[node] for user in other.users):
                return True
        return False

    def _root(self, node: Any) -> str:
        return self.roots.get(node.name, node.name)

    def _same(self, node: Any) -> str:
        return self.same.get(node.name, node.name)

    def _item(self, node: Any) -> None:
        source, item = node.args
        self.roots[node.name] = self._root(source)
        if source.name in self.known:
            self.known[node.name] = self.known[source.name][item]
        else:
            value = self.now[self._same(source)]
            assert isinstance(value, ValueOf)
            self.now[node.name] = ValueOf(value.node, item)

    def _is_known(self, node: Any, name: str, in_place: bool) -> bool:
        """Return whether torch can compute the node now: it reads constants alone."""
        if _RANDOM.search(name):
            return False
        operands = list(node.all_input_nodes)
        if name in _MADE and node.args and _fixed(node.meta.get("val")):
            return True
        if in_place and self._root(node.args[0]) in self.buffers:
            return False
        return all(operand.name in self.known for operand in operands) and (
            _fixed(node.meta.get("val")) or (in_place and not node.users)
        )

    def _evaluate(self, node: Any, in_place: bool) -> None:
        torch = self.torch
        if _base_name(str(node.target)) in _MADE:
            like = node.meta["val"]
            first = torch.empty(tuple(like.shape), dtype=like.dtype)
            args = (first, *self._torch_values(node.args[1:]))
        else:
            args = self._torch_values(node.args)
        with torch.no_grad():
            self.known[node.name] = node.target(*args, **self._torch_values(node.kwargs))

    def _torch_values(self, value: Any) -> Any:
        if isinstance(value, self.torch.fx.Node):
            return self.known[value.name]
        if isinstance(value, tuple | list):
            return type(value)(self._torch_values(item) for item in value)
        if isinstance(value, Mapping):
            return {key: self._torch_values(item) for key, item in value.items()}
        return value

    def _append(self, node: Any, op: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        named = tuple(
            (key, self._argument(value, node))
            for key, value in kwargs.items()
            if key not in _IGNORED_KEYWORDS and value is not None
        )
        module, kind = _module_of(node)
        read = tuple(self._argument(value, node) for value in args)
        results = _results(node.meta.get("val"))
        line = _line_of(node.meta.get("stack_trace"))
        self.nodes.append(GraphNode(node.name, op, read, named, results, module, kind, line))
        self.now[node.name] = ValueOf(node.name)

    def _argument(self, value: Any, node: Any) -> Any:
        torch = self.torch
        if isinstance(value, torch.fx.Node):
            return self._reference(value)
        if isinstance(value, tuple | list):
            return tuple(self._argument(item, node) for item in value)
        if isinstance(value, torch.dtype):
            return TypeOf(str(value).removeprefix("torch."))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        raise ValueError(f"argument {value!r} of {node.target} of {_where(node)} is not read")

    def _reference(self, node: Any) -> Any:
        """Return what an fx node stands for now; a constant is copied as it is now."""
        if node.name not in self.known:
            return self.now[self._same(node)]
        tensor = self.known[node.name]
        if not isinstance(tensor, self.torch.Tensor):
            return tensor
        name = node.name
        while name in self.constants and not self.torch.equal(self.constants[name], tensor):
            name = f"{name}_later"
        self.constants.setdefault(name, tensor.clone())
        return ArrayOf(name)


def _changed_parameter(name: str) -> str:
    return f"parameter {name} changes in its forward pass; only buffers can change"


def _base_name(full: str) -> str:
    """Return `add_` for `aten.add_.Tensor`."""
    return full.split(".")[1] if full.count(".") else full


def _fixed(value: Any) -> bool:
    """Return whether the shapes of results depend on no batch."""
    values = value if isinstance(value, tuple | list) else (value,)
    return all(
        hasattr(each, "shape") and all(type(size) is int for size in each.shape) for each in values
    )


def _results(value: Any) -> tuple[TensorSpec, ...]:
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(
        TensorSpec(
            tuple(size if type(size) is int else None for size in each.shape),
            str(each.dtype).removeprefix("torch."),
        )
        for each in values
        if hasattr(each, "shape")
    )


def _module_of(node: Any) -> tuple[str, str]:
    """Return the path and the class of the module that calls a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__name__
    return re.sub(r"@\d+", "", path), kind.rpartition(".")[2]


def _line_of(stack: str | None) -> str:
    """Return the last line of the user's code in a stack trace; that of torch's modules is none."""
    frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', stack or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}: {own[-1][2].strip()}" if own else ""


def _where(node: Any) -> str:
    module, _ = _module_of(node)
    line = _line_of(node.meta.get("stack_trace"))
    place = f"module {module}" if module else "the network"
    return f"{place} ({line})" if line else place


def _needed(nodes: tuple[GraphNode, ...], output: ValueOf, updates: Mapping[str, ValueOf]) -> Form:
    """Return the form with the nodes that its output and its updates need.

    An update of whole numbers that nothing reads is left out: batch norm's count of batches.
    """
    by_name = {node.name: node for node in nodes}
    counted = {
        name: value
        for name, value in updates.items()
        if not (name.endswith("num_batches_tracked") and _is_whole(by_name[value.node]))
    }
    needed: set[str] = set()
    waiting = [output.node, *(value.node for value in counted.values())]
    while waiting:
        name = waiting.pop()
        if name == INPUT or name in needed:
            continue
        needed.add(name)
        waiting += _names(by_name[name])
    return Form(tuple(n for n in nodes if n.name in needed), output, tuple(counted.items()))


def _is_whole(node: GraphNode) -> bool:
    return bool(node.results) and not node.results[0].dtype.startswith(("float", "bfloat"))


def _names(node: GraphNode) -> Iterator[str]:
    return (each.node for each in references_of(node) if isinstance(each, ValueOf))
