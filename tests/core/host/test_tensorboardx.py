"""The import of tensorboardX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pipeline.core.host.tensorboardx import import_tensorboardx
import_tensorboardx()
assert "torch" not in sys.modules
import tensorboardX
tensorboardX.SummaryWriter
import torch
assert torch.is_made_up
import_tensorboardx()
"""
BESIDE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pipeline.core.host.tensorboardx import _WithoutTorch
finder = _WithoutTorch()
sys.meta_path.insert(0, finder)
found = []
def import_torch():
    import torch
    found.append(torch.is_made_up)
thread = threading.Thread(target=import_torch)
thread.start()
thread.join()
assert found == [True]
"""

AT_ONCE = """
import sys, threading, time
class Slow:
    def find_spec(self, name, *_):
        if name.startswith("tensorboardX."):
            time.sleep(0.01)
sys.meta_path.insert(0, Slow())
from pipeline.core.host.tensorboardx import import_tensorboardx
imported = []
def import_from(module):
    import_tensorboardx()
    imported.append(__import__(module, fromlist=["x"]).__name__)
modules = ["tensorboardX.summary", "tensorboardX.writer", "tensorboardX.record_writer"]
threads = [threading.Thread(target=import_from, args=[module]) for module in 2 * modules]
for thread in threads:
    thread.start()
    time.sleep(0.02)
for thread in threads:
    thread.join()
assert sorted(imported) == sorted(2 * modules), imported
"""


@pytest.mark.medium
def test_threads_that_import_at_once_get_whole_modules() -> None:
    """The jobs of a sweep are threads. One that finds the package half imported, and imports a part
    of it, would get that part half imported."""
    ended = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.medium
@pytest.mark.parametrize("script", [SCRIPT, BESIDE], ids=["after", "beside"])
def test_torch_is_only_left_out_of_the_import(script: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("is_made_up = True\nclass Tensor: pass\n")
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert ended.returncode == 0


@pytest.mark.slow
def test_run_with_tensorboard_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pipeline.__main__ import main\n"
        f"sys.exit(main(['train.steps=3', 'hydra.run.dir={tmp_path}/run']))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
