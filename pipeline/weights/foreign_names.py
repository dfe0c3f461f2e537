"""A network's arrays under the names, and in the layout, of a file of another framework.

There are no rules for that direction: the rules that read such a file are followed for the places
of its values instead of the values, and so say where each of the network's values goes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.errors import DataError
from pipeline.files.error_text import shown
from pipeline.weights.axis_order import to_own_layout
from pipeline.weights.files.named_arrays import Arrays
from pipeline.weights.matching import match_weights
from pipeline.weights.naming import name_entries
from pipeline.weights.network import NetworkArrays


def under_foreign_names(
    file: str, model: Arrays, arrays: Mapping[str, np.ndarray], network: NetworkArrays
) -> Arrays:
    """`arrays` as `file`, whose entries are `model`, has them: names, order, layout and dtypes.

    What is no weight of a layer, such as counters, stays as it is there; what is added to another
    array becomes 0. Raises DataError where the
    file is not of this network, or `arrays` lacks what the file has.
    """
    matching = match_weights(file, model, network)
    matching.require(partial=False)
    places = {name: (name, _places(array)) for name, array in model.items()}
    result = {name: np.array(array) for name, array in model.items()}
    for entry in name_entries(file, places, network, matching.rules):
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


def _places(array: np.ndarray) -> np.ndarray:
    """Of every value of an array its number, counted row by row."""
    return np.arange(array.size).reshape(array.shape)
