"""The emulated device as a component of a recipe: its keys, its errors, and numbers that stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.backends.devices.ascend import Ascend
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]


def device(*overrides: str, name: str = "ascend910") -> Ascend:
    chosen = load_recipe("lenet5_digits", [f"device={name}", *overrides]).device
    assert isinstance(chosen, Ascend)
    return chosen


@pytest.mark.slow
def test_recipe_sets_how_the_device_is_used() -> None:
    spec = device("device.all_reduce_fusion=[85,160]", "device.precision=null")
    assert (spec.all_reduce_fusion, spec.precision) == ((85, 160), None)
    assert (spec.mode, spec.host_workers, spec.auto_tune, spec.strict) == ("auto", 12, None, False)
    assert device("device.hbm_gib.value=16").hbm_gib.value == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "mode"),
    [('"RL,GA"', "rl,ga"), ("'GA, RL'", "rl,ga"), ("[RL,GA]", "rl,ga"), ("GA", "ga")],
)
def test_autotune_mode_has_canns_spelling(text: str, mode: str) -> None:
    """A-02."""
    assert device(f"device.auto_tune={text}").auto_tune == mode


CASES = {
    "AutoTune's mode": (
        'device.auto_tune="RL,SA"',
        "device.auto_tune = RL,SA: must be 'exhaustive', 'ga', 'rl' or 'rl,ga'",
    ),
    "AutoTune's modes as a sweep": (
        "device.auto_tune=RL,GA",
        """in brackets, or a text in quotes, as 'device.auto_tune="RL,GA"'; -m runs each""",
    ),
    "no device": ("parallel.devices=0", "parallel.devices = 0: must be greater than 0"),
    "half a device": ("parallel.devices=0.5", "parallel.devices = 0.5: must be a whole number"),
    "launch mode": (
        "device.mode=eager",
        "device.mode = eager: must be 'auto', 'op_by_op', 'graph_sink' or 'loop_sink'",
    ),
    "precision": ("device.precision=O4", "device.precision = O4: must be 'O0', 'O1', 'O2' or 'O3'"),
    "split points": (
        "device.all_reduce_fusion=[160,85]",
        "device.all_reduce_fusion: [160, 85] must ascend, as in [85, 160]",
    ),
    "no split point": ("device.all_reduce_fusion=[]", "device.all_reduce_fusion = []: "),
    "nobody prepares data": ("device.host_workers=0", "device.host_workers = 0: must be greater"),
    "a bare number": (
        "device.ai_core_clock_mhz=1100",
        "device.ai_core_clock_mhz: must be {value: NUMBER, source: where it is from,",
    ),
    "another unit": (
        "+device.ai_core_clock_ghz=1",
        "there is no such key; did you mean device.ai_core_clock_mhz?",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("override", "message"), CASES.values(), ids=CASES.keys())
def test_device_error_has_one_line(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        device(override)
    (found,) = caught.value.problems
    assert message in found


DEVICES = {
    "too many": (1032, 1032, "parallel.devices = 1032: must be at most 1024 for Ascend 910A"),
    "a part of a server": (
        12,
        24,
        "parallel.devices = 12: must fill whole servers of 8 devices, as 8 or 16 would",
    ),
    "uneven shares": (
        8,
        100,
        "train.batch_size = 100: must be a multiple of the 8 devices",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize(("devices", "batch", "message"), DEVICES.values(), ids=DEVICES.keys())
def test_device_count_must_be_whole_servers_and_divide_the_batch(
    devices: int, batch: int, message: str
) -> None:
    asked = ("parallel.mode=data", "parallel.reproducible=layout", f"parallel.devices={devices}")
    with pytest.raises(RecipeError) as caught:
        device(*asked, f"train.batch_size={batch}")
    (found,) = caught.value.problems
    assert found == message


@pytest.mark.slow
@pytest.mark.mlp
def test_training_is_bit_equal_with_and_without_emulation(tiny: Compose, tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    for folder, name in ((on, "ascend910_proa"), (off, "cpu")):
        folder.mkdir()
        run(tiny(f"device={name}", "train.sink_size=20", "eval.every_steps=10"), folder)
    assert (on / "metrics.jsonl").read_bytes() == (off / "metrics.jsonl").read_bytes()
    outcome.assert_equal_arrays(outcome.arrays(on), outcome.arrays(off))
    versions = outcome.read_summary(on)["versions"]
    assert versions["device"].startswith("Ascend 910 ProA, emulated on cpu:0")
    modelled = [outcome.read_summary(folder)["modelled"] for folder in (on, off)]
    assert modelled[0]["step_ms"] > 0
    assert modelled[1] == {}
    logs = [(folder / "run.log").read_text() for folder in (on, off)]
    assert logs[0].count(" | modelled for Ascend 910 ProA: ") == 3
    assert "modelled" not in logs[1]
