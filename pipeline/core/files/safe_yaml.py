"""YAML as plain data: keys are texts, values are texts, numbers, booleans or null.

A few hundred bytes of YAML can expand to gigabytes (aliases of aliases), build other types (tags)
or overflow the stack (nesting). All of that is refused while a file is parsed, before any value is
built.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf.basecontainer import get_yaml_loader
from omegaconf.omegaconf import get_omega_conf_dumper

from pipeline.core.files.bounded_read import read_text

MAX_BYTES = 256 * 2**10
MAX_DEPTH = 64
MAX_NODES = 20_000
"""Keys and values; the ones of an anchor are counted for each alias too."""
MAX_NUMBER_LENGTH = 100
"""Characters; Python needs seconds for numbers of many digits, and prints none above 4300."""

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
"""Values of each type that an override on the command line has too, and .inf and .nan. Others are
of YAML 1.1, where 017 is 15, 1:30 is 90 and `no` is false; an override takes these for texts."""
_MALFORMED = (*(yaml.YAMLError, ValueError, LookupError), *(AttributeError, TypeError))
"""Errors that PyYAML raises; values that don't fit an explicit tag raise errors of conversion."""


def read_yaml(path: Path) -> Any:
    """Parse a YAML file; None if it is empty.

    Numbers and booleans are read as on the command line. Raises OSError if the file can't be
    read, and ValueError for anything wrong with it.
    """
    return parse_yaml(read_text(path, MAX_BYTES))


def parse_yaml(text: str) -> Any:
    """Parse a YAML text. Raises ValueError for anything wrong with it."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except _MALFORMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(reason) from error


def parse_written_yaml(text: str) -> Any:
    """Parse a text as `parse_yaml` does, five times as fast if it is plain.

    Plain is what `yaml_text` writes: one document without anchors, aliases and tags. Others go to
    `parse_yaml`, and so do malformed ones, but that the reader in C forgives some. Raises
    ValueError for anything else that is wrong.
    """
    try:
        if _is_plain(text):
            loader = _WrittenLoader(text)
            node = loader.get_single_node()
            return None if node is None else loader.construct_document(_with_plain_keys(node))
    except _MALFORMED:
        pass
    return parse_yaml(text)


def _is_plain(text: str) -> bool:
    """Whether a text is within the bounds; before nodes are made of it, which nest calls."""
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


def _with_plain_keys(node: yaml.Node) -> yaml.Node:
    """Return a node whose values are plain. Raises ValueError for others, and for a key twice."""
    _require_plain(node)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise ValueError("a key stands twice")
        for _, value in node.value:
            _with_plain_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _with_plain_keys(value)
    return node


def yaml_text(value: Any) -> str:
    """Plain data as a YAML text, which `parse_yaml` reads back unchanged."""
    return yaml.dump(value, Dumper=get_omega_conf_dumper(), sort_keys=False)


class _PlainLoader(yaml.SafeLoader):
    """A loader of YAML within bounds that knows numbers and booleans as OmegaConf's does.

    OmegaConf's loader is in C since 2.4, in which nodes can't be counted while they are composed.
    """

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._nodes_of: dict[str, int] = {}
        """Number of nodes by anchor, once the anchored node is complete."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose and count a node. Raises ValueError beyond a bound or for no plain value."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._count(self._count_alias(event))
            return super().compose_node(parent, index)
        before = self._nodes
        self._count(1)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"{_place(event)}nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._nodes_of[event.anchor] = self._nodes - before
        _require_plain(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Construct a mapping. Raises ConstructorError for a key that stands in it twice."""
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag == f"{_CORE}str" and key.value in keys:
                message = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def _count_alias(self, alias: yaml.AliasEvent) -> int:
        """The number of nodes of an alias; 0 for one that PyYAML will report as undefined."""
        if alias.anchor in self.anchors and alias.anchor not in self._nodes_of:
            raise ValueError(f"{_place(alias)}*{alias.anchor} stands within itself")
        return self._nodes_of.get(alias.anchor, 0)

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} keys and values, aliases written out")


def _require_plain(node: yaml.Node) -> None:
    if node.tag in _NUMBERS:
        if len(node.value) > MAX_NUMBER_LENGTH:
            raise ValueError(f"{_place(node)}a number of {len(node.value):,} characters")
    elif node.tag not in _PLAIN:
        tag = node.tag.replace(_CORE, "!!")
        raise ValueError(
            f"{_place(node)}the tag {tag}; values must be texts, numbers, true, false or null"
        )
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _require_one_reading(value, "")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _require_one_reading(value, f"{key.value} = ")
            if key.tag not in (f"{_CORE}str", f"{_CORE}merge"):
                text = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
                raise ValueError(f"{_place(key)}the key {text} must be a text")


def _require_one_reading(node: yaml.Node, key: str) -> None:
    pattern = _COMMAND_LINE.get(node.tag)
    if pattern is not None and not pattern.fullmatch(node.value):
        kind = "true or false" if node.tag.endswith("bool") else "a decimal number"
        raise ValueError(
            f"{_place(node)}{key}{node.value}: a text on the command line, and another value in "
            f"YAML 1.1; write {kind}, or a text in quotes: '{node.value}'"
        )


def _place(mark: Any) -> str:
    return f"line {mark.start_mark.line + 1}: "


class _WrittenLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader in C, if PyYAML has it, that knows numbers and booleans as OmegaConf's does."""

    yaml_implicit_resolvers = _PlainLoader.yaml_implicit_resolvers
