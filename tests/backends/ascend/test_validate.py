"""Your own steps against the model; an invalid table is refused in one line."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.cost.efficiency import load_calibration, load_populations
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.networks.workload_table import WORKLOADS
from pipeline.backends.ascend.published.scores import ClassedRow, PricedRow, load_classes, score
from pipeline.backends.ascend.published.workloads import (
    ATLAS_A2,
    DESCRIBED,
    DESCRIBED_LATER,
    PUBLISHED,
    SEALED,
    load_left_out,
    load_model_spec,
    load_published_steps,
    price_row,
    require_pixels,
    trace_image_step,
    trace_row,
)
from pipeline.backends.ascend.validate import (
    group_by_part,
    main,
    price_file,
    score_sealed,
    set_expected_times,
    set_population_intervals,
    validate,
)
from pipeline.core.errors import RunError

HEAD, *ROWS = PUBLISHED.read_text(encoding="utf-8").splitlines()
ALEXNET = next(row for row in ROWS if row.startswith("TR0341,"))


@pytest.mark.slow
def test_custom_step_has_the_price_of_the_same_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.csv"
    file.write_text(f"{HEAD}\n{ALEXNET}\n")
    (priced_row,) = price_file(file)
    pricing = Pricing(
        trace_image_step("alexnet", 32, 227, 10), chipset("ascend910"), load_calibration()
    )
    assert priced_row.modelled_ms == pricing.price_step(ExecutionConfig(devices=8)).step_ms
    assert priced_row.low_ms < priced_row.modelled_ms < priced_row.high_ms

    assert main([str(file)]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert "published" in heading
    assert line.split()[:2] == ["TR0341", "alexnet"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "not a table of steps"),
        (f"{HEAD}\n{ALEXNET.partition(',')[0]}\n", "not a table of steps"),
        (f"{HEAD}\n{ALEXNET.replace(',32,227,', ',many,227,')}\n", "not a table of steps"),
        (f"{HEAD}\n{ALEXNET.replace(',15.375,', ',0,')}\n", "ms = '0': must be greater than 0"),
        (f"{HEAD}\n{ALEXNET.replace(',15.375,', ',nan,')}\n", "ms = nan: must be a finite number"),
        (f"{HEAD}\n{ALEXNET.replace(',32,227,', ',-32,227,')}\n", "batch = '-32': must be"),
        (
            f"{HEAD}\n{ALEXNET.replace(',alexnet,', ',alexnot,', 1)}\n",
            "network alexnot: must be a file of conf/model, such as resnet50, or be in "
            "published/workloads.py or published/networks/workload_table.py; did you mean alexnet?",
        ),
        (
            f"{HEAD}\n{ALEXNET.replace(',alexnet,', ',dbnet_wide_deep,', 1)}\n",
            "network dbnet_wide_deep: must be a file of conf/model",
        ),
        ("id,model\na,b\n", "(has no column family, batch, pixels, "),
        (f'{HEAD}\n"{"a" * 200_000}",b\n', "not a table of steps (field larger than field limit"),
        (f"{HEAD}\n{ALEXNET.replace(',alexnet,', ',ernie_bas,', 1)}\n", "mean ernie_base?"),
        (f"{HEAD}\n{ALEXNET.replace(',alexnet,', ',swin_tt,', 1)}\n", "mean swin_t?"),
        (
            f"{HEAD}\n{ALEXNET.replace(',32,227,', ',32,1,')}\n",
            "network alexnet: can't be priced with batch = 32, pixels = 1, classes = ",
        ),
        (
            f"{HEAD}\n{ALEXNET.replace(',alexnet,', ',dncnn,', 1)}\n",
            "TR0341: pixels = 227: must be 40 for dncnn, whose samples have the shape (40, 40, 1)",
        ),
    ],
)
def test_invalid_table_of_steps_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.csv"
    file.write_text(text)
    assert main([str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.medium
def test_kernel_times_by_class_add_up_to_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--row", "MS0081"]) == 0
    head, *lines, memory = capsys.readouterr().out.splitlines()
    assert head.startswith("MS0081 lenet5: published 1.07 ms, modelled ")
    assert memory.startswith("memory: fits; in GiB: parameters 0.0 of 5, feature maps 0.0 of 26, ")
    row = next(row for row in load_published_steps() if row.id == "MS0081")
    tasks = price_row(row, load_calibration()).tasks
    assert {line.split()[0] for line in lines} == {cost.task.cost_class for cost in tasks}
    printed_ms = sum(float(line.split()[1]) for line in lines)
    assert printed_ms == pytest.approx(sum(task.us for task in tasks) / 1e3, abs=0.01 * len(lines))


def test_rows_of_the_package_have_the_pixels_of_their_networks() -> None:
    files = (PUBLISHED, DESCRIBED, DESCRIBED_LATER, ATLAS_A2)
    rows = [row for file in files for row in load_published_steps(file)]
    sampled = [row for row in rows if (w := WORKLOADS.get(row.model)) and w.sample]
    assert len(sampled) > 10
    for row in sampled:
        require_pixels(row)
        with pytest.raises(ValueError, match="pixels = 9999: must be"):
            require_pixels(replace(row, pixels=9999))


def test_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--row", "MS9999"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: --row MS9999: must be a row of published.csv, described.csv, des"
    )


@pytest.mark.parametrize(
    ("arguments", "chip"),
    [
        (["--row", "A20001"], "Atlas A2"),
        (["--row", "MS0081"], "Ascend 910A"),
        (["--row", "A20001", "--chip", "ascend910"], "Ascend 910A"),
        (["own.csv", "--row", "TR0341", "--chip", "atlas_a2"], "Atlas A2"),
        (["own.csv", "--row", "TR0341"], "Ascend 910A"),
    ],
)
def test_row_is_priced_on_the_chip_of_its_table(
    arguments: list[str], chip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_row(row: Any, _: Any, priced: Any) -> Any:
        opened.append((row.id, priced.name))
        raise RunError("opened")

    opened: list[Any] = []
    monkeypatch.setattr("pipeline.backends.ascend.validate.open_row", open_row)
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text(f"{HEAD}\n{ALEXNET}\n")
    assert main(arguments) == 1
    assert opened == [(arguments[arguments.index("--row") + 1], chip)]


def test_row_of_other_pixels_than_its_network_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.csv"
    file.write_text(f"{HEAD}\nX1,osnet,reid,8,9999,2,1,O2,loop_sink,,,9.0,device,own,own,\n")
    assert main([str(file), "--row", "X1"]) == 1
    assert "X1: pixels = 9999: must be" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "memory"),
    [
        ("F001", "memory: fits; in GiB: parameters 11.2 of 31, feature maps 12.8 of 20, "),
        ("F068", "memory: tight; in GiB: parameters 0.2 of 31, feature maps 29.1 of 31, "),
    ],
)
def test_network_that_ran_has_room(
    row: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stable Diffusion 1.5 with three images and RCAN with 160 patches ran."""
    assert main(["--row", row]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name", "sample_bytes"),
    [
        (PUBLISHED, "lenet5", 32 * 32 * 4 + 4),
        # An index and a value for each of 39 fields.
        (PUBLISHED, "wide_deep", 39 * (4 + 4) + 4),
        (DESCRIBED, "ernie_base", 256 * 4 + 4),
        # The loss compares three maps of the size of an image.
        (PUBLISHED, "dbnet_resnet18", 640 * 640 * 3 * (4 + 4)),
    ],
)
def test_network_of_each_kind_of_input_is_traced(file: Path, name: str, sample_bytes: int) -> None:
    row = next(row for row in load_published_steps(file) if row.model == name)
    assert trace_row(row).batch_bytes == row.batch * sample_bytes


@pytest.mark.medium
def test_published_row_is_priced_with_its_family_left_out() -> None:
    row = next(row for row in load_published_steps() if row.id == "MS0081")
    (priced_row,) = validate([row])
    without = load_left_out()["lenet"]
    assert priced_row.modelled_ms == price_row(row, without).step_ms
    assert without.multipliers != load_calibration().multipliers
    assert set(load_left_out()) == {row.family for row in load_published_steps()}


@pytest.mark.slow
def test_unfitted_chip_has_wider_intervals() -> None:
    priced_rows = price_file(ATLAS_A2, "atlas_a2")
    fitted = price_file(ATLAS_A2)
    for priced_row, narrow in zip(priced_rows, fitted, strict=True):
        assert priced_row.log_sd > 1.2 * narrow.log_sd
        assert priced_row.modelled_ms < narrow.modelled_ms
    assert all(priced_row.inside for priced_row in priced_rows)


@pytest.mark.slow
def test_published_rows_refer_to_existing_networks() -> None:
    for row in load_published_steps():
        if row.model not in ("swin_t", "convnext_tiny"):
            assert load_model_spec(row.model.removeprefix("dbnet_")).name
    assert len({row.id for row in load_published_steps()}) == len(load_published_steps())


CLASSES = {
    "A": ClassedRow("A", "alexnet", "tuned", "device", ""),
    "B": ClassedRow("B", "alexnet", "community", "device", ""),
    "C": ClassedRow("C", "resnet50", "community", "device", ""),
}


def test_rows_are_grouped_by_part_population_and_mode() -> None:
    row = load_published_steps()[0]
    changes: Any = ({"id": "A"}, {"id": "B", "mode": "op_by_op"}, {"id": "C"})
    priced_rows = [PricedRow(replace(row, **change), 1.0, 0.5, 2.0) for change in changes]
    groups = group_by_part(priced_rows, CLASSES)
    ids = {name: "".join(each.row.id for each in rows) for name, rows in groups.items()}
    assert ids == {
        "fit": "AB",
        "fit, community": "B",
        "fit, community, eager": "B",
        "fit, tuned": "A",
        "fit, tuned, graph": "A",
        "look": "C",
        "look, community": "C",
        "look, community, graph": "C",
    }


def test_row_has_its_population_interval_around_another_centre() -> None:
    row = replace(load_published_steps()[0], id="C")
    (shifted,) = set_population_intervals([PricedRow(row, 10.0, 9.0, 11.0)], CLASSES)
    community = load_populations().by_name["community"]
    assert (shifted.low_ms, shifted.high_ms) == community.interval_ms(10.0, eager=False)
    assert shifted.modelled_ms == 10
    centre = (10 + community.fixed_ms) * community.factor * community.mechanism_graph
    sd = math.hypot(community.network_log_sd, community.row_log_sd) * community.interval_scale
    assert shifted.deviation == pytest.approx(math.log(row.ms / centre) / sd, rel=1e-3)
    at_centre = replace(shifted, row=replace(row, ms=centre))
    assert at_centre.inside
    assert at_centre.deviation == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_sealed_rows_are_scored_once_in_seven_days(tmp_path: Path) -> None:
    table, log = tmp_path / "sealed.csv", tmp_path / "log.csv"
    tried = load_populations().fits_tried
    table.write_text(f"{HEAD}\n{ALEXNET.replace('TR0341,', 'A,', 1)}\n")

    def score_on(day: int, commit: str) -> float:
        today = date(2026, 3, day)
        scores = score_sealed(table, log, today=today, commit=commit, classes=CLASSES)
        return scores["fit"].mean_error

    (priced_row,) = set_population_intervals(price_file(table), CLASSES)
    assert score_on(1, "abc") == abs(priced_row.error)
    lines = log.read_text().splitlines()
    assert lines[1].startswith(f"2026-03-01,abc,{tried},fit,1,{round(abs(priced_row.error), 4)},")
    # The head, three groups by the modelled time, and the same by the expected time.
    assert len(lines) == 1 + 2 * 3
    with pytest.raises(RunError, match="scored on 2026-03-01, and it is 2026-03-07;"):
        score_on(7, "def")
    assert log.read_text().splitlines() == lines
    score_on(8, "ghi")
    assert log.read_text().splitlines()[7].startswith(f"2026-03-08,ghi,{tried},fit,1,")


def test_scores_of_sealed_rows_print_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = load_published_steps()[0]
    scores = {"seal": score([PricedRow(row, row.ms * 1.1, row.ms, row.ms * 2)])}
    monkeypatch.setattr("pipeline.backends.ascend.validate.score_sealed", lambda **_: scores)
    assert main(["--seal"]) == 0
    assert capsys.readouterr().out == f"seal: {scores['seal']}\n"
    assert main(["--seal", "--row", "MS0081"]) == 2
    assert capsys.readouterr().err.startswith("error: --seal: scores the sealed rows; must")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seal"], "must be without FILE, --row and --seal"),
        (["--row", "MS0081"], "must be without FILE, --row and --seal"),
        ([str(PUBLISHED)], "must be without FILE, --row and --seal"),
        ([], "there is no folder"),
    ],
)
def test_chart_that_cannot_be_written_is_refused_before_pricing(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = 2 if options else 1
    assert main([*options, "--plot", str(tmp_path / "missing" / "chart.svg")]) == status
    assert message in capsys.readouterr().err
    assert main([*options, "--plot", str(tmp_path)]) == status
    message = message if options else "can't be written; must be a file's path"
    assert message in capsys.readouterr().err


def test_chart_of_both_parts_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    classes = load_classes()
    rows = load_published_steps(DESCRIBED)
    parts = [classes[row.id].part for row in rows]
    few = [rows[parts.index("fit")], rows[parts.index("look")]]
    priced_rows = tuple(PricedRow(row, row.ms, row.ms / 2, row.ms * 2) for row in few)
    module = "pipeline.backends.ascend.validate"
    by_file = {DESCRIBED: priced_rows}
    monkeypatch.setattr(f"{module}.price_file", lambda file, *_: by_file.get(file, ()))
    monkeypatch.setattr(
        f"{module}.validate",
        lambda rows: tuple(PricedRow(row, row.ms, row.ms / 2, row.ms * 2) for row in rows),
    )
    chart = tmp_path / "chart.svg"
    assert main(["--plot", str(chart)]) == 0
    assert "look, 1 step<" in chart.read_text(encoding="utf-8")


@pytest.mark.parametrize("options", [[], ["--row", "MS0081"]])
def test_sealed_table_is_not_printed(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(SEALED), *options]) == 1
    assert capsys.readouterr().err.endswith("its rows stay unseen; must be scored by --seal\n")


def test_expected_time_is_that_of_the_population() -> None:
    row = replace(load_published_steps()[0], id="C")
    (expected,) = set_expected_times([PricedRow(row, 10.0, 9.0, 11.0)], CLASSES)
    community = load_populations().by_name["community"]
    assert expected.modelled_ms == community.expected_ms(10.0, eager=False)
    assert (expected.low_ms, expected.high_ms) == (9, 11)
