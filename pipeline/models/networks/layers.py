"""A network whose layers are listed in the recipe, with blocks.

A recipe defines a block once and uses it in its layers. A block is a list of layers with
parameters, placeholders that begin with a dollar: `{name: conv, features: $features}`. In a list of
layers, `{use: block, repeat: 2, with: {features: 64}}` stands for the layers of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError, model_validator
from pydantic_core import InitErrorDetails

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
    def _expand_uses(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("blocks"), dict):
            return values
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


def expand_uses(
    node: Any,
    blocks: Blocks,
    location: Location,
    parents: tuple[str, ...] = (),
    uses: Counter[str] | None = None,
) -> Any:
    """Return `node`, which lies at `location` in the recipe, with a `Sequence` for every block use.

    The layers of a block are validated here, so that a problem is reported at the block's location.
    `parents` names the blocks that are being expanded, and `uses` counts the uses of every block so
    far, for `MAX_USES`. Raises ValidationError.
    """
    uses = Counter() if uses is None else uses
    if isinstance(node, Mapping):
        return {
            key: expand_uses(value, blocks, (*location, key), parents, uses)
            for key, value in node.items()
        }
    if not isinstance(node, list):
        return node
    scope_counts: Counter[str] = Counter()
    expanded = []
    for index, entry in enumerate(node):
        if isinstance(entry, Mapping) and "use" in entry:
            use = _read_use(entry, (*location, index))
            body = _expand_use(use, blocks, (*location, index), parents, uses)
            scope = use.scope or _name_scope(use, scope_counts[use.block], (*location, index))
            expanded.append(Sequence(scope=scope, repeat=use.repeat, body=body))
            scope_counts[use.block] += 1
        else:
            expanded.append(expand_uses(entry, blocks, (*location, index), parents, uses))
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


def _expand_use(
    use: BlockUse, blocks: Blocks, location: Location, parents: tuple[str, ...], uses: Counter[str]
) -> Any:
    """Return the layers of the block, with the values of the use in place of parameters."""
    name = use.block
    if name not in blocks:
        hint = _suggest(name, blocks)
        raise _to_error(f"there is no block {name!r}{hint}", (*location, "use"), name)
    if name in parents:
        chain = " -> ".join((*parents, name))
        raise _to_error(f"a block can't use itself: {chain}", (*location, "use"), name)
    uses[name] += 1
    if uses.total() > MAX_USES:
        raise _to_error(f"blocks are used more than {MAX_USES:,} times", (*location, "use"), name)
    _check_parameters(use, set(_find_parameters(blocks[name])), (*location, "with"))
    # Other texts that begin with a dollar, such as `$classes`, don't change.
    layers = map_texts(
        lambda text: use.values.get(text[1:], text) if text.startswith("$") else text, blocks[name]
    )
    body = expand_uses(layers, blocks, ("blocks", name), (*parents, name), uses)
    return _make_validator().validate_python({"blocks": {name: body}})["blocks"][name]


def _name_scope(use: BlockUse, number: int, location: Location) -> str:
    """Return the scope of a use without one. Raises ValidationError for another block name."""
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
    details = InitErrorDetails(
        type="value_error", loc=location, input=value, ctx={"error": ValueError(message)}
    )
    return ValidationError.from_exception_data("BlockUse", [details])


def _suggest(name: str, names: Iterable[str]) -> str:
    nearest = find_nearest(name, names)
    return f"; did you mean {nearest!r}?" if nearest else ""
