"""PyTorch's DataLoader with worker processes over a dataset that maps sample by sample.

Ways: `torchvision`, its transforms; `pil`, the same steps on the same PIL images written out, for
where torchvision is not installed; `numpy`, the least that a sample can be written with by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.loading import MEAN, PAD, STD, Loaded, Work

_MEAN, _STD = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
_PLACES = 2 * PAD + 1

Transform = Callable[[np.ndarray], torch.Tensor]


def with_torchvision() -> Transform:
    """As torchvision's documentation has it."""
    from torchvision import transforms

    return transforms.Compose(
        [
            Image.fromarray,
            transforms.RandomCrop(32, padding=PAD),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def with_pil() -> Transform:
    """The steps of torchvision's transforms without their checks."""
    return _pil_sample


def _pil_sample(pixels: np.ndarray) -> torch.Tensor:
    padded = Image.new("RGB", (32 + 2 * PAD, 32 + 2 * PAD))
    padded.paste(Image.fromarray(pixels), (PAD, PAD))
    top, left = torch.randint(0, _PLACES, (2,)).tolist()
    image = padded.crop((left, top, left + 32, top + 32))
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _normalize(np.array(image))


def with_numpy() -> Transform:
    """Slices of a padded array."""
    return _numpy_sample


def _numpy_sample(pixels: np.ndarray) -> torch.Tensor:
    padded = np.zeros((32 + 2 * PAD, 32 + 2 * PAD, 3), np.uint8)
    padded[PAD:-PAD, PAD:-PAD] = pixels
    top, left = np.random.randint(0, _PLACES, 2)
    image = padded[top : top + 32, left : left + 32]
    if np.random.rand() < 0.5:
        image = image[:, ::-1]
    return _normalize(image)


def _normalize(image: np.ndarray) -> torch.Tensor:
    values = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return values.to(torch.float32).div_(255).sub_(_MEAN).div_(_STD)


TRANSFORMS = {"torchvision": with_torchvision, "pil": with_pil, "numpy": with_numpy}


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """CIFAR-10 in memory, mapped when they are read."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: Transform) -> None:
        self._images = images
        self._labels = labels
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._images[index]), int(self._labels[index])


class Epochs:
    """Batches of a DataLoader, epoch after epoch; its workers stay."""

    def __init__(self, loader: DataLoader[tuple[torch.Tensor, int]]) -> None:
        self._batches = _endless(loader)

    def load(self, batches: int) -> Loaded:
        """Load so many batches more."""
        for _ in range(batches):
            images, _ = next(self._batches)
        return Loaded(batches, float(images.mean()), float(images.std()))


def _endless(loader: DataLoader[tuple[torch.Tensor, int]]) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from loader


def open_loader(work: Work) -> Epochs:
    """A DataLoader with its workers started."""
    with np.load(work.arrays) as arrays:
        samples = Samples(arrays["images"], arrays["labels"], TRANSFORMS[work.way]())
    loader = DataLoader(
        samples,
        batch_size=work.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=work.workers,
        persistent_workers=work.workers > 0,
    )
    return Epochs(loader)
