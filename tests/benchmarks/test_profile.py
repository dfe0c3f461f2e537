"""The table of `benchmarks.profile`: operations by kind, over the steps that were traced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.profile import Profile, _report, drop_graphs, measure_copy_gb_s
from pipeline.backends.graph.hlo_program import HloInstruction, HloProgram

PROGRAM = HloProgram(
    {
        "scaled": HloInstruction("fusion", frozenset({"multiply"}), 3_000_000),
        "shifted": HloInstruction("fusion", frozenset({"add"}), 1_000_000),
        "loop": HloInstruction("while", frozenset({"while"}), 0),
        "ffi_call.1": HloInstruction("custom-call", frozenset({"custom-call"}), 2_000_000),
    }
)


def test_kinds_are_ranked_by_time_without_containers() -> None:
    profile = Profile(
        steps=2,
        seconds=0.02,
        busy_us={
            "scaled": 3000.0,
            "shifted": 1000.0,
            "loop": 18_000.0,
            "ffi_call.1__onednn$matmul": 12_000.0,
        },
        calls={"scaled": 2, "shifted": 2, "loop": 2, "ffi_call.1__onednn$matmul": 2},
    )
    task: Any = SimpleNamespace(name="mlp", batch_size=64, precision="bf16", on_gpu=False)
    lines = _report(task, profile, PROGRAM, 25.4).splitlines()
    assert lines[0] == "# mlp, batch 64, bf16: where a step goes"
    assert lines[2] == "    python -m benchmarks.profile --task mlp --precision bf16 --steps 2"
    said = "A step took 10.00 ms while it was traced. One core copies 25 GB/s."
    assert said in lines
    assert lines[-2:] == [
        "| matrix products, by oneDNN | 6.00 | 75% | 1 | 0.002 | 0 |",
        "| element by element | 2.00 | 25% | 2 | 0.004 | 2 |",
    ]


def test_gpu_is_traced_without_graphs_by_default() -> None:
    assert drop_graphs(["train.ema.decay=0.9"]) == ("train.ema.decay=0.9",)
    assert drop_graphs(["device=gpu"]) == ("device=gpu", "device.graphs=off")
    assert drop_graphs(["device=gpu", "device.graphs=step"]) == ("device=gpu", "device.graphs=step")


def test_calls_of_nvidias_libraries_are_distinguished() -> None:
    def kind(target: str) -> str | None:
        call = HloInstruction("custom-call", frozenset({"custom-call"}), 8, target=target)
        return HloProgram({"one": call}).find_kind("one")

    assert kind("__cudnn$convBackwardFilter") == "convolutions, by cuDNN"
    assert kind("__cudnn$norm") == "other calls of cuDNN"
    assert kind("__cublas$lt$matmul") == "matrix products, by cuBLAS"
    assert kind("something") == "element by element"


@pytest.mark.slow
def test_memory_bandwidth_is_measured() -> None:
    assert 0.1 < measure_copy_gb_s() < 10_000
