"""Operators of sizes that depend on the batch; sizes are Python's numbers while JAX traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pipeline.models.torch_graph.laid import Laid
from pipeline.models.torch_graph.operator_table import OPERATORS, Operator, aten


def _size(*names: str, of: Callable[..., Any]) -> None:
    """Register a function of sizes, which are Python's numbers."""
    for name in names:
        OPERATORS[f"sym.{name}"] = Operator(of, "", draws=False, full_weights=False)


def _number(value: Any) -> Any:
    """Return a size; while a program is exported some are symbols that compute as numbers do."""
    if isinstance(value, bool | str | tuple | Laid) or value is None:
        raise ValueError(f"{value!r} is no size")
    return value


_size("add", of=lambda x, y: _number(x) + _number(y))
_size("sub", of=lambda x, y: _number(x) - _number(y))
_size("mul", of=lambda x, y: _number(x) * _number(y))
_size("floordiv", of=lambda x, y: _number(x) // _number(y))
_size("truediv", of=lambda x, y: _number(x) / _number(y))
_size("mod", of=lambda x, y: _number(x) % _number(y))
_size("neg", of=lambda x: -_number(x))
_size("sym_max", of=lambda x, y: max(_number(x), _number(y)))
_size("sym_min", of=lambda x, y: min(_number(x), _number(y)))
_size("sym_float", of=lambda x: float(_number(x)))
_size("sym_int", of=lambda x: int(_number(x)))
_size("sym_sqrt", of=lambda x: math.sqrt(_number(x)))


@aten("sym_size.int")
def size_of(x: Laid, dim: int) -> int:
    """The size of an axis, a Python number."""
    return x.array.shape[x.axis(dim)]
