"""The arrays of a recipe's network, and the weights that a recipe starts from."""

from __future__ import annotations

from functools import partial

from pipeline.checkpoint.restore import Warn
from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset import Dataset
from pipeline.data.tables.encode_table import encoded_features, encoding_ops
from pipeline.data.transform import column_specs
from pipeline.stages.export.network import NetworkArrays, arrays_of_model
from pipeline.stages.export.restore import Restored, WeightSource, restore
from pipeline.training.state import TrainState


def restore_weights_of(recipe: Recipe, dataset: Dataset, like: TrainState, warn: Warn) -> Restored:
    """`like` with the weights that `checkpoint.restore` names, as `restore` returns it.

    Raises DataError if they can't be read or don't match the network.
    """
    spec = recipe.checkpoint
    assert spec.restore is not None, "the caller checks that there is something to restore"
    source = WeightSource(spec.restore, spec.renames, spec.rules, spec.partial)
    model = recipe.model.for_table(encoded_features(dataset.eval_ops))
    network = partial(arrays_of_model, model, len(dataset.classes), dataset.image)
    return restore(source, recipe.model_dump(mode="json"), like, network, warn)


def network_arrays(recipe: Recipe) -> NetworkArrays:
    """The arrays of a recipe's network; reads the dataset where its sizes are not known otherwise.

    Raises RecipeError where model, ops and dataset don't fit, DataError for unreadable data.
    """
    facts, model = recipe.dataset.facts(), recipe.model
    if facts is not None:
        columns = {"image": ColumnSpec(facts.image, "uint8"), "label": ColumnSpec((), "int32")}
        classes = facts.classes
    else:
        raw = recipe.dataset.read(cache_root(recipe.cache))
        columns, classes = raw.eval.specs(), len(raw.classes)
        encode = encoding_ops(raw.table, model.table_input)
        columns, model = column_specs(encode, columns), model.for_table(encoded_features(encode))
    try:
        image = column_specs(recipe.dataset.eval.ops, columns)["image"]
    except ValueError as error:
        raise RecipeError([f"dataset.eval.{error}"]) from error
    return arrays_of_model(model, classes, image)
