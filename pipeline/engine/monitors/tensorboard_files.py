"""Files of TensorBoard: events with scalars, and the projector's with pictures.

A record (TFRecord, little-endian) is the length of its data (uint64), the masked CRC-32C of these 8
bytes, the data, and the masked CRC-32C of the data. The data is an `Event` as a protocol buffer.
Events of scalars differ in a few bytes at fixed offsets, so they are encoded column by column.

`projector_config.pbtxt`, in the folder of the events, names the files of vectors, labels and
pictures in `embeddings/`.
"""

from __future__ import annotations

import io
import math
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.errors import printable
from pipeline.core.files.atomic_write import write_whole
from pipeline.engine.monitors.live_status import BOARD_CONFIG, BOARD_FOLDER

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

VERSION = "brain.Event:2"
PREFIX = "events.out.tfevents."
EVENTS_TO_PURGE = 3
"""Number of events at the start of a file that purges the events of earlier files: two with the
version, and the start of a session."""
MAX_PURGE_BYTES = 1000
"""Upper bound of the length of each of these events."""
PICTURED_CHANNELS = (1, 3, 4)
"""Numbers of channels of images that can be drawn."""
SPRITE_PIXELS = 8192
"""Longest side of a sheet of pictures, as browsers can show it."""
PICTURE_PIXELS = 64
"""Longest side of a picture on a sheet."""
CAPTION_PIXELS = 16
"""Height of a caption."""
LEAST_WIDTH_PIXELS = 96
"""Least width of a picture with a caption."""
MAX_CHARACTERS = 15
"""Largest number of characters of a caption."""
WRONG = (179, 38, 30)
RIGHT = (29, 36, 41)
"""Colours of captions, as RGB."""


class EventFile:
    """A new file of events in `folder`, which must exist. Raises OSError if it can't be written."""

    def __init__(self, folder: Path, suffix: str) -> None:
        from tensorboardX.proto.event_pb2 import Event

        name = f"{PREFIX}{_choose_stamp(folder)}.{socket.gethostname()}{suffix}"
        self._file = (folder / name).open("xb")
        self.add(Event(wall_time=time.time(), file_version=VERSION))

    def add(self, event: Event) -> None:
        """Append an event of any kind."""
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        head = struct.pack("<Q", len(data))
        for part in (head, data):
            self._file.write(part + struct.pack("<I", masked_crc32c(part)))

    def purge_after(self, step: int) -> None:
        """Make readers drop all events of earlier files that are after `step`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        now = time.time()
        self.add(Event(wall_time=now, step=step + 1, file_version=VERSION))
        start = SessionLog(status=SessionLog.START)
        self.add(Event(wall_time=now, step=step + 1, session_log=start))

    def add_scalars(
        self, tags: Sequence[str], steps: np.ndarray, wall_times: np.ndarray, values: np.ndarray
    ) -> None:
        """Append events with `values` (n, tags) at `steps` (n,), `wall_times` (n,) since 1970."""
        self._file.write(encode_scalars(tags, steps, wall_times, values))

    def flush(self) -> None:
        """Pass all events to the operating system."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def find_purging(folder: Path, step: int, suffix: str) -> list[Path]:
    """Return the event files whose names end in `suffix` and that purge the events after `step`."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    files = []
    for path in sorted(folder.glob(f"{PREFIX}*{suffix}")):
        with path.open("rb") as file, suppress(struct.error, DecodeError):
            for _ in range(EVENTS_TO_PURGE):
                (length,) = struct.unpack("<Q", file.read(8))
                record = file.read(min(length, MAX_PURGE_BYTES) + 8)
                event = Event.FromString(record[4:-4])  # without its two checksums
            if event.session_log.status == SessionLog.START and event.step == step + 1:
                files.append(path)
    return files


def _choose_stamp(folder: Path) -> int:
    """Return the seconds since 1970, but more than the stamps of all files in the folder: even if
    the clock was set back, TensorBoard must read the new file last, and it sorts them by name."""
    names = [file.name.removeprefix(PREFIX) for file in folder.glob(f"{PREFIX}*")]
    stamps = [name.partition(".")[0] for name in names]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdecimal())])


def encode_scalars(
    tags: Sequence[str], steps: np.ndarray, wall_times: np.ndarray, values: np.ndarray
) -> bytes:
    """Return the records of `EventFile.add_scalars`: an event for each step, with all tags."""
    step_bytes = _count_varint_bytes(steps)
    bounds = [0, *(np.flatnonzero(np.diff(step_bytes)) + 1).tolist(), len(steps)]
    return b"".join(
        _encode_records(
            tags, int(step_bytes[start]), steps[start:end], wall_times[start:end], values[start:end]
        )
        for start, end in pairwise(bounds)
        if start < end
    )


def _encode_records(
    tags: Sequence[str],
    step_bytes: int,
    steps: np.ndarray,
    wall_times: np.ndarray,
    values: np.ndarray,
) -> bytes:
    """Encode events whose steps have varints of `step_bytes`, so that all have the same length."""
    template, offsets = _make_template(tuple(tags), step_bytes)
    data = np.tile(np.frombuffer(template, np.uint8), (len(steps), 1))
    # The template begins with a key, 8 bytes of time, a key and the step.
    data[:, 1:9] = _view_bytes(wall_times, "<f8")
    data[:, 10 : 10 + step_bytes] = _encode_varints(steps, step_bytes)
    for offset, column in zip(offsets, values.T, strict=True):
        data[:, offset : offset + 4] = _view_bytes(column, "<f4")
    head = np.frombuffer(struct.pack("<Q", len(template)), np.uint8)[None]
    records = np.empty((len(steps), 12 + len(template) + 4), np.uint8)
    records[:, :8] = head
    records[:, 8:12] = _view_bytes(masked_crc(head), "<u4")
    records[:, 12:-4] = data
    records[:, -4:] = _view_bytes(masked_crc(data), "<u4")
    return records.tobytes()


@cache
def _make_template(tags: tuple[str, ...], step_bytes: int) -> tuple[bytes, list[int]]:
    """Return an event with any numbers, and the offset of each value."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=0.0) for tag in tags]
    ends = [*accumulate(Summary(value=[value]).ByteSize() for value in values)]
    step = 1 << 7 * (step_bytes - 1)
    event = Event(wall_time=1.0, step=step, summary=Summary(value=values)).SerializeToString()
    # The summary is last, and each value ends with its 4 bytes.
    return event, [len(event) - ends[-1] + end - 4 for end in ends]


def _count_varint_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the lengths in bytes of non-negative numbers as varints, int (n,)."""
    return 1 + ((numbers[:, None] >> np.arange(7, 63, 7)) > 0).sum(axis=1)


def _encode_varints(numbers: np.ndarray, length: int) -> np.ndarray:
    """Return varints, uint8 (n, length), of 7 bits a byte; the eighth is set but in the last."""
    groups = (numbers[:, None] >> (7 * np.arange(length))) & 0x7F
    groups[:, :-1] |= 0x80
    return groups.astype(np.uint8)


def _view_bytes(numbers: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(numbers, dtype).view(np.uint8).reshape(len(numbers), -1)


def masked_crc(data: np.ndarray) -> np.ndarray:
    """Return the masked CRC-32C of each row of uint8 (n, length), uint32 (n,).

    The mask, a rotation and a sum, is TFRecord's (tensorflow/core/lib/hash/crc32c.h).
    """
    from tensorboardX.crc32c import CRC_TABLE

    table = np.array(CRC_TABLE, np.uint32)
    crc = np.full(len(data), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(data.T):
        crc = table[(crc ^ column) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)


def write_embeddings(
    board: Path, vectors: np.ndarray, labels: Sequence[str], images: np.ndarray | None
) -> None:
    """Write vectors, float32 (n, features), their labels, and images (n, H, W, C) or None.

    Earlier files are replaced. Images with other than 1, 3 or 4 channels are left out. Raises
    OSError if the files can't be written.
    """
    folder = board / BOARD_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    rows = ("\t".join(f"{value:.7g}" for value in row) for row in vectors.tolist())
    write_whole(folder / "vectors.tsv", "".join(f"{row}\n" for row in rows))
    texts = (" ".join(printable(label).split()) or "-" for label in labels)
    write_whole(folder / "labels.tsv", "".join(f"{text}\n" for text in texts))
    sprite = ""
    if images is not None and images.shape[-1] in PICTURED_CHANNELS:
        sheet, (height, width) = _draw_sheet(stretch_range(images))
        write_whole(folder / "pictures.png", sheet)
        sprite = (
            f'  sprite {{ image_path: "{BOARD_FOLDER}/pictures.png" '
            f"single_image_dim: {width} single_image_dim: {height} }}\n"
        )
    # Written last, since it names the other files.
    write_whole(
        board / BOARD_CONFIG,
        'embeddings {\n  tensor_name: "input of the last layer"\n'
        f'  tensor_path: "{BOARD_FOLDER}/vectors.tsv"\n'
        f'  metadata_path: "{BOARD_FOLDER}/labels.tsv"\n'
        f"{sprite}}}\n",
    )


def _draw_sheet(images: np.ndarray) -> tuple[bytes, tuple[int, int]]:
    """Return a square sheet of images uint8 (n, H, W, C) as PNG, and a picture's height and width.
    Of pictures that are larger than `PICTURE_PIXELS`, or too large for the sheet, only every
    second, third, ... pixel is drawn."""
    from PIL import Image

    side = math.ceil(math.sqrt(len(images)))
    max_pixels = min(PICTURE_PIXELS, SPRITE_PIXELS // side)
    step = math.ceil(max(images.shape[1:3]) / max_pixels)
    pictures = images[:, ::step, ::step]
    height, width = pictures.shape[1:3]
    cells = np.zeros((side * side, *pictures.shape[1:]), np.uint8)
    cells[: len(pictures)] = pictures
    rows = cells.reshape(side, side, height, width, -1).swapaxes(1, 2)
    sheet = rows.reshape(side * height, side * width, -1)
    file = io.BytesIO()
    Image.fromarray(sheet[..., 0] if sheet.shape[-1] == 1 else sheet).save(file, "PNG")
    return file.getvalue(), (height, width)


def stretch_range(images: np.ndarray) -> np.ndarray:
    """Return images (n, H, W, C) as uint8, with the range of each stretched to 0 to 255."""
    values = images.astype(np.float64)
    low = values.min(axis=(1, 2, 3), keepdims=True)
    high = values.max(axis=(1, 2, 3), keepdims=True)
    return ((values - low) / np.maximum(high - low, 1e-12) * 255).astype(np.uint8)


def add_captions(
    images: np.ndarray, captions: Sequence[str], wrong: Sequence[bool] | None = None
) -> np.ndarray:
    """Return images uint8 (n, H, W, C), enlarged, with captions below: uint8 (n, H', W', 3).

    A caption is red if `wrong` is true for its image. C is 1, 3 or 4.
    """
    from PIL import Image, ImageDraw

    count, height, width, channels = images.shape
    scale = max(1, -(-LEAST_WIDTH_PIXELS // width))
    result = np.full((count, height * scale + CAPTION_PIXELS, width * scale, 3), 255, np.uint8)
    wrong = wrong or [False] * count
    for number, (image, caption, is_wrong) in enumerate(zip(images, captions, wrong, strict=True)):
        picture = Image.fromarray(image[..., 0] if channels == 1 else image).convert("RGB")
        size = width * scale, height * scale
        canvas = Image.fromarray(result[number])
        canvas.paste(picture.resize(size, Image.Resampling.NEAREST), (0, 0))
        text = caption if len(caption) <= MAX_CHARACTERS else f"{caption[: MAX_CHARACTERS - 1]}…"
        corner = (2, height * scale + 1)
        colour = WRONG if is_wrong else RIGHT
        ImageDraw.Draw(canvas).text(corner, text, fill=colour, font_size=12)
        result[number] = np.asarray(canvas)
    return result
