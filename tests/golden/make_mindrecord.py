"""Write MindRecord files with MindSpore, and the samples that it reads, into `mindrecord.zip`.

python tests/golden/make_mindrecord.py        with mindspore 2.10.0 and pillow 13.0.0
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from mindspore.mindrecord import FileReader, FileWriter
from PIL import Image

ARCHIVE = Path(__file__).parent / "mindrecord.zip"
HEADER_BYTES = 1 << 14
PAGE_BYTES = 1 << 15
"""The smallest sizes that MindSpore writes."""


def main() -> None:
    rng = np.random.default_rng(0)
    values = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, (schema, index, shards, samples) in _make_sets(rng).items():
            _write(name, schema, index, shards, samples)
            first = f"{name}0" if shards > 1 else name
            values[name] = [
                {key: _to_json(value) for key, value in sorted(sample.items())}
                for sample in FileReader(first).get_next()
            ]
        Path("values.json").write_text(json.dumps(values) + "\n")
        with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path().iterdir()):
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), 8, 9)


def _make_sets(rng: np.random.Generator) -> dict[str, tuple[Any, Any, int, list[dict[str, Any]]]]:
    """Schema, index fields, number of shards and samples, by name of the file."""
    images = rng.integers(0, 256, (12, 6, 5, 3), np.uint8)
    numbers = np.array([1, -1, 300, -300, 70000, -70000, 2**40, -(2**40), 127, 128, -128, -129])
    return {
        "train.mindrecord": (
            {"name": {"type": "string"}, "label": {"type": "int32"}, "data": {"type": "bytes"}},
            ["label", "name"],
            3,
            [
                {"name": f"größe {n}.png", "label": n % 3, "data": _encode(image)}
                for n, image in enumerate(images)
            ],
        ),
        "eval.mindrecord": (
            {"name": {"type": "string"}, "label": {"type": "int32"}, "data": {"type": "bytes"}},
            ["label"],
            1,
            [
                {"name": f"{n}.png", "label": n % 3, "data": _encode(image)}
                for n, image in enumerate(images[:4])
            ],
        ),
        "arrays.mindrecord": (
            {
                "f32": {"type": "float32", "shape": [2, 3]},
                "f64": {"type": "float64", "shape": [-1]},
                "i32": {"type": "int32", "shape": [2, 2]},
                "i64": {"type": "int64", "shape": [-1]},
                "label": {"type": "int64"},
                "score": {"type": "float32"},
                "ratio": {"type": "float64"},
                "raw": {"type": "bytes"},
            },
            None,
            1,
            [
                {
                    "f32": rng.normal(size=(2, 3)).astype(np.float32),
                    "f64": rng.normal(size=n + 1),
                    "i32": rng.integers(-(2**31), 2**31, (2, 2)).astype(np.int32) >> 8 * n,
                    "i64": np.roll(numbers, n)[: 12 - n],
                    "label": int(numbers[n]),
                    "score": float(np.float32(1.1 * n)),
                    "ratio": 1 / (n + 3),
                    "raw": bytes(range(n + 1)),
                }
                for n in range(4)
            ],
        ),
        "tokens.mindrecord": (
            {"ids": {"type": "int32", "shape": [-1]}, "label": {"type": "int32"}},
            ["label"],
            1,
            [{"ids": rng.integers(0, 30000, 8).astype(np.int32), "label": n % 2} for n in range(6)],
        ),
        "pages.mindrecord": (
            {"label": {"type": "int64"}, "data": {"type": "bytes"}},
            ["label"],
            1,
            [{"label": n, "data": bytes([n]) * 9000} for n in range(8)],
        ),
        "scalars.mindrecord": (
            {"x": {"type": "float64"}, "label": {"type": "int64"}, "text": {"type": "string"}},
            None,
            1,
            [{"x": n / 3, "label": -5 * n, "text": "ä" * n} for n in range(3)],
        ),
    }


def _write(
    name: str, schema: Any, index: list[str] | None, shards: int, samples: list[dict[str, Any]]
) -> None:
    writer = FileWriter(name, shards, overwrite=True)
    writer.set_header_size(HEADER_BYTES)
    writer.set_page_size(PAGE_BYTES)
    writer.add_schema(schema, "golden values")
    if index is not None:
        writer.add_index(index)
    writer.write_raw_data(samples)
    writer.commit()


def _encode(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": value.shape, "values": value.ravel().tolist()}
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
