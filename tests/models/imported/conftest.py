"""The plug-in of the networks that these tests import, loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flax import linen as nn

from pipeline.core.plugins import loading
from pipeline.core.plugins.loading import VARIABLE, load_named
from pipeline.core.registry import list_components

IMPORTED_NETWORKS = Path(__file__).with_name("imported_networks.py")


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> Iterator[None]:
    """Load it once for the tests of a file: to define its modules takes a quarter of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(IMPORTED_NETWORKS))
        plugins = list(load_named())
        yield
    for plugin in plugins:
        loading._loaded.pop(plugin.name, None)


@pytest.fixture
def imported() -> Callable[..., nn.Module]:
    """Build a network of the plug-in: (kind, name, type of activations, arguments)."""

    def build(kind: str, name: str, dtype: str = "float32", **arguments: Any) -> nn.Module:
        tree = {
            "name": kind,
            "import": f"imported_networks:{name}",
            "arguments": arguments,
            "init": {},
        }
        return list_components("model")[kind].model_validate(tree).build(10, dtype)

    return build
