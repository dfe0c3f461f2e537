"""`python -m pipeline completion SHELL`: the script for completion in a shell, and its calls.

The script is click's. It calls `pipeline` with COMP_WORDS and `_PIPELINE_COMPLETE` in the
environment, and `complete` prints the completions.
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

PROGRAM = "pipeline"


@add_completion_class
class BashWords(BashComplete):
    """Completion in bash, which splits `+recipe=lenet5` at the `=`."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor and the incomplete word, joined at `=`."""
        words, incomplete = super().get_completion_args()
        words += ["=", ""] if incomplete == "=" else [incomplete]
        # No word contains the separator.
        joined = "\0".join(words).replace("\0=\0", "=").split("\0")
        return joined[:-1], joined[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Return the part after `=`, since bash replaces only this part."""
        _, equals, value = str(item.value).partition("=")
        if item.type == "plain" and equals:
            return f"{item.type},{value}"
        return super().format_completion(item)


def main(shell: str) -> int:
    """Print the script of a shell; the exit status is 0."""
    script = get_completion_class(shell)
    assert script is not None, "the argument's type allows only shells of click"
    print(script(click.Command(PROGRAM), {}, PROGRAM, COMPLETION_VARIABLE).source())
    return 0


def complete(root: click.Command, instruction: str) -> int:
    """Print completions for an instruction such as `bash_complete`; return the exit status."""
    return shell_complete(root, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
