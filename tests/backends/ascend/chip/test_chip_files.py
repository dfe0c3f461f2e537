"""Chips from YAML: the shipped ones, a user's own, and one message for all that is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import load_recipe
from pipeline.backends.ascend.chip import hardware
from pipeline.backends.ascend.chip.chip_files import DEVICES, ChipError, load_chip
from pipeline.backends.ascend.chip.hardware import FIGURES, extract_hardware, find_unit
from pipeline.stages.record.recorded_recipe import read_recorded_recipe

SHIPPED = ["ascend910", "ascend910_30core", "ascend910_proa", "atlas_a2"]
FIGURE = {"value": 2.0, "source": "a data sheet", "confidence": "stated"}


def write(folder: Path, name: str = "mine", **keys: Any) -> Path:
    """A chip file in a folder, that starts from the shipped one unless it says otherwise."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"defaults": ["ascend910", "_self_"], **keys}, sort_keys=False))
    return file


def problems(file: Path | str) -> list[str]:
    with pytest.raises(ChipError) as caught:
        load_chip(file)
    assert caught.value.exit_status == 2
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return list(caught.value.problems)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_of_a_shipped_chip_has_its_source(name: str) -> None:
    chip = load_chip(name)
    assert all(len(getattr(chip, figure).source) > 4 for figure in FIGURES)
    assert extract_hardware(chip).hbm_gib == (64 if name == "atlas_a2" else 32)


@pytest.mark.parametrize("figure", FIGURES)
def test_figure_is_used_by_a_formula(figure: str) -> None:
    folder = Path(hardware.__file__).parents[1]
    sources = (file.read_text() for file in folder.rglob("*.py") if file.name != "hardware.py")
    properties = Path(hardware.__file__).read_text()
    assert f"self.{figure}" in properties or any(figure in text for text in sources)


@pytest.mark.medium
def test_obsolete_figure_of_an_earlier_file_is_ignored(tmp_path: Path) -> None:
    file = write(tmp_path, core_pipelines_count=FIGURE, ai_cpu_workers_count=FIGURE)
    assert load_chip(file) == load_chip("ascend910")
    recipe = load_recipe("lenet5_digits", ["device=ascend910"])
    tree = recipe.model_dump(mode="json")
    tree["device"]["core_pipelines_count"] = FIGURE
    recorded = tmp_path / "recipe.yaml"
    recorded.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert load_recipe(str(recorded)).device == recipe.device
    assert read_recorded_recipe(tmp_path)["device"] == recipe.model_dump(mode="json")["device"]


@pytest.mark.slow
def test_variants_differ_only_in_their_cores() -> None:
    base, proa, small = (
        extract_hardware(load_chip(name))
        for name in ("ascend910", "ascend910_proa", "ascend910_30core")
    )
    assert (base.ai_cores_count, base.ai_core_clock_mhz) == (32, 1000)
    assert proa == replace(base, ai_core_clock_mhz=1100)
    cores = {"ai_cores_count": 30, "vector_cores_count": 30}
    assert small == replace(base, **cores, ai_core_clock_mhz=900)
    assert load_chip("ascend910_proa").chip == "Ascend 910 ProA"


def test_peak_rates_match_published_values() -> None:
    """MindInsight's screenshots divide by 262.14 TFLOPS in float16; 4.1 T float16 lanes."""
    hw = extract_hardware(load_chip("ascend910"))
    assert 2 * hw.peak_fp16_macs_per_us * 1e6 == pytest.approx(262.144e12)
    assert hw.vector_bytes_per_us / 2 * 1e6 == pytest.approx(4.096e12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_chip_matches_hydra_composition(name: str) -> None:
    device = load_recipe("lenet5_digits", [f"device={name}"]).device
    chip = load_chip(name)
    assert chip.model_dump() == device.model_dump(include=set(type(chip).model_fields))


def test_custom_chip_file_inherits_as_in_hydra(tmp_path: Path) -> None:
    """Figure by figure, and within a figure: a value alone keeps the source beside it."""
    write(tmp_path, "first", chip="First", l2_mib=FIGURE, l1_kib={"value": 512})
    second = write(tmp_path, "second", defaults=["first", "_self_"], l2_mib={"value": 48})
    chip = load_chip(second)
    assert (chip.chip, chip.l2_mib.value, chip.l2_mib.source) == ("First", 48, "a data sheet")
    assert chip.l1_kib.value == 512
    assert chip.l1_kib.source == load_chip("ascend910").l1_kib.source


@pytest.mark.parametrize(
    ("defaults", "value"),
    [(["ascend910", "_self_"], 2), (["ascend910"], 2), (["_self_", "ascend910"], 32)],
)
def test_order_of_defaults_decides_the_value(
    defaults: list[str], value: float, tmp_path: Path
) -> None:
    file = write(tmp_path, defaults=defaults, l2_mib=FIGURE)
    assert load_chip(file).l2_mib.value == value
    assert load_chip(str(file)).l2_mib.value == value


def test_chip_file_named_like_its_base_is_read(tmp_path: Path) -> None:
    assert load_chip(write(tmp_path, "ascend910", l2_mib=FIGURE)).l2_mib.value == 2


CASES = {
    "negative": ({"l2_mib": {"value": -1}}, "l2_mib.value = -1: must be greater than 0"),
    "zero": ({"ai_core_clock_mhz": {"value": 0}}, "ai_core_clock_mhz.value = 0: must be greater"),
    "negative overhead": (
        {"task_gap_us": {"value": -0.5}},
        "task_gap_us.value = -0.5: must be greater than or equal to 0",
    ),
    "not a number": ({"l2_mib": {"value": float("nan")}}, "l2_mib.value = nan: must be a finite"),
    "infinite": ({"l2_mib": {"value": float("inf")}}, "l2_mib.value = inf: must be a finite"),
    "as good as nothing": (
        {"hbm_gib": {"value": 1e-300}},
        "hbm_gib: 1e-300 must be from 1e-06 to 4096 GiB",
    ),
    "without end": (
        {"op_launch_us": {"value": 1e30}},
        "op_launch_us: 1e+30 must be from 1e-06 to 1e+09 microseconds",
    ),
    "GHz": (
        {"ai_core_clock_mhz": {"value": 1.8}},
        "ai_core_clock_mhz: 1.8 must be from 10 to 100000 MHz",
    ),
    "Hz": ({"ai_core_clock_mhz": {"value": 1e9}}, "ai_core_clock_mhz: 1e+09 must be from 10 to"),
    "MiB": ({"hbm_gib": {"value": 32768}}, "hbm_gib: 32768 must be from 1e-06 to 4096 GiB"),
    "KiB": ({"l2_mib": {"value": 32768}}, "l2_mib: 32768 must be from 1e-06 to 4096 MiB"),
    "bytes": ({"l0a_kib": {"value": 65536}}, "l0a_kib: 65536 must be from 1e-06 to 32768 KiB"),
    "MB a second": (
        {"hbm_sustained_gb_per_s": {"value": 1e6}},
        "hbm_sustained_gb_per_s: 1e+06 must be from 1e-06 to 100000 10^9 bytes a second",
    ),
    "cores without end": (
        {"ai_cores_count": {"value": 1e9}},
        "ai_cores_count: 1e+09 must be from 1e-06 to 4096",
    ),
    "part of a byte": (
        {"memory_alignment_bytes": {"value": 0.5}},
        "memory_alignment_bytes: 0.5 must be a whole number",
    ),
    "part of a core": (
        {"ai_cores_count": {"value": 1.5}},
        "ai_cores_count: 1.5 must be a whole number",
    ),
    "text": ({"l2_mib": {"value": "32 MiB"}}, "l2_mib.value = 32 MiB: must be a number"),
    "number in quotes": ({"l2_mib": {"value": "32"}}, "l2_mib.value = '32': must be a number"),
    "a bare number": (
        {"l2_mib": 32},
        "l2_mib: must be {value: NUMBER, source: where it is from, "
        "confidence: measured | stated | derived | assumed}, not 32",
    ),
    "no number": ({"l2_mib": None}, "l2_mib: must be {value: NUMBER,"),
    "no unit": (
        {"ai_core_clock": FIGURE},
        "there is no such key; did you mean ai_core_clock_mhz? Keys carry their unit",
    ),
    "another unit": (
        {"ai_core_clock_ghz": FIGURE},
        "there is no such key; did you mean ai_core_clock_mhz? Keys carry their unit",
    ),
    "another unit of memory": ({"hbm_gb": FIGURE}, "did you mean hbm_gib? Keys carry their unit"),
    "misspelt": ({"task_gp_us": FIGURE}, "did you mean task_gap_us?"),
    "no idea": ({"zzz": 1}, "zzz = 1: there is no such key"),
    "how sure": (
        {"l2_mib": {"confidence": "very"}},
        "l2_mib.confidence = very: must be 'measured', 'stated', 'derived' or 'assumed'",
    ),
    "empty source": ({"l2_mib": {"source": ""}}, "l2_mib.source = "),
    "kind of core": ({"core": "shared"}, "core = shared: must be 'joined' or 'split'"),
    "a key within a figure": (
        {"l2_mib": {"sources": "INI-A"}},
        "l2_mib.sources = INI-A: there is no such key; did you mean l2_mib.source?",
    ),
    "nothing to compute in": ({"dtypes": []}, "dtypes = []: "),
}


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "message"), CASES.values(), ids=CASES.keys())
def test_chip_error_has_one_line(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    (found,) = problems(write(tmp_path, **keys))
    assert message in found


@pytest.mark.slow
@pytest.mark.parametrize("figure", FIGURES)
def test_missing_figure_is_reported(figure: str, tmp_path: Path) -> None:
    tree = yaml.safe_load((DEVICES / "ascend910.yaml").read_text())
    del tree[figure]
    (found,) = problems(write(tmp_path, defaults=[], **tree))
    unit = find_unit(figure)
    assert found == f"{figure}: missing; a formula needs it, in {unit}, with its source"


def test_unit_is_read_from_the_suffix_of_the_name() -> None:
    assert find_unit("ub_to_l2_bytes_per_cycle") == "bytes a cycle"
    assert find_unit("memory_alignment_bytes") == "bytes"
    assert all(map(find_unit, FIGURES))


def test_problems_are_all_reported_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, l2_mib=5, hbm_gb=FIGURE, task_gap_us={"value": -1}, chip="")
    found = problems(file)
    assert sorted(problem.split(" ")[0].rstrip(":") for problem in found) == [
        "chip",
        "hbm_gb",
        "l2_mib",
        "task_gap_us.value",
    ]


@pytest.mark.parametrize("name", ["ascend911", "cpu"])
def test_unknown_chip_error_lists_available_chips(name: str) -> None:
    (found,) = problems(name)
    assert "there is no such chip" in found
    assert f"Choose from {', '.join(SHIPPED)}; or name a YAML file" in found


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    broken, listing = tmp_path / "broken.yaml", tmp_path / "listing.yaml"
    broken.write_text("a: [1")
    listing.write_text("- 5\n")
    assert problems(tmp_path / "none.yaml") == ["there is no such file"]
    assert problems(broken)[0].startswith("not readable as YAML: ")
    assert problems(listing) == ["must hold keys and values, not a list"]


def test_missing_or_circular_defaults_are_reported(tmp_path: Path) -> None:
    (found,) = problems(write(tmp_path, defaults=["ascend91"]))
    assert "defaults: ascend91: there is no such device file; did you mean ascend910?" in found
    write(tmp_path, "one", defaults=["other"])
    (circle,) = problems(write(tmp_path, "other", defaults=["one"]))
    assert (
        circle
        == "defaults: must not lead back to their file, as other.yaml -> one.yaml -> other.yaml"
    )
    assert problems(write(tmp_path, defaults="ascend910")) == [
        "defaults = ascend910: must be a list"
    ]
