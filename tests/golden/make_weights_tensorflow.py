"""Writes weights/tensorflow/: one small network in each of TensorFlow's and Keras's files.

    python tests/golden/make_weights_tensorflow.py    with tensorflow-cpu 2.21.0, tf_keras 2.21.0

`logits.npz` has images NHWC and the network's logits in evaluation.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

FOLDER = Path(__file__).parent / "weights" / "tensorflow"
CLASSES = 10


def make_network(library: Any) -> Any:
    """Make the network of Keras 3 or Keras 2."""
    layers = library.layers
    return library.Sequential(
        [
            layers.Input((4, 4, 2)),
            layers.Conv2D(6, 3, padding="same", name="stem"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.Conv2DTranspose(4, 2, strides=2, padding="same"),
            layers.Flatten(),
            layers.Dense(5, activation="relu"),
            layers.Dense(5, name="middle"),
            layers.Dense(5),
            layers.Dense(CLASSES),
        ]
    )


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(3)
    images = random.normal(size=(4, 4, 4, 2)).astype(np.float32)
    network = make_network(keras)
    older = make_network(tf_keras)
    for model in (network, older):
        model.compile("adam", "mse")
        model.fit(images, np.zeros((4, CLASSES)), verbose=0)
    weights = [random.normal(size=w.shape) * 0.3 for w in network.get_weights()]
    network.set_weights([np.abs(w) if i == 5 else w for i, w in enumerate(weights)])
    older.set_weights(network.get_weights())
    logits = network(images, training=False).numpy()
    np.testing.assert_allclose(older(images, training=False).numpy(), logits, atol=1e-5)
    np.savez_compressed(FOLDER / "logits.npz", images=images, logits=logits)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tf.train.Checkpoint(model=network, optimizer=network.optimizer).write(folder / "keras3")
        older.save_weights(folder / "keras2")
        network.export(folder / "saved", verbose=False)
        write_plain(folder / "names", network)
        for stem in ("keras3", "keras2", "names", "saved/variables/variables"):
            for file in folder.glob(f"{stem}.*"):
                if file.suffix == ".index" or ".data-" in file.name:
                    name = file.name.replace("variables.", "saved_model.")
                    shutil.copyfile(file, FOLDER / name)
        network.save(folder / "network.keras")
        write_without_dates(folder / "network.keras")
    network.save_weights(FOLDER / "keras3.weights.h5")
    older.save_weights(FOLDER / "keras2.h5")


def write_plain(path: Path, network: Any) -> None:
    """Write a checkpoint of TensorFlow 1: variables by names that are given, without objects."""
    names = "stem/kernel stem/bias bn/gamma bn/beta bn/moving_mean bn/moving_variance"
    names += " wise/depthwise_kernel wise/bias up/kernel up/bias"
    names = [*names.split(), *(f"fc{n}/{leaf}" for n in range(4) for leaf in ("weights", "biases"))]
    values = dict(zip(names, network.get_weights(), strict=True))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in values.items():
            tf.compat.v1.get_variable(name, initializer=value)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(path), write_meta_graph=False)


def write_without_dates(file: Path) -> None:
    """Write a `.keras` without the date and the addresses of objects that Keras puts in."""
    target = FOLDER / "keras3.keras"
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(target, "w") as archive:
        for name in ("config.json", "model.weights.h5"):
            content = source.read(name)
            if name == "config.json":
                content = re.sub(rb'("shared_object_id": )\d+', rb"\g<1>0", content)
            archive.writestr(zipfile.ZipInfo(name), content)


if __name__ == "__main__":
    main()
