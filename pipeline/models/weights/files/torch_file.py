"""PyTorch's files, `.pt` and `.pth`: a zip of a pickle and the bytes of each storage."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import MAX_ENTRIES, count_array_bytes
from pipeline.models.weights.files.named_arrays import Arrays, add_array
from pipeline.models.weights.files.torch_pickle import (
    REBUILD_PARAMETER,
    REBUILD_TENSOR,
    STORAGES,
    Call,
    Name,
    Persistent,
    read_pickle,
)

MAX_SHARING = 16
"""Most bytes of all tensors per byte of the file. Tied weights share bytes of the file."""

_PICKLE = "data.pkl"
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file that torch before 1.6 wrote."""
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "model_state", "net")
"""Keys under which training scripts save a state dict."""


def read_torch(path: Path) -> Arrays:
    """Return the tensors of the file's state dict by name. No code of the file is run.

    The file has the state dict itself, or a dict with the state dict under one of a few keys.
    Raises ValueError and zipfile.BadZipFile for an invalid file.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(len(_OLD_FORMAT)) == _OLD_FORMAT:
                raise ValueError(
                    "torch.save wrote it in the format before torch 1.6; load and save it again"
                )
        raise ValueError("it is not a file that torch.save wrote")
    with zipfile.ZipFile(path) as archive:
        size = path.stat().st_size
        bytes_left = float(size)
        storages = _Storages(archive, size)
        tensors = _find_tensors(read_pickle(storages.read(_PICKLE)))
        arrays: Arrays = {}
        for name, value in tensors.items():
            add_array(arrays, name, _read_tensor(str(name), value, storages))
            bytes_left -= arrays[name].nbytes / MAX_SHARING
            if bytes_left < 0:
                raise ValueError(f"its tensors are more than {MAX_SHARING} times its size")
    return arrays


class _Storages:
    """The entries of a file of `size` bytes. Each entry is checked when it is read."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive = archive
        self._bytes_left = size
        if len(archive.infolist()) > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES:,} parts")
        names = [name for name in archive.namelist() if PurePosixPath(name).name == _PICKLE]
        if len(names) != 1:
            raise ValueError("it is a zip file, but torch.save didn't write it")
        self._folder = names[0].removesuffix(_PICKLE)
        self._read: dict[str, bytes] = {}
        order = f"{self._folder}byteorder"
        if order in archive.namelist() and self.read("byteorder") != b"little":
            raise ValueError("its bytes are in big-endian order; must be little-endian")

    def read(self, name: str) -> bytes:
        """Return the bytes of an entry. Raises ValueError if it is missing or compressed."""
        if name not in self._read:
            try:
                info = self._archive.getinfo(self._folder + name)
            except KeyError:
                raise ValueError(f"it lacks its part {show_name(name)}") from None
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"its part {show_name(name)} is compressed; torch stores without compression"
                )
            self._bytes_left -= info.file_size
            if self._bytes_left < 0:
                raise ValueError("its parts overlap")
            self._read[name] = self._archive.read(info)
        return self._read[name]

    def read_values(self, storage: Any) -> np.ndarray:
        """Return the values (n,) of a storage of the pickle. Raises ValueError if it is invalid."""
        match storage:
            case Persistent(("storage", Name(kind), str(key), str(_), int(count))) if (
                kind in STORAGES and key.isalnum()
            ):
                data = self.read(f"data/{key}")
                if count < 0 or len(data) != count * STORAGES[kind].itemsize:
                    raise ValueError(f"storage {key} doesn't have the size of its {count:,} values")
                return np.frombuffer(data, STORAGES[kind])
        raise ValueError("a tensor has no storage that can be read")


def _find_tensors(content: Any) -> Mapping[Any, Any]:
    """Return the state dict. Raises ValueError unless there is exactly one."""
    if _is_state_dict(content):
        return content
    if not isinstance(content, dict):
        raise ValueError("it holds no dictionary of tensors; save model.state_dict()")
    state_dicts = [content[key] for key in _STATE_DICTS if _is_state_dict(content.get(key))]
    if len(state_dicts) != 1:
        keys = ", ".join(show_name(str(key)) for key in list(content)[:10])
        raise ValueError(
            f"it holds a dictionary of {keys or 'nothing'}; must be a state dict, or have "
            f"one under one of {', '.join(_STATE_DICTS)}"
        )
    return state_dicts[0]


def _is_state_dict(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(value, Call) for value in content.values())
    )


def _read_tensor(name: str, value: Call, storages: _Storages) -> np.ndarray:
    """Return a tensor in C order. Raises ValueError if it reaches beyond its storage."""
    if value.function == REBUILD_PARAMETER and value.arguments:
        value = value.arguments[0]
    match value:
        # The other arguments are requires_grad, hooks, and in newer files flags such as conjugate.
        case Call(function, (storage, int(offset), tuple(shape), tuple(strides), _, _, *flags)) if (
            function == REBUILD_TENSOR and len(shape) == len(strides) and not any(flags)
        ):
            values = storages.read_values(storage)
            return _copy_strided(name, values, offset, shape, strides)
    raise ValueError(f"{show_name(name)} isn't a tensor of numbers")


def _copy_strided(
    name: str, values: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Return elements of a storage in C order. Raises ValueError for elements outside of it."""
    size = count_array_bytes(name, values.dtype, shape)
    is_valid = all(type(stride) is int and stride >= 0 for stride in strides)
    is_valid &= offset >= 0 and size <= values.nbytes
    if is_valid and size:
        pairs = zip(shape, strides, strict=True)
        last_index = offset + sum((length - 1) * stride for length, stride in pairs)
        is_valid = last_index < len(values)
    if not is_valid:
        raise ValueError(f"{show_name(name)} does not fit into its storage")
    if not size:
        return np.empty(shape, values.dtype)
    itemsize = values.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(
        values[offset:], shape, tuple(stride * itemsize for stride in strides), writeable=False
    )
    return np.ascontiguousarray(view).reshape(shape)
