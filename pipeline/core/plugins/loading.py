"""Plug-ins: custom Python files and modules, whose components a recipe may name.

Only the command line (`--plugin FILE`) and the environment (`PIPELINE_PLUGINS`) name plug-ins. A
recipe can't, so that a recipe from a stranger runs no code.
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
"""Environment variable with the library that Keras computes with, read when Keras is imported."""

INSTALL = {
    "torch": "pip install torch --index-url https://download.pytorch.org/whl/cpu (the build for "
    "the CPU), or pip install 'recipe-pipeline[torch]'"
}
"""Commands that install packages which this package doesn't need, but plug-ins may."""


@dataclass(frozen=True)
class Plugin:
    """A module that was imported because the user named it."""

    name: str
    """Name of the module, with which `import` keys of a recipe begin."""
    source: str
    """The file or module as the user named it."""
    module: ModuleType
    sha256: Mapping[str, str]
    """SHA-256 by path of the module's file, and of imported files below its folder. Files that are
    imported after the plug-in is loaded are left out, since they differ between processes."""

    def describe(self) -> dict[str, Any]:
        """Return the version of the module's distribution, and the SHA-256 of its files."""
        # Imported here: `--help` doesn't need it.
        from importlib.metadata import PackageNotFoundError, version

        try:
            installed = None if _is_file(self.source) else version(self.name.partition(".")[0])
        except PackageNotFoundError:
            installed = None
        return {"version": installed, "sha256": dict(self.sha256)}


_loaded: dict[str, Plugin] = {}


def take_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the plug-ins that a command line names, and its other arguments. Raises RecipeError
    for a flag without a file."""
    sources: list[str] = []
    other_arguments: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag != FLAG:
            other_arguments.append(argument)
            continue
        if not equals:
            value = next(remaining, "")
        if not value:
            raise RecipeError([f"{FLAG}: must be followed by a Python file, as components.py"])
        sources.append(value)
    return sources, other_arguments


def to_flags(sources: Sequence[str]) -> list[str]:
    """Return the arguments that name plug-ins."""
    return [word for source in sources for word in (FLAG, source)]


def export_plugins(sources: Sequence[str]) -> None:
    """Add plug-ins to the environment of this process and of those that it starts. Raises
    RecipeError for a path that the variable can't hold."""
    plugins = dict.fromkeys(_read_environment())
    for source in sources:
        plugin = _to_absolute(source)
        if os.pathsep in plugin:
            raise RecipeError([f"{FLAG} {source}: must have no {os.pathsep} in its path"])
        plugins[plugin] = None
    os.environ[VARIABLE] = os.pathsep.join(plugins)


def load_named() -> Iterator[Plugin]:
    """Import each plug-in of the environment that isn't loaded yet, and yield it before the next.

    Raises RecipeError for a plug-in that is missing, can't be imported, or has the name of another
    module.
    """
    sources = _read_environment()
    if sources:
        # Otherwise Keras, if a plug-in imports it, looks for TensorFlow.
        os.environ.setdefault(KERAS_BACKEND, "jax")
    for source in sources:
        name = Path(source).stem if _is_file(source) else source
        loaded = _loaded.get(name)
        if loaded is None:
            module = _import_file(source, name) if _is_file(source) else _import_module(source)
            _loaded[name] = Plugin(name, source, module, _hash_files(source, module))
            yield _loaded[name]
        elif loaded.source != source:
            raise RecipeError(
                [f"{FLAG} {source}: {loaded.source} is called {name} too; rename one"]
            )


def list_loaded_plugins() -> tuple[Plugin, ...]:
    """Return the plug-ins that are loaded, in the order of their names."""
    return tuple(_loaded[name] for name in sorted(_loaded))


def find_object(reference: str) -> Any:
    """Return the object that `module:name` refers to in a plug-in, such as `my_components:MyNet`.

    Raises ValueError for another form, for a module that isn't a plug-in, and for a name that the
    module doesn't have.
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
            raise ValueError(f"{reference!r}: {plugin.source} has no {attribute}")
        value = getattr(value, attribute)
    return value


def suggest_missing_flag() -> str:
    """Return the advice for an unknown component."""
    from pipeline.core.plugins.parts import list_missing_parts  # `--help` doesn't need it

    named = ", ".join(plugin.source for plugin in list_loaded_plugins())
    absent = "".join(f"; {name}: {reason}" for name, reason in list_missing_parts().items())
    return f"a custom component needs {FLAG} FILE{f' (named: {named})' if named else ''}{absent}"


def _read_environment() -> list[str]:
    """Return the plug-ins in the environment, without repetitions, files by absolute paths."""
    sources = os.environ.get(VARIABLE, "").split(os.pathsep)
    return list(dict.fromkeys(_to_absolute(source) for source in sources if source))


def _is_file(source: str) -> bool:
    """Return whether a plug-in is named as a file, not as a module."""
    return source.endswith(".py") or os.sep in source


def _to_absolute(source: str) -> str:
    return os.path.abspath(source) if _is_file(source) else source


def _import_module(name: str) -> ModuleType:
    """Import an installed module. Raises RecipeError."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        reason = _describe_import_error(error, None)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and name.startswith(missing):
            reason = f"no module {name} is installed; a file is named with its ending: {name}.py"
        raise RecipeError([f"{FLAG} {name}: {reason}"]) from error


def _import_file(source: str, name: str) -> ModuleType:
    """Import a file as the module `name`, and make the modules beside it importable."""
    path = Path(source)
    if not path.is_file():
        raise RecipeError([f"{FLAG} {source}: there is no such file"])
    if not name.isidentifier():
        raise RecipeError([f"{FLAG} {source}: {name} can't name a module; rename the file"])
    if _is_taken(name, path):
        raise RecipeError(
            [f"{FLAG} {source}: {name} is the name of another module; rename the file"]
        )
    if name in sys.modules:
        # A test of the user may have imported the file before.
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError([f"{FLAG} {source}: must be a Python file, ending in .py"])
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        # The folder is last, so that its files don't replace installed modules.
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise RecipeError([f"{FLAG} {source}: {_describe_import_error(error, path)}"]) from error
    return module


def _is_taken(name: str, path: Path) -> bool:
    """Return whether a module other than the file's has the name, imported or not."""
    if name in sys.stdlib_module_names:
        return True
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return file is None or Path(file).resolve() != path.resolve()
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        # Python finds nothing of the name, or only a folder without __init__.py.
        return False
    return Path(spec.origin).resolve() != path.resolve()


def _describe_import_error(error: BaseException, path: Path | None) -> str:
    """Return the text of an import's error, with the line in the user's file at `path`, if any."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError) and path is not None and error.filename == str(path):
        lines = [error.lineno]
    place = f"line {lines[-1]}: " if lines else ""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    hint = f"; {INSTALL[missing]}" if missing in INSTALL else ""
    return f"can't be imported: {place}{type(error).__name__}: {first_line(error)}{hint}"


def _hash_files(source: str, module: ModuleType) -> Mapping[str, str]:
    """Return the SHA-256 of a module's file by path, and of imported files below its folder.

    Files of the folder are included only if the user named a file. Installed packages in it, such
    as a virtual environment or this package, are left out, since they have versions.
    """
    file = getattr(module, "__file__", None)
    if file is None:
        return {}
    module_file = Path(file)
    digests = {module_file.name: _sha256(module_file)}
    if not _is_file(source):
        return digests
    plugins = {Path(plugin.source) for plugin in _loaded.values() if _is_file(plugin.source)}
    files = (getattr(imported, "__file__", None) for imported in list(sys.modules.values()))
    paths = {Path(file) for file in files if isinstance(file, str)} - {module_file, *plugins}
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
