"""Forms of graphs, without in-place operators, from programs of torch.export.

An in-place call of a program becomes a call that returns a new value, which later calls read
instead of the operand. That is wrong if another value shares the operand's memory and is read
later; then torch must rewrite the program first, which is slow. Torch computes all constants.

A program is rewritten by torch's decompositions, which takes seconds, only if it has an operator
that the table lacks, and only such operators are.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from pipeline.models.torch_graph.conversion.layer_list import choose_output, name_outputs
from pipeline.models.torch_graph.conversion.program_nodes import (
    describe_node,
    find_line,
    find_module,
    find_owner,
    list_hidden_views,
    parse_base_name,
    replace_idle_dropouts,
)
from pipeline.models.torch_graph.graph import (
    COTANGENT,
    CUSTOM_GRADIENT,
    INPUT,
    ArrayOf,
    Form,
    GraphNode,
    TensorSpec,
    TypeOf,
    ValueOf,
    find_references,
    refer_to_inputs,
)
from pipeline.models.torch_graph.operators.known_operators import OPERATORS

_FILLERS = frozenset(
    ["new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "empty_like"]
)
"""Operators that read only the dtype and the shape of their first argument."""
_RANDOM = re.compile(r"bernoulli|dropout|rand|normal|uniform|multinomial|exponential|lstm|gru|rnn")
_IGNORED_KEYWORDS = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "generator", "non_blocking", "copy"}
)
_IGNORED_OPS = re.compile(
    r"^(?=(?:aten|prims?|inductor)\.|<|[^.]+$)"
    r".*(?:_assert_|sym_constrain_range|_check|is_nonzero|_guard|assert_tensor_metadata)"
)
"""Names of torch's own operators and functions that only check values."""
_NORMS = ("aten.batch_norm.default", "aten.instance_norm.default")
"""Operators that change the running statistics among their arguments, 3 and 4, in training."""
_FUNCTIONAL = {"bernoulli.float": "bernoulli.p", "normal.default": "normal_functional.default"}
"""Names of functional operators by the in-place name without its underscore, if they differ."""


@dataclass(frozen=True)
class Draft:
    """A form whose arrays have torch.export's names, and its constants."""

    form: Form
    constants: Mapping[str, Any]
    """Constants, as tensors of torch, by name."""

    def find_changed_arrays(self) -> frozenset[str]:
        """Return the names of the arrays that the form changes, including batch statistics."""
        changed = {name for name, _ in self.form.updates}
        for node in self.form.nodes:
            if node.op in _NORMS and node.args[5] is True:
                changed |= {a.name for a in node.args[3:5] if isinstance(a, ArrayOf)}
        return frozenset(changed)

    def rename_arrays(self, names: Mapping[str, str], constant_suffix: str = "") -> Draft:
        """Return the draft with new names of arrays by old names; constants get the suffix."""

        def rename(name: str) -> str:
            return f"{name}{constant_suffix}" if name in self.constants else names.get(name, name)

        def rename_reference(leaf: Any) -> Any:
            return ArrayOf(rename(leaf.name)) if isinstance(leaf, ArrayOf) else leaf

        nodes = tuple(
            replace(
                node,
                args=jax.tree.map(rename_reference, node.args),
                kwargs=jax.tree.map(rename_reference, node.kwargs),
            )
            for node in self.form.nodes
        )
        updates = tuple((rename(name), value) for name, value in self.form.updates)
        constants = {rename(name): tensor for name, tensor in self.constants.items()}
        return Draft(replace(self.form, nodes=nodes, updates=updates), constants)


class SharedMemoryError(Exception):
    """An in-place call changes memory that other values share, and torch must rewrite it."""


@dataclass
class ProgramReader:
    """Reads an exported program, one fx node after another. Its fields name fx nodes."""

    torch: Any
    program: Any
    output: str | None = None
    """Name of the output that the form has; None for the logits, or the only tensor."""
    nodes: list[GraphNode] = field(default_factory=list)
    current: dict[str, Any] = field(default_factory=dict)
    """Current value of each fx node: a reference to a result or to an array."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Values, computed by torch, of the fx nodes that depend on constants only."""
    aliases: dict[str, str] = field(default_factory=dict)
    """For each in-place call the fx node whose tensor it changes and returns."""
    roots: dict[str, str] = field(default_factory=dict)
    """For each view or in-place call the fx node that owns the memory of its result."""
    constants: dict[str, Any] = field(default_factory=dict)
    updates: dict[str, ValueOf] = field(default_factory=dict)

    @cached_property
    def _buffers(self) -> Mapping[str, str]:
        """Names of buffers by the placeholders that stand for them."""
        return dict(self.program.graph_signature.inputs_to_buffers)

    def read(self) -> Draft:
        """Read all nodes.

        Raises SharedMemoryError if an in-place call changes memory that other values share, and
        ValueError unless an output is the logits, and each node calls an operator.
        """
        output: Any = None
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._read_placeholder(node)
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                output = self._read_output(node)
            elif node.op != "get_attr":
                raise ValueError(
                    f"{node.op} {node.target} isn't an operator; the network is too dynamic"
                )
        form = prune_form(tuple(self.nodes), output, self.updates)
        used = find_array_uses(form)
        constants = {name: tensor for name, tensor in self.constants.items() if name in used}
        return Draft(form, constants)

    def _read_placeholder(self, node: Any) -> None:
        signature = self.program.graph_signature
        constant = signature.inputs_to_lifted_tensor_constants.get(node.name)
        array = signature.inputs_to_parameters.get(node.name) or self._buffers.get(node.name)
        if constant is not None:
            self.tensors[node.name] = self.program.constants[constant].clone()
        elif array is not None:
            self.current[node.name] = ArrayOf(array)
        else:
            inputs = list(signature.user_inputs)
            self.current[node.name] = refer_to_inputs(len(inputs))[inputs.index(node.name)]

    def _read_output(self, node: Any) -> ValueOf:
        signature = self.program.graph_signature
        mutated = signature.buffers_to_mutate
        for name in signature.parameters_to_mutate.values():
            raise ValueError(_describe_changed_parameter(name))
        names = name_outputs(self.program.call_spec.out_spec)
        # The tensors that change come first.
        count = len(node.args[0]) - len(names)
        for result in node.args[0][:count]:
            if result is not None and result.name in mutated:
                value = self._find_value(result)
                if isinstance(value, ValueOf):
                    self.updates[mutated[result.name]] = value
        outputs = {
            name: result
            for name, result in zip(names, node.args[0][count:], strict=True)
            if hasattr(result, "meta") and hasattr(result.meta.get("val"), "shape")
        }
        value = self._find_value(choose_output(outputs, self.output))
        if not isinstance(value, ValueOf):
            raise ValueError("the network's output must depend on its input")
        return value

    def _read_call(self, node: Any) -> None:
        target = node.target
        if target is operator.getitem:
            self._read_item(node)
            return
        size_op = f"sym.{getattr(target, '__name__', '')}"
        # An unknown one of numbers is named with the other unknown operators; nothing reads the
        # result of a check of a size that depends on the data.
        if size_op in OPERATORS or getattr(target, "__module__", "") in ("_operator", "math"):
            self._append(node, size_op, node.args, {})
            return
        full_op = str(target)
        if _IGNORED_OPS.search(full_op):
            return
        name = parse_base_name(full_op)
        in_place = full_op.startswith("aten.") and name.endswith("_") and not name.startswith("__")
        if not in_place and (owner := find_owner(node, name)) is not None:
            self.roots[node.name] = self._find_root(owner)
        if self._is_constant(node, name, in_place):
            self._compute_constant(node)
        elif not isinstance(target, self.torch._ops.OpOverload):
            raise ValueError(f"operator {full_op} of {describe_node(node)} isn't supported")
        elif name == "as_strided" and not node.args[0].meta["val"].is_contiguous():
            raise ValueError(
                f"{full_op} of {describe_node(node)} reads a tensor that isn't contiguous; must be "
                "of x.contiguous()"
            )
        elif in_place:
            self._append_functional(node, full_op)
        else:
            self._append(node, full_op, node.args, node.kwargs)

    def _append_functional(self, node: Any, full_op: str) -> None:
        """Append the functional form of an in-place call."""
        root = self._find_root(node.args[0])
        changed = self._find_alias(node.args[0])
        parameters = self.program.graph_signature.inputs_to_parameters
        if root in parameters:
            raise ValueError(_describe_changed_parameter(parameters[root]))
        if self._is_shared_later(root, changed, node):
            raise SharedMemoryError
        name, _, overload = full_op.removeprefix("aten.").partition(".")
        functional = f"{name[:-1]}.{overload}"
        op = f"aten.{_FUNCTIONAL.get(functional, functional)}"
        self._append(node, op, node.args, node.kwargs)
        self.current[changed] = self.current.pop(node.name)
        self.tensors.pop(changed, None)
        self.roots[node.name] = root
        self.aliases[node.name] = changed
        if root in self._buffers:
            self.updates[self._buffers[root]] = self.current[changed]

    def _is_shared_later(self, root: str, changed: str, node: Any) -> bool:
        """Return whether a value other than `changed` in root's memory is read after a node."""
        if root in self._buffers and changed != root:
            return True
        for value in self.program.graph.nodes:
            is_shared = value.name == root or self.roots.get(value.name) == root
            if not is_shared or self._find_alias(value) == changed or value is node:
                continue
            if any(user > node for user in value.users):
                return True
        return False

    def _find_root(self, node: Any) -> str:
        return self.roots.get(node.name, node.name)

    def _find_alias(self, node: Any) -> str:
        return self.aliases.get(node.name, node.name)

    def _read_item(self, node: Any) -> None:
        source, item = node.args
        self.roots[node.name] = self._find_root(source)
        if source.name in self.tensors:
            self.tensors[node.name] = self.tensors[source.name][item]
        else:
            value = self.current[self._find_alias(source)]
            assert isinstance(value, ValueOf)
            self.current[node.name] = ValueOf(value.node, item)

    def _is_constant(self, node: Any, name: str, in_place: bool) -> bool:
        """Return whether the node reads only constants, so that torch can compute it."""
        if _RANDOM.search(name) or str(node.target) in (COTANGENT, CUSTOM_GRADIENT):
            return False
        if name in _FILLERS and node.args and _is_fixed(node.meta.get("val")):
            return True
        if in_place and self._find_root(node.args[0]) in self._buffers:
            return False
        reads_constants = all(operand.name in self.tensors for operand in node.all_input_nodes)
        is_unread = in_place and not node.users
        return reads_constants and (_is_fixed(node.meta.get("val")) or is_unread)

    def _compute_constant(self, node: Any) -> None:
        torch = self.torch
        if parse_base_name(str(node.target)) in _FILLERS:
            result = node.meta["val"]
            first = torch.empty(tuple(result.shape), dtype=result.dtype)
            args = (first, *self._insert_tensors(node.args[1:]))
        else:
            args = self._insert_tensors(node.args)
        with torch.no_grad():
            self.tensors[node.name] = node.target(*args, **self._insert_tensors(node.kwargs))

    def _insert_tensors(self, value: Any) -> Any:
        """Return arguments with the tensors of fx nodes in their place."""
        return self.torch.fx.node.map_arg(value, lambda node: self.tensors[node.name])

    def _append(self, node: Any, op: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        keyword_args = tuple(
            (key, self._read_argument(value, node))
            for key, value in kwargs.items()
            if key not in _IGNORED_KEYWORDS and value is not None
        )
        module, module_class = find_module(node)
        positional = tuple(self._read_argument(value, node) for value in args)
        results = _make_specs(node.meta.get("val"))
        line = find_line(node)
        self.nodes.append(
            GraphNode(node.name, op, positional, keyword_args, results, module, module_class, line)
        )
        self.current[node.name] = ValueOf(node.name)

    def _read_argument(self, value: Any, node: Any) -> Any:
        torch = self.torch
        if isinstance(value, torch.fx.Node):
            return self._find_value(value)
        if isinstance(value, tuple | list):
            return tuple(self._read_argument(item, node) for item in value)
        if isinstance(value, torch.dtype):
            return TypeOf(str(value).removeprefix("torch."))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        raise ValueError(
            f"argument {value!r} of {node.target} of {describe_node(node)} isn't supported"
        )

    def _find_value(self, node: Any) -> Any:
        """Return the current value of an fx node; a constant tensor becomes an array."""
        if node.name not in self.tensors:
            return self.current[self._find_alias(node)]
        tensor = self.tensors[node.name]
        if not isinstance(tensor, self.torch.Tensor):
            return tensor
        name = node.name
        while name in self.constants and not self._are_equal(self.constants[name], tensor):
            name = f"{name}_later"
        self.constants.setdefault(name, tensor.clone())
        return ArrayOf(name)

    def _are_equal(self, a: Any, b: Any) -> bool:
        """Return whether tensors have equal elements, of which NaN equals NaN."""
        if self.torch.equal(a, b) or a.shape != b.shape:
            return bool(a.shape == b.shape)
        return bool(((a == b) | ((a != a) & (b != b))).all())


def _describe_changed_parameter(name: str) -> str:
    return f"parameter {name} changes in its forward pass; only buffers can change"


def _is_fixed(value: Any) -> bool:
    """Return whether the shapes of the results don't depend on the batch."""
    values = value if isinstance(value, tuple | list) else (value,)
    return all(hasattr(x, "shape") and all(type(size) is int for size in x.shape) for x in values)


def _make_specs(value: Any) -> tuple[TensorSpec, ...]:
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(
        TensorSpec(
            tuple(size if type(size) is int else None for size in x.shape),
            str(x.dtype).removeprefix("torch."),
        )
        for x in values
        if hasattr(x, "shape")
    )


def prune_form(
    nodes: tuple[GraphNode, ...], output: ValueOf, updates: Mapping[str, ValueOf]
) -> Form:
    """Return a form of the nodes from which the output and the updates are computed.

    Batch norm's number of batches isn't updated unless a node of the form reads it.
    """
    by_name = {node.name: node for node in nodes}

    def counts_batches(name: str, value: ValueOf) -> bool:
        results = by_name[value.node].results
        is_integer = bool(results) and not results[0].dtype.startswith(("float", "bfloat"))
        return is_integer and name.endswith("num_batches_tracked")

    counts = {n: value for n, value in updates.items() if counts_batches(n, value)}
    used: set[str] = set()
    pending = [output.node, *(value.node for n, value in updates.items() if n not in counts)]
    while pending:
        name = pending.pop()
        if name != INPUT and name not in used:
            used.add(name)
            for reference in find_references(by_name[name]):
                if isinstance(reference, ValueOf):
                    pending.append(reference.node)
                elif isinstance(reference, ArrayOf) and reference.name in counts:
                    pending.append(counts.pop(reference.name).node)
    kept = tuple((n, value) for n, value in updates.items() if n not in counts)
    return Form(tuple(n for n in nodes if n.name in used), output, kept)


def find_array_uses(form: Form) -> Mapping[str, set[tuple[str, int]]]:
    """Return the operators that read each array, by the array's name.

    An operator is given with the index of the array among its arguments; -1 if the array is in a
    tuple or a keyword argument.
    """
    uses: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in form.nodes:
        for reference in find_references(node):
            if isinstance(reference, ArrayOf):
                indices = [n for n, argument in enumerate(node.args) if argument == reference]
                uses[reference.name].update((node.op, index) for index in indices or [-1])
    return uses


def read_program(torch: Any, program: Any, output: str | None = None) -> Draft:
    """Return the form of a program for its output of a name; None stands for the logits, or the
    only tensor. Raises ValueError as `ProgramReader.read` does."""
    try:
        draft = ProgramReader(torch, program, output).read()
    except SharedMemoryError:
        # A tensor changes in place through a view. Torch can rewrite that, but takes seconds.
        table = list_hidden_views(torch, program.graph_module)
        replace_idle_dropouts(torch, program.graph_module)
        program = program.run_decompositions(table)
        draft = ProgramReader(torch, program, output).read()
    if all(node.op in OPERATORS for node in draft.form.nodes):
        return draft
    program = program.run_decompositions(_list_decompositions(torch))
    return ProgramReader(torch, program, output).read()


def _list_decompositions(torch: Any) -> Any:
    """Return torch's decompositions of the operators that the table lacks."""
    table = torch.export.default_decompositions()
    for core_operator in list(table.keys()):
        if str(core_operator) in OPERATORS:
            table.pop(core_operator)
    return table
