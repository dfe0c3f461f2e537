"""Files: data, weights, checkpoints and banks, changed byte by byte, or with wrong insides."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy
from PIL import Image

from pipeline.backends.ascend.tune.autotune import check_tile_entry as checked_tile
from pipeline.checkpoint.restore import read_saved
from pipeline.config.compose import load_recipe
from pipeline.core.errors import DataError
from pipeline.core.files.knowledge_bank import read_bank
from pipeline.data.columns import Column, ColumnSpec, RawData, Split, Targets
from pipeline.data.records.record_writer import write_records
from pipeline.data.sources.audio_folder import AudioFolder
from pipeline.data.sources.cifar import Release, read_split, unpack
from pipeline.data.sources.example_files import Records
from pipeline.data.sources.idx import read_split as read_idx_split
from pipeline.data.sources.image_folder import ImageFolder
from pipeline.data.sources.image_masks import ImageMasks
from pipeline.data.sources.npz import NumpyArchive
from pipeline.models.lowerings.tune.tuner import BUILT_IN
from pipeline.models.lowerings.tune.tuner import check_lowering_entry as checked_lowering
from pipeline.models.weights.files.weight_files import read_weights, write_weights
from pipeline.stages.export.inference_files import read_samples
from pipeline.stages.record.trained_run import Samples
from tests.conftest import ROOT, TINY
from tests.data.section import section
from tests.fuzz.mutate import mutate_bytes, mutate_tree
from tests.sound_files import save_wav
from tests.whole_run import run

GOLDEN = ROOT / "tests" / "golden" / "weights"
SMALL = Release("small", "small", {"a.bin": 3, "b.bin": 2}, {"t.bin": 2}, 1, 10)

Files = Mapping[str, bytes]


def _digits(count: int, side: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side), np.uint8)


def lay(files: Files, folder: Path) -> None:
    """Write files by their paths."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def change_one(rng: Random, files: Files) -> dict[str, bytes]:
    """The files with one of them changed, or missing."""
    changed = dict(files)
    name = rng.choice(sorted(files))
    if rng.random() < 0.03:
        del changed[name]
    elif name.endswith((".json", "_METADATA", "metadata", ".zarray")) and rng.random() < 0.7:
        changed[name] = _changed_json(rng, files[name])
    else:
        changed[name] = mutate_bytes(rng, files[name])
    return changed


def _changed_json(rng: Random, content: bytes) -> bytes:
    return json.dumps(mutate_tree(rng, json.loads(content))).encode()


@cache
def _idx_files() -> Files:
    files = {}
    for prefix, count in (("train", 6), ("t10k", 4)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        head = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        files[f"{prefix}-images-idx3-ubyte"] = head + images.tobytes()
        labels = bytes(range(count))
        files[f"{prefix}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + count.to_bytes(4, "big") + labels
    return files


def read_idx_files(rng: Random, folder: Path) -> None:
    """MNIST's four files, plain or gzipped, the change inside or outside."""
    zipped = rng.random() < 0.5
    files = change_one(rng, _idx_files()) if rng.random() < 0.7 or not zipped else _idx_files()
    if zipped:
        files = {
            f"{name}.gz": gzip.compress(content, 1, mtime=0) for name, content in files.items()
        }
        if rng.random() < 0.5:
            files = change_one(rng, files)
    lay(files, folder)
    read_idx_split(folder, "train", 6)
    read_idx_split(folder, "t10k", 4)


@cache
def _cifar_files() -> Files:
    rng = np.random.default_rng(0)
    return {
        name: b"".join(
            bytes([n]) + rng.integers(0, 256, 3072, np.uint8).tobytes() for n in range(count)
        )
        for name, count in {**SMALL.train, **SMALL.eval}.items()
    }


def read_cifar_files(rng: Random, folder: Path) -> None:
    """CIFAR's records of bytes."""
    lay(change_one(rng, _cifar_files()), folder)
    read_split(folder, SMALL.train, SMALL)
    read_split(folder, SMALL.eval, SMALL)


def unpack_cifar(rng: Random, folder: Path) -> None:
    """CIFAR's archive: other paths, kinds and sizes of its members, or other bytes."""
    suffix = rng.choice((".tar", ".tar.gz", ".tar.xz"))
    buffer = io.BytesIO()
    mode = {".tar": "w", ".tar.gz": "w:gz", ".tar.xz": "w:xz"}[suffix]
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in change_one(rng, _cifar_files()).items():
            member = tarfile.TarInfo(rng.choice(("", "../", "/", "a/../../")) + name)
            member.size = len(content)
            if rng.random() < 0.1:
                member.type = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE))
                member.linkname, member.size = "/etc/passwd", 0
            if rng.random() < 0.1:
                member.pax_headers = {"path": rng.choice(("../x", "\0", "é" * 300)), "size": "9"}
            archive.addfile(member, io.BytesIO(content))
    content = buffer.getvalue()
    path = folder / f"small{suffix}"
    path.write_bytes(mutate_bytes(rng, content) if rng.random() < 0.6 else content)
    before = {path.name}
    try:
        unpack(path, SMALL, folder / "cache")
    finally:
        outside = {entry.name for entry in folder.iterdir()} - before - {"cache"}
        assert not outside, outside


def _npz(arrays: Mapping[str, np.ndarray], compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def rezip(rng: Random, content: bytes, method: int | None = None) -> bytes:
    """A zip file with one of its entries changed, and all checksums right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before:
        entries = {name: before.read(name) for name in before.namelist()}
    name = rng.choice(sorted(entries))
    entries[name] = mutate_bytes(rng, entries[name])
    if rng.random() < 0.1:
        entries[rng.choice(("../x.npy", "/x.npy", "x", "é.npy", ".npy"))] = entries.pop(name)
    if method is None:
        method = rng.choice((0, 0, 8, 8, 12, 14))
    with zipfile.ZipFile(buffer, "w", method) as after:
        for name, data in entries.items():
            after.writestr(name, data)
    return buffer.getvalue()


def _changed_zip(rng: Random, content: bytes, method: int | None = None) -> bytes:
    inside = rng.random() < 0.6
    return rezip(rng, content, method) if inside else mutate_bytes(rng, content)


def read_npz_dataset(rng: Random, folder: Path) -> None:
    """A user's own arrays: wrong dtypes and shapes, headers that lie, damaged archives."""
    labels = np.arange(5) % 3
    arrays: dict[str, Any] = {
        "x_train": _digits(5),
        "y_train": labels,
        "x_test": _digits(2),
        "y_test": labels[:2],
    }
    for _ in range(rng.choice((0, 1, 2))):
        name = rng.choice(sorted(arrays))
        arrays[rng.choice((name, name, "x_train_sizes", "x"))] = rng.choice(
            (
                np.zeros(arrays[name].shape, rng.choice(("f4", "f8", "i8", "S3", "?", "c8", "f2"))),
                np.full((2, 2), rng.choice((0, -1, 2**40))),
                np.array([{}], object),
                arrays[name][:0],
                np.float32(rng.choice((float("nan"), 1e38))) * np.ones((5, 8, 8), np.float32),
            )
        )
    content = _npz(arrays, rng.random() < 0.5)
    (folder / "d.npz").write_bytes(content if rng.random() < 0.3 else _changed_zip(rng, content))
    classes = rng.choice((None, None, 3, 2**20))
    NumpyArchive(**section(root=folder / "d.npz", classes=classes)).read(folder / "cache")


@cache
def _image(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.dstack([_digits(1)[0]] * 3)).save(
        buffer, kind, **({"progressive": True} if kind == "JPEG" else {})
    )
    return buffer.getvalue()


def _changed_image(rng: Random) -> tuple[str, bytes]:
    kind, suffix = rng.choice((("PNG", "png"), ("JPEG", "jpg"), ("BMP", "bmp")))
    content = _image(kind)
    if kind == "PNG" and rng.random() < 0.5:
        head = bytearray(mutate_bytes(rng, content[12:29]))
        content = content[:12] + bytes(head) + zlib.crc32(head).to_bytes(4, "big") + content[33:]
    else:
        content = mutate_bytes(rng, content)
    return suffix, content


def read_image_folder(rng: Random, folder: Path) -> None:
    """A folder of images, one of which is something else."""
    good = {
        f"{split}/{name}/{number}.png": _image("PNG")
        for split in ("train", "eval")
        for name in ("ant", "bee")
        for number in range(2)
    }
    suffix, content = _changed_image(rng)
    lay({**good, f"train/ant/9.{suffix}": content}, folder / "data")
    size = rng.choice((None, [8, 8], [5, 3]))
    spec = ImageFolder(**section(root=folder / "data", image_size=size, follow_links=False))
    data = spec.read(folder / "cache")
    data.train.columns["image"][:]


def read_audio_folder(rng: Random, folder: Path) -> None:
    """A folder of sound, one file of which is something else."""
    root = folder / "data"
    for split in ("train", "eval"):
        for name in ("ant", "bee"):
            save_wav(root / split / name / "0.wav", np.arange(40))
    channels = rng.choice((1, 2))
    numbers = np.arange(40 * channels).reshape(40, channels)
    changed = save_wav(root / "train/ant/9.wav", numbers, sample_bytes=rng.choice((1, 2, 3, 4)))
    content = changed.read_bytes()
    # Most changes are in the header.
    head = mutate_bytes(rng, content[:44]) + content[44:]
    changed.write_bytes(head if rng.random() < 0.7 else mutate_bytes(rng, content))
    settings = {
        "longer": rng.choice(("cut", "windows", "refuse")),
        "shorter": rng.choice(("pad", "refuse")),
        "channels": rng.choice(("single", "mono")),
    }
    spec = AudioFolder(**section(root=root, samples=rng.choice((1, 16, 40, 99)), **settings))
    data = spec.read(folder / "cache")
    sound = data.train.columns["audio"][:]
    assert np.isfinite(sound).all()
    assert np.abs(sound).max() <= 1


def read_image_table(rng: Random, folder: Path) -> None:
    """A CSV of images, changed."""
    rows = [f"{number}.png,{number % 2},{number / 3:.2f}" for number in range(6)]
    table = mutate_bytes(rng, "\n".join(["file,kind,age", *rows]).encode())
    good = {f"{number}.png": _image("PNG") for number in range(6)}
    lay({**good, "table.csv": table}, folder / "data")
    spec = ImageFolder(
        **section(
            root=folder / "data",
            labels_csv=folder / "data" / "table.csv",
            split=0.3,
            label_columns=rng.choice(((), ("kind",), ("age",))),
            task=rng.choice(("auto", "classification", "regression", "multi_label")),
        )
    )
    spec.read(folder / "cache").train.columns["image"][:]


def read_image_masks(rng: Random, folder: Path) -> None:
    """Images and masks, one of which is something else."""
    good = {f"{kind}/{n}.png": _mask() for kind in ("images", "masks") for n in range(4)}
    suffix, content = _changed_image(rng)
    if rng.random() < 0.5:
        suffix, content = "png", mutate_bytes(rng, _mask())
    lay({**good, f"{rng.choice(('images', 'masks'))}/3.{suffix}": content}, folder / "data")
    classes = rng.choice((None, 3, 20))
    spec = ImageMasks(**section(root=folder / "data", split=0.3, classes=classes, ignore_index=255))
    data = spec.read(folder / "cache")
    for name in ("image", "label"):
        data.train.columns[name][:]


@cache
def _mask() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(_digits(1)[0].astype(np.uint8) % 3).save(buffer, "PNG")
    return buffer.getvalue()


def infer_image(rng: Random, folder: Path) -> None:
    """An image or an array that a trained network is asked about."""
    suffix, content = _changed_image(rng)
    if rng.random() < 0.5:
        buffer = io.BytesIO()
        np.save(buffer, _digits(3))
        suffix, content = rng.choice((("npy", buffer.getvalue()), ("npz", _npz({"x": _digits(3)}))))
        content = _changed_zip(rng, content) if suffix == "npz" else mutate_bytes(rng, content)
    (folder / f"asked.{suffix}").write_bytes(content)
    samples = Samples({"image": ColumnSpec((8, 8, 1), "uint8")}, Targets(("a", "b")))
    read_samples(folder / f"asked.{suffix}", samples)


@cache
def _record_files() -> Files:
    def split(count: int) -> Split:
        images: Column = np.repeat(_digits(count)[..., np.newaxis], 3, -1)
        return Split({"image": images, "label": (np.arange(count) % 4).astype(np.int32)})

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "records"
        data = RawData(split(37), split(5), Targets(("a", "b", "c", "d")))
        write_records(folder, "mine", data, overwrite=False, notify=lambda *_: None)
        return _read_all(folder)


def _read_all(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read_record_files(rng: Random, folder: Path) -> None:
    """ArrayRecord files and their description."""
    files = _record_files()
    if rng.random() < 0.5:
        name = "records.json"
        changed = dict(files) | {name: _changed_json(rng, files[name])}
    else:
        changed = change_one(rng, files)
    lay(changed, folder / "records")
    data = Records(**section(root=folder / "records")).read(folder / "cache")
    for split in (data.train, data.eval):
        for column in split.columns.values():
            column[:3]


@cache
def _checkpoint_files() -> Files:
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        recipe = load_recipe(
            "lenet5_digits",
            [
                *TINY,
                "model=mlp",
                "model.hidden=[4]",
                "train.steps=2",
                f"cache.root={scratch}/cache",
                "cache.compiled=false",
            ],
        )
        run(recipe, run_dir)
        return _read_all(run_dir / "checkpoints")


def read_checkpoint_files(rng: Random, folder: Path) -> None:
    """A checkpoint: one file changed, with the manifest as it was or without any."""
    files = dict(_checkpoint_files())
    if rng.random() < 0.5:
        unsealed = ("manifest.json", "/recipe/")
        files = {name: files[name] for name in files if not any(u in name for u in unsealed)}
    lay(change_one(rng, files), folder / "checkpoints")
    read_saved(folder / "checkpoints", lambda text: None).select_weights()


@cache
def _weights(suffix: str) -> bytes:
    if suffix == ".safetensors":
        arrays = {"a": _digits(2).astype(np.float32), "b.c": np.arange(3), "s": np.float16(2)}
        return safetensors.numpy.save({name: np.asarray(a) for name, a in arrays.items()})
    if suffix == ".npz":
        return _npz({"a": _digits(2).astype(np.float32), "b": np.arange(3)})
    name = {".ckpt": "mindspore_dtypes.ckpt", ".pth": "torch_tiny.pth", ".pt": "torch_training.pt"}
    return (GOLDEN / name[suffix]).read_bytes()


def _changed_safetensors(rng: Random, content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        return mutate_bytes(rng, content)
    head = _changed_json(rng, content[8 : 8 + size])
    return len(head).to_bytes(8, "little") + head + content[8 + size :]


def read_weight_file(suffix: str) -> Callable[[Random, Path], None]:
    """A case of weight files of one kind."""

    def act(rng: Random, folder: Path) -> None:
        content = _weights(suffix)
        if suffix == ".safetensors":
            content = _changed_safetensors(rng, content)
        elif suffix == ".ckpt":
            content = mutate_bytes(rng, content)
        else:
            content = _changed_zip(rng, content, 0 if suffix != ".npz" else None)
        path = folder / f"w{suffix}"
        path.write_bytes(content)
        arrays = read_weights(path)
        if rng.random() < 0.2:
            write_weights(folder / "again.npz", arrays)

    return act


@cache
def _tile_bank() -> bytes:
    entries = {"conv 1x2x3": {"tiling": [1, 2, 3, 4, 5, 6, 7], "us": 3.5}}
    return json.dumps({"version": 1, "entries": entries}).encode()


def read_knowledge_bank(rng: Random, folder: Path) -> None:
    """A knowledge bank of lowerings or of tiles."""
    content, checked = rng.choice(
        ((BUILT_IN.read_bytes(), checked_lowering), (_tile_bank(), checked_tile))
    )
    path = folder / "bank.json"
    changed = _changed_json(rng, content) if rng.random() < 0.6 else mutate_bytes(rng, content)
    path.write_bytes(changed)
    read_bank(path, checked)


def read_folder_instead(rng: Random, folder: Path) -> None:
    """A folder, a pipe or nothing where a file should be."""
    path = folder / rng.choice(("w.npz", "w.pth", "w.ckpt", "w.safetensors", "records.json"))
    match rng.randrange(3):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
    if path.name == "records.json":
        Records(**section(root=folder)).read(folder)
    elif path.suffix == ".npz" and rng.random() < 0.5:
        NumpyArchive(**section(root=path, classes=None)).read(folder)
    else:
        read_weights(path)
    raise DataError("read what is no file")
