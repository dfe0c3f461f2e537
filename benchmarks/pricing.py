"""The time to price ResNet-50 on the emulated Ascend: `python -m benchmarks.pricing`.

Cold is a new process, with imports and tracing; warm prices the same step again; each what-if
changes a figure of the chip; 1024 devices are priced for a step that has a price already.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

COLD = """
from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import trace_image_step
pricing = Pricing(trace_image_step("resnet50", 32, 224, 1000), chipset("ascend910"))
step, memory = pricing.price_step(ExecutionConfig()), pricing.plan_memory(ExecutionConfig())
print(f"{step.step_ms:.2f} {step.interval_ms[0]:.2f} {memory.verdict}")
"""


def time_rounds(work: Callable[[], object], rounds: int = 5) -> list[float]:
    """Return the seconds of each round."""
    seconds = []
    for _ in range(rounds):
        started_at = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_at)
    return seconds


def price_cold() -> None:
    """Price in a new process."""
    subprocess.run([sys.executable, "-c", COLD], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Print a line for each way."""
    from pipeline.backends.ascend.chip.options import ExecutionConfig
    from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
    from pipeline.backends.ascend.published.workloads import trace_image_step

    chip = chipset("ascend910")
    traced = trace_image_step("resnet50", 32, 224, 1000)
    pricing = Pricing(traced, chip)
    pricing.price_step(ExecutionConfig())

    def price_what_ifs() -> None:
        for percent in range(100):
            pricing.with_figures(hbm_sustained_gb_per_s=800.0 + 4 * percent).price_step(
                ExecutionConfig()
            )

    ways: dict[str, Callable[[], object]] = {
        "cold process": price_cold,
        "warm": lambda: Pricing(traced, chip).price_step(ExecutionConfig()).interval_ms,
        "100 what-ifs": price_what_ifs,
        "1024 devices": lambda: pricing.price_step(ExecutionConfig(devices=1024)),
    }
    for name, work in ways.items():
        seconds = time_rounds(work)
        span = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"{name:14} {median(seconds):8.3f} s  ({span})", flush=True)


if __name__ == "__main__":
    main()
