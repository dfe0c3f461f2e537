"""Sources of graphs: a graph file, an ONNX file, or a PyTorch module that a plug-in defines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipeline.core.plugins.loading import find_object
from pipeline.models.torch_graph.graph import TorchGraph


@dataclass(frozen=True)
class GraphFile:
    """A graph file, which is read without torch."""

    path: Path

    def graph_for(self, image_shape: tuple[int, ...]) -> TorchGraph:
        """Read the file, whatever the shape of images. Raises ValueError if it isn't valid."""
        return _read(self.path, _file_version(self.path))


@dataclass(frozen=True)
class OnnxFile:
    """The network of an ONNX file, which is imported when the size of images is known."""

    path: Path
    output: str | None
    """Name of the tensor of logits, or None for the file's output."""

    def graph_for(self, image_shape: tuple[int, ...]) -> TorchGraph:
        """Import the file for images (height, width, channels).

        Raises ValueError if it can't be read or translated.
        """
        return _import(self, image_shape, _file_version(self.path))


@dataclass(frozen=True)
class ImportedModule:
    """A module of PyTorch that is made and exported when the size of images is known."""

    reference: str
    """Reference of the module, such as `my_nets:MyNet`."""
    arguments: str
    """Arguments of the constructor as JSON; the number of classes is one of them."""
    seed: int
    """Seed of the initial weights."""
    shape: tuple[int, ...] | None
    """Shape of an input sample, or None for (channels, height, width) of the images."""
    input_dtype: str
    batch: int | None
    """The only batch size that the module accepts, or None for any."""

    def graph_for(self, image_shape: tuple[int, ...]) -> TorchGraph:
        """Make the module, and export it for images (height, width, channels).

        Raises ValueError if `--plugin` or torch is missing, or if the module can't be exported.
        """
        height, width, channels = image_shape
        return _export(self, self.shape or (channels, height, width))


GraphSource = TorchGraph | GraphFile | OnnxFile | ImportedModule
"""The source of a network's graph. `graph_for` returns the graph for images (height, width,
channels), or raises ValueError."""


def _file_version(path: Path) -> tuple[int, int] | None:
    """Return a file's time of change in nanoseconds and size in bytes; None if it is missing."""
    stat = path.stat() if path.exists() else None
    return (stat.st_mtime_ns, stat.st_size) if stat else None


# Cached, since a run builds its network several times. `version` makes a changed file be read.
@lru_cache(maxsize=2)
def _read(path: Path, version: tuple[int, int] | None) -> TorchGraph:
    from pipeline.models.torch_graph.computation.graph_file import read_graph

    return read_graph(path)


@lru_cache(maxsize=2)
def _import(
    source: OnnxFile, image: tuple[int, ...], version: tuple[int, int] | None
) -> TorchGraph:
    from pipeline.models.torch_graph.onnx.import_onnx import import_onnx

    return import_onnx(source.path, image, source.output)


@lru_cache(maxsize=2)
def _export(source: ImportedModule, shape: tuple[int, ...]) -> TorchGraph:
    from pipeline.models.torch_graph.conversion.export_module import export_module, make_module

    maker = find_object(source.reference)
    module = make_module(source.reference, maker, json.loads(source.arguments), source.seed)
    return export_module(
        module, shape, origin=source.reference, dtype=source.input_dtype, batch=source.batch
    )
