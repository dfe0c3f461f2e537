"""The kinds of cases and their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tests.fuzz import file_kinds as files
from tests.fuzz import library_kinds as libraries
from tests.fuzz import recipe_kinds as recipes
from tests.fuzz.outcomes import Act


@dataclass(frozen=True)
class Kind:
    """The action of a case, its weight among the kinds, and its time limit."""

    act: Act
    weight: int
    timeout_s: float = 30.0
    """Processor time."""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "recipe, checked": Kind(recipes.check_recipe_tree, 4000),
        "recipe file": Kind(recipes.check_recipe_text, 200, 60.0),
        "component file": Kind(recipes.check_component_file, 100, 60.0),
        "overrides": Kind(recipes.check_overrides, 150, 60.0),
        "recipe, built": Kind(recipes.build_recipe, 100, 100.0),
        "recipe, trained": Kind(recipes.train_recipe, 5, 200.0),
        "command, in process": Kind(recipes.launch_command, 30, 60.0),
        "command": Kind(recipes.run_process, 5, 200.0),
        "idx": Kind(files.read_idx_files, 1500),
        "cifar files": Kind(files.read_cifar_files, 900),
        "cifar archive": Kind(files.unpack_cifar, 900),
        "npz dataset": Kind(files.read_npz_dataset, 1500),
        "image folder": Kind(files.read_image_folder, 1200),
        "audio folder": Kind(files.read_audio_folder, 600),
        "image table": Kind(files.read_image_table, 600),
        "image masks": Kind(files.read_image_masks, 600),
        "image to infer": Kind(files.infer_image, 900),
        "records": Kind(files.read_record_files, 1000),
        "checkpoint": Kind(files.read_checkpoint_files, 900),
        "safetensors": Kind(files.read_weight_file(".safetensors"), 900),
        "mindspore weights": Kind(files.read_weight_file(".ckpt"), 900),
        "torch weights": Kind(files.read_weight_file(".pth"), 500),
        "torch checkpoint": Kind(files.read_weight_file(".pt"), 500),
        "npz weights": Kind(files.read_weight_file(".npz"), 500),
        "knowledge bank": Kind(files.read_knowledge_bank, 900),
        "parquet": Kind(libraries.read_parquet_table, 100),
        "tokenizer": Kind(libraries.read_tokenizer_file, 200),
        "no file": Kind(files.read_folder_instead, 40),
    }
)


def split_cases(cases: int, kinds: Sequence[str]) -> dict[str, int]:
    """Split a number of cases among kinds by weight, at least one each."""
    total = sum(KINDS[kind].weight for kind in kinds)
    counts = {kind: max(1, cases * KINDS[kind].weight // total) for kind in kinds}
    largest = max(kinds, key=lambda kind: KINDS[kind].weight)
    counts[largest] = max(1, counts[largest] + cases - sum(counts.values()))
    return counts
