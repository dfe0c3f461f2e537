"""One side of a comparison by its tensors: of a dump, a step, or another framework's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.inspect.compare.tensor_rows import Read
from pipeline.inspect.dumps.dump_files import DumpRecord
from pipeline.inspect.dumps.tensor_names import TensorName


@dataclass(frozen=True)
class TensorSide:
    """The tensors of one side of a comparison by files, in the order of the forward pass."""

    name: str
    about: str
    layers: Mapping[str, str]
    """Kinds of layers by path."""
    names: Sequence[TensorName]
    read: Read
    warning: str | None = None


def side_of_dump(record: DumpRecord) -> TensorSide:
    """Return the tensors of a dump of this project."""
    about = f"{record.about.get('model')}, step {record.about.get('step')}"
    names = list(record.entries)
    return TensorSide(str(record.folder), about, record.layers, names, record.read, record.stopped)
