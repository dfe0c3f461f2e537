"""One of several processes of a run: `python -m pipeline.cli.worker FOLDER`.

`pipeline.stages.launch.local` starts it, with the request in FOLDER and the rank in the
environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from pipeline.core.errors import PipelineError, get_exit_status
from pipeline.core.host.process_start import collect_less_while_starting
from pipeline.core.host.signals import interrupt_command

PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal to this process when its parent ends. From linux/prctl.h."""


def main(folder: Path) -> int:
    """Run the recipe of FOLDER/request.json, and return the exit status."""
    rank = int(os.environ["RANK"])
    request = json.loads((folder / "request.json").read_text())
    # The system kills this process when the one that started it ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        os._exit(1)
    interrupt_command()
    collect_less_while_starting()
    # Output of C++ libraries on stdout goes to stderr, which is a log.
    python_stdout = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(python_stdout, "w")
    # Imported after signals are handled, since it takes seconds.
    from pipeline.config.compose import check_tree
    from pipeline.stages.launch.local import note_end, write_error
    from pipeline.stages.run import run
    from pipeline.stages.runner.context import RunOptions

    recipe_folder = request["recipe_folder"]
    options = RunOptions(
        run_dir=Path(request["run_dir"]),
        recipe_folder=Path(recipe_folder) if recipe_folder else None,
        changed=request["changed"],
        started_at=request["started_at"],
        how_to_resume=lambda *_: None,
    )
    try:
        summary = run(check_tree(request["recipe"], length_replaced=True), options)
    except PipelineError as error:
        write_error(folder, rank, error)
        return get_exit_status(error)
    except Exception as error:
        write_error(folder, rank, error)
        raise
    if rank == 0:
        summary.write(folder)
    note_end(folder, rank)
    return summary.exit_status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
