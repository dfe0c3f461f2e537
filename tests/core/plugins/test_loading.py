"""Plug-ins are imported from where the command line says, once, and under a name of their own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.core.errors import RecipeError
from pipeline.core.plugins.loading import (
    VARIABLE,
    Plugin,
    export_plugins,
    find_object,
    list_loaded_plugins,
    load_named,
    suggest_missing_flag,
    take_flags,
    to_flags,
)

NUMBERS = count()
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a file below the test's folder, under a name that no other test has."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)

    def go(text: str, name: str = "", folder: str = ".") -> Path:
        file = tmp_path / folder / (name or f"own_{next(NUMBERS)}.py")
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(text)
        return file

    yield go
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


def load(*files: Path | str) -> list[Plugin]:
    export_plugins([str(file) for file in files])
    return list(load_named())


def refused(*files: Path | str) -> str:
    """The line of the error that the last file gives."""
    with pytest.raises(RecipeError) as caught:
        load(*files)
    (problem,) = caught.value.problems
    start = f"--plugin {files[-1]}: "
    assert problem.startswith(start)
    return problem.removeprefix(start)


def test_plugin_flags_are_taken_from_any_position() -> None:
    typed = ["doctor", "--plugin", "a.py", "x=1", "--plugin=b", "--plugins", "--plug=c"]
    assert take_flags(typed) == (["a.py", "b"], ["doctor", "x=1", "--plugins", "--plug=c"])
    assert take_flags(["--", "--plugin", "a.py"]) == (["a.py"], ["--"])
    assert to_flags(["a.py", "b"]) == ["--plugin", "a.py", "--plugin", "b"]


@pytest.mark.parametrize("typed", [["--plugin"], ["--plugin="], ["--plugin", ""]], ids=str)
def test_flag_without_a_file_is_refused(typed: list[str]) -> None:
    with pytest.raises(RecipeError, match="--plugin: must be followed by a Python file"):
        take_flags(typed)


@pytest.mark.medium
def test_plugin_file_is_the_module_of_references(write: Write) -> None:
    file = write("class Net:\n    def deeper(self): return 3\n")
    (plugin,) = load(file)
    assert plugin.name == file.stem
    assert find_object(f"{file.stem}:Net").__name__ == "Net"
    assert find_object(f"{file.stem}:Net.deeper")(None) == 3
    assert plugin in list_loaded_plugins()
    assert str(file) in suggest_missing_flag()
    assert load(file) == []


@pytest.mark.parametrize("reference", ["", "own", ":Net", "own:"])
def test_malformed_reference_is_refused(reference: str) -> None:
    with pytest.raises(ValueError, match="must be module:name, as my_components:MyNet"):
        find_object(reference)


@pytest.mark.medium
def test_unknown_reference_is_refused_with_a_hint(write: Write) -> None:
    with pytest.raises(ValueError, match="runs only where the command line names it: add --plugin"):
        find_object("os:system")
    file = write("x = 1\n")
    load(file)
    with pytest.raises(ValueError, match=r"own_\d+\.py has no y"):
        find_object(f"{file.stem}:y")


def test_installed_module_can_be_a_plugin(write: Write) -> None:
    (plugin,) = load("hypothesis.strategies")
    described = plugin.describe()
    assert described["version"] == sys.modules["hypothesis"].__version__
    assert list(described["sha256"]) == ["__init__.py"]
    assert find_object("hypothesis.strategies:integers") is not None


@pytest.mark.medium
def test_plugin_file_is_loaded_once_for_any_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`PIPELINE_PLUGINS=components.py` and `--plugin ./components.py`, in one command."""
    file = write("x = 1\n")
    monkeypatch.chdir(tmp_path)
    separator = os.pathsep
    monkeypatch.setenv(VARIABLE, f"{separator}{file.name}{separator}{separator}./{file.name}")
    assert [plugin.source for plugin in load(f"../{tmp_path.name}/{file.name}")] == [str(file)]
    assert os.environ[VARIABLE] == str(file)


def test_plugin_variable_has_absolute_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("x = 1\n")
    monkeypatch.chdir(tmp_path)
    export_plugins([file.name])
    assert os.environ[VARIABLE] == str(file)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\ndef f(: pass\n", "line 2: SyntaxError: invalid syntax"),
        ("\nimport no_such_module\n", "line 2: ModuleNotFoundError: No module named"),
        ("def f():\n    raise KeyError('a')\nf()\n", "line 2: KeyError: 'a'"),
        ("raise ValueError('two\\nlines')\n", "line 1: ValueError: two"),
        ("import sys\nsys.exit(0)\n", "line 2: SystemExit: 0"),
        ("raise RuntimeError\n", "line 1: RuntimeError: RuntimeError"),
    ],
)
def test_import_error_names_the_line(text: str, problem: str, write: Write) -> None:
    file = write(text)
    message = refused(file)
    assert message.startswith(f"can't be imported: {problem}")
    assert "\n" not in message
    assert file.stem not in sys.modules
    # Once it is mended, it does.
    file.write_text("def f(): pass\n")
    assert len(list(load_named())) == 1


@pytest.mark.parametrize("name", ["none.py", "folder.py"])
def test_missing_file_is_refused(name: str, write: Write, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    assert refused(tmp_path / name) == "there is no such file"


def test_missing_module_is_refused(write: Write) -> None:
    hint = "a file is named with its ending: no_such.mod.py"
    assert refused("no_such.mod") == f"no module no_such.mod is installed; {hint}"


@pytest.mark.parametrize("name", ["json.py", "pytest.py", "flax.py", "pipeline.py", "sys.py"])
def test_name_of_another_module_is_refused(name: str, write: Write) -> None:
    """Also one that is installed and not yet imported, as jax is not while a recipe is checked."""
    file = write("x = 1\n", name)
    stem = name.removesuffix(".py")
    assert refused(file) == f"{stem} is the name of another module; rename the file"


def test_name_of_an_unimported_package_is_refused(write: Write) -> None:
    installed = write("x = 1\n", "__init__.py", "site/own_installed")
    sys.path.append(str(installed.parents[1]))
    file = write("x = 2\n", "own_installed.py")
    assert refused(file).startswith("own_installed is the name of another module")


def test_invalid_module_name_is_refused(write: Write) -> None:
    assert refused(write("", "my-components.py")) == (
        "my-components can't name a module; rename the file"
    )


@pytest.mark.medium
def test_two_files_of_one_name_are_refused(write: Write) -> None:
    one = write("x = 1\n", f"own_{next(NUMBERS)}.py")
    other = write("x = 2\n", one.name, "folder")
    assert refused(one, other) == f"{one} is called {one.stem} too; rename one"


def test_path_with_path_separator_is_refused(write: Write) -> None:
    file = write("x = 1\n", folder=f"a{os.pathsep}b")
    assert refused(file) == f"must have no {os.pathsep} in its path"


@pytest.mark.medium
def test_file_already_imported_is_not_imported_again(write: Write) -> None:
    """As a test of custom components does, before it starts a run."""
    file = write("x = []\n")
    sys.path.insert(0, str(file.parent))
    module = __import__(file.stem)
    (plugin,) = load(file)
    assert plugin.module is module


@pytest.mark.medium
def test_module_beside_a_file_is_imported_without_replacing_modules(write: Write) -> None:
    write("x = 1\n", "own_beside.py")
    write("raise RuntimeError\n", "hypothesis.py")
    file = write("import own_beside, hypothesis\n")
    (plugin,) = load(file)
    assert isinstance(plugin.module.own_beside, ModuleType)
    assert plugin.module.hypothesis.given is not None


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.medium
def test_digests_cover_the_file_and_its_local_imports(write: Write) -> None:
    below = write("x = 1\n", "own_below.py", "own_package")
    write("x = 1\n", "own_unused.py")
    write("x = 1\n", "own_later.py")
    installed = write("x = 1\n", "own_site.py", "venv/lib/site-packages")
    sys.path.append(str(installed.parent))
    file = write("import own_package.own_below, own_site\ndef f(): import own_later\n")
    (plugin,) = load(file)
    expected = {file.name: digest(file), "own_package/own_below.py": digest(below)}
    assert plugin.describe() == {"version": None, "sha256": expected}
    # What one process has imported by then, another has not.
    plugin.module.f()
    file.write_text("changed since it was loaded\n")
    assert plugin.describe()["sha256"] == expected


@pytest.mark.slow
def test_digests_exclude_other_plugins(write: Write) -> None:
    """They would depend on the order of the flags."""
    one, other = write("x = 1\n"), write("x = 2\n")
    plugins = load(one, other)
    assert [list(plugin.sha256) for plugin in plugins] == [[one.name], [other.name]]


IMPORTED = """
from pipeline.core.errors import RecipeError
from pipeline.core.plugins.loading import find_object
from pipeline.core.registry import load_all
try:
    load_all()
    print(find_object("zoo:Net").__module__)
except RecipeError as error:
    print(*error.problems)
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("from animals.nets import Net", "animals.nets"),
        pytest.param(
            "def __getattr__(name):\n    import animals.nets as it\n    return it.Net",
            "animals.nets",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "from typing import Literal\nfrom pipeline.api import Op, component\n_net = abs",
            "--plugin zoo: registers no component and exports nothing",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["re-export", "lazy", "nothing"],
)
def test_package_exports_classes_of_its_modules(text: str, printed: str, tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(text)
    (tmp_path / "animals").mkdir()
    (tmp_path / "animals" / "nets.py").write_text("class Net: pass")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, VARIABLE: "zoo"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == printed, done.stderr
