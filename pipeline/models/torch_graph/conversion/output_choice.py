"""The choice of the logits among the outputs of a PyTorch module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOGITS = "logits"
"""Name of the output that is chosen by default among several."""
MAX_NAMED = 8
"""Most outputs that a message names."""


def name_outputs(spec: Any) -> list[str]:
    """Return the names of the leaves of a result, by its `TreeSpec` of torch.

    Keys of a dictionary, fields of a named tuple, and positions are joined by dots:
    `past_key_values.0`. An only tensor has the name "".
    """
    if spec.is_leaf():
        return [""]
    children = spec.children()
    return [
        ".".join(filter(None, (key, inner)))
        for key, child in zip(_name_children(spec.context, len(children)), children, strict=True)
        for inner in name_outputs(child)
    ]


def _name_children(context: Any, count: int) -> list[str]:
    """Return the names of a container's items; their positions if the context has no names."""
    names = getattr(context, "_fields", context)
    if isinstance(names, Sequence) and not isinstance(names, str) and len(names) == count:
        return list(map(str, names))
    return list(map(str, range(count)))


def choose_tensor(torch: Any, result: Any) -> Any:
    """Return the logits in the result of a module. Raises ValueError unless they are known."""
    leaves, spec = torch.utils._pytree.tree_flatten(result)
    named = zip(name_outputs(spec), leaves, strict=True)
    return choose_output({n: x for n, x in named if isinstance(x, torch.Tensor)}, None)


def choose_output(outputs: Mapping[str, Any], name: str | None) -> Any:
    """Return the output of a name, or the logits if that is None.

    `outputs` are tensors by name. An only tensor that has no name is returned whatever the name.
    Raises ValueError unless such an output exists.
    """
    if set(outputs) == {""}:
        return outputs[""]
    chosen = LOGITS if name is None and LOGITS in outputs else name
    if chosen is None and len(outputs) == 1:
        return next(iter(outputs.values()))
    if chosen is not None and chosen in outputs:
        return outputs[chosen]
    names = ", ".join(list(outputs)[:MAX_NAMED])
    if len(outputs) > MAX_NAMED:
        names += f" and {len(outputs) - MAX_NAMED} more"
    if not outputs:
        raise ValueError("the network returns no tensor; must return one, the logits")
    if chosen is None:
        raise ValueError(
            f"the network returns {len(outputs)} tensors, {names}; model.output must name one of "
            "them, the logits"
        )
    raise ValueError(
        f"the network returns no output {chosen}; model.output must name one of {names}"
    )
