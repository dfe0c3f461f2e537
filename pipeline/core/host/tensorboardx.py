"""Import of tensorboardX without PyTorch, which it imports for the type of an annotation."""

import sys
import threading

_LOCK = threading.Lock()


class _WithoutTorch:
    """A finder by which one thread finds no PyTorch."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("not imported for an annotation", name=fullname)


def import_tensorboardx() -> None:
    """Import tensorboardX, in 0.1 s instead of 1.3 if PyTorch is installed. Other threads may
    import PyTorch meanwhile, and this one afterwards. One that calls this meanwhile waits: a part
    of a package that another thread imports could be imported by half."""
    with _LOCK:
        finders = [] if "torch" in sys.modules else [_WithoutTorch()]
        sys.meta_path[:0] = finders
        try:
            import tensorboardX  # noqa: F401
        finally:
            for finder in finders:
                sys.meta_path.remove(finder)
