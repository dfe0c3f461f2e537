"""Plug-ins: Python files and modules of the user's own, whose parts a recipe may name.

Only the command line (`--plugin FILE`) and the environment (`PIPELINE_PLUGINS`) name them, never a
recipe: a recipe from a stranger runs no code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import RecipeError, first_line

FLAG, VARIABLE = "--plugin", "PIPELINE_PLUGINS"

INSTALL = {
    "torch": "pip install torch --index-url https://download.pytorch.org/whl/cpu (the build for "
    "the CPU), or pip install 'recipe-pipeline[torch]'"
}
"""Commands that install packages which plug-ins need and this one does not."""


@dataclass(frozen=True)
class Plugin:
    """A module that was imported because the user named it."""

    name: str
    """Name of the module: what `import` keys of a recipe begin with."""
    given: str
    """A file or the name of a module, as it was named."""
    module: ModuleType

    def describe(self) -> dict[str, Any]:
        """Return name and version of the module, and SHA-256 of its file and those beside it.

        Files of its folder count where something has imported them.
        """
        file = getattr(self.module, "__file__", None)
        files = {} if file is None else {Path(file).name: _sha256(Path(file))}
        if _is_file(self.given) and file is not None:
            files |= _imported_beside(Path(file))
        try:
            installed = None if _is_file(self.given) else version(self.name.partition(".")[0])
        except PackageNotFoundError:
            installed = None
        return {"version": installed, "sha256": files}


_loaded: dict[str, Plugin] = {}


def take_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the plug-ins that it names and the other arguments.

    Raises RecipeError for a flag without a file.
    """
    named: list[str] = []
    others: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        flag, equals, value = argument.partition("=")
        if flag != FLAG:
            others.append(argument)
            continue
        if not equals:
            value = next(waiting, "")
        if not value:
            raise RecipeError([f"{FLAG}: names nothing; must be a Python file, as {FLAG} parts.py"])
        named.append(value)
    return named, others


def to_flags(named: Sequence[str]) -> list[str]:
    """Return the arguments that name plug-ins."""
    return [word for name in named for word in (FLAG, name)]


def name_for_all(named: Sequence[str]) -> None:
    """Name plug-ins for this process and those that it starts, by the environment."""
    known = _named_in_environment()
    absolute = [os.path.abspath(name) if _is_file(name) else name for name in named]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, *absolute]))


def load_named() -> Iterator[Plugin]:
    """Import the plug-ins that are named and not loaded yet; yield each before the next.

    Raises RecipeError for one that is not there, does not import, or has the name of another
    module.
    """
    for given in _named_in_environment():
        name = Path(given).stem if _is_file(given) else given
        held = _loaded.get(name)
        if held is not None and held.given != given:
            raise RecipeError([f"{FLAG} {given}: {held.given} is called {name} too; rename one"])
        if held is None:
            module = _import_file(given, name) if _is_file(given) else _import_module(given)
            _loaded[name] = Plugin(name, given, module)
            yield _loaded[name]


def loaded_plugins() -> tuple[Plugin, ...]:
    """The plug-ins that are loaded, in the order of their names."""
    return tuple(_loaded[name] for name in sorted(_loaded))


def find_object(reference: str) -> Any:
    """Return what `module:name` stands for in a plug-in, as `my_parts:MyNet`.

    Raises ValueError for another form, a module that the command line does not name, and a name
    that it does not have.
    """
    name, colon, path = reference.partition(":")
    if not colon or not name or not path:
        raise ValueError(f"{reference!r} must be module:name, as my_parts:MyNet")
    plugin = _loaded.get(name)
    if plugin is None:
        known = ", ".join(_loaded) or "none is named"
        raise ValueError(
            f"{reference!r} is code, which runs only where the command line names it: add "
            f"{FLAG} {name}.py, or {FLAG} {name} for an installed module (named: {known})"
        )
    found: Any = plugin.module
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ValueError(f"{reference!r}: {plugin.given} has no {attribute}")
        found = getattr(found, attribute)
    return found


def missing_flag_hint() -> str:
    """Return what to do about a part that nothing defines."""
    named = ", ".join(plugin.given for plugin in loaded_plugins())
    return f"a part of your own needs {FLAG} FILE" + (f" (named: {named})" if named else "")


def _named_in_environment() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def _is_file(given: str) -> bool:
    return given.endswith(".py") or os.sep in given


def _import_module(name: str) -> ModuleType:
    with_hint = f"{FLAG} {name}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            missing = f"no module {name} is installed; a file is named with its ending: {name}.py"
            raise RecipeError([f"{with_hint}: {missing}"]) from error
        raise RecipeError([f"{with_hint}: {_why(error, None)}"]) from error
    except Exception as error:
        raise RecipeError([f"{with_hint}: {_why(error, None)}"]) from error


def _import_file(given: str, name: str) -> ModuleType:
    """Import a file under its own name; what lies beside it can be imported too."""
    path = Path(given)
    if not path.is_file():
        raise RecipeError([f"{FLAG} {given}: there is no such file"])
    if not name.isidentifier() or name in sys.stdlib_module_names or name in sys.modules:
        why = "is the name of another module" if name.isidentifier() else "is no name of a module"
        raise RecipeError([f"{FLAG} {given}: {name} {why}; rename the file"])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError([f"{FLAG} {given}: must be a Python file, ending in .py"])
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        # Last: nothing there takes the place of a module that is installed.
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RecipeError([f"{FLAG} {given}: {_why(error, path)}"]) from error
    return module


def _why(error: Exception, path: Path | None) -> str:
    """Describe an error of an import, with the line of the user's file where it arose."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError) and path is not None and error.filename == str(path):
        lines = [error.lineno]
    where = f"line {lines[-1]}: " if lines else ""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    hint = f"; {INSTALL[missing]}" if missing in INSTALL else ""
    return f"does not import: {where}{type(error).__name__}: {first_line(error)}{hint}"


def _imported_beside(file: Path) -> dict[str, str]:
    """SHA-256 by path of the files below a file's folder that modules were imported from.

    What is installed there, in a virtual environment, has a version instead.
    """
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(other) for other in files if other}
    installed = Path(sys.prefix)
    return {
        str(path.relative_to(file.parent)): _sha256(path)
        for path in sorted(paths)
        if file.parent in path.parents and installed not in path.parents and path.is_file()
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
