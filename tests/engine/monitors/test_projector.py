from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from PIL import Image
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from tensorboard.plugins.projector.projector_plugin import _read_tensor_tsv_file

from pipeline.engine.monitors.projector import CONFIG, write_embeddings


def config_of(board: Path) -> ProjectorConfig:
    return text_format.Parse((board / CONFIG).read_text(), ProjectorConfig())


def test_tensorboard_reads_vectors_labels_and_pictures(tmp_path: Path) -> None:
    vectors = np.arange(15, dtype=np.float32).reshape(5, 3) / 7
    images = np.arange(5 * 4 * 6).reshape(5, 4, 6, 1)
    write_embeddings(tmp_path, vectors, ["a", "b\tc", "", "d\n", "e"], images)
    (embedding,) = config_of(tmp_path).embeddings
    read = _read_tensor_tsv_file(str(tmp_path / embedding.tensor_path))
    assert np.allclose(read, vectors, rtol=1e-6)
    labels = (tmp_path / embedding.metadata_path).read_text().split("\n")
    assert labels == ["a", "b\\tc", "-", "d\\n", "e", ""]
    assert list(embedding.sprite.single_image_dim) == [6, 4]
    with Image.open(tmp_path / embedding.sprite.image_path) as picture:
        sheet = np.asarray(picture)
    assert sheet.shape == (3 * 4, 3 * 6)
    assert sheet[4, 0] == 0
    assert sheet[7, 11] == 255


def test_non_image_samples_have_no_sprite(tmp_path: Path) -> None:
    write_embeddings(tmp_path, np.ones((2, 2), np.float32), ["a", "b"], None)
    (embedding,) = config_of(tmp_path).embeddings
    assert not embedding.HasField("sprite")


@pytest.mark.slow
def test_sprite_of_many_large_images_is_bounded(tmp_path: Path) -> None:
    write_embeddings(
        tmp_path, np.ones((400, 1), np.float32), ["x"] * 400, np.zeros((400, 224, 224, 3), np.uint8)
    )
    (embedding,) = config_of(tmp_path).embeddings
    assert list(embedding.sprite.single_image_dim) == [56, 56]
    with Image.open(tmp_path / embedding.sprite.image_path) as sheet:
        assert sheet.size == (1120, 1120)
