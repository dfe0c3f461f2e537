"""A Python script as syntax: its calls, assignments and constants. It is parsed, and never run."""

from __future__ import annotations

import ast
import json
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.files.bounded_read import read_text

MAX_BYTES = 2**18

MAX_NODES = 2**18
"""Most syntax nodes that are read: constants may refer to one another in a circle."""
MAX_NAMES = 16
"""Most names that lead from one to another."""
TEXT_CALLS = ("as_bytes", "as_text", "as_str", "str", "bytes")
"""Functions that turn a text into a text of another type."""
MAX_RESULT = 1e100
"""Bound of the results of arithmetic. Python doesn't print integers of many digits."""
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
"""Arithmetic whose results can't be much longer than its numbers."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SILENT = (ast.Import, ast.ImportFrom, ast.Pass, ast.Global, ast.Nonlocal, ast.Delete)
"""Statements that set nothing."""


@contextmanager
def convert_script_errors() -> Iterator[None]:
    """Raise ValueError in place of the parser's errors, and of those of trees that are too deep."""
    try:
        yield
    except (SyntaxError, RecursionError, MemoryError) as error:
        # A MemoryError of the parser has no text.
        reason = str(error) or "it is nested too deeply"
        raise ValueError(f"isn't Python: {reason}") from error


def parse_script(file: Path) -> Script:
    """Parse a script. Raises OSError, and ValueError if it isn't Python."""
    with convert_script_errors():
        return Script(ast.parse(read_text(file, MAX_BYTES)))


class Script:
    """The calls, assignments and constants of a script."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self.tree = tree
        self._used_names: set[str] = set()
        self.assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        self.contexts = [node.context_expr for node in nodes if isinstance(node, ast.withitem)]
        self._nodes_left = MAX_NODES
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        """Calls by name of the function or method, without the object: `Session` for tf.Session."""
        for node in nodes:
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                self.calls[name].append(node)
        names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        names += [node.arg for node in nodes if isinstance(node, ast.arg)]
        num_bindings = Counter(names)
        self.constants = {
            target.id: node.value
            for node in self.assignments
            for target in node.targets
            if isinstance(target, ast.Name) and num_bindings[target.id] == 1
        }
        """Values of the names that are assigned once."""

    def find_calls(self, names: Sequence[str]) -> list[ast.Call]:
        """Return the calls of functions and methods with these names."""
        return [call for name in names for call in self.calls[name]]

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the value of a constant's name, or the node."""
        for _ in range(MAX_NAMES):
            if not (isinstance(node, ast.Name) and node.id in self.constants):
                break
            self._used_names.add(node.id)
            node = self.constants[node.id]
        return node

    def read_constant(self, node: ast.expr) -> Any:
        """Return the value of a literal, of a constant's name, or of arithmetic with numbers; else
        an Expression. Raises ValueError as `read_value` does."""
        number = self._compute(node)
        if number is not None:
            return number
        resolved = self.resolve(node)
        if isinstance(resolved, ast.Call):
            return Expression(ast.unparse(node))
        return self.read_value(resolved)

    def _compute(self, node: ast.expr) -> int | float | None:
        """Return the result of arithmetic with numbers; None for other values."""
        self._count_nodes(1)
        node = self.resolve(node)
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._compute(node.operand)
            return None if number is None else -number
        if not isinstance(node, ast.BinOp) or type(node.op) not in ARITHMETIC:
            return None
        left, right = self._compute(node.left), self._compute(node.right)
        if left is None or right is None:
            return None
        try:
            number = ARITHMETIC[type(node.op)](left, right)
        except (ArithmeticError, ValueError):
            return None
        return number if abs(number) < MAX_RESULT else None

    def _count_nodes(self, count: int) -> None:
        self._nodes_left -= count
        if self._nodes_left < 0:
            raise ValueError(f"has values of more than {MAX_NODES:,} parts")

    def read_value(self, node: ast.expr) -> Any:
        """Return the value of a literal, a call's keywords by name, or an Expression of the rest.

        A name of a constant has the constant's value. Raises ValueError if all values that were
        read have more than `MAX_NODES` nodes together.
        """
        if isinstance(node, ast.Name):
            self._used_names.add(node.id)
            node = self.constants.get(node.id, node)
        node = _unwrap_text(node)
        keywords = node.keywords if isinstance(node, ast.Call) and not node.args else None
        self._count_nodes(sum(1 for _ in ast.walk(node)) if keywords is None else 1)
        if keywords is not None:
            return {item.arg: self.read_value(item.value) for item in keywords if item.arg}
        try:
            value = ast.literal_eval(node)
            if isinstance(value, bytes):
                value = value.decode()
            json.dumps(value)
        except (ValueError, TypeError):
            return Expression(ast.unparse(node))
        return value

    def list_other_code(self, read: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
        """Yield line and text of each statement that no setting was read from.

        `read` are the nodes with settings. A function or class without such a node is one entry,
        and so is each statement outside of functions, but for imports and docstrings.
        """
        # Each node is compared by identity.
        nodes = {id(node) for node in read}

        def is_read(statement: ast.AST) -> bool:
            return any(id(node) in nodes for node in ast.walk(statement))

        def has_unread_keyword(node: ast.AST) -> bool:
            if id(node) in nodes:
                return False
            if isinstance(node, ast.Call) and node.keywords:
                return True
            return any(map(has_unread_keyword, ast.iter_child_nodes(node)))

        def visit(body: Sequence[ast.stmt]) -> Iterator[tuple[int, str]]:
            for statement in body:
                blocks = list(_list_blocks(statement))
                if blocks and is_read(statement):
                    if not isinstance(statement, SCOPES):
                        yield statement.lineno, ast.unparse(statement).partition("\n")[0]
                    for block in blocks:
                        yield from visit(block)
                elif not (isinstance(statement, SILENT) or _is_docstring(statement)):
                    is_whole = is_read(statement) and not has_unread_keyword(statement)
                    if not is_whole and not self._is_used(statement):
                        yield statement.lineno, ast.unparse(statement).partition("\n")[0]

        yield from visit(self.tree.body)

    def _is_used(self, statement: ast.stmt) -> bool:
        """Return whether a statement assigns a constant that a setting has read."""
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        return bool(names) and self._used_names.issuperset(names)

    def find_values(self, name: str) -> Iterator[ast.expr]:
        """Yield the values of attributes and keywords of this name."""
        for node in self.assignments:
            if any(isinstance(item, ast.Attribute) and item.attr == name for item in node.targets):
                yield node.value
        for call in self.find_calls(list(self.calls)):
            yield from (item.value for item in call.keywords if item.arg == name)


@dataclass(frozen=True, repr=False)
class Expression:
    """The text of an expression that isn't a literal. Messages show it without quotes."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _list_blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a compound statement, also of its cases and handlers."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
        elif isinstance(value, list):
            for inner in value:
                if isinstance(inner, ast.excepthandler | ast.match_case):
                    yield from _list_blocks(inner)


def _is_docstring(statement: ast.AST) -> bool:
    """Return whether a statement is a text alone."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _unwrap_text(node: ast.expr) -> ast.expr:
    """Return the text that a call such as `tf.compat.as_bytes("text")` converts, else the node."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        is_text = isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
        if name in TEXT_CALLS and is_text:
            return node.args[0]
    return node
