"""Losses and metrics of networks that match pairs, such as two towers.

Such a network returns two embeddings for each pair, one after the other, (B, 2 F). The label of a
pair is its number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PositiveFloat

from pipeline.core.registry import component
from pipeline.data.columns import Column, Task
from pipeline.training.component_specs import LossSpec, MetricSpec

if TYPE_CHECKING:
    import jax

RANKED_ROWS = 1024
"""Queries that are ranked at once, against all partners."""


class PairLoss(LossSpec):
    """Base of the losses of pairs, by the cosines of each first and second embedding of a batch.

    Pairs of the same number aren't compared, and others with the first of them alone: padding
    repeats a pair.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("matching",)
    compares_samples: ClassVar[bool] = True

    @abstractmethod
    def compare(self, cosines: jax.Array, partners: jax.Array, is_compared: jax.Array) -> jax.Array:
        """Return the loss of each pair, float32 (B,).

        Takes the cosines of first and second embeddings, float32 (B, B), those of each pair,
        float32 (B,), and which embeddings are compared with each, bool (2, B, B): second ones with
        first ones, and first ones with second ones. Both have the axes of the cosines.
        """

    def build(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Return a function (outputs (B, 2 F), numbers of the pairs (B,)) -> losses (B,)."""
        import jax.numpy as jnp

        def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
            first, second = _split_embeddings(jnp, logits.astype(jnp.float32))
            # Full precision: GPUs would round the factors.
            cosines = jnp.matmul(first, second.T, precision="highest")
            partners = (first * second).sum(axis=-1)
            differs = labels[:, None] != labels
            # The first place of each number in the batch.
            is_first = jnp.argmax(~differs, axis=1) == jnp.arange(len(labels))
            is_compared = jnp.stack([differs & is_first, differs & is_first[:, None]])
            return self.compare(cosines, partners, is_compared)

        return loss


@component("loss")
class Contrastive(PairLoss):
    """Symmetric InfoNCE of the pairs of a batch (van den Oord et al. 2018, Radford et al. 2021).

    The logits of a pair are the cosines of its first embedding and all second ones of the batch,
    divided by `temperature`. Its loss is the cross-entropy of its partner, in both directions on
    average.
    """

    name: Literal["contrastive"] = "contrastive"
    temperature: PositiveFloat = 0.05

    def compare(self, cosines: jax.Array, partners: jax.Array, is_compared: jax.Array) -> jax.Array:
        import jax.numpy as jnp
        from jax.nn import logsumexp

        is_pair = jnp.eye(len(cosines), dtype=bool)
        scores = jnp.where(is_compared | is_pair, cosines / self.temperature, -jnp.inf)
        totals = logsumexp(scores[0], axis=1) + logsumexp(scores[1], axis=0)
        return totals / 2 - partners / self.temperature


@component("loss")
class Siglip(PairLoss):
    """Sigmoid loss of the pairs of a batch (Zhai et al. 2023, "Sigmoid Loss for Language Image
    Pre-Training").

    Whether a first and a second embedding are of one pair is a binary task, with the logit
    cosine / temperature + bias. The loss of a pair is the sum of the cross-entropies of its first
    embedding with all second ones. The paper trains temperature and bias, from 0.1 and -10; here
    they are fixed.
    """

    name: Literal["siglip"] = "siglip"
    temperature: PositiveFloat = 0.1
    bias: float = -10.0

    def compare(self, cosines: jax.Array, partners: jax.Array, is_compared: jax.Array) -> jax.Array:
        import jax.numpy as jnp
        from jax.nn import softplus

        others = jnp.where(is_compared[0], softplus(cosines / self.temperature + self.bias), 0)
        return softplus(-partners / self.temperature - self.bias) + others.sum(axis=1)


@component("loss")
class Triplet(PairLoss):
    """Triplet loss with the hardest negatives of the batch (Hermans et al. 2017, Faghri et al.
    2018).

    The loss of a pair is by how much the cosine of an embedding and the nearest embedding of
    another pair, plus `margin`, exceeds that of its partner, in both directions on average. An
    embedding has one partner, which is its hardest positive too.
    """

    name: Literal["triplet"] = "triplet"
    margin: PositiveFloat = 0.2

    def compare(self, cosines: jax.Array, partners: jax.Array, is_compared: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        # Less than each cosine, and finite, as a batch may have one pair alone.
        others = jnp.where(is_compared, cosines, -2 - self.margin)
        excess = [others[n].max(axis=1 - n) + self.margin - partners for n in (0, 1)]
        return (jnp.maximum(excess[0], 0) + jnp.maximum(excess[1], 0)) / 2


def _split_embeddings(xp: Any, outputs: Any) -> tuple[Any, Any]:
    """Return both embeddings (B, F) of outputs (B, 2 F), scaled to length 1. Zeros remain zeros."""
    parts = outputs.reshape(len(outputs), 2, -1)
    squares = xp.sum(parts * parts, axis=-1, keepdims=True)
    # The gradient of a root isn't finite at 0.
    is_zero = squares == 0
    unit = xp.where(is_zero, 0, parts / xp.sqrt(xp.where(is_zero, 1, squares)))
    return unit[:, 0], unit[:, 1]


def compute_cosines(outputs: np.ndarray) -> np.ndarray:
    """Return the cosine of both embeddings of each pair, float64 (n,), of outputs (n, 2 F)."""
    first, second = _split_embeddings(np, np.asarray(outputs, np.float64))
    return (first * second).sum(axis=-1)


def rank_partners(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each pair's partner for its first embedding, from 1, and the pair whose
    second embedding is nearest, int64 (n,) each, of outputs (n, 2 F).

    The second embeddings of all pairs are ranked by their cosine. Of equal ones the earlier pair
    ranks first. A partner whose cosine isn't finite has the last rank.
    """
    first, second = _split_embeddings(np, np.asarray(outputs, np.float64))
    numbers = np.arange(len(outputs))
    ranks, nearest = np.empty_like(numbers), np.empty_like(numbers)
    for start in range(0, len(outputs), RANKED_ROWS):
        rows = numbers[start : start + RANKED_ROWS]
        cosines = first[rows] @ second.T
        partner = cosines[numbers[: len(rows)], rows][:, None]
        # NaN never ranks after, so a network that diverged finds nothing.
        ranks_after = (cosines < partner) | ((cosines == partner) & (numbers > rows[:, None]))
        ranks[rows] = len(outputs) - ranks_after.sum(axis=1)
        nearest[rows] = cosines.argmax(axis=1)
    return ranks, nearest


class RecallMetric(MetricSpec):
    """Base of the shares of pairs whose partner is among the `k` nearest of the whole split.

    The split is all evaluated pairs, whatever the batches (`rank_partners`).
    """

    k: ClassVar[int]
    numbers: int = 0
    """The largest number of a pair, plus one."""
    outputs: int = 0
    """The length of both embeddings together."""

    def fit_to_samples(self, labels: Sequence[Column], outputs: tuple[int, ...]) -> Self:
        numbers = max(int(np.asarray(column[:]).max()) for column in labels) + 1
        return self.model_copy(update={"numbers": numbers, "outputs": outputs[-1]})

    def zero(self, classes: int) -> Any:
        """Return zeros for the embeddings and the presence of each number, float32 (numbers, 2 F)
        and (numbers,)."""
        return {
            "embeddings": np.zeros((self.numbers, self.outputs), np.float32),
            "present": np.zeros(self.numbers, np.float32),
        }

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        if labels.ndim != 1 or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ValueError("needs pairs to match, whose labels are their numbers")
        rows = jnp.where(mask, labels, self.numbers)
        embeddings = jnp.zeros((self.numbers, logits.shape[-1]), jnp.float32)
        present = jnp.zeros(self.numbers, jnp.float32)
        return {
            "embeddings": embeddings.at[rows].set(logits, mode="drop"),
            "present": present.at[rows].set(1, mode="drop"),
        }

    def value(self, sums: Any) -> float:
        outputs = np.asarray(sums["embeddings"])[np.asarray(sums["present"]) > 0]
        ranks, _ = rank_partners(outputs)
        return float((ranks <= self.k).mean())


@component("metric")
class RecallAt1(RecallMetric):
    """The share of pairs whose partner is the nearest of the whole split."""

    k: ClassVar[int] = 1
    name: Literal["recall_at_1"] = "recall_at_1"


@component("metric")
class RecallAt5(RecallMetric):
    """The share of pairs whose partner is among the 5 nearest of the whole split."""

    k: ClassVar[int] = 5
    name: Literal["recall_at_5"] = "recall_at_5"


@component("metric")
class RecallAt10(RecallMetric):
    """The share of pairs whose partner is among the 10 nearest of the whole split."""

    k: ClassVar[int] = 10
    name: Literal["recall_at_10"] = "recall_at_10"
