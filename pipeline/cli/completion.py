"""`python -m pipeline completion SHELL`: scripts for shells, and the answers to their questions.

click's scripts call `pipeline` with COMP_WORDS and `_PIPELINE_COMPLETE`; see its documentation.
"""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from pipeline.cli.commands import COMPLETION_VARIABLE
from pipeline.core.errors import UsageError

PROGRAM = "pipeline"


@add_completion_class
class BashWords(BashComplete):
    """Completion in bash, which takes the `=` of `+recipe=lenet5` for a separate word."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor and the incomplete one, joined at `=`."""
        words, incomplete = super().get_completion_args()
        if incomplete == "=":
            incomplete = ""
            words = [*words, "="]
        joined: list[str] = []
        for index, word in enumerate([*words, incomplete]):
            follows = word == "=" or (index > 0 and [*words, incomplete][index - 1] == "=")
            if joined and follows:
                joined[-1] += word
            else:
                joined.append(word)
        return joined[:-1], joined[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Return the part after `=`, which alone bash replaces."""
        _, equals, value = str(item.value).partition("=")
        if item.type == "plain" and equals:
            return f"{item.type},{value}"
        return super().format_completion(item)


def main(shell: str) -> int:
    """Print the script of a shell; the exit status is 0. Raises UsageError for another shell."""
    script = get_completion_class(shell)
    if script is None:
        raise UsageError([shell], "there is no such shell")
    print(script(click.Command(PROGRAM), {}, PROGRAM, COMPLETION_VARIABLE).source())
    return 0


def complete(root: click.Command, instruction: str) -> int:
    """Answer the question that a shell's script asks, such as `bash_complete`; the exit status."""
    return shell_complete(root, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
