"""Import of tensorboardX without PyTorch, which it imports for the type of an annotation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _WithoutTorch(MetaPathFinder):
    """A finder by which one thread finds no PyTorch."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("not imported for an annotation", name=fullname)


def import_tensorboardx() -> None:
    """Import tensorboardX, in 0.1 s instead of 1.3 if PyTorch is installed. Other threads may
    import PyTorch meanwhile, and this one afterwards."""
    if "tensorboardX" in sys.modules or "torch" in sys.modules:
        return
    finder = _WithoutTorch()
    sys.meta_path.insert(0, finder)
    try:
        import tensorboardX  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
