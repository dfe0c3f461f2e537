"""Conversion of weights from the layout of PyTorch and MindSpore to the one used here.

Theirs is (out, in, height, width) for convolutions and (out, in) for dense layers; here it is
(height, width, in, out) and (in, out). They flatten images channel by channel, here pixel by pixel.
Transposed convolutions are (in, out, height, width) there, and (height, width, in, out), rotated by
180 degrees, here: they keep the kernel of the convolution that is transposed, here it is the kernel
that slides over the image with zeros between its pixels.
"""

from __future__ import annotations

import numpy as np

from pipeline.stages.export.network import NetworkArrays

_OIHW_TO_HWIO = (2, 3, 1, 0)
_IOHW_TO_HWIO = (2, 3, 0, 1)


def to_own_layout(array: np.ndarray, target: str, network: NetworkArrays) -> np.ndarray:
    """The array in the layout of the network's array `target`; unchanged where it is unknown.

    The caller checks the resulting shape.
    """
    wanted = len(network.shapes[target])
    path, _, leaf = target.partition("/")[2].rpartition("/")
    if leaf != "kernel":
        return _without_leading_ones(array, wanted)
    if path.rpartition("/")[2].startswith("conv_transpose"):
        return array.transpose(_IOHW_TO_HWIO)[::-1, ::-1] if array.ndim == 4 else array
    if array.ndim == 4 and wanted == 2:
        array = array.reshape(len(array), -1)  # a convolution over a whole image is a dense layer
    elif array.ndim == 2 and wanted == 4:
        array = array[:, :, None, None]
    if array.ndim == 4:
        return array.transpose(_OIHW_TO_HWIO)
    if array.ndim != 2:
        return array
    channels = network.flattened.get(path)
    if channels is not None and array.shape[1] % channels == 0:
        outputs, inputs = array.shape
        by_channel = array.reshape(outputs, channels, inputs // channels)
        array = by_channel.swapaxes(1, 2).reshape(outputs, inputs)
    return array.T


def _without_leading_ones(array: np.ndarray, axes: int) -> np.ndarray:
    """Drop leading axes of size 1, down to `axes` axes."""
    while array.ndim > axes and array.shape[0] == 1:
        array = array[0]
    return array
