"""The commands, to be called with arguments as on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.cli.commands.root import ROOT


def _command(*words: str) -> Callable[[Sequence[str]], int]:
    """Return a function that runs a command with arguments, and returns the exit status."""
    return lambda args: ROOT([*words, *args])


convert = _command("convert")
convert_records = _command("convert", "records")
adopt = _command("adopt")
autopsy = _command("autopsy")
bisect = _command("bisect")
columns = _command("columns")
compare = _command("compare")
diff = _command("diff")
doctor = _command("doctor")
dump = _command("dump")
explain = _command("explain")
export = _command("export")
forecast = _command("forecast")
fork = _command("fork")
infer = _command("infer")
new = _command("new")
receipt = _command("receipt")
recommend = _command("recommend")
report = _command("report")
reproduce = _command("reproduce")
runs = _command("runs")
step = _command("step")
summary = _command("summary")
verify = _command("verify")
without = _command("without")
