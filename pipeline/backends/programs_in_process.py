"""Compiled programs that later runs of the same process use again.

XLA's persistent cache keeps programs between processes, but none that calls oneDNN: jaxlib 0.10.2
writes such a call as if it were another kind of call, reads fields that it has not, and fails with
`std::bad_alloc` (`CustomCallThunkToProto` is given a `OneDnnOpThunk`). In a sweep, jobs that differ
in rates, seeds and lengths have the same program, which is compiled once here.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

MOST = 4
"""Programs that are remembered: training and evaluation of the last two networks. One takes some
megabytes."""

_NAMES = re.compile(r'loc\("([^"]*/[^"]*)"\(')
"""Paths of layers and operations in a program's text; names of Python's functions have no slash."""

_LOCK = threading.Lock()
_PROGRAMS: OrderedDict[tuple[str, tuple[jax.Device, ...]], Any] = OrderedDict()


def compiled_once(
    lowered: Any,
    options: Mapping[str, Any] | None,
    devices: Sequence[jax.Device],
    compile_: Callable[[], Any],
) -> tuple[Any, bool]:
    """Return the compiled program of a lowered one, and whether it was compiled before.

    The same are programs with the same text, names of layers included, with the same options, for
    the same devices: those of a client that JAX has given up are others.
    """
    key = _digest(lowered, options), tuple(devices)
    with _LOCK:
        if key in _PROGRAMS:
            _PROGRAMS.move_to_end(key)
            return _PROGRAMS[key], True
    program = compile_()
    with _LOCK:
        _PROGRAMS[key] = program
        while len(_PROGRAMS) > MOST:
            _PROGRAMS.popitem(last=False)
    return program, False


def _digest(lowered: Any, options: Mapping[str, Any] | None) -> str:
    # Without lines of source, which differ with the place that a run is started from.
    names = sorted(set(_NAMES.findall(lowered.as_text(debug_info=True))))
    about = sorted((options or {}).items())
    structure = str(lowered.in_tree), str(lowered.out_tree)
    described = [lowered.as_text(), *names, repr(about), *structure]
    return hashlib.sha256("\0".join(described).encode()).hexdigest()
