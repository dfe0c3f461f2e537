"""Commands of other distributions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.cli.commands.installed_commands import (
    find_installed_command,
    list_installed_commands,
)
from pipeline.cli.commands.root import ROOT
from pipeline.core.errors import UsageError
from tests.distributions import install_entries

MODULE = """
import click

@click.command(short_help="counts")
@click.argument("upto", type=int)
def count(upto):
    print(*range(upto))

@click.command()
def fail():
    return 1

number = 3
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    entries = {
        "count-up": "counting_of_mine:count",
        "fail": "counting_of_mine:fail",
        "number": "counting_of_mine:number",
        "gone": "nothing_of_mine:gone",
    }
    install_entries(folder, "counting", {"pipeline.commands": entries})
    (folder / "counting_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(ROOT, "commands", dict(ROOT.commands))


def test_command_of_a_distribution_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count-up", "3"]) == 0
    assert capsys.readouterr().out == "0 1 2\n"
    assert main(["fail"]) == 1


def test_wrong_argument_of_a_command_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count-up"]) == 2
    assert capsys.readouterr().err == "error: count-up: missing argument 'UPTO'\n"


def test_help_lists_commands_of_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "all"]) == 0
    captured = capsys.readouterr()
    assert "count-up" in captured.out
    assert "warning: gone: can't be imported from counting: ModuleNotFoundError" in captured.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "counting_of_mine:number of counting must be a command of click, and is a int"),
        ("gone", "can't be imported from counting: ModuleNotFoundError: No module named"),
    ],
)
def test_wrong_entry_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_installed_command(name)


def test_commands_are_found_by_name() -> None:
    assert find_installed_command("nothing") is None
    assert {"count-up", "fail"} <= set(list_installed_commands())
    assert not {"number", "gone"} & set(list_installed_commands())
