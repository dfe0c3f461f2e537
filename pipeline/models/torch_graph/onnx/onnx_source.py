"""ONNX files as a source of graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipeline.models.torch_graph.conversion.sources import file_version
from pipeline.models.torch_graph.graph import TorchGraph
from pipeline.models.torch_graph.onnx.import_onnx import ImportSettings, import_onnx


@dataclass(frozen=True)
class OnnxFile:
    """The network of an ONNX file, which is imported when the size of images is known."""

    path: Path
    output: str | None
    """Name of the tensor of logits; None: the file's output."""

    def graph_for(self, image: tuple[int, ...]) -> TorchGraph:
        """Import the file for images (height, width, channels). Raises ValueError."""
        return _import(self, image, file_version(self.path))


# Cached, since a run builds its network several times.
@lru_cache(maxsize=2)
def _import(
    source: OnnxFile, image: tuple[int, ...], version: tuple[int, int] | None
) -> TorchGraph:
    return import_onnx(source.path, ImportSettings(image, source.output))
