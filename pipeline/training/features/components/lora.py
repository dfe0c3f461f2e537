"""LoRA: a network whose matrices are frozen, and small adapters beside them that are trained.

Formulas and sources are in `models/modules/adapted_network.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.core.registry import Seq, component
from pipeline.training.step_feature import FeatureContext, FeatureSpec, StepFeature

if TYPE_CHECKING:
    from flax import linen as nn

    from pipeline.models.modules.adapted_network import AdapterRule

DIGEST_WORDS = 8
"""Words of a digest of the frozen weights."""


@component("feature")
class LoraSpec(FeatureSpec):
    """Trains adapters of the matrices that `targets` cover, and nothing else.

    The frozen weights are those of `base`: a run, one of its checkpoints or a weight file; null:
    the network's initial weights, which of an imported network are its file's. Checkpoints have the
    adapters only, and exports and predictions the sum of both.
    """

    frozen: ClassVar[tuple[str, ...]] = ("*", "!*/lora_down", "!*/lora_up", "!*/lora_magnitude")
    completes: ClassVar[str | None] = "pipeline.stages.runner.adapted_run:merge_run"
    name: Literal["lora"] = "lora"
    base: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    """The adapters' product is multiplied by alpha / rank, or alpha / sqrt(rank)."""
    stabilized: bool = False
    """Divide alpha by the square root of the rank (rsLoRA)."""
    targets: Annotated[Seq[str], Field(min_length=1)] = ("*",)
    """Patterns over the paths of matrices."""
    dora: bool = False
    """Also train the length of each output's weights (DoRA)."""

    @property
    def rule(self) -> AdapterRule:
        from pipeline.models.modules.adapted_network import AdapterRule

        divisor = self.rank**0.5 if self.stabilized else self.rank
        return AdapterRule(self.targets, self.rank, self.alpha / divisor, self.dora)

    def check(self, recipe: Any) -> Iterator[str]:
        train, saves = recipe.train, recipe.checkpoint
        for key in ("freeze", "unfreeze"):
            if patterns := getattr(train, key):
                texts = [getattr(pattern, "pattern", pattern) for pattern in patterns]
                yield f"train.{key} = {texts}: must be [] with lora, which trains adapters alone"
        if saves.restore is not None:
            yield (
                f"checkpoint.restore = {saves.restore}: must be null with lora, whose `base` names "
                "the frozen weights"
            )
        if saves.prefix or saves.directory:
            yield (
                f"checkpoint.prefix = {saves.prefix}: must be null with lora, whose checkpoints "
                "lack the frozen weights"
            )
        if train.on_nan.name == "rollback":
            yield "train.on_nan = rollback: must be another policy with lora"
        if train.optimizer.observes_layers:
            yield f"train.optimizer = {train.optimizer.name}: must be another optimizer with lora"

    def change_network(self, network: nn.Module) -> nn.Module:
        from pipeline.models.modules.adapted_network import adapt_network

        return adapt_network(network, self.rule)

    def merge_params(self, params: Any) -> Any:
        import jax

        return jax.jit(self.rule.merge)(params)

    def build(self, context: FeatureContext) -> StepFeature:
        self.rule.require_fit(context.params)
        return Lora(self)


@dataclass(frozen=True)
class Lora(StepFeature):
    """The adapters. Its state is the first words of the SHA-256 of the frozen weights, uint32 (8,),
    by which a resumed run finds that they have changed."""

    name: ClassVar[str] = "lora"
    spec: LoraSpec
    frozen: tuple[str, ...] = LoraSpec.frozen
    unsaved: tuple[str, ...] = LoraSpec.frozen

    def init(self, trained: Any) -> Any:
        import jax.numpy as jnp

        return jnp.zeros(DIGEST_WORDS, jnp.uint32)
