"""The commands, to be called with arguments as on the command line."""

from __future__ import annotations

from pipeline.cli.commands.conversion_commands import CONVERT
from pipeline.cli.commands.root import ROOT

convert = CONVERT
convert_records = CONVERT.commands["records"]
_commands = ROOT.commands
adopt = _commands["adopt"]
autopsy = _commands["autopsy"]
columns = _commands["columns"]
compare = _commands["compare"]
diff = _commands["diff"]
doctor = _commands["doctor"]
dump = _commands["dump"]
explain = _commands["explain"]
export = _commands["export"]
forecast = _commands["forecast"]
infer = _commands["infer"]
new = _commands["new"]
recommend = _commands["recommend"]
report = _commands["report"]
reproduce = _commands["reproduce"]
runs = _commands["runs"]
summary = _commands["summary"]
