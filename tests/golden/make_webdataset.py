"""Write tars with the webdataset package, and what it reads in them, into `webdataset/`.

python tests/golden/make_webdataset.py        with webdataset 1.0.2 and pillow 13.0.0
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import webdataset
from braceexpand import braceexpand

FOLDER = Path(__file__).parent / "webdataset"
PATTERNS = ("train-{000..002}.tar", "{train,val}-{8..11}", "{3..1}", "a{,b}", "x{y}", "{a,{b,c}}z")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    pattern = str(FOLDER / "train-%03d.tar")
    with webdataset.ShardWriter(pattern, maxcount=4, mtime=0, verbose=0) as writer:
        for number in range(8):
            sample = {
                "__key__": f"folder.d/{number:04d}",
                "png": rng.integers(0, 256, (5, 4, 3), np.uint8),
                "cls": number % 3,
                "json": {"label": number % 2, "score": number / 4, "box": [0, 1, number, 2.5]},
                "txt": "cat" if number % 2 else "dog",
                "depth.npy": rng.normal(size=(5, 4)).astype("f"),
                "npy": rng.normal(size=(5, 4)).astype("f"),
            }
            writer.write(sample)
    urls = [str(FOLDER / f"train-{number:03d}.tar") for number in range(2)]
    samples = [
        {
            "key": sample["__key__"],
            "png": sample["png"].tolist(),
            "cls": sample["cls"],
            "json": sample["json"],
            "txt": sample["txt"],
            "npy": sample["npy"].astype(float).tolist(),
        }
        for sample in webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8")
    ]
    series = {pattern: list(braceexpand(pattern)) for pattern in PATTERNS}
    content = {"samples": samples, "series": series}
    (FOLDER / "read.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
