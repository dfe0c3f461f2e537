"""A Python script as syntax: its calls, assignments and constants. It is parsed, and never run."""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NODES = 2**18
"""Most syntax nodes that are read: constants may refer to one another in a circle."""


class Script:
    """The calls, assignments and constants of a script."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
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

    def read_value(self, node: ast.expr) -> Any:
        """Return the value of a literal, a call's keywords by name, or an Expression of the rest.

        A name of a constant has the constant's value. Raises ValueError if all values that were
        read have more than `MAX_NODES` nodes together.
        """
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id, node)
        keywords = node.keywords if isinstance(node, ast.Call) and not node.args else None
        self._nodes_left -= sum(1 for _ in ast.walk(node)) if keywords is None else 1
        if self._nodes_left < 0:
            raise ValueError(f"has values of more than {MAX_NODES:,} parts")
        if keywords is not None:
            return {item.arg: self.read_value(item.value) for item in keywords if item.arg}
        try:
            value = ast.literal_eval(node)
            json.dumps(value)
        except (ValueError, TypeError):
            return Expression(ast.unparse(node))
        return value

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
