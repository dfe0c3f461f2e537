"""Switches of the adapters for TensorFlow and PyTorch, by the names that they have there.

Each is another word for a key of this package, with the adapter's rules. A recipe
that is checked has the key alone: the resolved recipe shows what a word stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.core.registry import Spec

if TYPE_CHECKING:
    from pipeline.config.recipe import TrainSpec

PrecisionMode = Literal[
    "must_keep_origin_dtype", "allow_fp32_to_fp16", "allow_mix_precision", "force_fp16"
]
LEVEL_OF: Mapping[str, str] = {
    "must_keep_origin_dtype": "O0",
    "allow_fp32_to_fp16": "O1",
    "allow_mix_precision": "O2",
    "force_fp16": "O3",
}
"""The level nearest to each mode: float32 as written; float16 for the matrix unit alone; float16
but for operators that lose too much by it; float16 throughout."""


class AdapterWords(Spec):
    """The adapters' switches, as further keys of `train`."""

    precision_mode: PrecisionMode | None = Field(default=None, exclude=True)
    """TensorFlow's adapter, for `precision`: must_keep_origin_dtype is O0,
    allow_fp32_to_fp16 O1, allow_mix_precision O2, force_fp16 O3."""
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = Field(default=None, exclude=True)
    """APEX, for `precision`."""
    iterations_per_loop: PositiveInt | None = Field(default=None, exclude=True)
    """TensorFlow's adapter, for `sink_size`; it must divide the steps of training."""
    enable_data_pre_proc: bool | None = Field(default=None, exclude=True)
    """TensorFlow's adapter, for `sink`."""
    mix_compile_mode: bool | None = Field(default=None, exclude=True)
    """TensorFlow's adapter: true is `mode: eager`, in which a loop has one step."""

    @model_validator(mode="after")
    def _translate(self) -> Self:
        changed: dict[str, Any] = {}
        for word, key, value, default in _meanings(self):
            there = changed.get(key, getattr(self, key))
            if there != value and (key in changed or there != default):
                raise ValueError(
                    f"{word} = {getattr(self, word)} conflicts with {key} = {there}; they are two "
                    "words for one thing: give one of them"
                )
            changed[key] = value
        return self.model_copy(update=changed) if changed else self


def _meanings(words: AdapterWords) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield each word that is set: its name, the key and value that it means, and the key's
    default."""
    if words.precision_mode is not None:
        yield "precision_mode", "precision", LEVEL_OF[words.precision_mode], "O0"
    if words.opt_level is not None:
        yield "opt_level", "precision", words.opt_level, "O0"
    if words.enable_data_pre_proc is not None:
        yield "enable_data_pre_proc", "sink", words.enable_data_pre_proc, True
    if words.mix_compile_mode is not None:
        yield "mix_compile_mode", "mode", "eager" if words.mix_compile_mode else "graph", "graph"
    if words.iterations_per_loop is not None:
        yield "iterations_per_loop", "sink_size", words.iterations_per_loop, -1


def loop_problems(train: TrainSpec, total: int | None) -> Iterator[str]:
    """The adapter's objections to `iterations_per_loop`; `total` steps, None if unknown."""
    size = train.iterations_per_loop
    if size is None or size == 1:
        return
    key = f"train.iterations_per_loop = {size}"
    if train.mode == "eager":
        yield f"{key}: must be 1 with train.mode = eager (mix_compile_mode)"
    if not train.sink:
        yield f"{key}: must be 1 with train.sink = false (enable_data_pre_proc)"
    if total is not None and total % size:
        nearest = f"{total - total % size} steps or {total - total % size + size}"
        yield f"{key}: must divide the {total} steps of training; train {nearest}"
