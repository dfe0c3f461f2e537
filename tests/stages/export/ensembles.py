"""Runs of fresh weights, to be averaged."""

from __future__ import annotations

from flax.traverse_util import flatten_dict

from pipeline.config.recipe import Recipe
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.inputs import NetworkInput
from pipeline.data.transform import compute_column_specs
from pipeline.stages.build import build_network
from pipeline.stages.record.trained_run import Samples, TrainedRun
from tests.models.build import draw_variables, shapes

DIGITS = Samples({"image": ColumnSpec((8, 8, 1), "uint8")}, Targets(tuple("0123456789")))


def make_run(recipe: Recipe, seed: int, samples: Samples = DIGITS) -> TrainedRun:
    """A run of a recipe that has trained no step, with the weights of a seed."""
    network = build_network(recipe, samples.targets)
    mapped = compute_column_specs(recipe.dataset.eval.ops, samples.columns)["image"]
    image = NetworkInput("image", "image", mapped)
    variables = draw_variables(shapes(network, image.shape), seed)
    return TrainedRun(recipe, flatten_dict(variables, sep="/"), seed, samples)
