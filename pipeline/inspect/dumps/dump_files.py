"""Files of a dump, written and read, and the names of the tensors in them.

Names don't depend on device, precision or lowering.

    {path}/{time}/{device}/{model}/{model id}/{steps done}/     CANN's layout
      dump.json       run, step, loss, and whether the dump is complete
      tensors.jsonl   a tensor a line: name, file, shape, SHA-256, statistics
      {layer}.{role}.{index}.{microseconds}.npy     {layer} has _ instead of /
    {path}/{time}/{device}/{model}/ge_proto_{model id}_Build.txt   the layers, in their order

A line of tensors.jsonl is written when the tensor's file is complete. If the disk becomes full, the
lines that were written are valid.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pipeline.config.inspection_specs import Content, What
from pipeline.core.errors import DataError, RecipeError, printable
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_bytes, read_json, read_text
from pipeline.core.files.npy import parse_npy
from pipeline.core.files.value_text import join_first
from pipeline.inspect.dumps.layer_programs import LayerTensors
from pipeline.models.layers.path_patterns import covers, require_covered

ABOUT = "dump.json"
TENSORS = "tensors.jsonl"
STATISTICS = ("min", "max", "mean", "std", "norm", "zeros", "not_finite")
"""Figures of a tensor. `min`, `max`, `mean`, `std` and the Euclidean `norm` are of its finite
elements. `zeros` is the share of zeros, `not_finite` the number of infinities and NaN."""
MODEL_ID = 1
"""Number of the model in CANN's layout; a run has one model."""
MAX_INDEX_BYTES = 256 << 20
MAX_TENSOR_BYTES = 64 << 30
_DAMAGE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors from parsing an index that is damaged or of another origin."""
Role = Literal["input", "output", "output_gradient", "input_gradient", "gradient", "statistics"]
ROLES: tuple[Role, ...] = get_args(Role)
DATA = "dataset.train.ops"
"""Name of the map ops, which are listed like a layer."""
LOSS = "train.loss"
"""Name of the loss, which is listed like a layer."""

OUTPUT_ROLES: tuple[Role, ...] = ("output", "input_gradient", "gradient", "statistics")
"""Roles of the tensors that a layer returns."""
_ROLES_BY_CHOICE: Mapping[What, tuple[Role, ...]] = {
    "input": ("input", "output_gradient"),
    "output": OUTPUT_ROLES,
    "all": ROLES,
}


@dataclass(frozen=True)
class DumpHeader:
    """The content of dump.json, except the result of writing."""

    recipe: str
    model: str
    device: str
    step: int
    """Number of steps before the step whose tensors are dumped."""
    content: Content
    loss: float
    """Loss that the dump's program computed."""
    run: str = ""
    run_loss: float | None = None
    """Loss that the run logged for the step; None until the run has logged it."""
    precision: str = ""
    layers: Sequence[tuple[str, str, str]] = ()
    """Path, kind, and dtype of the output of every layer."""
    approximate: Sequence[str] = ()
    """Reasons why the state isn't the run's; empty if it has the run's bits."""


@dataclass(frozen=True)
class DumpReport:
    """The result of writing a dump."""

    folder: Path
    loss: float
    """Loss that the dump's program computed."""
    num_tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()
    """Names of tensors that the size limit left no room for. The dump has only their statistics."""
    stopped: str | None = None
    """Place and reason of an early end; None for a complete dump."""

    def __str__(self) -> str:
        text = f"{self.num_tensors} tensors, {self.nbytes / 1e6:,.1f} MB: {self.folder}"
        if self.left_out:
            text += f"; {len(self.left_out)} beyond the limit, first {self.left_out[0]}"
        return text if self.stopped is None else f"{text}; {self.stopped}"


def dump_folder(root: Path, time_text: str, device: int, model: str, step: int) -> Path:
    """Return the folder of a dump in CANN's layout."""
    return root / time_text / str(device) / model / str(MODEL_ID) / str(step)


def write_dump(
    folder: Path,
    header: DumpHeader,
    tensors: Iterable[tuple[TensorName, np.ndarray]],
    limit_bytes: int,
) -> DumpReport:
    """Write a dump. If a file can't be written, stop and report the reason, without raising.

    If nothing could be written, as on a full disk, no folder is left.
    """
    new_folders = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    num_written = 0
    nbytes = 0
    left_out = list[str]()
    place = "its folder"
    stopped = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = "".join(f"{path}\t{kind}\t{dtype}\n" for path, kind, dtype in header.layers)
        graph = f"# {header.model}: path, kind and type of every layer\n{rows}"
        write_whole(folder.parent.parent / f"ge_proto_{MODEL_ID:05}_Build.txt", graph)
        (folder / TENSORS).unlink(missing_ok=True)
        for tensor, array in tensors:
            place = str(tensor)
            entry: dict[str, Any] = {
                "name": str(tensor),
                "shape": list(array.shape),
                "dtype": str(array.dtype),
            }
            if header.approximate:
                entry["approximate"] = True
            if header.content == "tensors" and nbytes + array.nbytes > limit_bytes:
                left_out.append(str(tensor))
            elif header.content == "tensors":
                buffer = io.BytesIO()
                # ascontiguousarray adds an axis to a scalar, and reshape removes it.
                contiguous = np.ascontiguousarray(array).reshape(array.shape)
                np.save(buffer, contiguous, allow_pickle=False)
                content = buffer.getvalue()
                file = tensor.file_name(time.time_ns() // 1000)
                write_whole(folder / file, content)
                entry |= {"file": file, "sha256": hashlib.sha256(content).hexdigest()}
                nbytes += array.nbytes
            with open(folder / TENSORS, "a", encoding="utf-8") as index:
                index.write(format_json(entry | {"statistics": _compute_statistics(array)}) + "\n")
            num_written += 1
    except OSError as error:
        stopped = f"stops at {place}: {error.strerror or error}"
    document = {**asdict(header), "tensors": num_written, "left_out": left_out, "stopped": stopped}
    try:
        write_whole(folder / ABOUT, format_json(document, indent=2) + "\n")
    except OSError as error:
        stopped = stopped or f"without {ABOUT}: {error.strerror or error}"
        if not num_written:
            _remove_if_empty(new_folders)
    return DumpReport(folder, header.loss, num_written, nbytes, tuple(left_out), stopped)


def _remove_if_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the innermost first, up to one that has files besides an unfinished index."""
    with suppress(OSError):
        for folder in folders:
            (folder / TENSORS).unlink(missing_ok=True)
            folder.rmdir()


def add_run_loss(folder: Path, loss: float) -> None:
    """Add `loss`, which the run logged for the step, to dump.json. Raises nothing."""
    with suppress(OSError, ValueError):
        header = read_json(folder / ABOUT)
        write_whole(folder / ABOUT, format_json({**header, "run_loss": loss}, indent=2) + "\n")


def _compute_statistics(array: np.ndarray) -> dict[str, float | int]:
    """Return the `STATISTICS`, computed in float64; NaN without a finite element."""
    values = np.asarray(array, np.float64).ravel()
    finite = values[np.isfinite(values)]
    figures = [float("nan")] * 5
    if finite.size:
        norm = np.sqrt(np.square(finite).sum())
        figures = list(map(float, (finite.min(), finite.max(), finite.mean(), finite.std(), norm)))
    zeros = float(np.mean(values == 0)) if values.size else float("nan")
    return dict(zip(STATISTICS, (*figures, zeros, int(values.size - finite.size)), strict=True))


@dataclass(frozen=True)
class DumpEntry:
    """A tensor of a dump."""

    shape: tuple[int, ...]
    file: str | None = None
    """Name of the file; None if the tensor has only statistics."""
    sha256: str | None = None


@dataclass(frozen=True)
class DumpRecord:
    """The index of a dump; `read` reads one array."""

    folder: Path
    about: Mapping[str, Any]
    """Content of dump.json."""
    entries: Mapping[TensorName, DumpEntry] = field(default_factory=dict)

    @property
    def stopped(self) -> str | None:
        """Place and reason of an early end; None for a complete dump."""
        reason = self.about.get("stopped")
        return None if reason is None else str(reason)

    @property
    def warning(self) -> str | None:
        """An early end, or why the tensors aren't those of the run; None for a sound dump."""
        reasons = self.about.get("approximate")
        texts = [] if self.stopped is None else [self.stopped]
        if isinstance(reasons, list) and reasons:
            texts.append(f"approximate: {'; '.join(map(str, reasons))}")
        return "; ".join(texts) or None

    @property
    def layers(self) -> dict[str, str]:
        """Kinds of layers by path, in the order of the forward pass."""
        return {str(path): str(kind) for path, kind, _ in self.about.get("layers", ())}

    def read(self, name: TensorName) -> np.ndarray | None:
        """Read an array; None if the dump has only its statistics. Raises DataError for a missing,
        changed or invalid file."""
        entry = self.entries[name]
        if entry.file is None:
            return None
        path = self.folder / entry.file
        try:
            if path.is_symlink() or not path.is_file():
                raise ValueError("is missing")
            content = read_bytes(path, MAX_TENSOR_BYTES)
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise ValueError(f"differs from its SHA-256 in {TENSORS}")
            array = parse_npy(path.stem, content)
            if array.shape != entry.shape:
                raise ValueError(f"has shape {array.shape}; must be {entry.shape}, as in {TENSORS}")
            if array.dtype.kind not in "biuf":
                raise ValueError(f"has type {array.dtype}; must have numbers")
        except (OSError, ValueError) as error:
            raise DataError(printable(f"{path}: damaged dump: {error}")) from error
        return array


def find_dump(path: Path) -> Path | None:
    """Return the folder of the only dump at or below a path, or None. Raises DataError for more."""
    if (path / ABOUT).is_file() or (path / TENSORS).is_file():
        return path
    if not path.is_dir():
        return None
    folders = sorted(file.parent for file in path.glob(f"**/{ABOUT}"))
    if len(folders) > 1:
        names = join_first([str(folder.relative_to(path)) for folder in folders], 4)
        raise DataError(f"{path}: has {len(folders)} dumps; name one of {names}")
    return folders[0] if folders else None


def read_dump(folder: Path) -> DumpRecord:
    """Read the index of a dump. Raises DataError if it is damaged."""
    try:
        header = read_json(folder / ABOUT)
        if not isinstance(header, dict):
            raise ValueError("must be a JSON object")
        for row in header.get("layers", ()):
            if not (isinstance(row, list) and len(row) == 3):
                raise ValueError("its layers must be rows of path, kind and type")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(printable(f"{folder / ABOUT}: damaged dump: {error}")) from error
    try:
        entries: dict[TensorName, DumpEntry] = {}
        for line in read_text(folder / TENSORS, MAX_INDEX_BYTES).splitlines():
            fields = json.loads(line)
            entries[parse_name(fields["name"])] = _parse_entry(fields)
        if len(entries) != header.get("tensors"):
            raise ValueError(
                f"has {len(entries)} tensors; must have {header.get('tensors')}, as in {ABOUT}"
            )
    except (*_DAMAGE_ERRORS, OSError) as error:
        raise DataError(printable(f"{folder / TENSORS}: damaged dump: {error}")) from error
    return DumpRecord(folder, header, entries)


def _parse_entry(fields: Any) -> DumpEntry:
    file = fields.get("file")
    digest = fields.get("sha256")
    if file is not None and (not isinstance(file, str) or Path(file).name != file):
        raise ValueError(f"{file!r:.80} must be the name of a file in this folder")
    shape = tuple(int(size) for size in fields["shape"])
    return DumpEntry(shape, file, digest)


@dataclass(frozen=True, order=True)
class TensorName:
    """Name of a tensor: its layer's path, its role, and an index or the name of a parameter.

    In the backward pass a layer reads `output_gradient` and returns `input_gradient`. `gradient` is
    the gradient of a parameter; `statistics` are running means and variances.
    """

    layer: str
    role: Role
    index: str = "0"

    def __str__(self) -> str:
        return f"{self.layer}:{self.role}:{self.index}"

    @property
    def tensor_index(self) -> str:
        """Role and index in the layer, such as output:0."""
        return f"{self.role}:{self.index}"

    def file_name(self, time_us: int) -> str:
        """Return the name of the .npy file: / becomes _, : becomes a dot, and the time is last."""
        return f"{str(self).replace('/', '_').replace(':', '.')}.{time_us}.npy"


def parse_name(text: str) -> TensorName:
    """Parse layer:role:index. Raises ValueError for a text of another form."""
    layer, role, index = text.rsplit(":", 2)
    if not layer or role not in ROLES:
        raise ValueError(f"{text!r:.80} isn't the name of a tensor; must be layer:role:index")
    return TensorName(layer, ROLES[ROLES.index(role)], index)


def named_tensors(
    tensors: LayerTensors, inputs: Mapping[str, np.ndarray]
) -> Iterator[tuple[TensorName, np.ndarray]]:
    """Yield tensors by name, in forward order; `inputs` is what the network reads."""
    for name, array in inputs.items():
        yield TensorName(DATA, "output", name), array
    parameters: Mapping[Role, Mapping[str, Mapping[str, np.ndarray]]] = {
        "gradient": _group_by_layer(tensors.parameters, tensors.forms),
        "statistics": _group_by_layer(tensors.statistics, tensors.forms),
    }
    arrays: Mapping[Role, Mapping[str, np.ndarray]] = {
        "input": tensors.inputs,
        "output": tensors.outputs,
        "output_gradient": tensors.output_gradients,
        "input_gradient": tensors.input_gradients,
    }
    for layer in tensors.forms:
        for role, by_layer in arrays.items():
            if layer in by_layer:
                yield TensorName(layer, role), by_layer[layer]
        for role, groups in parameters.items():
            for name, array in groups.get(layer, {}).items():
                yield TensorName(layer, role, name), array
    yield TensorName(LOSS, "input"), tensors.logits
    yield TensorName(LOSS, "output"), np.asarray(tensors.loss)
    yield TensorName(LOSS, "input_gradient"), tensors.logits_gradient


def _group_by_layer(
    arrays: Mapping[str, np.ndarray], layers: Mapping[str, object]
) -> dict[str, dict[str, np.ndarray]]:
    """Return arrays by the innermost layer that holds them, then by their path in that layer."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for path, array in arrays.items():
        scopes = path.split("/")
        for depth in range(len(scopes) - 1, 0, -1):
            layer = "/".join(scopes[:depth])
            if layer in layers:
                groups.setdefault(layer, {})["/".join(scopes[depth:])] = array
                break
    return groups


def require_layers(patterns: Sequence[str], layers: Sequence[str], key: str) -> None:
    """Raise RecipeError for a pattern that covers no layer; `key` is their option or key."""
    names = [*layers, DATA, LOSS]
    try:
        require_covered(patterns, [tuple(layer.split("/")) for layer in names], "layers")
    except ValueError as error:
        raise RecipeError([f"{key}: {error}"]) from error


def is_selected(name: TensorName, patterns: Sequence[str], what: What) -> bool:
    """Whether layer and role of a tensor are requested; no patterns request all layers."""
    path = tuple(name.layer.split("/"))
    is_covered = not patterns or any(covers(pattern, path) for pattern in patterns)
    return is_covered and name.role in _ROLES_BY_CHOICE[what]
