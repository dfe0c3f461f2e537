"""Versions of installed packages, compared with the tested ones and with the lock file."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from pipeline.core.errors import DataError

PYTHON = "Programming Language :: Python :: "
PACKAGES_SHOWN = 4
"""Packages that a line names."""


def tested_pythons(distribution: str) -> list[Version]:
    """Versions of Python that a distribution's classifiers name, in order."""
    classifiers = metadata(distribution).get_all("Classifier") or []
    names = [name.removeprefix(PYTHON) for name in classifiers if name.startswith(PYTHON)]
    return sorted(map(Version, names))


def find_untested(distribution: str) -> list[str]:
    """A sentence for Python and each requirement that is missing or has an untested version.

    Requirements of extras count if they are installed. A version of Python between two tested ones
    counts as tested.
    """
    sentences: dict[str, None] = {}
    pythons, release = tested_pythons(distribution), Version(platform.python_version()).release[:2]
    if pythons and not pythons[0].release <= release <= pythons[-1].release:
        tested = ", ".join(map(str, pythons))
        sentences[f"Python {platform.python_version()}: tested are {tested}"] = None
    for requirement in map(Requirement, requires(distribution) or ()):
        bounds, marker = _bounds(requirement), requirement.marker
        installed = installed_version(requirement.name)
        if installed is None:
            if marker is None or marker.evaluate({"extra": ""}):
                sentences[f"{requirement.name}: not installed, tested are {bounds}"] = None
        elif not requirement.specifier.contains(installed, prereleases=True):
            sentences[f"{requirement.name} {installed}: tested are {bounds}"] = None
    return list(sentences)


def describe_tested(distribution: str, names: tuple[str, ...]) -> str:
    """The tested versions of Python and of the named requirements, on one line."""
    needed = {line.name: line for line in map(Requirement, requires(distribution) or ())}
    pythons = ", ".join(map(str, tested_pythons(distribution))) or "any"
    bounds = [f"{name} {_bounds(needed[name])}" for name in names if name in needed]
    return "; ".join([f"Python {pythons}", *bounds])


def compare_with_lock(lock: Path) -> str:
    """The number of installed packages that differ from a lock file (PEP 751), and the first few.

    Packages that aren't installed don't count: most are tools of development. Raises DataError if
    the file isn't a lock file.
    """
    pairs = {name: (installed_version(name), locked) for name, locked in _read_lock(lock).items()}
    shared = {name: (here, locked) for name, (here, locked) in pairs.items() if here is not None}
    differing = [
        f"{name} {here} instead of {locked}"
        for name, (here, locked) in shared.items()
        if Version(here) != Version(locked)
    ]
    if not differing:
        return f"all {len(shared)} installed packages of {lock.name} have its versions"
    more = len(differing) - PACKAGES_SHOWN
    listed = ", ".join(differing[:PACKAGES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"{len(differing)} of {len(shared)} installed packages differ from {lock.name}: {listed}"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None if it isn't installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _bounds(requirement: Requirement) -> str:
    return ",".join(sorted(map(str, requirement.specifier), reverse=True)) or "any"


def _read_lock(lock: Path) -> Mapping[str, str]:
    """Versions by name. A package without a version, such as a folder, is left out."""
    try:
        packages = tomllib.loads(lock.read_text())["packages"]
        versions = {row["name"]: row["version"] for row in packages if row.get("version")}
        for text in versions.values():
            Version(text)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{lock}: isn't a lock file (PEP 751): {error!r}") from error
    return versions
