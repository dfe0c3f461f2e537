from __future__ import annotations

import platform
import re
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.core.host.tested_versions import (
    compare_with_lock,
    describe_tested,
    find_installed_version,
    find_untested,
)

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put the metadata of a distribution on the path, and return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, number: str = "1.0", lines: tuple[str, ...] = ()) -> str:
        folder = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        head = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}")
        (folder / "METADATA").write_text("\n".join([*head, *lines, ""]))
        return name

    return write


def test_versions_within_the_bounds_are_tested(install: Install) -> None:
    install("inner", "1.5rc1")
    lines = (
        "Classifier: Programming Language :: Python :: 3.8",
        "Classifier: Programming Language :: Python :: 3.99",
        "Classifier: Typing :: Typed",
        "Requires-Dist: inner<2,>=1",
        "Provides-Extra: more",
        'Requires-Dist: absent<3,>=2; extra == "more"',
    )
    name = install("outer", lines=lines)
    assert find_untested(name) == []
    assert describe_tested(name, ("inner", "absent")) == (
        "Python 3.8, 3.99; inner >=1,<2; absent >=2,<3"
    )


def test_untested_versions_are_named_once(install: Install) -> None:
    install("newer", "2.0")
    install("older", "0.9")
    lines = (
        "Classifier: Programming Language :: Python :: 3.98",
        "Classifier: Programming Language :: Python :: 3.99",
        "Requires-Dist: newer<2,>=1",
        "Requires-Dist: older<2,>=1",
        "Requires-Dist: absent<2,>=1",
        "Provides-Extra: more",
        'Requires-Dist: newer[fast]<2,>=1; extra == "more"',
    )
    assert find_untested(install("outer", lines=lines)) == [
        f"Python {platform.python_version()}: tested are 3.98, 3.99",
        "newer 2.0: tested are >=1,<2",
        "older 0.9: tested are >=1,<2",
        "absent: not installed, tested are >=1,<2",
    ]


def test_this_package_has_tested_versions() -> None:
    """Packages of extras may have others here: they are there for other programs too."""
    needed = {
        line.partition(" ")[0] for line in requires("recipe-pipeline") or () if ";" not in line
    }
    names = {re.split("[<>=]", line)[0] for line in needed}
    assert len(names) > 10
    untested = {sentence.split()[0].rstrip(":") for sentence in find_untested("recipe-pipeline")}
    assert untested & names == set()


def write_lock(path: Path, versions: dict[str, str]) -> Path:
    rows = [f'[[packages]]\nname = "{name}"\nversion = "{text}"' for name, text in versions.items()]
    path.write_text("\n".join(['lock-version = "1.0"', *rows, '[[packages]]\nname = "folder"']))
    return path


def test_lock_comparison_names_differing_packages(install: Install, tmp_path: Path) -> None:
    names = [install(f"package-{number}", "1.0") for number in range(6)]
    same = {"package-0": "1", "not-installed": "5"}
    lock = write_lock(tmp_path / "pylock.toml", same)
    assert compare_with_lock(lock) == "all 1 installed packages of pylock.toml have its versions"
    lock = write_lock(tmp_path / "pylock.toml", same | dict.fromkeys(names[1:], "2.0"))
    assert compare_with_lock(lock) == (
        "5 of 6 installed packages differ from pylock.toml: package-1 1.0 instead of 2.0, "
        "package-2 1.0 instead of 2.0, package-3 1.0 instead of 2.0, "
        "package-4 1.0 instead of 2.0 and 1 more"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "packages = 3",
        "[[packages]]\nversion = '1'",
        "[[packages]]\nname = 'numpy'\nversion = 'x y'",
        "[[packages]]\nname = 'numpy'\nversion = 3",
        "packages = ['numpy']",
        "\0",
    ],
)
def test_damaged_lock_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "pylock.toml").write_text(text)
    with pytest.raises(DataError, match=r"pylock\.toml: isn't a lock file \(PEP 751\)"):
        compare_with_lock(tmp_path / "pylock.toml")


def test_missing_package_has_no_version() -> None:
    assert find_installed_version("no-such-package") is None
    assert find_installed_version("numpy") == version("numpy")
