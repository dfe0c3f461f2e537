"""Switches of Ascend's adapters for TensorFlow and PyTorch, as further keys of `train`.

Each switch, here called a word, stands for another key of `train`, which gets the word's value when
the recipe is checked. A word isn't written with the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.core.registry import Spec

if TYPE_CHECKING:
    from pipeline.config.recipe import TrainSpec

PrecisionMode = Literal[
    "must_keep_origin_dtype", "allow_fp32_to_fp16", "allow_mix_precision", "force_fp16"
]
LEVELS_BY_MODE: Mapping[str, str] = {
    "must_keep_origin_dtype": "O0",
    "allow_fp32_to_fp16": "O1",
    "allow_mix_precision": "O2",
    "force_fp16": "O3",
}
"""The level of `precision` that is nearest to each mode. O0: float32; O1: float16 for the matrix
unit alone; O2: float16 except for operators that lose too much precision; O3: float16."""


_MEANINGS: Mapping[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "precision_mode": ("precision", "O0", LEVELS_BY_MODE.get),
    "opt_level": ("precision", "O0", str),
    "enable_data_pre_proc": ("sink", True, bool),
    "mix_compile_mode": ("mode", "graph", lambda is_on: "eager" if is_on else "graph"),
    "iterations_per_loop": ("sink_size", -1, int),
}
"""The key of `train` that each word stands for, the key's default, and the function that translates
a value of the word."""


class AdapterWords(Spec):
    """The adapters' switches, as further keys of `train`."""

    precision_mode: PrecisionMode | None = Field(default=None, exclude=True)
    """TensorFlow's adapter, for `precision`: must_keep_origin_dtype is O0,
    allow_fp32_to_fp16 O1, allow_mix_precision O2, force_fp16 O3."""
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = Field(default=None, exclude=True)
    """Apex's name for `precision`."""
    iterations_per_loop: PositiveInt | None = Field(default=None, exclude=True)
    """TensorFlow's adapter, for `sink_size`, which must divide the steps of training."""
    enable_data_pre_proc: bool | None = Field(default=None, exclude=True)
    """TensorFlow's adapter, for `sink`."""
    mix_compile_mode: bool | None = Field(default=None, exclude=True)
    """TensorFlow's adapter: true is `mode: eager`, with iterations_per_loop = 1."""

    @model_validator(mode="after")
    def _translate(self) -> Self:
        """Set the keys that the words stand for. Raises ValueError if a key has another value."""
        changes: dict[str, Any] = {}
        settings: dict[str, str] = {}  # by key, the word that set it, with the word's value
        for word, (key, default, translate) in _MEANINGS.items():
            word_value = getattr(self, word)
            if word_value is None:
                continue
            value = translate(word_value)
            current = changes.get(key, getattr(self, key))
            is_set = key in changes or current != default
            if is_set and current != value:
                other_setting = settings.get(key, f"{key} = {current}")
                raise ValueError(
                    f"{word} = {word_value} conflicts with {other_setting}; they are two words for "
                    "one thing: give one of them"
                )
            changes[key] = value
            settings[key] = f"{word} = {word_value}"
        return self.model_copy(update=changes) if changes else self


def find_loop_problems(train: TrainSpec, total_steps: int | None) -> Iterator[str]:
    """Yield a problem for each rule of TensorFlow's adapter that `iterations_per_loop` breaks.

    `total_steps` is the number of steps of training, None if unknown.
    """
    size = train.iterations_per_loop
    if size is None or size == 1:
        return
    setting = f"train.iterations_per_loop = {size}"
    if train.mode == "eager":
        yield f"{setting}: must be 1 with train.mode = eager (mix_compile_mode)"
    if not train.sink:
        yield f"{setting}: must be 1 with train.sink = false (enable_data_pre_proc)"
    if total_steps is not None and total_steps % size:
        lower = total_steps - total_steps % size
        advice = f"train {lower} steps or {lower + size}" if lower else f"train {size} steps"
        yield f"{setting}: must divide the {total_steps} steps of training; {advice}"
