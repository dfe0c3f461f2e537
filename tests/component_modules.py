"""Import this to have the modules of all components of the package imported.

Plug-ins are loaded when components are first asked for, so that is left to the processes forked
later.
"""

from __future__ import annotations

import importlib
import pkgutil

from pipeline.core.registry import COMPONENT_MODULES

for _name in COMPONENT_MODULES:
    _folder = getattr(importlib.import_module(_name), "__path__", ())
    for _info in pkgutil.iter_modules(_folder, f"{_name}."):
        importlib.import_module(_info.name)
