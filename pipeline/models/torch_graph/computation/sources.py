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

    def graph_for(self, shape: tuple[int, ...], dtype: str = "float32") -> TorchGraph:
        """Read the file, whatever the shape of samples. Raises ValueError if it isn't valid."""
        return _read(self.path, _file_version(self.path))


@dataclass(frozen=True)
class OnnxFile:
    """The network of an ONNX file, which is imported when the shape of samples is known."""

    path: Path
    output: str | None
    """Name of the tensor of logits, or None for the file's output."""

    def graph_for(self, shape: tuple[int, ...], dtype: str = "float32") -> TorchGraph:
        """Import the file for samples of a shape, of images (height, width, channels).

        Raises ValueError if it can't be read or translated.
        """
        return _import(self, shape, _file_version(self.path))


@dataclass(frozen=True)
class ImportedModule:
    """A module of PyTorch that is made and exported when the shape of samples is known."""

    reference: str
    """Reference of the module, such as `my_nets:MyNet`."""
    arguments: str
    """Arguments of the constructor as JSON; the number of classes is one of them."""
    seed: int
    """Seed of the initial weights."""
    shape: tuple[int, ...] | None
    """Shape of an input sample, or None for (channels, height, width) of the images."""
    input_dtype: str | None
    """Type of an input sample, or None for int64 of whole numbers, else float32."""
    batch: int | None
    """The only batch size that the module accepts, or None for any."""

    def graph_for(self, shape: tuple[int, ...], dtype: str = "float32") -> TorchGraph:
        """Make the module, and export it for samples of a shape, of images (height, width,
        channels).

        Raises ValueError if `--plugin` or torch is missing, or if the module can't be exported.
        """
        is_whole = dtype.startswith("int")
        own_dtype = self.input_dtype or ("int64" if is_whole else "float32")
        # PyTorch's images have channels first.
        first = (shape[-1], *shape[:-1]) if len(shape) == 3 else shape
        return _export(self, self.shape or first, own_dtype)


GraphSource = TorchGraph | GraphFile | OnnxFile | ImportedModule
"""The source of a network's graph. `graph_for` returns the graph for samples of a shape and dtype,
of images (height, width, channels), or raises ValueError."""


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
    source: OnnxFile, shape: tuple[int, ...], version: tuple[int, int] | None
) -> TorchGraph:
    from pipeline.models.torch_graph.onnx.import_onnx import import_onnx

    return import_onnx(source.path, shape, source.output)


@lru_cache(maxsize=2)
def _export(source: ImportedModule, shape: tuple[int, ...], dtype: str) -> TorchGraph:
    from pipeline.models.torch_graph.conversion.export_module import export_module, make_module

    maker = find_object(source.reference)
    module = make_module(source.reference, maker, json.loads(source.arguments), source.seed)
    return export_module(module, shape, origin=source.reference, dtype=dtype, batch=source.batch)
