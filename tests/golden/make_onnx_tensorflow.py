"""Writes onnx/tensorflow.onnx and .npz: a small Keras network as tf2onnx converts it.

    python tests/golden/make_onnx_tensorflow.py        with tensorflow-cpu 2.21.0 and tf2onnx 1.17.0

The arrays are those of make_onnx.py, with images NCHW; the network reads them NHWC.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf
import tf2onnx
from tensorflow import keras
from tensorflow.keras import layers

FOLDER = Path(__file__).parent / "onnx"
CLASSES, BATCH, STEPS, RATE = 3, 4, 5, 0.05


def main() -> None:
    """Write the network, and what it computes."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            layers.Input((12, 12, 3)),
            layers.Conv2D(8, 3, padding="same", strides=2),
            layers.ReLU(6.0),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.AveragePooling2D(2),
            layers.Conv2D(6, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2, padding="same"),
            layers.Flatten(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    # tf2onnx leaves biases of zero out.
    for weight in model.trainable_variables:
        if len(weight.shape) == 1:
            weight.assign(tf.random.normal(weight.shape, stddev=0.1))
    images = np.random.default_rng(3).normal(size=(BATCH, 12, 12, 3)).astype(np.float32)
    labels = np.arange(BATCH) % CLASSES
    signature = (tf.TensorSpec((None, 12, 12, 3), tf.float32, name="images"),)
    function = tf.function(lambda x: model(x, training=False), input_signature=signature)
    tf2onnx.convert.from_function(
        function, signature, opset=15, output_path=str(FOLDER / "tensorflow.onnx")
    )
    probabilities = model(images, training=False).numpy()
    # A softmax says its logits up to one number for each sample.
    logits = np.log(probabilities)
    losses = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            loss = keras.losses.sparse_categorical_crossentropy(labels, outputs)
            loss = tf.reduce_mean(loss)
        for weight, gradient in zip(
            model.trainable_variables,
            tape.gradient(loss, model.trainable_variables),
            strict=True,
        ):
            weight.assign_sub(RATE * gradient)
        losses.append(float(loss))
    arrays = {"logits": logits, "losses": losses, "labels": labels}
    np.savez_compressed(FOLDER / "tensorflow.npz", images=images.transpose(0, 3, 1, 2), **arrays)


if __name__ == "__main__":
    main()
