"""Small recipes built without a run, and layers whose computation a test replaces."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.build import Built, build
from pipeline.stages.data import load_data
from tests.conftest import compose_tiny

apply_module = importlib.import_module("pipeline.models.modules.apply_layers")


def build_silently(folder: Path, overrides: Sequence[str]) -> tuple[Dataset, Built]:
    """Build the tiny recipe with overrides, and print nothing."""
    recipe = compose_tiny(folder, *overrides, "train.steps=6")
    with open("/dev/null", "w") as sink:
        reporter = Reporter(None, Console(file=sink))
        dataset = load_data(recipe, reporter)
        return dataset, build(recipe, dataset, reporter)


@contextmanager
def patch_layers(compute: Callable[..., Any]) -> Iterator[None]:
    """Compute layers by `compute(apply_layer, layer, x, context)` in programs traced meanwhile."""
    apply_layer = apply_module.apply_layer

    def apply_patched(layer: Any, x: Any, context: Any) -> Any:
        return compute(apply_layer, layer, x, context)

    apply_module.apply_layer = apply_patched
    try:
        yield
    finally:
        apply_module.apply_layer = apply_layer
