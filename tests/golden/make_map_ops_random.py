"""What MindSpore's random ops draw, many times over, written to map_ops/random.npz.

    python tests/golden/make_map_ops_random.py    with mindspore 2.10.0

Images tell what was drawn: pixels hold their own place, or one level all over. A
seeded op of MindSpore draws the same at every call, so that every call is given a seed of its own.
"""

from __future__ import annotations

from pathlib import Path

import mindspore.dataset as ds
import numpy as np
from mindspore.dataset import vision
from mindspore.dataset.vision import AutoAugmentPolicy, ImageBatchFormat, Inter

FILE = Path(__file__).parent / "map_ops" / "random.npz"
HEIGHT, WIDTH = 18, 24
DRAWS = 4000
BATCH = 4
MIXED = (6, 8)
UNSEEDED = 5489
"""MindSpore takes the default seed of mt19937 for none, and draws something else every time."""
POLICY_IMAGE = np.random.default_rng(22).integers(0, 200, (11, 13, 3), dtype=np.uint8)


def places(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """An image whose pixels are their row + 1 and column + 1."""
    rows, columns = np.mgrid[1 : height + 1, 1 : width + 1]
    return np.stack([rows, columns, rows], axis=-1).astype(np.uint8)


def set_seed(series: int, draw: int) -> None:
    """A seed for every draw of every series; these count from 1, which leaves 0 for `UNSEEDED`."""
    seed = series * DRAWS + draw
    ds.config.set_seed(0 if seed == UNSEEDED else seed)


def draw_output(op, image: np.ndarray, series: int):
    """The op's output, again and again."""
    for draw in range(DRAWS):
        set_seed(series, draw)
        yield op(image)


def resized_crops() -> np.ndarray:
    """Top, left, height and width of every crop: nearest pixels of a larger image show all."""
    op = vision.RandomResizedCrop((64, 64), (0.2, 0.9), (0.5, 3.0), Inter.NEAREST, 2)
    ends = [(*out[0, 0, :2], *out[-1, -1, :2]) for out in draw_output(op, places(), 1)]
    top, left, bottom, right = np.array(ends, int).T
    return np.stack([top - 1, left - 1, bottom - top + 1, right - left + 1], axis=-1)


def crops() -> np.ndarray:
    """The first pixel of every crop of a padded image, (0, 0) where that is padding."""
    op = vision.RandomCrop((HEIGHT, WIDTH), (2, 1, 0, 3))
    return np.array([out[-5, 5, :2] for out in draw_output(op, places(), 2)], int)


def cutouts() -> np.ndarray:
    """First and last row and column of every hole, all -1 where there is none."""
    results = []
    for out in draw_output(vision.CutOut(5, 1), places(), 3):
        rows, columns = (np.flatnonzero((out[..., 0] == 0).any(axis=axis)) for axis in (1, 0))
        results.append((rows[0], rows[-1], columns[0], columns[-1]) if len(rows) else (-1,) * 4)
    return np.array(results, int)


def flips() -> np.ndarray:
    """Whether an image was turned upside down."""
    out = draw_output(vision.RandomVerticalFlip(0.3), places(), 4)
    return np.array([image[0, 0, 0] != 1 for image in out], int)


def brightness() -> np.ndarray:
    """The level that 200 becomes."""
    image = np.full((1, 1, 3), 200, np.uint8)
    op = vision.RandomColorAdjust(brightness=(0.25, 1.0))
    return np.array([out[0, 0, 0] for out in draw_output(op, image, 5)], int)


def mix_ups() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batches, and what images and labels became."""
    images = np.random.default_rng(23).integers(0, 256, (BATCH, 5, 7, 3), dtype=np.uint8)
    op, labels = vision.MixUpBatch(0.4), np.eye(BATCH, dtype=np.float32)
    mixed = []
    for draw in range(DRAWS // 4):
        set_seed(6, draw)
        mixed.append(op(images, labels))
    return images, np.stack([pair[0] for pair in mixed[:40]]), np.stack([p[1] for p in mixed])


def cut_mixes() -> np.ndarray:
    """Per sample: partner or -1 where nothing shows, first and last row and column + 1, share."""
    levels = np.arange(1, BATCH + 1, dtype=np.uint8)
    images = np.broadcast_to(levels[:, None, None, None], (BATCH, *MIXED, 3)).copy()
    op = vision.CutMixBatch(ImageBatchFormat.NHWC, 1.0, 0.7)
    results = []
    for draw in range(DRAWS // 2):
        set_seed(7, draw)
        out, labels = op(images, np.eye(BATCH, dtype=np.float32))
        for position in range(BATCH):
            box = out[position, ..., 0] != position + 1
            rows, columns = np.flatnonzero(box.any(axis=1)), np.flatnonzero(box.any(axis=0))
            edges = (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1) if len(rows) else (0,) * 4
            partner = out[position][box][0, 0] - 1 if len(rows) else -1
            results.append((partner, *edges, labels[position, position]))
    return np.array(results, np.float32)


def outcomes(op, image: np.ndarray, series: int) -> tuple[np.ndarray, np.ndarray]:
    """The different images that come out, and how often each."""
    counts: dict[bytes, int] = {}
    for out in draw_output(op, image, series):
        counts[out.tobytes()] = counts.get(out.tobytes(), 0) + 1
    shape = (-1, *image.shape)
    images = np.frombuffer(b"".join(counts), np.uint8).reshape(shape)
    return images, np.array(list(counts.values()))


def policies() -> dict[str, np.ndarray]:
    """What the policies make of one image."""
    ops = {
        f"rand_augment/{magnitude}/{name}": vision.RandAugment(1, magnitude, 31, inter, 7)
        for magnitude in (1, 9, 22)
        for name, inter in (("nearest", Inter.NEAREST), ("linear", Inter.LINEAR))
    }
    ops |= {
        f"auto_augment/{policy.value}/nearest": vision.AutoAugment(policy, fill_value=7)
        for policy in AutoAugmentPolicy
    }
    orders = vision.RandomColorAdjust((0.5, 0.5), (1.5, 1.5), (1.25, 1.25), (0.2, 0.2))
    ops["random_color_adjust/0/orders"] = orders
    made = {"policy_image": POLICY_IMAGE}
    for series, (name, op) in enumerate(ops.items(), start=8):
        made[f"{name}/images"], made[f"{name}/counts"] = outcomes(op, POLICY_IMAGE, series)
    return made


def main() -> None:
    """Ask MindSpore for every case."""
    images, mixed, labels = mix_ups()
    np.savez_compressed(
        FILE,
        resized_crops=resized_crops().astype(np.int8),
        crops=crops().astype(np.int8),
        cutouts=cutouts().astype(np.int8),
        flips=flips().astype(np.int8),
        brightness=brightness().astype(np.int16),
        mix_up_images=images,
        mix_up_mixed=mixed,
        mix_up_labels=labels,
        cut_mixes=cut_mixes(),
        **policies(),
    )


if __name__ == "__main__":
    main()
