"""One of several processes of a run: `python -m pipeline.runner.worker FOLDER`.

`pipeline.launch.local` starts it, with what to run in FOLDER and its place in the environment.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

from pipeline.config.compose import check_tree
from pipeline.errors import PipelineError, exit_status_of
from pipeline.host.signals import interrupt_command
from pipeline.launch.local import REQUEST, write_error
from pipeline.runner.run import run

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def main(folder: Path) -> int:
    """Run what is asked for, and return the exit status."""
    started_at = time.perf_counter()
    _keep_stdout_for_python()
    # Nothing is left running where the process that started this one is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    interrupt_command()
    request = json.loads((folder / REQUEST).read_text())
    try:
        recipe = check_tree(request["recipe"], length_replaced=True)
        summary = run(
            recipe,
            Path(request["run_dir"]),
            changed=request["changed"],
            started_at=started_at - request["started_s_ago"],
            how_to_resume=lambda recipe, run_dir: None,
        )
    except PipelineError as error:
        write_error(folder, int(os.environ["RANK"]), error)
        return exit_status_of(error)
    except Exception as error:
        write_error(folder, int(os.environ["RANK"]), error)
        raise
    return summary.exit_status


def _keep_stdout_for_python() -> None:
    """Let only Python print to stdout: libraries in C++ print there to stderr, which is a log."""
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(own, "w")


if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 100)
    sys.exit(main(Path(sys.argv[1])))
