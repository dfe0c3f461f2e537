"""Import this to have a recipe composed: all parts are then loaded and the schema is built.

A forked process is spared half a second by it. No device of JAX is opened.
"""

from __future__ import annotations

from pipeline import load_recipe

load_recipe()
