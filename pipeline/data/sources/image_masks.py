"""The user's images and their masks. A mask has the class of each pixel of an image."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import join_first
from pipeline.core.registry import Expected, Seq, component
from pipeline.data.columns import (
    DECODING_THREADS,
    Column,
    RawData,
    Split,
    Targets,
    require_trained_range,
)
from pipeline.data.dataset_roots import LocalDatasetSpec, RequiredRoot
from pipeline.data.dataset_spec import require_distinct
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share, hold_out
from pipeline.data.sources.class_folders import (
    FileKind,
    describe_left_out,
    find_splits,
    list_files,
)
from pipeline.data.sources.image_columns import (
    ImageFiles,
    MaskValues,
    RaggedImageFiles,
    decode_mask,
    describe_16_bits,
    describe_pages,
    make_image_columns,
    read_sizes,
    require_readable,
)
from pipeline.data.sources.image_folder import ImageSize

MASKS = FileKind("mask", (".png", ".bmp", ".tif", ".tiff"), "PNG, BMP and TIFF")
"""Files in lossless formats, which keep the classes."""
MAX_MASK_CLASSES = 256
"""The most classes that 8 bits per pixel can hold."""
FolderName = Annotated[str, Field(pattern=r"^\w[\w .+-]*$", max_length=255)]
ClassCount = Annotated[PositiveInt, Field(le=MAX_MASK_CLASSES)]
ClassNames = Annotated[Seq[str], Field(min_length=1, max_length=MAX_MASK_CLASSES)]


@component("dataset")
class ImageMasks(LocalDatasetSpec):
    """`images/*` and `masks/*` in train/ and in eval/, with the same names except for suffixes.

    With `split`, images/ and masks/ are in `root`, and a share of the images is evaluated. A mask
    is a PNG, BMP or TIFF, grey or with a palette. The value of a pixel is its class, or
    `ignore_index`. Images are PNG, JPEG, BMP, GIF, WebP and TIFF of the same size as their masks,
    read as RGB and upright.
    """

    root_must_be = "a folder with images/ and masks/ in train/ and eval/, or with dataset.split"
    name: Literal["image_masks"] = "image_masks"
    root: RequiredRoot
    """The folder with train and eval, or with images and masks."""
    images: FolderName = "images"
    masks: FolderName = "masks"
    """Names of the folders of images and of masks."""
    split: Share | None = None
    """The share of the images that is evaluated; null: the images of eval are."""
    split_seed: NonNegativeInt = 0
    """Seed of the split. It isn't `seed`, so runs with different seeds have the same split."""
    classes: Annotated[
        ClassCount | ClassNames | None, Expected("a number from 1 to 256, or a list of names")
    ] = None
    """The number of classes, or their names in the order of values; null: one more than the largest
    value of the training masks; with `split`, of all masks. All are then read before training."""
    follow_links: bool = False
    """Whether links to files and folders outside `root` are read."""
    image_size: ImageSize | None = None
    """[height, width] that images and masks are resized to; null: all have one, or `buckets`."""

    @model_validator(mode="after")
    def _require_two_folders(self) -> Self:
        if self.images == self.masks:
            raise ValueError(f"masks = {self.masks}: must be another folder than the images'")
        return self

    @field_validator("classes")
    @classmethod
    def _require_distinct_classes(cls, classes: Any) -> Any:
        return require_distinct(classes) if isinstance(classes, tuple) else classes

    def read(self, cache: Path) -> RawData:
        """Return RGB images, and masks as labels, decoded on demand. With `buckets` and without
        `image_size` their sizes differ."""
        split_pairs, left_out = self._list_splits()
        split_masks = [[mask for _, mask in pairs] for pairs in split_pairs]
        notes = describe_left_out(left_out[0], self.images)
        notes += describe_left_out(left_out[1], self.masks, MASKS.formats)
        if isinstance(self.classes, tuple):
            names = self.classes
        else:
            count = self.classes
            if count is None:
                count, class_notes = self._count_classes(*split_masks)
                notes += class_notes
            names = tuple(str(label) for label in range(count))
        values = MaskValues(len(names), self.ignore_index)
        images = make_image_columns(
            [[image for image, _ in pairs] for pairs in split_pairs],
            self.image_size,
            several_sizes=self.buckets is not None,
        )
        splits = []
        for column, masks in zip(images, split_masks, strict=True):
            labels: Column
            if self.buckets is not None and self.image_size is None:
                labels = RaggedImageFiles(masks, read_sizes(masks), values)
            else:
                height, width = self.image_size or read_sizes(masks[:1])[0].tolist()
                labels = ImageFiles(masks, height, width, values)
            splits.append(Split({"image": column, "label": labels}))
        train, evaluated = splits
        train_images = [image for image, _ in split_pairs[0]]
        notes += describe_16_bits(train_images)
        notes += describe_pages([*train_images, *split_masks[0]])
        return RawData(train, evaluated, Targets(names), notes=notes)

    def _count_classes(
        self, train: Sequence[str], evaluated: Sequence[str]
    ) -> tuple[int, tuple[str, ...]]:
        """Return one more than the largest value of all masks, and notes. Raises DataError if
        evaluation masks in their own folder have a larger value than the training masks."""
        train_values = list_values(train, self.ignore_index)
        eval_values = list_values(evaluated, self.ignore_index)
        if not train_values.size:
            problem = f"this and all other training masks have only the value {self.ignore_index}"
            raise DataError(f"{train[0]}: {problem}")
        if self.split is None and eval_values.size:
            with name_file(self.root):
                require_trained_range(train_values, eval_values)
        untrained = np.setdiff1d(eval_values, train_values)
        notes = []
        if untrained.size:
            names = join_first([str(value) for value in untrained], 3)
            notes.append(f"only evaluation masks have the classes {names}, which can't be learned")
        return 1 + int(np.union1d(train_values, eval_values).max()), tuple(notes)

    def _list_splits(self) -> tuple[list[list[tuple[str, str]]], tuple[list[str], list[str]]]:
        """Return the paths (image, mask) of both splits, and the files that are left out, beside
        the images and beside the masks."""
        if self.split is None:
            content = f", each with {self.images} and {self.masks}"
            train_folder, eval_folder = find_splits(self.root, content)
            train_pairs, *train_left_out = self._pair_files(train_folder)
            eval_pairs, *eval_left_out = self._pair_files(eval_folder)
            images, masks = (a + b for a, b in zip(train_left_out, eval_left_out, strict=True))
            return [train_pairs, eval_pairs], (images, masks)
        pairs, *left_out = self._pair_files(self.root)
        if len(pairs) < 2:
            folder = self.root / self.images
            raise DataError(f"{folder}: has 1 image; dataset.split needs at least 2")
        groups = np.zeros(len(pairs), int)
        split_rows = hold_out(groups, [self.images], self.split, self.split_seed)
        return [[pairs[row] for row in rows] for rows in split_rows], (left_out[0], left_out[1])

    def _pair_files(self, folder: Path) -> tuple[list[tuple[str, str]], list[str], list[str]]:
        """Return the paths (image, mask) in a folder, sorted, and the files that are left out,
        beside the images and beside the masks. Raises DataError for an image without a mask, a
        mask without an image, a mask of another size than its image, and a mask that can't be
        read."""
        root = None if self.follow_links else self.root.resolve()
        for name in (self.images, self.masks):
            if not (folder / name).is_dir():
                raise DataError(f"{folder}: has no folder {name}; must hold images and their masks")
        image_paths, left_out = list_files(folder / self.images, root)
        mask_paths, others = list_files(folder / self.masks, root, MASKS)
        images = _map_stems(image_paths, folder / self.images)
        masks = _map_stems(mask_paths, folder / self.masks)
        lacking_mask = sorted(images.keys() - masks.keys(), key=images.__getitem__)
        lacking_image = sorted(masks.keys() - images.keys(), key=masks.__getitem__)
        if lacking_mask:
            problem = f"{images[lacking_mask[0]]}: has no mask of its name in {folder / self.masks}"
            unread = _explain_unread_mask(lacking_mask[0], others, folder / self.masks)
            raise DataError(problem + _count_others(lacking_mask) + unread)
        if lacking_image:
            problem = f"{masks[lacking_image[0]]}: has no image of its name in"
            raise DataError(f"{problem} {folder / self.images}{_count_others(lacking_image)}")
        pairs = [(images[stem], masks[stem]) for stem in sorted(images)]
        _require_same_sizes(pairs)
        require_readable([mask for _, mask in pairs], masks=True)
        return pairs, left_out, others


def _count_others(unpaired: Sequence[str]) -> str:
    return f"; nor have {len(unpaired) - 1:,} others" if len(unpaired) > 1 else ""


def _explain_unread_mask(stem: str, left_out: Sequence[str], folder: Path) -> str:
    """Return a sentence if a file that is left out of the masks' folder has the name of an image,
    by its path in the folder without suffix."""
    for path in map(Path, left_out):
        if str(path.relative_to(folder).with_suffix("")) == stem:
            return (
                f"; {show_name(path.name)} there isn't read, since only {MASKS.formats} keep the "
                "classes"
            )
    return ""


def _map_stems(paths: Sequence[str], folder: Path) -> dict[str, str]:
    """Return files by their path below a folder without suffix. Raises DataError for files that
    differ only in their suffix."""
    files: dict[str, str] = {}
    for path in paths:
        other = files.setdefault(str(Path(path).relative_to(folder).with_suffix("")), path)
        if other is not path:
            raise DataError(
                f"{path}: has the same name as {other} but for the suffix; must be different"
            )
    return files


def _require_same_sizes(pairs: Sequence[tuple[str, str]]) -> None:
    """Raise DataError with the first mask that has another size than its image."""
    image_sizes = read_sizes([image for image, _ in pairs])
    mask_sizes = read_sizes([mask for _, mask in pairs])
    different = np.flatnonzero((image_sizes != mask_sizes).any(axis=1))
    if different.size:
        image, mask = pairs[different[0]]
        height, width = image_sizes[different[0]].tolist()
        rows, columns = mask_sizes[different[0]].tolist()
        raise DataError(
            f"{mask}: is {rows}x{columns}, and its image {image} {height}x{width}; masks must have "
            f"the size of their images, but {different.size:,} of {len(pairs):,} don't"
        )


def list_values(masks: Sequence[str], ignored: int | None) -> np.ndarray:
    """Return the values of masks except `ignored`, sorted, int32 (n,)."""

    def list_mask_values(path: str) -> np.ndarray:
        height, width = read_sizes([path])[0].tolist()
        return np.unique(decode_mask(path, height, width))

    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        values = np.unique(np.concatenate([*pool.map(list_mask_values, masks)])).astype(np.int32)
    return values[values != ignored]
