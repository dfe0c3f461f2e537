"""Samples in MindRecord files, which MindSpore's FileWriter wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pipeline.core.registry import component
from pipeline.data.records.example_images import ExampleSettings, IndexFile
from pipeline.data.records.mindrecord_file import index_mindrecord
from pipeline.data.sources.example_files import ExampleFilesSpec


@component("dataset")
class MindRecord(ExampleFilesSpec):
    """MindRecord files with their indices NAME.db.

    The image is a field of bytes, a file such as PNG or JPEG or plain 8-bit pixels, or an array:
    an image, or tokens. The label is an integer, a number or an array of numbers.
    """

    root_must_be = "a folder with MindRecord files, train* and one of eval*, val* or test*"
    index_file: ClassVar[IndexFile] = staticmethod(index_mindrecord)
    suffix_left_out: ClassVar[str | None] = ".db"
    name: Literal["mindrecord"] = "mindrecord"
    image_layout: Literal["hwc", "chw"] = "hwc"
    """The order of axes of images that are arrays."""

    @property
    def _settings(self) -> ExampleSettings:
        return replace(super()._settings, image_layout=self.image_layout)
