"""Tasks of `benchmarks.train`: the network, images and optimizer of all contestants.

A task is a recipe of this project with three changes: images are read from an .npz of uint8 in
memory (resized before if the recipe resizes), the only map ops left are rescaling and normalising,
and the learning rate is constant without label smoothing. Texts are read as bytes, which need no
map ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline import load_recipe
from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.data.columns import Split
from pipeline.data.order import SampleOrder
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Conv, MaxPool
from pipeline.models.modules.apply_layers import name_scopes
from pipeline.training.optimizers.first_order import AdamW, Momentum

Precision = Literal["float32", "bf16"]
PRECISIONS: Mapping[Precision, str] = {"float32": "O0", "bf16": "bf16"}
CLASSES = 10
BYTES = 256
EVALUATED = 16
RESIZED_AT_ONCE = 1024


@dataclass(frozen=True)
class TaskSpec:
    """A recipe, its overrides, and the number of training samples that are used.

    `mean` and `std` are of pixels in [0, 1], a value per channel; texts have none.
    """

    recipe: str
    overrides: tuple[str, ...]
    samples: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    padded_apart: float = 0.0
    """The largest relative difference of losses after the first, since PyTorch pads a strided
    convolution on other sides."""

    @property
    def reads_text(self) -> bool:
        """Whether samples are numbers of tokens, each with the next token as its label."""
        return not self.mean


# With the recipe's weights of deviation 0.02, the loss of LeNet-5 stays the same for 2,000 steps.
_LENET5_INIT = ("model.init.conv=he_normal", "model.init.dense=he_uniform", "model.init.bias=zeros")
_MNIST = ((0.1307,), (0.3081,))
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

_ADAMW = (
    *("optimizer=adamw", "train.optimizer.lr=0.0005", "train.optimizer.weight_decay=0.05"),
    "model.dropout=0.0",
)
# Peers have no Muon, which adds 0.5 % to the products of a step of 2,000 images.
_CNN6 = ("optimizer=momentum", "train.optimizer.lr=0.02", "train.optimizers=[]", "train.freeze=[]")
_VIT = ("model=vit_tiny", "model.patch=4", "model.blocks=6", *_ADAMW)
_GPT = ("model.features=256", "model.hidden=1024", "model.blocks=4", "model.heads=4", *_ADAMW)

TASKS: Mapping[str, TaskSpec] = {
    "lenet5": TaskSpec("lenet5_mnist", _LENET5_INIT, 60_000, *_MNIST),
    "mlp": TaskSpec("mlp_mnist", (), 60_000, *_MNIST),
    "resnet18": TaskSpec("resnet18_cifar10", ("train.optimizer.lr=0.02",), 12_800, *_CIFAR10),
    "resnet50": TaskSpec("resnet50_cifar10", ("train.optimizer.lr=0.005",), 512, *_CIFAR10, 0.05),
    "cnn6": TaskSpec("cnn6_cifar10_speedrun", _CNN6, 50_000, *_CIFAR10),
    "vit": TaskSpec("resnet18_cifar10", (*_VIT, "train.batch_size=64"), 12_800, *_CIFAR10),
    "gpt": TaskSpec("gpt_text", (*_GPT, "train.clip.norm=null", "train.batch_size=16"), 1_000_000),
}
"""The recipes' learning rates of ResNets need a warmup, for which a benchmark is too short. All
samples of a text are used, as ours reads it from the recipe's dataset."""


@dataclass(frozen=True)
class Task:
    """A task for every contestant."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    """Changes of `recipe` for this project."""
    folder: Path
    """Folder of images, initial weights and run directories."""
    layers: tuple[LayerSpec, ...]
    spec: TaskSpec
    optimizer: Momentum | AdamW
    batch_size: int
    precision: Precision
    sink_size: int
    seed: int
    threads: int

    @property
    def momentum(self) -> Momentum:
        """The optimizer of a task that has momentum. Raises TypeError for another."""
        if not isinstance(self.optimizer, Momentum):
            raise TypeError(f"this peer has no optimizer {self.optimizer.name}")
        return self.optimizer

    @property
    def on_gpu(self) -> bool:
        """Whether all contestants train on a GPU, as our recipe does."""
        return "device=gpu" in self.overrides

    @property
    def images(self) -> Path:
        """x_train, y_train, x_test, y_test: uint8 (n, H, W, C) and int32 (n,)."""
        return self.folder / "images.npz"

    @property
    def weights(self) -> Path:
        """The initial weights, drawn by this project: parameter path -> float32 array."""
        return self.folder / "weights.npz"


def make_task(
    name: str,
    folder: Path,
    *,
    root: Path | None,
    batch_size: int | None,
    precision: Precision,
    sink_size: int,
    threads: int,
    overrides: tuple[str, ...] = (),
) -> Task:
    """Write the images of a task into `folder` and put the task together.

    `overrides` change our recipe; the peers follow in layers and optimizer. Raises
    DataError if the data can't be read.
    """
    spec = TASKS[name]
    folders = [f"dataset.root={root}"] if root and not spec.reads_text else []
    source = load_recipe(spec.recipe, [*spec.overrides, *folders])
    if not isinstance(source.train.optimizer, Momentum | AdamW):
        raise TypeError(f"{spec.recipe}: a task needs the optimizer momentum or adamw")
    if not isinstance(source.model, LayeredModelSpec):
        raise TypeError(f"{spec.recipe}: a task needs a network of layers")
    batch_size = batch_size or source.train.batch_size
    images = folder / "images.npz"
    _write_images(source, spec.samples, images)
    changes = (*_make_changes(spec, images, batch_size, precision, sink_size), *overrides)
    recipe = load_recipe(spec.recipe, changes)
    assert isinstance(recipe.train.optimizer, Momentum | AdamW)
    assert isinstance(recipe.model, LayeredModelSpec)
    return Task(
        name=name,
        recipe=spec.recipe,
        overrides=changes,
        folder=folder,
        layers=tuple(recipe.model.layers_for(BYTES if spec.reads_text else CLASSES)),
        spec=spec,
        optimizer=recipe.train.optimizer,
        batch_size=batch_size,
        precision=precision,
        sink_size=sink_size,
        seed=recipe.seed,
        threads=threads,
    )


def _make_changes(
    spec: TaskSpec, images: Path, batch_size: int, precision: Precision, sink_size: int
) -> tuple[str, ...]:
    return (
        *spec.overrides,
        *(() if spec.reads_text else _make_data_keys(spec, images)),
        "schedule=constant",
        "train.loss.smoothing=0.0",
        f"train.batch_size={batch_size}",
        f"train.precision={PRECISIONS[precision]}",
        f"train.sink_size={sink_size}",
        # A bound for all rounds together, whose lengths are found by timing.
        "train.steps=1000000",
        *("eval.samples=all", "eval.every_epochs=null", "eval.every_steps=null"),
        *("checkpoint.every_epochs=null", "checkpoint.best=null", "monitor.loss_every=0"),
        "stages=[data,build,compile,train]",
    )


def _make_data_keys(spec: TaskSpec, images: Path) -> tuple[str, ...]:
    ops = (
        f"[{{name: rescale, factor: {1 / 255}, shift: 0.0}},"
        f" {{name: normalize, mean: {list(spec.mean)}, std: {list(spec.std)}}}]"
    )
    return (
        *("dataset=numpy", f"dataset.root={images}", f"dataset.classes={CLASSES}"),
        *(f"dataset.train.ops={ops}", f"dataset.eval.ops={ops}"),
    )


def _write_images(recipe: Recipe, samples: int, path: Path) -> None:
    """Write the first training samples, resized as by the recipe, and a few for evaluation."""
    raw = recipe.dataset.read(cache_root(recipe.cache))
    (column,) = raw.inputs
    train = _resize_samples(recipe, raw.train, column, samples)
    test = _resize_samples(recipe, raw.eval, column, EVALUATED)
    np.savez(
        path,
        x_train=train[0],
        y_train=train[1],
        x_test=test[0],
        y_test=test[1],
    )


def _resize_samples(
    recipe: Recipe, split: Split, column: str, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first samples and their labels after the recipe's resize, if it has one; uint8
    stays uint8."""
    ops = tuple(op for op in recipe.dataset.train.ops if op.name == "resize")
    images = []
    for first in range(0, min(samples, len(split)), RESIZED_AT_ONCE):
        rows = np.arange(first, min(first + RESIZED_AT_ONCE, samples, len(split)))
        columns = {column: split.columns[column][rows]}
        mapped = apply_ops(np, ops, columns, seed_words(recipe.seed), np.int32(0), rows)
        images.append(mapped[column])
    array = np.concatenate(images)
    return array, np.asarray(split.columns["label"][: len(array)], np.int32)


@dataclass(frozen=True)
class Batches:
    """An epoch in the order of this project: float32 (n, B, H, W, C), int32 (n, B).

    Images are normalised, contiguous and in memory, so a peer's batch is a slice. For texts both
    arrays are int32 (n, B, tokens).
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load_batches(task: Task) -> Batches:
    """Read the batches that the peers repeat, epoch after epoch."""
    with np.load(task.images) as arrays:
        images = arrays["x_train"]
        labels = arrays["y_train"]
    order = SampleOrder(
        seed=task.seed,
        samples=len(labels),
        batch_size=task.batch_size,
        shuffle=True,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    indices = order.batches(0, order.steps_per_epoch).indices
    if task.spec.reads_text:
        tokens = images.reshape(len(images), -1).astype(np.int32)
        return Batches(tokens[indices], labels[indices])
    mean = np.array(task.spec.mean, np.float32)
    std = np.array(task.spec.std, np.float32)
    batches = np.empty((*indices.shape, *images.shape[1:]), np.float32)
    for step, rows in enumerate(indices):
        batches[step] = (images[rows] * np.float32(1 / 255) - mean) / std
    return Batches(batches, labels[indices])


def load_weights(task: Task) -> dict[str, np.ndarray]:
    """Read the initial weights: parameter path, such as "conv_0/kernel" -> float32 array.

    Kernels of convolutions are (height, width, in, out), kernels of dense layers (in, out).
    """
    with np.load(task.weights) as arrays:
        return dict(arrays)


def name_layers(layers: tuple[LayerSpec, ...], scope: str = "") -> Iterator[tuple[str, LayerSpec]]:
    """Yield layers with their paths, which their weights share."""
    for name, layer in zip(name_scopes(layers), layers, strict=True):
        yield f"{scope}/{name}" if scope else name, layer


def get_window(
    layer: Conv | MaxPool, *, bias: bool = False
) -> tuple[int, int, Literal["same", "valid"]]:
    """Return kernel, stride and padding. Raises TypeError if the peers have no counterpart.

    `bias` is whether the peer's convolutions can add a bias.
    """
    kernel = layer.kernel
    padding = layer.padding
    stride = kernel if layer.stride is None else layer.stride
    special = isinstance(layer, Conv) and (
        (layer.groups, layer.dilation) != (1, 1) or (layer.bias and not bias)
    )
    if special or not isinstance(kernel, int) or not isinstance(stride, int):
        raise TypeError(f"the peers have no {layer!r}")
    if padding not in ("same", "valid"):
        raise TypeError(f"the peers have no padding {padding} of {layer!r}")
    return kernel, stride, padding


def order_rows(kernel: np.ndarray, channels: int) -> np.ndarray:
    """Order the rows of a dense kernel (in, out) after an image by channel, height and width.

    Networks with the channels first flatten square images in this order.
    """
    side = round((kernel.shape[0] / channels) ** 0.5)
    return kernel.reshape(side, side, channels, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
