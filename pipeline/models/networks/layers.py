"""A network whose layers are listed in the recipe, with blocks.

A recipe defines a block once and uses it in its layers. A block is a list of layers with
parameters, placeholders that begin with a dollar: `{name: conv, features: $features}`. In a list of
layers, `{use: block, repeat: 2, with: {features: 64}}` stands for the layers of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.name_text import find_nearest
from pipeline.core.registry import Seq, component
from pipeline.models.blocks.common_blocks import map_layers
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import (
    CLASSES,
    BlockUse,
    Layers,
    LayerSpec,
    ScopeName,
    map_texts,
)
from pipeline.models.layers.standard import Branches, Sequence

Blocks = Mapping[str, Any]
Location = tuple[int | str, ...]

MAX_USES = 1000
"""Most uses of all blocks together. Nested uses can grow exponentially."""
MAX_VALUES = 100_000
"""Most values, with those inside lists and objects, that all uses put in place of parameters. They
can grow exponentially too."""


@dataclass
class _Expansion:
    """The blocks of a recipe, and the sizes of what their uses have been replaced by so far."""

    blocks: Blocks
    num_uses: int = 0
    num_values: int = 0


@component("model")
class LayerList(LayeredModelSpec):
    """Layers from the recipe's list; `$classes` stands for the dataset's number of classes.

    `{use: name, repeat: n, with: {...}}` stands for the layers of block `name` in `blocks`, in a
    separate scope.
    """

    name: Literal["layers"] = "layers"
    blocks: dict[str, Seq[Any]]
    layers: Layers

    @model_validator(mode="before")
    @classmethod
    def _replace_uses(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("blocks"), dict):
            return values
        for name in values["blocks"]:
            if not isinstance(name, str):
                text = f"the name of a block must be a text, such as block_{name}"
                raise _to_error(text, ("blocks", str(name)), name)
        layers = expand_uses(values.get("layers"), values["blocks"], ("layers",))
        return {**values, "layers": layers}

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        # Towers return embeddings, whatever the classes.
        last = self.layers[-1] if self.layers else None
        are_towers = isinstance(last, Branches) and bool(last.inputs)
        if not are_towers and self.layers_for(1) == self.layers:
            raise ValueError(
                f"no layer has {CLASSES}; must end in a layer such as "
                f"{{name: dense, features: {CLASSES}}}, or to match pairs in branches with inputs"
            )
        return self

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        def set_classes(layer: LayerSpec) -> LayerSpec:
            changes = {field: classes for field, value in layer if value == CLASSES}
            return layer.model_copy(update=changes)

        return map_layers(set_classes, self.layers)


def expand_uses(node: Any, blocks: Blocks, location: Location) -> Any:
    """Return `node`, which lies at `location` in the recipe, with a `Sequence` for every block use.

    The layers of a block are validated here, so that a problem is reported at the block's location,
    or at a use whose value is the problem. Raises ValidationError.
    """
    return _expand_node(_Expansion(blocks), node, location, ())


def _expand_node(
    expansion: _Expansion, node: Any, location: Location, parents: tuple[str, ...]
) -> Any:
    """Return `node` as `expand_uses` does; `parents` are the blocks that are being expanded."""
    if isinstance(node, Mapping):
        return {
            key: _expand_node(expansion, value, (*location, key), parents)
            for key, value in node.items()
        }
    if not isinstance(node, list):
        return node
    scope_counts: Counter[str] = Counter()
    expanded = []
    for index, entry in enumerate(node):
        if isinstance(entry, Mapping) and "use" in entry:
            use = _read_use(entry, (*location, index))
            body = _make_body(expansion, use, (*location, index), parents)
            scope = use.scope or _name_scope(use, scope_counts[use.block], (*location, index))
            expanded.append(Sequence(scope=scope, repeat=use.repeat, body=body))
            scope_counts[use.block] += 1
        else:
            expanded.append(_expand_node(expansion, entry, (*location, index), parents))
    return expanded


def _read_use(entry: Mapping[str, Any], location: Location) -> BlockUse:
    try:
        return BlockUse.model_validate(entry)
    except ValidationError as error:
        problems = [
            InitErrorDetails(
                type=details["type"],
                loc=(*location, *details["loc"]),
                input=details["input"],
                ctx=details.get("ctx", {}),
            )
            for details in error.errors()
        ]
        raise ValidationError.from_exception_data("BlockUse", problems) from None


def _make_body(
    expansion: _Expansion, use: BlockUse, location: Location, parents: tuple[str, ...]
) -> Any:
    """Return the layers of the block, with the values of the use in place of parameters."""
    name, blocks = use.block, expansion.blocks
    if name not in blocks:
        hint = _suggest(name, blocks)
        raise _to_error(f"there is no block {name!r}{hint}", (*location, "use"), name)
    if name in parents:
        chain = " -> ".join((*parents, name))
        raise _to_error(f"a block can't use itself: {chain}", (*location, "use"), name)
    expansion.num_uses += 1
    if expansion.num_uses > MAX_USES:
        raise _to_error(f"blocks are used more than {MAX_USES:,} times", (*location, "use"), name)
    _check_parameters(use, set(_find_parameters(blocks[name])), (*location, "with"))
    sizes = {parameter: _count_values(value) for parameter, value in use.values.items()}

    def replace_parameter(text: str) -> Any:
        # Other texts that begin with a dollar, such as `$classes`, don't change.
        if not text.startswith("$") or text[1:] not in sizes:
            return text
        expansion.num_values += sizes[text[1:]]
        if expansion.num_values > MAX_VALUES:
            problem = f"parameters of blocks stand for more than {MAX_VALUES:,} values"
            raise _to_error(problem, (*location, "with"), name)
        return use.values[text[1:]]

    layers = map_texts(replace_parameter, blocks[name])
    body = _expand_node(expansion, layers, ("blocks", name), (*parents, name))
    return _validate_body(use, body, blocks[name], location)


def _count_values(value: Any) -> int:
    """Return the number of values in nested lists and objects, which count themselves too."""
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return 1
    return 1 + sum(map(_count_values, inner))


def _validate_body(use: BlockUse, body: Any, block: Any, location: Location) -> Any:
    """Return the layers of a block, whose `body` has the values of its use. If only values of the
    use at `location` are the problem, they are reported there."""
    layers = {"blocks": {use.block: body}}
    try:
        return _make_validator().validate_python(layers)["blocks"][use.block]
    except ValidationError as error:
        problems = []
        for details, line in zip(error.errors(), describe_problems(error, layers), strict=True):
            name = _find_parameter(block, details["loc"][2:])
            if name not in use.values:
                raise
            place = (*location, "with", name)
            problems.append(_describe(f"makes {line}", place, details["input"]))
        raise ValidationError.from_exception_data("BlockUse", problems) from None


def _find_parameter(block: Any, location: Location) -> str | None:
    """Return the parameter that a block has at a location, or around it; None if it has another
    value there."""
    for part in location:
        # Other parts are names of components, which the recipe has no key for.
        has_key = isinstance(block, Mapping) and part in block
        if has_key or (isinstance(block, list) and isinstance(part, int)):
            block = block[part]
    is_parameter = isinstance(block, str) and block.startswith("$")
    return block[1:] if is_parameter else None


def _name_scope(use: BlockUse, number: int, location: Location) -> str:
    """Return the scope of a use without one. Raises ValidationError for a block whose name
    can't be part of a scope."""
    try:
        return _make_scope_validator().validate_python(f"{use.block}_{number}")
    except ValidationError:
        text = f"block {use.block!r} can't name a scope, which must match ^\\w+$"
        text += "; give the block another name, or its use a scope"
        raise _to_error(text, (*location, "use"), use.block) from None


@cache
def _make_scope_validator() -> TypeAdapter[str]:
    return TypeAdapter(ScopeName)


@cache
def _make_validator() -> TypeAdapter[Any]:
    """Return a validator of a block's layers. Its errors have locations in `blocks.<name>`."""
    return TypeAdapter(dict[str, dict[str, Layers]])


def _check_parameters(use: BlockUse, parameters: set[str], location: Location) -> None:
    for name in sorted(parameters - use.values.keys()):
        raise _to_error(f"block {use.block!r} needs a value for {name!r}", location, use.values)
    for name in sorted(use.values.keys() - parameters):
        hint = _suggest(name, parameters) or f"; it has {', '.join(sorted(parameters)) or 'none'}"
        raise _to_error(
            f"block {use.block!r} has no parameter {name!r}{hint}", (*location, name), name
        )


def _find_parameters(node: Any) -> Iterator[str]:
    """Yield the names of a block's parameters, which begin with a dollar; not `$classes`."""
    if isinstance(node, str) and node.startswith("$") and node != CLASSES:
        yield node[1:]
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _find_parameters(value)
    elif isinstance(node, list):
        for value in node:
            yield from _find_parameters(value)


def _to_error(message: str, location: Location, value: Any) -> ValidationError:
    return ValidationError.from_exception_data("BlockUse", [_describe(message, location, value)])


def _describe(message: str, location: Location, value: Any) -> InitErrorDetails:
    context = {"error": ValueError(message)}
    return InitErrorDetails(type="value_error", loc=location, input=value, ctx=context)


def _suggest(name: str, names: Iterable[str]) -> str:
    nearest = find_nearest(name, names)
    return f"; did you mean {nearest!r}?" if nearest else ""
