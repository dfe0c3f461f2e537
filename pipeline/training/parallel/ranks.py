"""The processes of one run, and their agreement.

Every process computes the same steps. The first process makes all decisions that depend on a clock,
a signal or the disk. The others read the decisions from the key-value store of jax.distributed.
Unlike a collective operation, the store has a time-out, so no process waits for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from pipeline.core.errors import PipelineError, RunError

T = TypeVar("T")
Agree = Callable[[Callable[[], Any]], Any]
"""(decide) -> the result of `decide` in the first process. All processes must make the same
calls."""
STORED_ANSWERS = 16
"""Number of answers in the store. Processes compute steps together, so none lags by more."""


class PeerGoneError(RunError):
    """Another process of the run has ended or doesn't answer; its log has the reason."""


def decide_alone(decide: Callable[[], T], /) -> T:
    """Return the result of `decide`: an `Agree` for a run of one process."""
    return decide()


@dataclass(frozen=True)
class Ranks:
    """The rank of this process in a run, from 0 to `size` - 1."""

    rank: int = 0
    size: int = 1
    timeout_s: float = 300.0
    """Seconds to wait for other processes."""
    _store: Any = None
    """Client of the key-value store; None for one process."""
    _numbers: Any = field(default_factory=count)
    """Numbers of the calls that use the store, the same in all processes."""

    @property
    def is_first(self) -> bool:
        """Whether this process decides, and writes the run directory."""
        return self.rank == 0

    def agree(self, decide: Callable[[], T], /, timeout_s: float | None = None) -> T:
        """Return in all processes the result of `decide` in the first process, a value of JSON. All
        processes must make the same calls in the same order.

        Errors of `decide` are raised in the first process only. Raises PeerGoneError if the first
        process doesn't answer within `timeout_s`, by default the run's timeout.
        """
        if self.size == 1:
            return decide()
        number = next(self._numbers)
        if not self.is_first:
            answer: T = json.loads(self._get(f"decision/{number}", timeout_s or self.timeout_s))
            return answer
        value = decide()
        self._store.key_value_set(f"decision/{number}", json.dumps(value))
        if number >= STORED_ANSWERS:
            self._store.key_value_delete(f"decision/{number - STORED_ANSWERS}")
        return value

    def require_same(self, facts: dict[str, str]) -> None:
        """Raise RunError if the facts, values by name, differ between processes."""
        if self.size == 1:
            return
        number = next(self._numbers)
        self._store.key_value_set(f"facts/{number}/{self.rank}", json.dumps(facts))
        for peer in range(self.size):
            other = json.loads(self._get(f"facts/{number}/{peer}", self.timeout_s))
            for name in facts | other:
                if facts.get(name) != other.get(name):
                    raise RunError(
                        f"processes {self.rank} and {peer} of {self.size} differ in {name}: "
                        f"{facts.get(name)} and {other.get(name)}; start all with the same"
                    )

    def _get(self, key: str, timeout_s: float) -> str:
        """Return an answer from the store. Raises PeerGoneError after the timeout."""
        try:
            text: str = self._store.blocking_key_value_get(key, round(1000 * timeout_s))
        except Exception as error:  # jaxlib raises types that it doesn't export.
            raise PeerGoneError(
                f"process {self.rank} of {self.size}: no answer from another process within "
                f"{timeout_s:g} s"
            ) from error
        return text


def is_readable(array: Any) -> bool:
    """Return whether this process has all values of an array of JAX or NumPy."""
    return getattr(array, "is_fully_replicated", True) or bool(array.is_fully_addressable)


def is_peer_error(error: BaseException) -> bool:
    """Return whether an error of JAX means that another process has ended."""
    clues = ("Gloo ", "gloo", "NCCL", "coordination service")
    return not isinstance(error, PipelineError) and any(clue in str(error) for clue in clues)
