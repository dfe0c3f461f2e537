"""`python -m pipeline autopsy RUN_DIR`: replay and examine the non-finite step of a run."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import printable_lines
from pipeline.inspect.autopsy.examine import examine
from pipeline.inspect.autopsy.on_failure import read_reproducer


def main(run_dir: Path) -> CommandResult:
    """Replay the non-finite step, and print where values ceased to be finite.

    The exit status is 0 if the run found the same, else 1. Raises the errors of `read_reproducer`.
    """
    reproducer = read_reproducer(run_dir)
    finding = examine(reproducer.step_config, reproducer.state, reproducer.batch, reproducer.device)
    print(printable_lines(str(finding)))
    if reproducer.left_out:
        print(f"computed without {', '.join(reproducer.left_out)}, which no reproducer has")
    run_finding = str(reproducer.facts["text"])
    is_same = str(finding) == run_finding
    if is_same:
        print("this is what the run has found")
    else:
        print(printable_lines(f"the run has found:\n{run_finding}"))
    facts = {**finding.to_dict(), "run_found": run_finding, "same": is_same}
    return CommandResult(facts, exit_status=0 if is_same else 1)
