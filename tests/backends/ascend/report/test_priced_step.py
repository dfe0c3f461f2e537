"""Layers of tasks, and tasks outside of modules."""

from __future__ import annotations

import pytest

from pipeline.backends.ascend.report.priced_step import IMPORTED, name_layer
from pipeline.models.imported.imported_network import ImportedNetwork
from tests.backends.ascend.made_up import task


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("jvp(ImportedNetwork)/Conv_0", "Conv_0"),
        ("jvp(ImportedNetwork)", "(outside modules): SoftmaxV2"),
        ("transpose(jvp(ImportedNetwork))/transpose()", "(outside modules): SoftmaxV2"),
        ("jvp(Attention)", "Attention"),
        ("", "(backward)"),
    ],
)
def test_task_is_named_by_its_module_or_op(scope: str, layer: str) -> None:
    assert name_layer(task(phase="backward", scope=scope, type="SoftmaxV2")) == layer


def test_scope_of_an_imported_network_is_its_class_name() -> None:
    assert ImportedNetwork.__name__ == IMPORTED
