"""A chip's file from measured steps: its factor, its interval, and tables that are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.backends.ascend import calibrate
from pipeline.backends.ascend.calibrate import (
    FittedChip,
    MeasuredStepsError,
    calibrate_chip,
    read_steps,
    scale_figures,
)
from pipeline.backends.ascend.cost.efficiency import load_calibration, load_populations
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import configure_row, parse_row, trace_row
from pipeline.backends.ascend.validate import main
from pipeline.core.errors import RunError

HEAD = "model,batch,step_ms,chip"
STEP = "lenet5,32,2.0,ascend910"
SECOND = "lenet5,64,2.5,ascend910"


@pytest.mark.medium
def test_chip_made_by_slower_steps_takes_as_long_as_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of a device at 1 / 1.5 of the speeds give this factor, from three rows."""
    chip = chipset("ascend910")
    rows, pricings = [], []
    for batch in (256, 512, 1024):
        cells = {
            "id": "1", "model": "lenet5", "family": "own", "batch": str(batch), "pixels": "32",
            "classes": "10", "devices": "1", "precision": "O2", "mode": "loop_sink", "fusion": "",
            "op_launch_us": "", "ms": "1", "quality": "device", "framework": "MindSpore",
            "source": "own",
        }  # fmt: skip
        step = parse_row(cells)
        pricing = Pricing(trace_row(step), chip, load_calibration())
        slower = pricing.with_figures(**scale_figures(chip.hardware, 1.5))
        ms = slower.price_step(configure_row(step)).step_ms
        rows.append(f"lenet5,{batch},{ms},ascend910,32,10")
        pricings.append((pricing, configure_row(step), ms))
    table = tmp_path / "mine.csv"
    table.write_text("\n".join([f"{HEAD},pixels,classes", *rows]) + "\n")
    assert main(["--calibrate", str(table)]) == 0
    assert "the device's work takes 1.500 times as long" in capsys.readouterr().out

    made = chipset(str(tmp_path / "mine.yaml"))
    assert made.measured_steps is not None
    assert (made.measured_steps.rows, made.measured_steps.networks) == (3, 1)
    assert made.hardware.ai_core_clock_mhz == pytest.approx(1000 / 1.5, rel=1e-3)
    assert made.hardware.hccs_bus_gb_per_s == chip.hardware.hccs_bus_gb_per_s
    for pricing, config, ms in pricings:
        report = Pricing(pricing.traced, made, load_calibration()).price_modes(config)
        assert report.step_ms == pytest.approx(ms, rel=2e-3)
        low, high = report.interval_ms
        assert math.sqrt(low * high) == pytest.approx(report.step_ms), "no factor of other code"
        assert "interval of 3 steps of 1 network of your own" in str(report)

    recipe = load_recipe("lenet5_digits", [f"device={tmp_path / 'mine.yaml'}"])
    assert recipe.device.measured_steps == made.measured_steps  # type: ignore[attr-defined]

    assert main(["--calibrate", str(table)]) == 0, "its own file is written again"
    (tmp_path / "mine.yaml").write_text("chip: other\n")
    assert main(["--calibrate", str(table)]) == 2
    assert (tmp_path / "mine.yaml").read_text() == "chip: other\n"


def test_spread_of_few_steps_is_near_that_of_community_code() -> None:
    """By hand: (4 x community variance + 2 x 0.1^2) / (4 + 3 - 1) x (1 + 1 / 3)."""
    community = load_populations().by_name["community"]
    variance = community.network_log_sd**2 + community.row_log_sd**2
    by_hand = math.sqrt((4 * variance + 0.02) / 6 * 4 / 3)
    assert FittedChip(1.2, (-0.1, 0.0, 0.1), 3).log_sd == pytest.approx(by_hand)
    assert FittedChip(1.2, (0.0,) * 40, 9).log_sd < by_hand / 2, "many steps that agree"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,batch,time,chip\n", "column time: must be step_ms, the milliseconds of a step"),
        ("model,batch\n", "lacks step_ms, chip; must have the columns model, batch, step_ms, chip"),
        ("", "lacks model, batch, step_ms, chip; must have"),
        (f"{HEAD},devises\n", "column devises: must be one of model, "),
        (f"{HEAD}\n{STEP}\n", "has 1 step; a factor needs at least 3"),
        (
            f"{HEAD}\n{STEP}\n{STEP}\n{STEP.replace('910', '910_proa')}\n",
            "step 3: chip = ascend910_proa: must be ascend910; steps of another chip",
        ),
        (f"{HEAD}\n{STEP}\n{STEP}\nlenet5,32,2.0\n", "step 3: must have a value for each column"),
        (f"{HEAD}\n{STEP}\n{STEP}\n{STEP},1\n", "step 3: must have a value for each column"),
        (f"{HEAD}\n{STEP}\n{SECOND}\n{STEP}\n", "step 3: repeats step 1, with the same time; must"),
        (f"{HEAD}\n{STEP}\n{STEP}\n".replace(",", ";"), "has no commas; must have commas"),
        (f"{HEAD},batch\n", "column batch: must be there once"),
        (f"{HEAD}\n{STEP}\n{STEP}\nlenet5,{2**70},2.0,ascend910\n", "at most 2,147,483,647"),
        (f"{HEAD}\n{STEP}\n{STEP}\nlenet5,many,2.0,ascend910\n", "batch = many: must be a whole"),
        (
            f"{HEAD}\n{STEP}\n{STEP}\nlenet5,0,2.0,ascend910\n",
            "step 3: batch = '0': must be",
        ),
        (f"{HEAD}\n{STEP}\n{STEP}\nlenet5,32,,ascend910\n", "step 3: lacks step_ms"),
        (
            f"{HEAD},framework\n{STEP},PyTorch 2.1\n{SECOND},\n{STEP},pytorch 2.1\n",
            "step 3: framework = pytorch 2.1: must be one of MindSpore, PyTorch, TensorFlow, with",
        ),
        (
            f"{HEAD}\n{STEP}\n{STEP}\nlenet5,32,-2,ascend910\n",
            "step_ms = '-2': must be greater than 0",
        ),
        (
            f"{HEAD}\n{STEP}\n{STEP}\nlenet5,32,nan,ascend910\n",
            "step_ms = nan: must be a finite",
        ),
    ],
)
def test_table_that_no_factor_comes_from_says_what_is_missing(
    text: str, message: str, tmp_path: Path
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(text)
    with pytest.raises(MeasuredStepsError) as caught:
        read_steps(table, "ascend910")
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(table))
    assert caught.value.exit_status == 2
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("lenet55,32,2.0,ascend910", "step 1: network lenet55: must be a file of conf/model, "),
        ("stable_diffusion,32,2.0,ascend910", "workload_table.py; did you mean stable_diffusion_"),
        ("onnx,32,2.0,ascend910", "classes = 10: file = null: must name the file"),
        ("torch,32,2.0,ascend910", "step 1: network torch: needs settings"),
        ("lenet5,99999999,2.0,ascend910", "step 1: batch_size = 99999999: makes a batch of"),
        ("lenet5,32,2000000,ascend910", "no factor from 0.1 to 10 on the device explains these"),
    ],
)
def test_steps_that_no_factor_explains_are_refused(step: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    others = [step.replace(",2", f",{digit}") for digit in (3, 4)]
    rows = [f"{row},32,10" for row in (step, *others)]
    table.write_text("\n".join([f"{HEAD},pixels,classes", *rows]) + "\n")
    with pytest.raises(MeasuredStepsError) as caught:
        calibrate_chip(table, "ascend910")
    assert message in str(caught.value)
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.medium
def test_step_far_from_the_others_is_refused(tmp_path: Path) -> None:
    """Of three steps that agree and one of 1e308 ms no spread of 10^300 is made."""
    table = tmp_path / "mine.csv"
    rows = [f"lenet5,{batch},{batch / 200},ascend910,32,10" for batch in (256, 512, 1024)]
    table.write_text(
        "\n".join([f"{HEAD},pixels,classes", *rows, "lenet5,64,1e308,ascend910,32,10"])
    )
    with pytest.raises(
        MeasuredStepsError, match=r"step 4: step_ms = 1e\+308: is more than 10 times"
    ):
        calibrate_chip(table, "ascend910")
    assert not (tmp_path / "mine.yaml").exists()


class HostBoundPricing:
    """Prices of steps of which a fourth is the device's work."""

    def __init__(self, ms: float, *_: Any) -> None:
        self.step_ms = ms

    def with_figures(self, ai_core_clock_mhz: float, **_: float) -> HostBoundPricing:
        return HostBoundPricing(0.75 + 0.25 * 1000 / ai_core_clock_mhz)

    def price_step(self, _: Any) -> HostBoundPricing:
        return self


@pytest.mark.parametrize("factor", [0.12, 1.0, 6.0, 9.9])
def test_factor_is_found_however_little_the_device_does(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "Pricing", HostBoundPricing)
    monkeypatch.setattr(calibrate, "trace_row", lambda row: row.ms)
    monkeypatch.setattr(calibrate, "configure_row", lambda row: row)
    table = tmp_path / "mine.csv"
    ms = 0.75 + 0.25 * factor
    table.write_text("\n".join([HEAD, *(f"lenet5,{n},{ms},ascend910" for n in (1, 2, 3))]))
    steps = read_steps(table, "ascend910")
    fitted = calibrate.fit_factor(table, steps, chipset("ascend910"))
    assert fitted.factor == pytest.approx(factor, rel=1e-3)


def test_table_named_as_a_shipped_device_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "ascend910.csv"
    table.write_text(f"{HEAD}\n{STEP}\n{SECOND}\nlenet5,128,3.0,ascend910\n")
    with pytest.raises(MeasuredStepsError, match="ascend910 is a shipped device; rename the file"):
        calibrate_chip(table, "ascend910")


def test_device_is_named_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "fit_factor", lambda *_: FittedChip(1.2, (0.0,) * 3, 1))
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    for folder, device in (("sub", "./sub/mine.yaml"), (tmp_path, f"{tmp_path}/mine.yaml")):
        table = Path(folder, "mine.csv")
        table.write_text(f"{HEAD}\n{STEP}\n{SECOND}\nlenet5,128,3.0,ascend910\n")
        assert f"\ndevice={device} prices with it" in calibrate_chip(table, "ascend910")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_table_of_a_spreadsheet_is_read(encoding: str, end: str, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    lines = (HEAD, STEP, SECOND, "lenet5,128, 3.0,ascend910", "")
    table.write_bytes(end.join(lines).encode(encoding))
    assert [row.ms for row in read_steps(table, "ascend910")] == [2.0, 2.5, 3.0]


def test_folder_that_cannot_be_written_is_refused_before_pricing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f"{HEAD}\n{STEP}\n{SECOND}\nlenet5,128,3.0,ascend910\n")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(RunError, match=r"mine\.yaml: can't be written: there is no permission"):
        calibrate_chip(table, "ascend910")


@pytest.mark.parametrize("others", [["own.csv"], ["--row", "MS0081"], ["--seal"]])
def test_calibration_beside_other_requests_is_refused(
    others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--calibrate", "mine.csv", *others]) != 0
    assert "--calibrate: must be without" in capsys.readouterr().err
