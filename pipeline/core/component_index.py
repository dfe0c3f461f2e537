"""The modules of the package's components, found in their text, without importing them.

A run imports only the modules of the components that its recipe names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from pipeline.core.files.package_paths import PACKAGE

COMPONENT_MODULES = (
    "pipeline.backends.devices",
    "pipeline.engine.callbacks.metric_callbacks",
    "pipeline.engine.callbacks.trackers",
    "pipeline.data.ops",
    "pipeline.data.selections",
    "pipeline.data.sources",
    "pipeline.models.imported.model_specs",
    "pipeline.models.layers.initializers",
    "pipeline.models.layers.standard",
    "pipeline.models.networks",
    "pipeline.models.layers.tables",
    "pipeline.models.layers.token_mixers",
    "pipeline.models.layers.tokens",
    "pipeline.stages.runner.calibration",
    "pipeline.study.final_value.run_estimate",
    "pipeline.training.adversarial",
    "pipeline.training.contrastive",
    "pipeline.training.features.components",
    "pipeline.training.features.non_finite_steps",
    "pipeline.training.features.gradient_rules",
    "pipeline.training.features.loss_scales",
    "pipeline.training.sequences",
    "pipeline.training.number_losses",
    "pipeline.training.target_losses",
    "pipeline.training.optimizers.adaptive",
    "pipeline.training.optimizers.kronecker",
    "pipeline.training.optimizers.layerwise",
    "pipeline.training.optimizers.schedule_free",
    "pipeline.training.losses",
    "pipeline.training.target_metrics",
    "pipeline.training.optimizers.first_order",
    "pipeline.training.rate_table",
    "pipeline.training.phased_schedules",
    "pipeline.training.schedules",
    "pipeline.training.optimizers.thor.thor_spec",
)
"""Modules of components. A package stands for all its modules."""

_COMPONENT = re.compile(
    r'^@component\("(\w+)"\)\n.*?^    name: Literal\["([^"\n]+)"\]', re.MULTILINE | re.DOTALL
)
"""A component's kind and name."""


@cache
def read_index() -> Mapping[str, Mapping[str, str]]:
    """Return the module of each component of the package, by kind and name."""
    index: dict[str, dict[str, str]] = {}
    for module in list_modules():
        file = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        text = file.read_text("utf-8") if file.is_file() else ""
        for kind, name in _COMPONENT.findall(text):
            index.setdefault(kind, {})[name] = module
    return index


def list_modules() -> Iterator[str]:
    """Yield the modules of components, and of a package each module."""
    for name in COMPONENT_MODULES:
        folder = PACKAGE.parent.joinpath(*name.split("."))
        if not folder.is_dir():
            yield name
        for file in sorted(folder.glob("*.py")):
            if file.stem != "__init__":
                yield f"{name}.{file.stem}"
