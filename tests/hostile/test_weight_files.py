"""Weights, banks, exports and runs of strangers: refused in one line, within bounds."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from pipeline.backends.ascend.tune.autotune import check_tile_entry as checked_tile
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.manifest import write_manifest
from pipeline.checkpoint.restore import read_saved
from pipeline.config.renames import RenameSpec
from pipeline.core.errors import DataError, PipelineError, RunError
from pipeline.core.files.knowledge_bank import read_bank
from pipeline.models.lowerings.tune.tuner import check_lowering_entry as checked_lowering
from pipeline.models.weights.files import torch_file
from pipeline.models.weights.files.weight_files import read_weights
from pipeline.stages.export.export import DESCRIPTION, read_export


def refusal(act: Callable[[], Any], kind: type[PipelineError] = DataError) -> str:
    """The message that an act ends in, printable and on one line."""
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    assert message.isprintable()
    return message


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def varint(number: int) -> bytes:
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def entry(message: bytes) -> bytes:
    return b"\x0a" + varint(len(message)) + message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x0a\x00" * 200_000, "an entry has no name or no array"),
        (entry(b"\x0a\x01w\x12\x04\x08\x01\x08\x01") * 100_001, "more than 100,000 fields"),
        (entry(b"\x20\x00" * 3_000_000), "an entry of more than 64 fields"),
        (entry(b"\x0a\x01w" + b"\x12" + varint(1000) + b"\x08\x01" * 500), "more than 64 fields"),
        (entry(b"\x0a\x01w\x12\x66\x0a\x64" + b"\1" * 100), "an entry has no possible shape"),
        (
            entry(b"\x0a\x01w\x12\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
            "it ends in the middle",
        ),
    ],
)
def test_mindspore_file_with_endless_fields_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "w.ckpt", content)
    assert message in refusal(lambda: read_weights(path))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff" * 8, "can't read these weights"),
        (struct.pack("<Q", 2**62), "can't read these weights"),
        (struct.pack("<Q", 99_000_000) + b"{}", "can't read these weights"),
        (
            struct.pack("<Q", 66)
            + b'{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}} ',
            "can't read these weights",
        ),
        (
            struct.pack("<Q", 61)
            + b'{"\\u001b[31m":{"dtype":"F9","shape":[],"data_offsets":[0,0]}}',
            "can't read these weights",
        ),
    ],
)
def test_wrong_header_of_safetensors_is_refused(
    header: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "w.safetensors", header)
    assert message in refusal(lambda: read_weights(path))


class Mine:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self._call, self._arguments = call, arguments

    def __reduce__(self) -> Any:
        return self._call, self._arguments


def as_torch(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", content)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt"])
@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Mine(os.mkdir, "pwned")),
        pickle.dumps({"w": Mine(eval, "__import__('os').mkdir('pwned')")}, 0),
        pickle.dumps([Mine(subprocess.check_call, ["mkdir", "pwned"])], 2),
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00(i__main__\nX\n.",
        b"\x80\x02cbuiltins\ngetattr\n(cos\nmkdir\nX\x01\x00\x00\x00xtR.",
        b"\x80\x02\x81.",
        b"\x80\x02}\x8c\x01w(oX.",
        b"\x80\x04\x82\x01.",
    ],
)
def test_pickles_are_not_executed(
    content: bytes, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = as_torch(tmp_path / f"w{suffix}", content)
    assert "can't read these weights: " in refusal(lambda: read_weights(path))
    assert os.listdir() == [path.name]


def test_number_of_pickle_opcodes_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_file, "MAX_OPCODES", 1000)
    path = as_torch(tmp_path / "w.pt", b"\x80\x02" + b"]" * 2000 + b".")
    assert "has more than 1,000 opcodes" in refusal(lambda: read_weights(path))


@pytest.mark.slow
def test_deeply_nested_pickle_is_refused(tmp_path: Path) -> None:
    path = as_torch(tmp_path / "w.pt", b"\x80\x02]" + b"]" * 100_000 + b"a" * 100_000 + b".")
    assert "it holds no dictionary of tensors" in refusal(lambda: read_weights(path))


def test_sparse_file_is_not_read_into_memory(tmp_path: Path) -> None:
    for suffix in (".safetensors", ".ckpt"):
        with (tmp_path / f"w{suffix}").open("wb") as file:
            file.truncate(10**13)
        message = refusal(lambda suffix=suffix: read_weights(tmp_path / f"w{suffix}"))
        assert "reading it would take 20,000.0 GB of memory, " in message


@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing", "link to itself"])
@pytest.mark.parametrize("suffix", [".npz", ".pth", ".ckpt", ".safetensors"])
def test_special_file_path_is_refused(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    make = {"pipe": os.mkfifo, "folder": os.mkdir, "link to itself": lambda p: p.symlink_to(p)}
    if kind in make:
        make[kind](path)
    assert refusal(lambda: read_weights(path)).endswith("there is no such file")


BANK: dict[str, Any] = {
    "version": 1,
    "entries": {
        "conv": {
            "before_us": 2.0,
            "after": {"lowering": "default/xla", "us": 1.0},
            "plain": {"lowering": "default/xla", "us": 1.0},
        }
    },
}


def bank_with(**changes: Any) -> str:
    return json.dumps({**BANK, "entries": {"conv": {**BANK["entries"]["conv"], **changes}}})


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "null",
        '{"version": 1}',
        '{"version": 1, "entries": [1]}',
        '{"version": 1, "entries": {"a": {"tiling": [1e999], "us": 1}}}',
        bank_with(before_us=10**400),
        bank_with(before_us=float("inf")),
        bank_with(before_us=float("nan")),
        bank_with(before_us="\x1b[31m"),
        bank_with(after=None),
        bank_with(after={"lowering": 1, "us": 1}),
        bank_with(after={"lowering": "default/xla/" + "9" * 5000, "us": 1}),
        bank_with(after={"lowering": "x/os.system", "us": 1}),
        " " * (17 * 2**20),
    ],
)
def test_invalid_knowledge_bank_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bank.json"
    path.write_text(text)
    for checked in (checked_lowering, checked_tile):
        message = refusal(lambda checked=checked: read_bank(path, checked), RunError)
        assert "not a knowledge bank of AutoTune" in message
    assert path.read_text() == text


@pytest.mark.parametrize(
    "about",
    [
        "[" * 100_000,
        '{"image": {"shape": [4, 4, 1], "dtype": "O"}, "classes": ["a"]}',
        '{"image": {"shape": [4, 4, 1], "dtype": "f4,(9,9)f8"}, "classes": ["a"]}',
        '{"image": {"shape": [-4, 4, 1], "dtype": "uint8"}, "classes": ["a"]}',
        '{"image": {"shape": [4, 4], "dtype": "uint8"}, "classes": ["a"]}',
    ],
)
def test_invalid_export_description_is_refused(about: str, tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text(about)
    assert "doesn't describe an export" in refusal(lambda: read_export(tmp_path))


def test_rename_expressions_match_long_names_quickly() -> None:
    """Python's own would be at it for longer than the tests may take."""
    rule = RenameSpec.model_validate({"match": "(a|aa)+(a|aa)+(a|aa)+b", "to": "x"})
    assert not rule.pattern.fullmatch("a" * 100_000)


@pytest.mark.slow
def test_modules_in_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    """`python -m` looks there first: for modules, and for distributions that offer components."""
    (tmp_path / "evil.py").write_text("open('pwned', 'w')")
    (tmp_path / "yaml.py").write_text("open('pwned', 'w')")
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "evil.py").write_text("open('pwned', 'w')")
    info = tmp_path / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pipeline.components]\nevil = evil\n")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "--cfg", "job"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "pwned").exists()


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", w=np.array([Mine(os.mkdir, str(tmp_path / "pwned"))], object))
    assert "w holds objects; must be plain numbers" in refusal(
        lambda: read_weights(tmp_path / "w.npz")
    )
    assert not (tmp_path / "pwned").exists()


def test_checkpoint_naming_outside_arrays_is_refused(tmp_path: Path) -> None:
    """orbax would read them: a name that begins with a slash is a path."""
    state = make_checkpoint_path(tmp_path / "checkpoints", 3) / "state"
    with ocp.StandardCheckpointer() as writer:
        writer.save(state, {"params/x": np.arange(4.0), "step": np.int32(3)})
    (state.parent / "host").mkdir()
    (state.parent / "host" / "metadata").write_text("{}")
    (state.parent / "recipe").mkdir()
    (state.parent / "recipe" / "metadata").write_text("{}")
    write_manifest(state.parent, "digest")
    assert set(read_saved(tmp_path, print).arrays) == {"params/x", "step"}
    secret = tmp_path / "secret"
    store = {"driver": "file", "path": f"{secret}/"}
    metadata = {"shape": [3], "dtype": "<f8"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "create": True}
    tensorstore.open(spec).result().write(np.ones(3)).result()
    described = json.loads((state / "_METADATA").read_text())
    (key, entry), *_ = described["tree_metadata"].items()
    for name in (str(secret), "../../../secret"):
        entry["key_metadata"] = [{"key": name, "key_type": 2}]
        for ocdbt in (True, False):
            changed = {"use_ocdbt": ocdbt, "tree_metadata": {key: entry}}
            (state / "_METADATA").write_text(json.dumps({**described, **changed}))
            write_manifest(state.parent, "digest")  # a stranger seals it, too
            message = refusal(lambda: read_saved(tmp_path, print))
            assert "can't be the name of an array" in message or "not in the database" in message
