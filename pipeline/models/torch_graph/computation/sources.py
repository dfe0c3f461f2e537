"""Sources of graphs: a graph file, an ONNX file, or a PyTorch module that a plug-in defines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipeline.core.plugins.loading import find_object
from pipeline.models.torch_graph.graph import SampleSpec, TensorSpec, TorchGraph


@dataclass(frozen=True)
class GraphFile:
    """A graph file, which is read without torch."""

    path: Path

    def graph_for(self, *samples: SampleSpec) -> TorchGraph:
        """Read the file, whatever the samples. Raises ValueError if it isn't valid."""
        return _read(self.path, _file_version(self.path))


@dataclass(frozen=True)
class OnnxFile:
    """The network of an ONNX file, which is imported when the shape of samples is known."""

    path: Path
    output: str | None
    """Name of the tensor of logits, or None for the file's output."""

    def graph_for(self, *samples: SampleSpec) -> TorchGraph:
        """Import the file for samples. Raises ValueError if it can't be read or translated."""
        return _import(self, samples, _file_version(self.path))


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
    output: str | None = None
    """Name of the logits among several outputs, or None for `logits` or the only tensor."""

    def graph_for(self, *samples: SampleSpec) -> TorchGraph:
        """Make the module, and export it for samples.

        Raises ValueError if `--plugin` or torch is missing, or if the module can't be exported.
        """
        if len(samples) > 1 and (self.shape or self.input_dtype):
            names = ", ".join(sample.name for sample in samples)
            raise ValueError(
                f"input_shape and input_dtype are of an only input, and the network reads {names}; "
                "must be null"
            )
        return _export(self, tuple(map(self._describe_tensor, samples)))

    def _describe_tensor(self, sample: SampleSpec) -> tuple[str, TensorSpec]:
        """Return an input's name, and its sample as the module reads it."""
        shape = sample.shape
        is_whole = sample.dtype.startswith("int")
        # PyTorch's images have channels first.
        first = (shape[-1], *shape[:-1]) if len(shape) == 3 else shape
        dtype = self.input_dtype or ("int64" if is_whole else "float32")
        return sample.name, TensorSpec(self.shape or first, dtype)


GraphSource = TorchGraph | GraphFile | OnnxFile | ImportedModule
"""The source of a network's graph. `graph_for` returns the graph for samples of its inputs, or
raises ValueError."""


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
    source: OnnxFile, samples: tuple[SampleSpec, ...], version: tuple[int, int] | None
) -> TorchGraph:
    from pipeline.models.torch_graph.onnx.import_onnx import import_onnx

    return import_onnx(source.path, samples, source.output)


@lru_cache(maxsize=2)
def _export(source: ImportedModule, samples: tuple[tuple[str, TensorSpec], ...]) -> TorchGraph:
    from pipeline.models.torch_graph.conversion.export_module import export_module, make_module

    maker = find_object(source.reference)
    module = make_module(source.reference, maker, json.loads(source.arguments), source.seed)
    return export_module(
        module,
        dict(samples),
        origin=source.reference,
        batch=source.batch,
        output=source.output,
    )
