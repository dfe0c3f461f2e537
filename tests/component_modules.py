"""Import this to have the modules of all components of the package imported.

Plug-ins are loaded when components are first asked for, so that is left to the processes forked
later.
"""

from __future__ import annotations

import importlib

from pipeline.core.registry import list_modules

for _name in list_modules():
    importlib.import_module(_name)
