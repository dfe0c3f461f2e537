"""Reading of YAML as plain data: keys are texts, values are texts, numbers, booleans or null.

A few hundred bytes of YAML can expand to gigabytes (aliases of aliases), build other types (tags)
or overflow the stack (nesting). The parser refuses these before any value is built.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.files.bounded_read import read_text

MAX_BYTES = 256 * 2**10
MAX_DEPTH = 64
MAX_NODES = 20_000
"""Most keys and values of a file. Those of an anchor are counted again for each alias."""
MAX_SPLIT_LINES = 2000
"""Most lines of a text that is split into parts."""
MAX_SPLIT_DEPTH = 8
"""Most levels of keys that are split into parts."""
MAX_PARTS = 100_000
"""Most parts that are remembered."""
MAX_NUMBER_LENGTH = 100
"""Most characters of a number. Python is slow with many digits, and prints at most 4300."""

_CORE = "tag:yaml.org,2002:"
_PLAIN = frozenset(f"{_CORE}{kind}" for kind in ("null", "bool", "str", "seq", "map", "merge"))
_NUMBERS = frozenset(f"{_CORE}{kind}" for kind in ("int", "float"))
_COMMAND_LINE = {
    f"{_CORE}bool": re.compile(r"(?i:true|false)"),
    f"{_CORE}int": re.compile(r"[+-]?(0|[1-9](_?\d)*)"),
    f"{_CORE}float": re.compile(
        r"[+-]?((\d(_?\d)*)?\.(\d(_?\d)*)?([eE][+-]?\d(_?\d)*)?"
        r"|\d(_?\d)*[eE][+-]?\d(_?\d)*|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
    ),
}
"""Pattern of each type's values on the command line. YAML 1.1 has other values, which are refused:
017 is 15, 1:30 is 90 and `no` is false."""
_EXPONENT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
"""Numbers that OmegaConf reads, while PyYAML reads them as texts: 1e3 and 1.5e3."""
_KEY = re.compile(r"([A-Za-z_]\w*):(?: (.+))?", re.ASCII)
"""A line with a key and perhaps a value."""
_CONTINUES = (" ", "-")
"""First characters of lines that belong to the key before them."""
_MALFORMED = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError)
"""Errors that PyYAML raises, also for values that don't fit an explicit tag."""


def read_yaml(path: Path) -> Any:
    """Parse a YAML file; None if it is empty.

    Numbers and booleans are read as on the command line. Raises OSError if the file can't be read,
    and ValueError if its content is refused.
    """
    return parse_yaml(read_text(path, MAX_BYTES))


def parse_yaml(text: str) -> Any:
    """Parse a YAML text as `read_yaml` does. Raises ValueError if it is refused."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except _MALFORMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(reason) from error


def parse_written_yaml(text: str) -> Any:
    """Parse a text as `parse_yaml` does, five times as fast if `format_yaml` has written it.

    The parser in C accepts a few mistakes for which `parse_yaml` raises ValueError.
    """
    try:
        if _is_plain(text):
            loader = _WrittenLoader(text)
            node = loader.get_single_node()
            if node is None:
                return None
            _require_plain_tree(node)
            return loader.construct_document(node)
    except _MALFORMED:
        pass
    return parse_yaml(text)


class RepeatedYaml:
    """A parser of many texts with equal parts, such as the recipes of a sweep. It parses each part
    once, so its results share values and must not be changed."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    def parse(self, text: str) -> Any:
        """Parse a text as `parse_written_yaml` does. Raises ValueError if it is refused."""
        lines = text.removesuffix("\n").split("\n")
        if len(lines) <= MAX_SPLIT_LINES:
            # A part that isn't as `format_yaml` writes it may depend on others.
            with suppress(ValueError):
                return self._parse_lines(lines, 0)
        return parse_written_yaml(text)

    def _parse_lines(self, lines: Sequence[str], depth: int) -> dict[str, Any]:
        """Parse the lines of a mapping. Raises ValueError if they aren't independent keys."""
        starts = [
            number for number, line in enumerate(lines) if line[:1] not in _CONTINUES or not line
        ]
        if not starts or starts[0] != 0:
            raise ValueError("must begin with a key")
        mapping: dict[str, Any] = {}
        for start, stop in pairwise([*starts, len(lines)]):
            key, value = self._parse_part(lines[start:stop], depth)
            if key in mapping:
                raise ValueError(f"has the key {key} twice")
            mapping[key] = value
        return mapping

    def _parse_part(self, lines: Sequence[str], depth: int) -> tuple[str, Any]:
        """Parse the lines of a key. Raises ValueError if they aren't one key."""
        head = _KEY.fullmatch(lines[0])
        if head is None:
            raise ValueError("must begin with a key")
        text = "\n".join(lines)
        if text in self._parts:
            return head[1], self._parts[text]
        holds_keys = len(lines) > 1 and head[2] is None and lines[1][2:3] not in _CONTINUES
        is_indented = all(line.startswith("  ") for line in lines[1:])
        if holds_keys and is_indented and depth < MAX_SPLIT_DEPTH:
            # The key is checked with another value.
            self._parse_part([f"{head[1]}: 0"], depth)
            value: Any = self._parse_lines([line[2:] for line in lines[1:]], depth + 1)
        else:
            tree = parse_written_yaml(text)
            if not isinstance(tree, dict) or list(tree) != [head[1]]:
                raise ValueError("must be one key")
            value = tree[head[1]]
        if len(self._parts) >= MAX_PARTS:
            self._parts.clear()
        self._parts[text] = value
        return head[1], value


def _is_plain(text: str) -> bool:
    """Return whether a text has one document, within the bounds, without anchors and tags."""
    depth = nodes = documents = 0
    for event in yaml.parse(text, Loader=_WrittenLoader):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if isinstance(event, yaml.AliasEvent) or event.anchor or event.tag:
                return False
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
        if depth > MAX_DEPTH or nodes > MAX_NODES or documents > 1:
            return False
    return True


def _require_plain_tree(node: yaml.Node) -> None:
    """Raise ValueError if a node or one in it isn't plain, or has a key twice."""
    _require_plain(node)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise ValueError("has a key twice")
        for _, value in node.value:
            _require_plain_tree(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _require_plain_tree(value)


class _PlainLoader(yaml.SafeLoader):
    """A loader of YAML within bounds, which reads numbers and booleans as OmegaConf's loader does.

    OmegaConf's loader can't be used: it is in C since 2.4, so its nodes can't be counted in time.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's
        first: [pair for pair in resolvers if pair[0] != f"{_CORE}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._nodes_by_anchor: dict[str, int] = {}
        """Number of nodes of each anchor whose node is complete."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose and count a node. Raises ValueError beyond a bound, or if it isn't plain."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._add_nodes(self._count_alias(event))
            return super().compose_node(parent, index)
        nodes_before = self._nodes
        self._add_nodes(1)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"{_format_line(event)}nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._nodes_by_anchor[event.anchor] = self._nodes - nodes_before
        _require_plain(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Construct a mapping. Raises ConstructorError if it has a key twice."""
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag == f"{_CORE}str" and key.value in keys:
                message = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def _count_alias(self, alias: yaml.AliasEvent) -> int:
        """Return the number of nodes of an alias; 0 for one that PyYAML reports as undefined."""
        if alias.anchor in self.anchors and alias.anchor not in self._nodes_by_anchor:
            raise ValueError(f"{_format_line(alias)}*{alias.anchor} contains itself")
        return self._nodes_by_anchor.get(alias.anchor, 0)

    def _add_nodes(self, count: int) -> None:
        self._nodes += count
        if self._nodes > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} keys and values, with aliases expanded")


_PlainLoader.add_implicit_resolver(f"{_CORE}float", _EXPONENT, list("-+0123456789"))


def _require_plain(node: yaml.Node) -> None:
    """Raise ValueError for a long number, a tag of another type, and an ambiguous value or key."""
    if node.tag in _NUMBERS:
        if len(node.value) > MAX_NUMBER_LENGTH:
            raise ValueError(
                f"{_format_line(node)}a number of {len(node.value):,} characters; must have at "
                f"most {MAX_NUMBER_LENGTH}"
            )
    elif node.tag not in _PLAIN:
        tag = node.tag.replace(_CORE, "!!")
        raise ValueError(
            f"{_format_line(node)}the tag {tag}; values must be texts, numbers, true, false or null"
        )
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _require_unambiguous(value, "")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _require_unambiguous(value, f"{key.value} = ")
            if key.tag not in (f"{_CORE}str", f"{_CORE}merge"):
                text = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
                raise ValueError(f"{_format_line(key)}the key {text} must be a text")


def _require_unambiguous(node: yaml.Node, key: str) -> None:
    """Raise ValueError for a text of the command line that is another value in YAML 1.1."""
    pattern = _COMMAND_LINE.get(node.tag)
    if pattern is not None and not pattern.fullmatch(node.value):
        kind = "true or false" if node.tag.endswith("bool") else "a decimal number"
        raise ValueError(
            f"{_format_line(node)}{key}{node.value}: a text on the command line, and another value "
            f"in YAML 1.1; write {kind}, or a text in quotes: '{node.value}'"
        )


def _format_line(node: Any) -> str:
    """Return the line of a node or an event, as the beginning of a message."""
    return f"line {node.start_mark.line + 1}: "


class _WrittenLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader in C, if PyYAML has one. It reads numbers and booleans as `_PlainLoader` does."""

    yaml_implicit_resolvers = _PlainLoader.yaml_implicit_resolvers
