"""Write AutoTune's built-in bank: `python -m benchmarks.ascend_fit.built_in_bank`.

It has every product of ResNet-50 at a batch of 32 in O2, tuned by all tilings. The operators of the
vendor's built-in bank aren't published.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from pipeline.backends.ascend.chip.chip_files import load_chip
from pipeline.backends.ascend.chip.hardware import extract_hardware
from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.cost.efficiency import load_efficiency
from pipeline.backends.ascend.published.workloads import trace_image_step
from pipeline.backends.ascend.tune.autotune import BUILT_IN, check_tile_entry, tune
from pipeline.core.files.knowledge_bank import BANK_VERSION, read_bank


def main() -> None:
    """Tune and write the bank, a product a line."""
    graph = trace_image_step("resnet50", 32, 224, 1000).tasks("O2")
    hardware = extract_hardware(load_chip("ascend910"))
    with tempfile.TemporaryDirectory() as folder:
        bank_path = Path(folder) / "bank.json"
        BUILT_IN.unlink(missing_ok=True)
        config = ExecutionConfig(auto_tune="exhaustive", tune_bank=str(bank_path))
        tune(graph, hardware, config, load_efficiency())
        entries = read_bank(bank_path, check_tile_entry)
    lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(entries.items()))
    head = f'{{\n "version": {BANK_VERSION},\n "entries": {{\n'
    BUILT_IN.write_text(head + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    print(f"{len(entries)} products in {BUILT_IN.name}")


if __name__ == "__main__":
    main()
