"""Plug-ins: custom Python files and modules, whose components a recipe may name.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.core.errors import RecipeError, first_line

FLAG = "--plugin"
VARIABLE = "PIPELINE_PLUGINS"
PACKAGE = Path(__file__).parents[2]
KERAS_BACKEND = "KERAS_BACKEND"
"""Variable from which Keras learns, when it is imported, what it computes with."""

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
    sha256: Mapping[str, str]
    """SHA-256 of its file, and by path of those below its folder that it had imported when it was
    loaded: what is imported later depends on what a process does."""

    def describe(self) -> dict[str, Any]:
        """Return the version of the module's distribution, and the SHA-256 of its files."""
        # Imported here: `--help`, which has no plug-in, would wait for it.
        from importlib.metadata import PackageNotFoundError, version

        try:
            installed = None if _is_file(self.given) else version(self.name.partition(".")[0])
        except PackageNotFoundError:
            installed = None
        return {"version": installed, "sha256": dict(self.sha256)}


_loaded: dict[str, Plugin] = {}


def take_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the plug-ins that it names and the other arguments.

    Raises RecipeError for a flag without a file.
    """
    named: list[str] = []
    other_words: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        flag, equals, value = argument.partition("=")
        if flag != FLAG:
            other_words.append(argument)
            continue
        if not equals:
            value = next(waiting, "")
        if not value:
            raise RecipeError(
                [f"{FLAG}: names nothing; must be a Python file, as {FLAG} components.py"]
            )
        named.append(value)
    return named, other_words


def to_flags(named: Sequence[str]) -> list[str]:
    """Return the arguments that name plug-ins."""
    return [word for name in named for word in (FLAG, name)]


def name_for_all(named: Sequence[str]) -> None:
    """Name plug-ins for this process and those that it starts, by the environment.

    Raises RecipeError for a path that the environment can't hold.
    """
    for name in named:
        if os.pathsep in _absolute(name):
            raise RecipeError([f"{FLAG} {name}: must have no {os.pathsep} in its path"])
    names = _named_in_environment()
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*names, *map(_absolute, named)]))


def load_named() -> Iterator[Plugin]:
    """Import the plug-ins that are named and not loaded yet; yield each before the next.

    Raises RecipeError for one that is not there, does not import, or has the name of another
    module.
    """
    names = _named_in_environment()
    if names:
        # A Keras that one of them imports would look for TensorFlow.
        os.environ.setdefault(KERAS_BACKEND, "jax")
    for source in names:
        name = Path(source).stem if _is_file(source) else source
        held = _loaded.get(name)
        if held is not None and held.given != source:
            raise RecipeError([f"{FLAG} {source}: {held.given} is called {name} too; rename one"])
        if held is None:
            module = _import_file(source, name) if _is_file(source) else _import_module(source)
            _loaded[name] = Plugin(name, source, module, _digests(source, module))
            yield _loaded[name]


def loaded_plugins() -> tuple[Plugin, ...]:
    """Return the plug-ins that are loaded, in the order of their names."""
    return tuple(_loaded[name] for name in sorted(_loaded))


def find_object(reference: str) -> Any:
    """Return what `module:name` stands for in a plug-in, as `my_components:MyNet`.

    Raises ValueError for another form, a module that the command line does not name, and a name
    that it does not have.
    """
    name, colon, path = reference.partition(":")
    if not colon or not name or not path:
        raise ValueError(f"{reference!r} must be module:name, as my_components:MyNet")
    plugin = _loaded.get(name)
    if plugin is None:
        names = ", ".join(_loaded) or "none is named"
        raise ValueError(
            f"{reference!r} is code, which runs only where the command line names it: add "
            f"{FLAG} {name}.py, or {FLAG} {name} for an installed module (named: {names})"
        )
    value: Any = plugin.module
    for attribute in path.split("."):
        if not hasattr(value, attribute):
            raise ValueError(f"{reference!r}: {plugin.given} has no {attribute}")
        value = getattr(value, attribute)
    return value


def missing_flag_hint() -> str:
    """Return what to do about a component that nothing defines."""
    named = ", ".join(plugin.given for plugin in loaded_plugins())
    return f"a custom component needs {FLAG} FILE" + (f" (named: {named})" if named else "")


def _named_in_environment() -> list[str]:
    """Return the plug-ins that are named, without repetitions, files by their absolute paths."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    return list(dict.fromkeys(_absolute(name) for name in named if name))


def _is_file(source: str) -> bool:
    return source.endswith(".py") or os.sep in source


def _absolute(source: str) -> str:
    return os.path.abspath(source) if _is_file(source) else source


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        reason = _describe_import_error(error, None)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and name.startswith(missing):
            reason = f"no module {name} is installed; a file is named with its ending: {name}.py"
        raise RecipeError([f"{FLAG} {name}: {reason}"]) from error


def _import_file(source: str, name: str) -> ModuleType:
    """Import a file under its name; what is beside it can be imported too."""
    path = Path(source)
    if not path.is_file():
        raise RecipeError([f"{FLAG} {source}: there is no such file"])
    if not name.isidentifier():
        raise RecipeError([f"{FLAG} {source}: {name} is no name of a module; rename the file"])
    if _is_taken(name, path):
        raise RecipeError(
            [f"{FLAG} {source}: {name} is the name of another module; rename the file"]
        )
    if name in sys.modules:
        # A test of the user's has imported it before.
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError([f"{FLAG} {source}: must be a Python file, ending in .py"])
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        # Last: nothing there takes the place of a module that is installed.
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise RecipeError([f"{FLAG} {source}: {_describe_import_error(error, path)}"]) from error
    return module


def _is_taken(name: str, path: Path) -> bool:
    """Return whether another module than this file has a name, imported or not."""
    if name in sys.stdlib_module_names:
        return True
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return file is None or Path(file).resolve() != path.resolve()
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        # A folder without __init__.py may have the name.
        return False
    return Path(spec.origin).resolve() != path.resolve()


def _describe_import_error(error: BaseException, path: Path | None) -> str:
    """Describe an error of an import, with the line of the user's file that raised it."""
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


def _digests(source: str, module: ModuleType) -> Mapping[str, str]:
    """SHA-256 of a module's file and, of a file that was named, of what it imports of its folder.

    What is installed there, in a virtual environment or as this package, has a version instead.
    """
    file = getattr(module, "__file__", None)
    if file is None:
        return {}
    module_file = Path(file)
    digests = {module_file.name: _sha256(module_file)}
    if not _is_file(source):
        return digests
    plugins = {Path(plugin.given) for plugin in _loaded.values() if _is_file(plugin.given)}
    files = (getattr(other, "__file__", None) for other in list(sys.modules.values()))
    paths = {Path(other) for other in files if isinstance(other, str)} - {module_file, *plugins}
    for path in sorted(paths):
        if module_file.parent in path.parents and not _is_installed(path) and path.is_file():
            digests[str(path.relative_to(module_file.parent))] = _sha256(path)
    return digests


def _is_installed(path: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(folder in path.parents for folder in (Path(os.__file__).parent, PACKAGE))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
