"""The module that an entry point names: to import it adds a loss to those there are."""

from pipeline.core.registry import component
from tests.training.sampled_loss import SampledMse

component("loss")(SampledMse)
