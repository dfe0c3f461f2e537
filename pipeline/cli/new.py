"""`python -m pipeline new NAME`: a small project with a recipe and custom components."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import yaml

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import RunError, UsageError
from pipeline.core.files.paths import PROJECT

NAME = re.compile(r"(?i:(?!(inf|nan)\Z)[a-z]\w*)", re.ASCII)
"""Names that Hydra reads as texts, besides those that YAML doesn't read as texts."""
NAME_RULE = "must be a name of letters, digits and _ that YAML and Hydra read as a text"
FILES = (
    "README.md",
    "components.py",
    "recipes/demo.yaml",
    "tests/conftest.py",
    "tests/test_components.py",
)
EXAMPLE_NAME = re.compile(r"\bdemo\b")
"""Name of the project in its files, which the new name replaces."""


def main(name: str) -> CommandResult:
    """Make the project in a new folder of this name.

    Raises UsageError for an invalid name, RunError if the folder exists or can't be made.
    """
    # `+recipe=null` would not name a recipe called null.
    if not NAME.fullmatch(name) or not isinstance(yaml.safe_load(name), str):
        raise UsageError([name], NAME_RULE)
    folder = Path(name)
    try:
        folder.mkdir()
        for file in FILES:
            copy = folder / EXAMPLE_NAME.sub(name, file)
            copy.parent.mkdir(exist_ok=True)
            text = (PROJECT / file).read_text(encoding="utf-8")
            copy.write_text(EXAMPLE_NAME.sub(name, text), encoding="utf-8")
    except FileExistsError as error:
        raise RunError(f"{name}: already exists; choose another name") from error
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RunError(f"{name}: can't be made: {error.strerror or error}") from error
    files = [EXAMPLE_NAME.sub(name, file) for file in FILES]
    print(f"{name}/ has {', '.join(files)}")
    print(f"train: cd {name} && python -m pipeline --plugin components.py +recipe={name}")
    return CommandResult({"folder": name, "files": files})
