"""`python -m pipeline new NAME`: a small project with a recipe and parts of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import RunError, UsageError
from pipeline.core.files.package_paths import PROJECT

USAGE = "new takes NAME: the folder to make, of letters, digits and _, and no word such as null"
HELP = """usage: python -m pipeline new NAME

Make a folder with a recipe, a plug-in with one part of each kind, a test and a README.

example: python -m pipeline new demo && cd demo && python -m pipeline --plugin parts.py +recipe=demo
"""
FILES = ("README.md", "parts.py", "recipes/demo.yaml", "tests/conftest.py", "tests/test_parts.py")
NAME_THERE = re.compile(r"\bdemo\b")


def main(args: Sequence[str]) -> int:
    """Make the project; the exit status is 0.

    Raises UsageError for another name, RunError where the folder is there or can't be made.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    if len(args) != 1 or not re.fullmatch(r"[A-Za-z]\w*", args[0]):
        raise UsageError(args, USAGE)
    if not isinstance(yaml.safe_load(args[0]), str):
        # As null, which `+recipe=null` would not name.
        raise UsageError(args, USAGE)
    name = args[0]
    folder = Path(name)
    try:
        folder.mkdir()
        for file in FILES:
            copy = folder / NAME_THERE.sub(name, file)
            copy.parent.mkdir(exist_ok=True)
            text = (PROJECT / file).read_text(encoding="utf-8")
            copy.write_text(NAME_THERE.sub(name, text), encoding="utf-8")
    except FileExistsError as error:
        raise RunError(f"{name}: is there already; choose another name") from error
    except OSError as error:
        raise RunError(f"{name}: can't be made: {error.strerror or error}") from error
    print(f"{name}/ has {', '.join(NAME_THERE.sub(name, file) for file in FILES)}")
    print(f"train: cd {name} && python -m pipeline --plugin parts.py +recipe={name}")
    return 0
