"""Runs of fresh weights, to be averaged."""

from __future__ import annotations

from flax.traverse_util import flatten_dict

from pipeline.config.recipe import Recipe
from pipeline.data.columns import ColumnSpec
from pipeline.data.targets import Targets
from pipeline.data.transform import compute_column_specs
from pipeline.stages.build import build_network
from pipeline.stages.export.trained_run import Samples, TrainedRun
from pipeline.training.initial_state import get_image_shape
from tests.models.build import draw_variables, shapes

DIGITS = Samples((8, 8, 1), "uint8", Targets(tuple("0123456789")))


def make_run(recipe: Recipe, seed: int, samples: Samples = DIGITS) -> TrainedRun:
    """A run of a recipe that has trained no step, with the weights of a seed."""
    network = build_network(recipe, len(samples.classes))
    columns = {"image": ColumnSpec(samples.shape, samples.dtype)}
    mapped = compute_column_specs(recipe.dataset.eval.ops, columns)["image"]
    variables = draw_variables(shapes(network, get_image_shape(mapped)), seed)
    return TrainedRun(recipe, flatten_dict(variables, sep="/"), seed, samples)
