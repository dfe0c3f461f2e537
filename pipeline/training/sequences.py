"""The loss of sequences that aren't aligned with the network's outputs, and their error rate.

A network returns logits at every position of a sample, (B, T, C). Class 0 is the blank, which also
fills labels, int (B, L), after their last symbol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from pipeline.core.registry import component
from pipeline.data.columns import Task
from pipeline.training.component_specs import LossSpec, MetricSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax


@component("loss")
class Ctc(LossSpec):
    """Connectionist temporal classification (Graves et al. 2006): the negative logarithm of the
    probability of all ways to write a sequence, with blanks and repeated symbols, over the
    positions. It is divided by the number of symbols, as `reduction="mean"` of PyTorch does.

    A sequence that doesn't fit the positions, since equal neighbours need a blank in between, has
    the loss 0 and no gradient, as with `zero_infinity` of PyTorch.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("sequence",)
    name: Literal["ctc"] = "ctc"

    def choose_task(self, task: Task) -> Task:
        return "sequence" if task == "classification" else task

    def build(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Return the loss function (logits, labels) -> (B,) float32. It raises ValueError for
        labels that aren't sequences of whole numbers."""
        import jax.numpy as jnp
        import optax

        def ctc(logits: jax.Array, labels: jax.Array) -> jax.Array:
            require_sequences(logits, labels)
            is_symbol = labels > 0
            count = is_symbol.sum(axis=1)
            is_repeated = is_symbol[:, 1:] & (labels[:, 1:] == labels[:, :-1])
            fits = count + is_repeated.sum(axis=1) <= logits.shape[1]
            no_padding = jnp.zeros(logits.shape[:2], jnp.float32)
            losses = optax.ctc_loss(
                logits.astype(jnp.float32),
                no_padding,
                # A sequence that doesn't fit is replaced by the empty one, whose loss is finite.
                jnp.where(fits[:, None], labels, 0).astype(jnp.int32),
                1.0 - (is_symbol & fits[:, None]),
            )
            return jnp.where(fits, losses / jnp.maximum(count, 1), 0.0)

        return ctc


@component("metric")
class LabelErrorRate(MetricSpec):
    """Insertions, deletions and substitutions that turn the predicted sequences into the labels,
    divided by the number of symbols of the labels. The prediction is the most probable class of
    each position, without repetitions and blanks."""

    better: ClassVar[Literal["max", "min"]] = "min"
    name: Literal["label_error_rate"] = "label_error_rate"

    def zero(self, classes: int) -> Any:
        return {"edits": np.int32(0), "symbols": np.int32(0)}

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        require_sequences(logits, labels)
        path = jnp.argmax(logits, axis=-1)
        is_new = path != jnp.pad(path, ((0, 0), (1, 0)))[:, :-1]
        edits = count_edits(path, is_new & (path > 0), labels)
        symbols = (labels > 0).sum(axis=1)
        return {
            "edits": jnp.where(mask, edits, 0).sum(dtype=jnp.int32),
            "symbols": jnp.where(mask, symbols, 0).sum(dtype=jnp.int32),
        }

    def value(self, sums: Any) -> float:
        return int(sums["edits"]) / max(int(sums["symbols"]), 1)


def count_edits(symbols: jax.Array, is_kept: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the Levenshtein distances of sequences, int32 (B,): of the kept `symbols`, int (B, T),
    to the labels, int (B, L), up to their first 0."""
    import jax
    import jax.numpy as jnp

    places = jnp.arange(labels.shape[1] + 1)
    first = jnp.broadcast_to(places, (len(labels), len(places)))

    def read_symbol(before: jax.Array, read: tuple[jax.Array, jax.Array]) -> Any:
        """Return the distances of one symbol more to the first 0, 1, ... labels, (B, L + 1)."""
        symbol, keeps = read
        replaced = before[:, :-1] + (labels != symbol[:, None])
        reached = jnp.minimum(
            before + 1, jnp.pad(replaced, ((0, 0), (1, 0)), constant_values=2**30)
        )
        # A label that is left out costs 1 more than the best with one label less.
        after = jax.lax.cummin(reached - places, axis=1) + places
        return jnp.where(keeps[:, None], after, before), None

    distances, _ = jax.lax.scan(read_symbol, first, (symbols.T, is_kept.T))
    length = (labels > 0).sum(axis=1)
    return jnp.take_along_axis(distances, length[:, None], axis=1)[:, 0].astype(jnp.int32)


def read_symbols(logits: np.ndarray) -> list[int]:
    """Return the predicted sequence of a sample, whose logits are (T, C): its most probable
    classes, without repetitions and blanks."""
    path = logits.argmax(axis=-1)
    is_new = np.diff(path, prepend=0) != 0
    return path[is_new & (path > 0)].tolist()


def require_sequences(logits: jax.Array, labels: jax.Array) -> None:
    """Raise ValueError unless logits are (B, T, C) and labels int (B, L)."""
    if logits.ndim != 3 or labels.ndim != 2 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels of shape {labels.shape} and dtype {labels.dtype} and logits of shape "
            f"{logits.shape}; must be whole numbers (batch, symbols) and (batch, positions, "
            "classes), of which class 0 is the blank"
        )
