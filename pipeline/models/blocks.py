"""Blocks: lists of layers that a recipe writes once and uses with parameters.

A block writes a parameter with a dollar, `{name: conv, features: $features}`, and is used as
`{use: block, repeat: 2, with: {features: 64}}` wherever a layer may stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from pipeline.models.layers import CLASSES
from pipeline.models.spec import Layers

Blocks = Mapping[str, Any]
Location = tuple[int | str, ...]


def expand_uses(node: Any, blocks: Blocks, where: Location, within: tuple[str, ...] = ()) -> Any:
    """Put a sequence in place of every use of a block in `node`, which stands at `where`.

    The sequence has the scope of the use, or the block's name and a number. The layers of a block
    are checked here, so that a problem is reported where the block writes it. `within` names the
    blocks being expanded. Raises ValidationError.
    """
    if isinstance(node, Mapping):
        items = node.items()
        return {key: expand_uses(value, blocks, (*where, key), within) for key, value in items}
    if not isinstance(node, list):
        return node
    counts: Counter[str] = Counter()
    expanded = []
    for index, entry in enumerate(node):
        if isinstance(entry, Mapping) and "use" in entry:
            block = str(entry["use"])
            entry = {"scope": f"{block}_{counts[block]}", **entry, "use": block}
            counts[block] += 1
            expanded.append(_sequence(entry, blocks, (*where, index), within))
        else:
            expanded.append(expand_uses(entry, blocks, (*where, index), within))
    return expanded


def _sequence(
    use: Mapping[str, Any], blocks: Blocks, where: Location, within: tuple[str, ...]
) -> dict[str, Any]:
    name = use["use"]
    if name not in blocks:
        hint = _nearest(name, blocks)
        raise _problem(f"there is no block {name!r}{hint}", (*where, "use"), name)
    if name in within:
        chain = " -> ".join((*within, name))
        raise _problem(f"a block can't use itself: {chain}", (*where, "use"), name)
    values = use.get("with", {})
    _check_parameters(name, blocks[name], values, (*where, "with"))
    body = expand_uses(_filled(blocks[name], values), blocks, ("blocks", name), (*within, name))
    rest = {key: value for key, value in use.items() if key not in ("use", "with")}
    return {"name": "sequence", **rest, "body": _checked(name, body)}


def _check_parameters(block: str, node: Any, values: Any, where: Location) -> None:
    if not isinstance(values, Mapping):
        raise _problem("must be a section of parameters and their values", where, values)
    wanted = set(_parameters(node))
    for name in sorted(wanted - values.keys()):
        raise _problem(f"block {block!r} needs a value for {name!r}", where, values)
    for name in sorted(values.keys() - wanted):
        hint = _nearest(name, wanted) or f"; it has {', '.join(sorted(wanted)) or 'none'}"
        raise _problem(f"block {block!r} has no parameter {name!r}{hint}", (*where, name), name)


def _parameters(node: Any) -> Iterator[str]:
    """The names behind the dollars of a block, but for `$classes`."""
    if isinstance(node, str) and node.startswith("$") and node != CLASSES:
        yield node[1:]
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _parameters(value)
    elif isinstance(node, list):
        for value in node:
            yield from _parameters(value)


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    """A block with its parameters replaced."""
    if isinstance(node, str) and node.startswith("$"):
        return values.get(node[1:], node)
    if isinstance(node, Mapping):
        return {key: _filled(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, values) for value in node]
    return node


@cache
def _sections() -> TypeAdapter[Any]:
    return TypeAdapter(dict[str, dict[str, Layers]])


def _checked(block: str, body: Any) -> Any:
    """The layers of a block; what is wrong with them is located at `blocks.<block>`."""
    return _sections().validate_python({"blocks": {block: body}})["blocks"][block]


def _problem(message: str, where: Location, value: Any) -> ValidationError:
    problem = InitErrorDetails(
        type="value_error", loc=where, input=value, ctx={"error": ValueError(message)}
    )
    return ValidationError.from_exception_data("blocks", [problem])


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
