"""The child process of test_limited_process.py: answers, fails or exceeds its limits."""

from __future__ import annotations

from pipeline.core.host.limited_child import serve


def compute(kind: bytes, content: bytes) -> list[bytes]:
    """Answer a request by its letter."""
    match kind:
        case b"e":
            return [content[:2], content[2:]]
        case b"f":
            raise ValueError(f"{content.decode()}\nsecond line")
        case b"i":
            raise ImportError("no module named parser")
        case b"m":
            return [bytes(1 << 40)]
    while True:
        pass


if __name__ == "__main__":
    serve(compute)
