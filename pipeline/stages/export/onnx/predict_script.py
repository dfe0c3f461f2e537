"""Predict samples with an exported network: python predict.py [OPTION] FILE|FOLDER ...

Options: --int8 and --weights choose model_int8.onnx and model_weights.onnx, if the export has them;
--top N prints N classes.
Needs onnxruntime, numpy and pillow, and the files model.onnx and model.json in the same folder.
Reads images, WAV files and .npy files of samples, and prints a line for each sample. For a network
with several inputs, reads .npz files with an array for each.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import wave
import zipfile
import zlib
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SUFFIXES = (*IMAGE_SUFFIXES, ".wav", ".npy", ".npz")
MODES = {1: "L", 3: "RGB"}
PROGRAM_OPTIONS = ("--int8", "--weights")
# fmt: off
UNREADABLE = (
    OSError, ValueError, EOFError, LookupError, SyntaxError, TypeError, wave.Error,
    zipfile.BadZipFile, zlib.error, struct.error, Image.DecompressionBombError,
)
# fmt: on
"""Errors that numpy, Pillow and wave raise for other and damaged files."""


class OnnxNetwork:
    """The network of a folder, run by onnxruntime on the CPU.

    Samples have the shape `shape`, such as (height, width, channels) of images, and the dataset's
    type and values. Several inputs are a dictionary by name.
    """

    def __init__(self, folder: Path, program: str = "program") -> None:
        self.description = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        files = self.description["onnx"]
        if program not in files:
            raise SystemExit(
                f"there is no model_{program}.onnx here; export with --to onnx --{program}"
            )
        self.session = onnxruntime.InferenceSession(
            str(folder / files[program]), providers=["CPUExecutionProvider"]
        )
        self.inputs = files.get("inputs") or [files["input"]]
        column = self.description["columns"][self.inputs[0]]
        self.shape = tuple(column["shape"])
        self.dtype = np.dtype(column["dtype"])

    def fit(self, array: np.ndarray, name: str) -> np.ndarray:
        """Return the samples of an array, (n, *shape) in the type of the input `name`.

        The last axis may be left out if it has one value. Raises ValueError for another shape, for
        no samples, and for values that the input's type can't hold.
        """
        column = self.description["columns"][name]
        shape, dtype = tuple(column["shape"]), np.dtype(column["dtype"])
        is_whole = shape in (array.shape, array.shape[1:])
        num_sizes = min(len(shape) - 1, array.ndim)
        if not is_whole and shape == (*array.shape[array.ndim - num_sizes :], 1):
            array = array[..., np.newaxis]
        samples = array[np.newaxis] if array.shape == shape else array
        if samples.shape[1:] != shape or not len(samples):
            sizes = ", ".join(map(str, shape))
            raise ValueError(f"{name} has shape {array.shape}; must be {shape} or (n, {sizes})")
        with np.errstate(invalid="ignore"):
            converted = samples.astype(dtype)
        if dtype.kind != "f" and not np.array_equal(converted, samples):
            raise ValueError(f"{name} has values that aren't {dtype}")
        return converted

    def predict(self, samples: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        """Return logits float32 (n, ...) of samples (n, *shape), or of several inputs by name."""
        named = samples if isinstance(samples, dict) else {self.inputs[0]: samples}
        return self.session.run([self.description["onnx"]["output"]], named)[0]

    def read(self, file: Path) -> np.ndarray | dict[str, np.ndarray]:
        """Return the samples of a file, (n, *shape), or of several inputs by name.

        An image file is turned upright by its EXIF tag and resized. A .npy file may have several.
        Raises one of `UNREADABLE` for other files.
        """
        if file.suffix.lower() == ".wav":
            return self.read_sound(file)
        if len(self.inputs) > 1 or file.suffix.lower() == ".npz":
            return self.read_columns(file)
        if file.suffix.lower() == ".npy":
            return self.fit(np.load(file, allow_pickle=False), self.inputs[0])
        is_image = self.dtype == np.uint8 and len(self.shape) == 3 and self.shape[2] in MODES
        if not is_image:
            raise ValueError(
                f"the network reads {self.dtype} of shape {self.shape}: give a .npy file"
            )
        height, width, channels = self.shape
        with Image.open(file) as image:
            upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):  # grey levels of 16 bits, which Pillow would clip
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        elif upright.mode in ("I", "F"):
            raise ValueError(f"its pixels are {upright.mode}, not 8 or 16 bits per channel")
        pixels = upright.convert(MODES[channels])
        if pixels.size != (width, height):
            pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(pixels).reshape(1, height, width, channels)

    def read_sound(self, file: Path) -> np.ndarray:
        """Return the sound of a WAV file of whole numbers, cut or padded to (n, samples)."""
        audio = self.description.get("audio")
        if audio is None:
            raise ValueError(f"the network reads {self.dtype} of shape {self.shape}, not sound")
        with wave.open(str(file), "rb") as sound:
            channels, width, rate, frames = sound.getparams()[:4]
            content = sound.readframes(frames)
        if not content or len(content) != frames * channels * width:
            raise ValueError("it is empty or truncated")
        if rate != audio["rate_hz"] or (channels > 1 and audio["channels"] != "mono"):
            raise ValueError(
                f"it has {rate} Hz and {channels} channels; the network reads "
                f"{audio['rate_hz']} Hz, {audio['channels']}"
            )
        length = audio["length"]
        for is_other, key in ((frames > length, "longer"), (frames < length, "shorter")):
            if is_other and audio[key] == "refuse":
                raise ValueError(f"it has {frames:,} samples; the network reads {length:,}")
        numbers = np.zeros((len(content) // width, 4), np.uint8)
        numbers[:, 4 - width :] = np.frombuffer(content, np.uint8).reshape(-1, width)
        if width == 1:
            numbers[:, 3] ^= 0x80  # only 8 bits are unsigned
        values = (numbers.view("<i4") / 2.0**31).reshape(-1, channels).mean(axis=1)
        count = max(1, len(values) // length) if audio["longer"] == "windows" else 1
        samples = np.zeros(count * length, np.float32)
        samples[: len(values)] = values[: len(samples)]
        return samples.reshape(count, length)

    def read_columns(self, file: Path) -> dict[str, np.ndarray]:
        """Return the arrays of an .npz file that the network reads, by name."""
        names = ", ".join(self.inputs)
        if file.suffix.lower() != ".npz":
            raise ValueError(f"the network reads {names}: give an .npz file with them")
        with np.load(file, allow_pickle=False) as arrays:
            if missing := [name for name in self.inputs if name not in arrays.files]:
                raise ValueError(f"it lacks {', '.join(missing)}; must have {names}")
            columns = {name: self.fit(arrays[name], name) for name in self.inputs}
        if len({len(column) for column in columns.values()}) > 1:
            raise ValueError(f"{names} must have equally many samples")
        return columns

    def format_line(self, logits: np.ndarray, top: int) -> str:
        """Return the outputs of one sample as a line: numbers, or labels with probabilities."""
        names = self.description["classes"]
        targets = self.description["targets"]
        if targets["task"] == "matching":
            first, second = logits.astype(np.float64).reshape(2, -1)
            lengths = np.linalg.norm(first) * np.linalg.norm(second)
            return f"cosine {first @ second / (lengths or 1):.4f}"
        if targets["task"] == "regression":
            numbers = logits * np.array(targets["std"]) + np.array(targets["mean"])
            pairs = zip(names, numbers)  # noqa: B905
            return ", ".join(f"{name} {number:.6g}" for name, number in pairs)
        if targets["task"] == "sequence":
            path = logits.argmax(axis=-1)
            symbols = path[(np.diff(path, prepend=0) != 0) & (path > 0)]
            return " ".join(names[symbol] for symbol in symbols) or "no symbol"
        if logits.ndim != 1:
            return f"outputs of shape {logits.shape}"
        if targets["task"] == "multi_label":
            probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
            indices = [i for i in np.argsort(-probabilities) if probabilities[i] > 0.5]
        else:
            exponentials = np.exp(logits.astype(np.float64) - logits.max())
            probabilities = exponentials / exponentials.sum()
            indices = list(np.argsort(-probabilities, kind="stable")[:top])
        return ", ".join(f"{names[i]} {probabilities[i]:.4f}" for i in indices) or "no label"


def parse_arguments(arguments: list[str]) -> tuple[list[Path], int, str]:
    """Return the files, the number of classes of a line, and the key of the program.

    Raises ValueError for another option, and for a path where nothing is.
    """
    paths = []
    top = 1
    programs = [option[2:] for option in PROGRAM_OPTIONS if option in arguments]
    if len(programs) > 1:
        raise ValueError(f"{' and '.join(PROGRAM_OPTIONS)}: must be one of them")
    remaining = iter(arguments)
    for argument in remaining:
        name, separator, value = argument.partition("=")
        if name == "--top":
            value = value if separator else next(remaining, "")
            if not (value.isascii() and value.isdecimal() and int(value)):
                raise ValueError(f"--top {value!r}: must be a whole number from 1")
            top = int(value)
        elif argument.startswith("-") and argument not in PROGRAM_OPTIONS:
            known = ", ".join(PROGRAM_OPTIONS)
            raise ValueError(f"{argument}: there is no such option; must be {known} or --top N")
        elif argument not in PROGRAM_OPTIONS:
            paths.append(Path(argument))
    if absent := [path for path in paths if not path.exists()]:
        raise ValueError(f"{absent[0]}: there is no such file or folder")
    return paths, top, programs[0] if programs else "program"


def list_files(path: Path) -> list[Path]:
    """Return the files of samples in a folder and its subfolders, or the file itself."""
    if not path.is_dir():
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise SystemExit(f"{path}: holds no file that ends in one of {', '.join(SUFFIXES)}")
    return files


def main(arguments: list[str]) -> int:
    """Print a line for each sample of the files and folders; return the exit status."""
    try:
        paths, top, program = parse_arguments(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not paths:
        print((__doc__ or "").strip())
        return 2
    network = OnnxNetwork(Path(__file__).resolve().parent, program)
    for path in paths:
        for file in list_files(path):
            try:
                samples = network.read(file)
            except UNREADABLE as error:
                raise SystemExit(f"{file}: can't be read: {error}") from error
            predicted = network.predict(samples)
            for index, logits in enumerate(predicted):
                name = str(file) if len(predicted) == 1 else f"{file}[{index}]"
                line = f"{name}: {network.format_line(logits, top)}"
                # Names of files and classes may hold control characters.
                print(line if line.isprintable() else repr(line)[1:-1])
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe. Python flushes again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
