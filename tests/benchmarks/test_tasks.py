"""What all contestants train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tasks import (
    Task,
    get_window,
    load_batches,
    make_task,
    name_layers,
    order_rows,
)
from pipeline import load_recipe
from pipeline.models.layers.standard import Conv, MaxPool, Relu, Residual


@pytest.mark.slow
def test_digits_task_has_resized_images(digits: Callable[..., Task]) -> None:
    task = digits()
    with np.load(task.images) as arrays:
        assert (arrays["x_train"].shape, arrays["x_train"].dtype) == ((96, 32, 32, 1), np.uint8)
        assert arrays["y_train"].shape == (96,)
        assert arrays["x_train"].std() > 0
    assert task.batch_size == 32
    assert task.optimizer.lr == 0.02
    assert [layer.name for layer in task.layers[:3]] == ["conv", "relu", "max_pool"]


@pytest.mark.slow
def test_batches_have_every_image_once_normalised(digits: Callable[..., Task]) -> None:
    task = digits(batch_size=16)
    batches = load_batches(task)
    assert (batches.images.shape, batches.images.dtype) == ((6, 16, 32, 32, 1), np.float32)
    with np.load(task.images) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    expected = (images.astype(np.float64) / 255 - 0.03) / 0.02
    order = np.lexsort(expected.reshape(96, -1).T)
    found = batches.images.reshape(96, -1)
    np.testing.assert_allclose(
        found[np.lexsort(found.T)], expected.reshape(96, -1)[order], atol=1e-4
    )
    assert sorted(batches.labels.ravel()) == sorted(labels)
    assert not np.array_equal(batches.labels.ravel(), labels)


@pytest.mark.slow
def test_task_overrides_take_precedence(digits: Callable[..., Task]) -> None:
    task = digits(overrides=("train.optimizer.lr=0.5",), precision="bf16")
    assert task.optimizer.lr == 0.5
    assert "train.precision=bf16" in task.overrides


@pytest.mark.slow
def test_text_is_tokens_with_next_tokens_as_labels(tmp_path: Path) -> None:
    task = make_task(
        "gpt",
        tmp_path,
        root=None,
        batch_size=None,
        precision="float32",
        sink_size=4,
        threads=1,
    )
    batches = load_batches(task)
    assert batches.images.shape == batches.labels.shape
    assert batches.images.shape[1:] == (16, 128)
    dataset = load_recipe("gpt_text").dataset.read(tmp_path)
    assert len(batches) == len(dataset.train) // 16
    np.testing.assert_array_equal(batches.images[..., 1:], batches.labels[..., :-1])
    assert batches.images.dtype == np.int32
    assert [layer.name for layer in task.layers] == ["tied_embedding"]
    with pytest.raises(TypeError, match="no optimizer adamw"):
        _ = task.momentum


def test_layer_names_match_weight_names() -> None:
    residual = Residual(scope="block", body=(Conv(features=2, kernel=3),))
    named = dict(name_layers((Conv(features=2, kernel=3), Relu(), residual)))
    assert list(named) == ["conv_0", "relu_0", "block"]
    assert [path for path, _ in name_layers(residual.body, "block")] == ["block/conv_0"]


def test_rows_channel_first_matches_channel_first_flattening() -> None:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, 4, 4, 3))
    kernel = rng.normal(size=(48, 5))
    expected = images.reshape(2, -1) @ kernel
    flattened = images.transpose(0, 3, 1, 2).reshape(2, -1)
    np.testing.assert_allclose(flattened @ order_rows(kernel, 3), expected)


def test_only_windows_supported_by_every_peer_are_accepted() -> None:
    assert get_window(Conv(features=2, kernel=3, stride=2)) == (3, 2, "same")
    assert get_window(MaxPool(kernel=2)) == (2, 2, "valid")
    assert get_window(Conv(features=2, kernel=3, bias=True), bias=True) == (3, 1, "same")
    for layer in (
        Conv(features=2, kernel=3, groups=2),
        Conv(features=2, kernel=3, bias=True),
        Conv(features=2, kernel=(3, 1)),
        Conv(features=2, kernel=3, padding=1),
    ):
        with pytest.raises(TypeError, match="the peers have no"):
            get_window(layer)
