"""Networks of ONNX files, which any framework may have written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.core.registry import FilePath, component
from pipeline.models.layers.model_spec import ModelSpec

if TYPE_CHECKING:
    from flax import linen as nn


@component("model")
class OnnxNetwork(ModelSpec):
    """The network of an ONNX file, which JAX computes and trains.

    The file is data and needs neither onnx nor `--plugin`. Training starts from its weights; of
    `init` only `rules` are used. Batch norm and dropout train. A file with several inputs reads the
    columns of their names, or those of `model.inputs`.
    """

    name: Literal["onnx"] = "onnx"
    file: FilePath | None = None
    """The file, `net.onnx`; external data lies in its folder."""
    output: Annotated[str, Field(max_length=500)] | None = None
    """Name of the tensor of logits; null: the file's output, or what its last softmax reads."""

    def list_inputs(self) -> tuple[str, ...] | None:
        """Return the names of several inputs of the file; None for one, and without a file."""
        from pipeline.models.torch_graph.onnx.import_onnx import list_onnx_inputs

        if self.file is None:
            return None
        names = list_onnx_inputs(self.file, self.output)
        return names if len(names) > 1 else None

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return the network, which reads the file for its first images.

        Raises ValueError without a file.
        """
        from pipeline.models.torch_graph.computation.sources import OnnxFile
        from pipeline.models.torch_graph.computation.torch_network import TorchNetwork

        if self.file is None:
            raise ValueError("file = null: must name the file, as model.file=net.onnx")
        return TorchNetwork(OnnxFile(self.file, self.output), dtype)
