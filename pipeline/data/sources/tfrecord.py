"""Images in TFRecord files, one tf.train.Example each."""

from __future__ import annotations

from typing import ClassVar, Literal

from pipeline.core.registry import component
from pipeline.data.records.example_images import IndexFile
from pipeline.data.records.tf_example import index_tfrecord
from pipeline.data.sources.example_files import ExampleFilesSpec


@component("dataset")
class TFRecord(ExampleFilesSpec):
    """TFRecord files of images with labels: files such as PNG and JPEG, plain 8-bit pixels, or
    lists of tokens."""

    root_must_be = "a folder with TFRecord files, train* and one of eval*, val* or test*"
    index_file: ClassVar[IndexFile] = staticmethod(index_tfrecord)
    name: Literal["tfrecord"] = "tfrecord"
