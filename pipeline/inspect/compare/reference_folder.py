"""Tensors that another framework dumped into a folder of .npy files, read as one side.

Files are named as in CANN's and MindSpore's documents, or as in this project's dumps. `/` of an
operator's name is `_` in these names, and `:` is a dot:

    {op}.{output}.{microseconds}.npy
    {type}.{op}.{task}.{stream}.{microseconds}.{input or output}.{index}.{format}.npy
    {layer}.{role}.{index}.{microseconds}.npy

The operators are in the order of a file `*execution_order*`, whose lines begin with the full name
of an operator and a comma, else in the order of the times in the names.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError, printable
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.npy import read_npy
from pipeline.core.files.value_text import join_first
from pipeline.inspect.compare.tensor_rows import TensorSide
from pipeline.inspect.dumps.tensor_names import ROLES, TensorName

ORDER = "*execution_order*"
MAX_FILES = 100_000
_NAMES = (
    re.compile(
        r"(?P<type>\w+)\.(?P<op>.+)\.\d+\.\d+\.(?P<time>\d+)"
        r"\.(?P<role>input|output)\.(?P<index>\d+)\.[A-Za-z_]\w*"
    ),
    re.compile(rf"(?P<op>.+)\.(?P<role>{'|'.join(ROLES)})\.(?P<index>\w+)\.(?P<time>\d+)"),
    re.compile(r"(?P<op>.+)\.(?P<index>\d+)\.(?P<time>\d+)"),
)


def read_reference(folder: Path) -> TensorSide:
    """List a folder's tensors, without links and pipes. Raises DataError for a wrong name."""
    paths = [p for p in sorted(folder.rglob("*.npy")) if p.is_file() and not p.is_symlink()]
    if not paths or len(paths) > MAX_FILES:
        problem = f"must hold 1 to {MAX_FILES:,} .npy files of one step, it has {len(paths):,}"
        raise DataError(printable(f"{folder}: {problem}"))
    files: dict[TensorName, Path] = {}
    times: dict[str, int] = {}
    for path in paths:
        match = next(filter(None, (form.fullmatch(path.stem) for form in _NAMES)), None)
        if match is None:
            rule = "must be named OP.OUTPUT.MICROSECONDS.npy, or as MindSpore names its dumps"
            raise DataError(printable(f"{path}: {rule}"))
        fields = match.groupdict()
        role = ROLES[ROLES.index(fields.get("role") or "output")]
        tensor = TensorName(fields["op"], role, fields["index"])
        if tensor in files:
            problem = f"{tensor} is in {files[tensor].name} and {path.name}; must be of one step"
            raise DataError(printable(f"{folder}: {problem}"))
        files[tensor] = path
        times.setdefault(tensor.layer, int(fields["time"]))
    places = _read_order(folder)
    ops = sorted(times, key=lambda op: (places.get(op, len(places)), times[op]))
    ranks = {op: rank for rank, op in enumerate(ops)}
    names = sorted(files, key=lambda name: (ranks[name.layer], ROLES.index(name.role), name.index))

    def read(name: TensorName) -> np.ndarray:
        try:
            array = read_npy(files[name])
            if array.dtype.kind not in "biuf":
                raise ValueError(f"has type {array.dtype}; must have numbers")
        except (OSError, ValueError) as error:
            raise DataError(printable(f"{files[name]}: can't be read: {error}")) from error
        return array

    about = f"{len(files)} tensors of {len(ops)} operators"
    return TensorSide(str(folder), about, dict.fromkeys(ops, ""), names, read)


def _read_order(folder: Path) -> dict[str, int]:
    """Return the places of operators by full and last name, {} without a file."""
    files = sorted(path for path in folder.glob(ORDER) if not path.is_symlink())
    if len(files) > 1:
        names = join_first([file.name for file in files], 4)
        raise DataError(printable(f"{folder}: must have one execution order, it has {names}"))
    places: dict[str, int] = {}
    for file in files:
        try:
            lines = read_text(file).splitlines()
        except (OSError, ValueError) as error:
            raise DataError(printable(f"{file}: can't be read: {error}")) from error
        for place, line in enumerate(lines):
            op = line.partition(",")[0].strip()
            for name in (op, op.rpartition("/")[2]):
                places.setdefault(flatten_name(name), place)
    return places


def flatten_name(name: str) -> str:
    """Return a name as it is in a file's name."""
    return name.replace("/", "_").replace(":", ".")
