"""Scale the images of a batch to a size drawn from a fixed set (D-18)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.core.registry import Seq, part
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import GeometricOp
from pipeline.data.ops.image import Size
from pipeline.data.ops.resize import Interpolation, Resize

MAX_SIZES = 32
"""Each size is a branch of the compiled program."""


@part("op")
class RandomSize(GeometricOp):
    """Scale every image of a batch to one of `sizes`, [height, width], drawn for each step.

    All batches of a size share one branch of the compiled program, so a fixed set of sizes is
    compiled once, as in YOLOv3's training at several scales. The network must take any size.
    """

    name: Literal["random_size"] = "random_size"
    sizes: Annotated[Seq[Size], Field(min_length=2, max_length=MAX_SIZES)]
    interpolation: Interpolation = "linear"

    @field_validator("sizes")
    @classmethod
    def _are_different(cls, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"sizes = {[list(size) for size in sizes]}: must be different")
        return sizes

    @property
    def choices(self) -> int:
        return len(self.sizes)

    def chosen(self, number: int) -> Resize:
        """The op that scales to one of the sizes."""
        return Resize(size=self.sizes[number], interpolation=self.interpolation, column=self.column)

    def output(self, value: ColumnSpec) -> ColumnSpec:
        """Spec of an image of the first size."""
        return self.chosen(0).output(value)

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        """Images of the first size; a step applies what `chosen` gives for it."""
        return self.chosen(0)(xp, values, uniforms)
