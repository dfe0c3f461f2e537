"""Version of the code: a digest of the package's files, and the git state of a checkout."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.core.files.package_paths import PACKAGE

NOT_CODE = frozenset({"__pycache__", "conf", "examples", "pylock.toml", "recipes"})
"""Folders and files of the package that decide nothing once a recipe is composed."""
GIT = ("git", "--no-optional-locks", "status", "--porcelain=v2", "--branch")
GIT_S = 5.0
"""Longest time for git, whose file system may hang."""
CHANGES_KEPT = 50
FIELDS = {"1": 8, "2": 9, "u": 10, "?": 1}
"""Fields before the path in a line of `git status`, by the kind of line."""


@cache
def describe_imported_code() -> dict[str, Any]:
    """Return what `describe_code` says of this package when it is first asked in a process.

    What a process has imported stays as it is, so the runs after the first one read no file again
    and start no git.
    """
    return describe_code()


def describe_code(package: Path = PACKAGE) -> dict[str, Any]:
    """Return a SHA-256 of the package's files, the same in a checkout and a wheel.

    In a checkout `git` has the commit, whether files differ from it, and which; elsewhere the key
    is absent.
    """
    digest = hashlib.sha256()
    for folder, inner, files in os.walk(package):
        inner[:] = sorted(set(inner) - NOT_CODE)
        for file in sorted(set(files) - NOT_CODE):
            path = os.path.join(folder, file)
            if not os.path.isfile(path):
                continue  # such as an editor's lock, a link to nowhere
            with open(path, "rb") as opened:
                content = opened.read()
            name = os.path.relpath(path, package)
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    git = _read_git_state(package.parent)
    return {"sha256": digest.hexdigest()} | ({"git": git} if git else {})


def _read_git_state(root: Path) -> dict[str, Any] | None:
    # Git itself would also find the checkout of a user who has the package inside of it.
    if not (root / ".git").exists():
        return None
    try:
        status = subprocess.run(
            GIT, cwd=root, capture_output=True, text=True, timeout=GIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {"commit": None, "why": str(error).splitlines()[0]}
    lines = status.stdout.splitlines()
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid "))
    changed = [
        line.split(" ", FIELDS[line[0]])[-1].partition("\t")[0]
        for line in lines
        if line[0] in FIELDS
    ]
    return {"commit": commit, "dirty": bool(changed), "changed": changed[:CHANGES_KEPT]}
