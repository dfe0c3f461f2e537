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
"""Most packages that a line names."""


def list_tested_pythons(distribution: str) -> list[Version]:
    """Return the versions of Python that a distribution's classifiers name, in order."""
    classifiers = metadata(distribution).get_all("Classifier") or []
    names = [name.removeprefix(PYTHON) for name in classifiers if name.startswith(PYTHON)]
    return sorted(map(Version, names))


def find_untested(distribution: str) -> list[str]:
    """Return a sentence for each requirement, and for Python, whose version isn't tested.

    Requirements of extras are included if they are installed. Python is tested from the lowest to
    the highest tested version.
    """
    sentences: dict[str, None] = {}  # an ordered set
    pythons = list_tested_pythons(distribution)
    release = Version(platform.python_version()).release[:2]
    if pythons and not pythons[0].release <= release <= pythons[-1].release:
        tested = ", ".join(map(str, pythons))
        sentences[f"Python {platform.python_version()}: tested are {tested}"] = None
    for requirement in map(Requirement, requires(distribution) or ()):
        bounds = _format_bounds(requirement)
        marker = requirement.marker
        installed = find_installed_version(requirement.name)
        if installed is None:
            if marker is None or marker.evaluate({"extra": ""}):
                sentences[f"{requirement.name}: not installed, tested are {bounds}"] = None
        elif not requirement.specifier.contains(installed, prereleases=True):
            sentences[f"{requirement.name} {installed}: tested are {bounds}"] = None
    return list(sentences)


def describe_tested(distribution: str, names: tuple[str, ...]) -> str:
    """Return the tested versions of Python and of the requirements `names`, on one line."""
    requirements = {req.name: req for req in map(Requirement, requires(distribution) or ())}
    pythons = ", ".join(map(str, list_tested_pythons(distribution))) or "any"
    bounds = [
        f"{name} {_format_bounds(requirements[name])}" for name in names if name in requirements
    ]
    return "; ".join([f"Python {pythons}", *bounds])


def compare_with_lock(lock: Path) -> str:
    """Return a line about the installed packages whose versions differ from a lock file (PEP 751).

    Packages that aren't installed, of which most are tools for development, are left out. Raises
    DataError if the file isn't a lock file.
    """
    num_shared = 0
    differing = []
    for name, locked in _read_lock(lock).items():
        installed = find_installed_version(name)
        if installed is not None:
            num_shared += 1
            if Version(installed) != Version(locked):
                differing.append(f"{name} {installed} instead of {locked}")
    if not differing:
        return f"all {num_shared} installed packages of {lock.name} have its versions"
    count = f"{len(differing)} of {num_shared} installed packages differ from {lock.name}"
    num_left = len(differing) - PACKAGES_SHOWN
    ending = f" and {num_left} more" if num_left > 0 else ""
    return f"{count}: {', '.join(differing[:PACKAGES_SHOWN])}{ending}"


def find_installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it isn't installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _format_bounds(requirement: Requirement) -> str:
    return ",".join(sorted(map(str, requirement.specifier), reverse=True)) or "any"


def _read_lock(lock: Path) -> Mapping[str, str]:
    """Return versions by name. A package without a version, such as a folder, is left out."""
    try:
        packages = tomllib.loads(lock.read_text())["packages"]
        versions = {row["name"]: row["version"] for row in packages if row.get("version")}
        for text in versions.values():
            Version(text)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{lock}: isn't a lock file (PEP 751): {error!r}") from error
    return versions
