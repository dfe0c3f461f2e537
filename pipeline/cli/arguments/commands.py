"""The commands: one table, by which they are called and listed in `--help`."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, Mapping[str, str]] = {
    "explain": {"+recipe=NAME KEY=VALUE ...": "what sinks cost, hold and buy here, measured"},
    "profile": {"+recipe=NAME KEY=VALUE ...": "where the time of a step goes, and a verdict"},
    "forecast": {"+recipe=NAME [--check]": "what a step will take here; was it so?"},
    "summary": {"+recipe=NAME|RUN_DIR": "layers, shapes, parameters, what is trained"},
    "convert weights": {"FROM TO +recipe=NAME": "weights of PyTorch or MindSpore, renamed"},
    "convert records": {"OUT dataset=NAME ...": "any dataset as ArrayRecord files"},
    "convert model": {"MODULE OUT [SIZE ...]": "a network of PyTorch as a recipe"},
    "report": {"RUN_DIR": "what it gets right and wrong, as one page"},
    "export": {
        "RUN_DIR FOLDER": "a trained network as StableHLO and weights",
        "RUN_DIR FOLDER to=FORMAT": "as ONNX (onnx, int8=true) or for MindSpore (ckpt)",
    },
    "infer": {
        "RUN_DIR|FOLDER FILE ...": "what it says of images, texts, rows",
        "RUN_DIR|FOLDER --prompt TEXT": "a text continued; --tokens, --temperature",
    },
    "reproduce": {"RUN_DIR": "run it again: the same losses, bit for bit?"},
    "diff": {"RUN_A RUN_B": "what sets two runs apart, what came of it"},
    "compare": {"RUN_DIR against=CHANGES": "which layer makes two computations differ"},
    "dump": {"RUN_DIR step=N": "the tensors of every layer in one step"},
    "runs": {"[FOLDER] [--html]": "all runs as a table, or as one page"},
    "recommend": {"FOLDER +recipe=NAME ...": "what to try next, by what runs have shown"},
    "columns": {"FILE": "the columns of a CSV file, and their types"},
    "doctor": {"+recipe=NAME KEY=VALUE ...": "are device, cache, data, disk, limits ok?"},
    "autopsy": {"RUN_DIR": "the bad step that ended a run, looked into"},
    "new": {"NAME": "a project with parts of your own"},
    "schema": {"": "JSON schema of recipes, for editors"},
}
"""Arguments and outcome by command, one line for each way to call it.

A command is `main(args)` of the module of `pipeline.cli` with its first word as name.
"""


def command_words() -> list[str]:
    """Return the first words of the commands, in the order of the table."""
    return list(dict.fromkeys(name.partition(" ")[0] for name in COMMANDS))


def conversions() -> list[str]:
    """Return the second words of `convert`."""
    return [words[1] for words in map(str.split, COMMANDS) if words[0] == "convert"]
