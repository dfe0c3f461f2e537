"""A network's arrays under the names, and in the layout, of a file of another framework.

There are no rules for that direction. Instead, the rules for reading such a file are applied to the
positions of its values, which gives the position of each of the network's values.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.error_text import shown
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.stages.export.axis_order import to_own_layout
from pipeline.stages.export.matching import match_weights
from pipeline.stages.export.naming import name_entries
from pipeline.stages.export.network import NetworkArrays


def under_foreign_names(
    file: str, model: Arrays, arrays: Mapping[str, np.ndarray], network: NetworkArrays
) -> Arrays:
    """`arrays` with the names, order, layout and dtypes of `file`, whose entries are `model`.

    Entries that are no weights of a layer, such as counters, keep the file's values; those that are
    added to another array become 0. Raises DataError where the file is not of this network, or has
    an entry that `arrays` lacks.
    """
    matching = match_weights(file, model, network)
    matching.require(partial=False)
    positions = {name: (name, _positions(array)) for name, array in model.items()}
    result = {name: np.array(array) for name, array in model.items()}
    for entry in name_entries(file, positions, network, matching.rules):
        if entry.target is None:
            continue
        if entry.target not in arrays:
            raise DataError(f"{file}: has {shown(entry.source)}, for which there are no weights")
        if entry.added:
            result[entry.source][...] = 0
            continue
        where = entry.array
        if matching.rules is not None:
            where = to_own_layout(where, entry.target, network)
        result[entry.source].flat[where.reshape(-1)] = arrays[entry.target].reshape(-1)
    return result


def _positions(array: np.ndarray) -> np.ndarray:
    """The flat index of every value of an array, in C order, int64 of the array's shape."""
    return np.arange(array.size).reshape(array.shape)
