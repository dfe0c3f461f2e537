"""Write a TFRecord file with TensorFlow, and the orders of its `interleave`, into `tfrecord/`.

python tests/golden/make_tfrecord.py        with tensorflow-cpu 2.21.0
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tensorflow as tf

FOLDER = Path(__file__).parent / "tfrecord"
CYCLES = (1, 2, 3, 10)
FILES = ([3, 1, 2], [5, 5, 5, 5], [1, 0, 7, 2, 0, 3, 4], [0, 0, 2], [12])


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    features = []
    with tf.io.TFRecordWriter(str(FOLDER / "train.tfrecord")) as writer:
        for number in range(4):
            pixels = rng.integers(0, 256, 6, np.uint8).tobytes()
            weights = rng.normal(size=3).astype(np.float32)
            example = tf.train.Example(
                features=tf.train.Features(
                    feature={
                        "image_raw": _feature(bytes_list=tf.train.BytesList(value=[pixels])),
                        "label": _feature(int64_list=tf.train.Int64List(value=[number % 2])),
                        "weights": _feature(float_list=tf.train.FloatList(value=weights)),
                        "height": _feature(int64_list=tf.train.Int64List(value=[3])),
                        "width": _feature(int64_list=tf.train.Int64List(value=[2])),
                        "depth": _feature(int64_list=tf.train.Int64List(value=[1])),
                    }
                )
            )
            writer.write(example.SerializeToString())
            features.append(
                {
                    "image_raw": pixels.hex(),
                    "label": [number % 2],
                    "weights": weights.astype(float).tolist(),
                }
            )
    (FOLDER / "features.json").write_text(json.dumps(features) + "\n")
    orders = [
        {"files": files, "cycle_length": cycle, "order": _interleave(files, cycle)}
        for files in FILES
        for cycle in CYCLES
    ]
    definition = f"tensorflow {version('tensorflow-cpu')}, tf.data.Dataset.interleave"
    result = {"definition": definition, "orders": orders}
    (FOLDER / "interleave.json").write_text(json.dumps(result) + "\n")


def _feature(**kind: object) -> tf.train.Feature:
    return tf.train.Feature(**kind)


def _interleave(files: list[int], cycle_length: int) -> list[list[int]]:
    """The file, and the sample in it, at each position."""
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(len(files)))
    sizes = tf.constant(files, tf.int64)

    def open_file(number: tf.Tensor) -> tf.data.Dataset:
        samples = tf.data.Dataset.range(sizes[number])
        return samples.map(lambda sample: tf.stack([number, sample]))

    read = numbers.interleave(open_file, cycle_length=cycle_length, block_length=1)
    return [pair.tolist() for pair in read.as_numpy_iterator()]


if __name__ == "__main__":
    main()
