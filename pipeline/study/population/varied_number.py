"""A number of a recipe that the runs of a population share a program for, each with its own value.

The parts of a recipe compute with it in Python, as `1 - b1` in Adam, where the value of a single
run is a double that becomes a float32 constant of its program. A varied number keeps such an
expression. Where it meets an array it stands for an argument of the program, into which the
expression goes as computed in doubles and rounded once: the constant of the run alone, bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

Values = Mapping[str, float]
"""The numbers of one run by key."""
Plain = int | float


class CompiledInError(ValueError):
    """A number that decides what is compiled; `keys` are those of the recipe that it is made of."""

    def __init__(self, keys: Sequence[str], use: str, *, is_certain: bool = True) -> None:
        super().__init__(f"{', '.join(keys)}: decides what is compiled ({use})")
        self.keys, self.is_certain = tuple(keys), is_certain
        """Whether each of the keys is known to do so, and not only one of them."""


@dataclass
class ProgramArguments:
    """The expressions of a program that are arguments of it, in the order of their columns.

    While `row` is None they are collected, and 1 stands for each; later they are looked up in the
    row, float32 (columns,), of the run whose step is traced.
    """

    expressions: dict[str, Callable[[Values], float]] = field(default_factory=dict)
    row: jax.Array | None = None
    decisions: list[tuple[Callable[[Values], bool], bool]] = field(default_factory=list)
    """Decisions that the numbers of all runs make alike, as those of another run must too."""

    def array_of(self, number: VariedNumber) -> jax.Array:
        """The value of an expression in the traced program, float32 (): what parts compute with."""
        if self.row is None:
            self.expressions.setdefault(number.text, number.compute)
            return jnp.ones((), jnp.float32)
        column = list(self.expressions).index(number.text)
        return self.row[column]

    def values(self, numbers: Values) -> list[float]:
        """The values of all columns for a run with these numbers."""
        return [float(compute(numbers)) for compute in self.expressions.values()]

    def serve(self, numbers: Values) -> bool:
        """Whether a run with these numbers decides as those of the program do."""
        return all(decide(numbers) == answer for decide, answer in self.decisions)


@dataclass(frozen=True, eq=False)
class VariedNumber:
    """An expression over numbers of a recipe, with the numbers of every run of the population."""

    text: str
    keys: tuple[str, ...]
    compute: Callable[[Values], float]
    members: tuple[Values, ...]
    arguments: ProgramArguments

    @classmethod
    def of_key(
        cls, key: str, members: Sequence[Values], arguments: ProgramArguments
    ) -> VariedNumber:
        """The number that a key of the recipe gives."""
        return cls(key, (key,), operator.itemgetter(key), tuple(members), arguments)

    def __jax_array__(self) -> jax.Array:
        return self.arguments.array_of(self)

    def _combined(self, name: str, left: Any, right: Any) -> Any:
        """The result of a binary operator of Python, of this number and a plain one or another
        varied one; with an array it is an array."""
        apply: Callable[[Any, Any], Any] = getattr(operator, name)
        if not all(isinstance(side, Plain | VariedNumber) for side in (left, right)):
            return apply(_to_array(left), _to_array(right))
        (one, first), (other, second) = _parts(left), _parts(right)
        keys = dict.fromkeys((*_keys(left), *_keys(right)))
        return VariedNumber(
            f"{name}({one}, {other})",
            tuple(keys),
            lambda numbers: apply(first(numbers), second(numbers)),
            self.members,
            self.arguments,
        )

    def __add__(self, other: Any) -> Any:
        return self._combined("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._combined("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._combined("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._combined("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._combined("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._combined("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._combined("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._combined("truediv", other, self)

    def __pow__(self, other: Any) -> Any:
        return self._combined("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._combined("pow", other, self)

    def __neg__(self) -> Any:
        return self._combined("sub", 0.0, self)

    def _decided(self, use: str, decide: Callable[[float], bool]) -> bool:
        """The decision that all runs make alike. Raises CompiledInError where they don't."""

        def of_run(numbers: Values) -> bool:
            return decide(self.compute(numbers))

        answers = set(map(of_run, self.members))
        if len(answers) > 1:
            raise CompiledInError(self.keys, use)
        (answer,) = answers
        self.arguments.decisions.append((of_run, answer))
        return answer

    def _compared(self, name: str, other: Any) -> Any:
        if not isinstance(other, Plain):
            return getattr(operator, name)(self.__jax_array__(), other)
        return self._decided(
            f"{self.text} {name} {other}", lambda own: bool(getattr(operator, name)(own, other))
        )

    def __bool__(self) -> bool:
        return self._decided(f"whether {self.text} is 0", bool)

    def __eq__(self, other: object) -> Any:
        return self is other or self._compared("eq", other)

    def __ne__(self, other: object) -> Any:
        return self is not other and self._compared("ne", other)

    def __lt__(self, other: Any) -> Any:
        return self._compared("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._compared("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._compared("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self._compared("ge", other)

    __hash__ = object.__hash__

    def __float__(self) -> NoReturn:
        raise CompiledInError(self.keys, f"{self.text} as a plain number")

    __int__ = __index__ = __float__


def _to_array(side: Any) -> Any:
    return side.__jax_array__() if isinstance(side, VariedNumber) else side


def _parts(side: Plain | VariedNumber) -> tuple[str, Callable[[Values], float]]:
    if isinstance(side, VariedNumber):
        return side.text, side.compute
    return repr(side), lambda _: side


def _keys(side: Plain | VariedNumber) -> tuple[str, ...]:
    return side.keys if isinstance(side, VariedNumber) else ()


# Functions of optax that are compiled by themselves take it as an argument, as they do a number.
jax.tree_util.register_pytree_node(
    VariedNumber, lambda number: ((number.__jax_array__(),), None), lambda _, array: array[0]
)
