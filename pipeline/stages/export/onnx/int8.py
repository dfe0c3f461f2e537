"""Static quantisation of an ONNX model: weights and activations of products in 8 bits."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PRODUCTS = ["Conv", "ConvTranspose", "Gemm", "MatMul"]
"""Operators that are quantised; the map ops before the network stay as they are."""


def quantized(content: bytes, name: str, images: np.ndarray, batch: int) -> bytes:
    """The model with int8 products, with ranges as `images` (n, H, W, C) give them as input `name`.

    Batch norm is folded into convolutions first. Weights have a scale for each channel (QDQ
    format, symmetric int8), activations one for each tensor, from the least to the greatest value.
    """
    import onnxruntime
    from onnxruntime import quantization

    # Its advice to preprocess the model, which is done here.
    logging.getLogger().addFilter(_is_no_advice)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, folded, target = (
                Path(folder) / file for file in ("source.onnx", "folded.onnx", "int8.onnx")
            )
            source.write_bytes(content)
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            options.optimized_model_filepath = str(folded)
            onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
            quantization.quantize_static(
                folded,
                target,
                _reader(name, images, batch),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=PRODUCTS,
                per_channel=True,
                activation_type=quantization.QuantType.QInt8,
                weight_type=quantization.QuantType.QInt8,
            )
            return target.read_bytes()
    finally:
        logging.getLogger().removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing" not in record.getMessage()


def _reader(name: str, images: np.ndarray, batch: int) -> Any:
    """A reader of calibration data, as ONNX Runtime wants it."""
    from onnxruntime.quantization import CalibrationDataReader

    def feeds() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, len(images), batch):
            yield {name: images[start : start + batch]}

    left = feeds()

    class _Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(left, None)

    return _Reader()
