"""Figures of a report agree: shares, layers, modes, files and the print-out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.backends.ascend.chip.options import MODES, ExecutionConfig
from pipeline.backends.ascend.cost.collectives import Group, collective_us
from pipeline.backends.ascend.cost.efficiency import load_populations
from pipeline.backends.ascend.estimate import advise
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import trace_image_step
from pipeline.backends.ascend.report.explanation import TRACK_RECORD
from pipeline.backends.ascend.report.report import Report, format_report
from pipeline.models.modules.name_stack import find_layer

ASKED = ExecutionConfig(sink_size=100, devices=8, host_workers=12)


@pytest.fixture(scope="module")
def pricing() -> Pricing:
    return Pricing(trace_image_step("lenet5", 32, 32, 10), chipset("ascend910"))


@pytest.fixture(scope="module")
def report(pricing: Pricing) -> Report:
    return pricing.price_modes(ASKED)


def test_shares_and_iteration_add_up_to_the_step(report: Report) -> None:
    assert sum(report.shares.values()) == pytest.approx(1)
    assert report.iteration.iteration_us / 1e3 == pytest.approx(report.step_ms)
    assert report.shares["communication"] * report.step_ms == pytest.approx(
        report.phases["communication"]
    )


def test_pipelines_share_the_time_of_the_tasks_that_they_limit(report: Report) -> None:
    """H-02."""
    assert sum(report.pipelines.values()) == pytest.approx(1)
    assert list(report.pipelines.values()) == sorted(report.pipelines.values(), reverse=True)
    on_core = [cost for cost in report.tasks if cost.task.engine in ("cube", "vector")]
    cube_us = sum(cost.us for cost in on_core if cost.time.bound == "cube")
    assert report.pipelines["cube"] == pytest.approx(cube_us / sum(cost.us for cost in on_core))
    line = next(line for line in str(report).splitlines() if line.startswith("  pipelines"))
    assert f"start of a task {report.pipelines['floor']:.1%}" in line
    assert report.to_dict()["modelled_pipelines"] == dict(report.pipelines)


def test_inserted_conversions_are_reported_separately(report: Report) -> None:
    assert {time.type for time in report.inserted} == {"Cast", "TransData", "MemSet"}
    inserted = [cost for cost in report.tasks if cost.task.is_inserted]
    assert sum(time.us for time in report.inserted) == pytest.approx(sum(t.us for t in inserted))
    assert sum(time.tasks for time in report.inserted) == sum(t.task.repeat for t in inserted)
    by_type = {time.type: time for time in report.inserted}
    line = next(line for line in str(report).splitlines() if line.startswith("  inserted"))
    memset = by_type["MemSet"]
    assert f"{memset.tasks} MemSet {memset.share:.1%}" in line
    assert report.to_dict()["modelled_inserted_ms"]["Cast"] == by_type["Cast"].us / 1e3


def test_layers_cover_all_tasks(report: Report) -> None:
    assert sum(layer.us for layer in report.layers) == pytest.approx(
        sum(task.us for task in report.tasks)
    )
    assert sum(layer.tasks for layer in report.layers) == len(report.tasks)
    assert sum(layer.share for layer in report.layers) == pytest.approx(1)
    costs = [layer.us for layer in report.layers]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("mode", MODES)
def test_report_has_every_mode_and_sinking_is_never_slower(
    mode: str, pricing: Pricing, report: Report
) -> None:
    assert report.modes["loop_sink"].timeline is report.timeline
    alone = pricing.price_modes(replace(ASKED, mode=mode))  # type: ignore[arg-type]
    assert report.modes[mode].step_ms == alone.step_ms  # type: ignore[index]
    steps = [report.modes[name].step_ms for name in MODES]
    assert steps == sorted(steps, reverse=True)


def test_interval_is_that_of_code_from_outside_and_throughput_matches_the_step(
    report: Report,
) -> None:
    community = load_populations().by_name["community"]
    assert report.interval_ms == community.interval_ms(report.step_ms, eager=False)
    eager = report.modes["op_by_op"]
    assert eager.interval_ms == community.interval_ms(eager.step_ms, eager=True)
    low, high = report.table_interval_ms
    assert low < report.step_ms < high < report.interval_ms[1]
    assert report.to_dict()["modelled_interval_ms"] == list(report.interval_ms)
    assert report.samples_per_s == pytest.approx(8 * 32 / report.step_ms * 1e3)


def test_task_times_are_at_least_their_roofline(report: Report) -> None:
    assert all(task.us >= task.roofline_us for task in report.tasks)
    assert report.device_ms <= report.step_ms
    assert set(report.coverage["equations"]) <= {"task", "fused", "free", "unsupported"}
    assert sum(report.coverage["time"].values()) == pytest.approx(1)


def test_json_marks_every_time_as_modelled(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "price.json")
    read = json.loads((tmp_path / "price.json").read_text())
    assert read["modelled_step_ms"] == report.step_ms
    assert read["modelled_modes_ms"].keys() == {*MODES}
    assert read["question"]["devices"] == 8
    timed = [key for key in read if re.search(r"_ms$|_per_s$|shares", key)]
    assert len(timed) >= 8
    assert all(key.startswith("modelled_") for key in timed)


def test_trace_and_picture_are_saved_as_valid_files(report: Report, tmp_path: Path) -> None:
    report.save_trace(tmp_path / "trace.json")
    report.save_picture(tmp_path / "step.html", "LeNet <5>")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"X", "M"} == {event["ph"] for event in events}
    html = (tmp_path / "step.html").read_text()
    assert "<title>LeNet &lt;5&gt;</title>" in html
    assert "<svg" in html


def test_printed_report_is_complete_and_fits_132_columns(pricing: Pricing, report: Report) -> None:
    changes = advise(pricing, ASKED)[:3]
    text = format_report(report, changes, steps=3000)
    lines = text.splitlines()
    assert lines[0] == (
        "MODELLED, not measured: 8 x Ascend 910A, batch 256 (32 a device), O2, "
        "loop_sink of 100 steps"
    )
    low, high = report.interval_ms
    assert f"{report.step_ms:,.2f} ms, 80 % interval {low:,.2f} to {high:,.2f} ms" in lines[1]
    tuned_ms = load_populations().by_name["tuned"].centre_ms(report.step_ms, eager=False)
    assert lines[2].strip() == (
        f"{tuned_ms:,.2f} ms if as tuned as the zoo, {low:,.2f} to {high:,.2f} as most "
        "repositories run;"
    )
    assert [line.strip() for line in lines[3:5]] == list(TRACK_RECORD)
    community = load_populations().by_name["community"]
    assert f"{community.rows} steps of {community.networks} networks" in " ".join(TRACK_RECORD)
    assert lines[5].split() == ["in", "all", *f"{report.step_ms * 3:.1f} s (3,000 steps)".split()]
    assert lines[6].split()[:2] == ["limit", f"{report.bound}:".split()[0]]
    assert [line.split()[0] for line in lines if "_sink  " in line or "op_by_op" in line] == [
        *MODES
    ]
    assert sum("<- the recipe's" in line for line in lines) == 1
    shares = re.findall(r"(?<=[ ,])[A-Z][A-Za-z ]+ \d+\.\d%", text)
    assert len(shares) >= len(report.shares)
    words_of_all = ("Cube", "Format conversion", "data tail", "of 26", "slowest layers")
    for words in (*words_of_all, "fits on each device", f"all-reduce {report.communication}"):
        assert words in text
    for layer in report.layers[:10]:
        assert layer.layer in text
    for change in changes:
        assert change.override in text
    assert max(map(len, lines)) <= 132
    assert len(lines) <= 45


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("jvp(Net)/conv_0", "conv_0"),
        ("transpose(jvp(Net))/block/conv_0", "block/conv_0"),
        ("transpose(jvp(Net))/block/conv_0/transpose()", "block/conv_0"),
        ("transpose(jvp(Net))/jvp(Net)/block/up", "block/up"),
        ("transpose(jvp(Net))/jvp(Net)/rematted_computation/block/up", "block/up"),
        ("jvp(Net)/transpose_0/jitter/vmap(jit(f))", "transpose_0/jitter"),
        ("jvp(encoder)/attention", "encoder/attention"),
        ("transpose(jvp(vmap(encoder)))/attention", "encoder/attention"),
        ("jvp(decoder)/decoder/up", "decoder/decoder/up"),
        ("Net", "Net"),
        ("jvp()", ""),
        ("", ""),
    ],
)
def test_layer_name_is_the_module_path(scope: str, layer: str) -> None:
    assert find_layer(scope) == layer


def test_report_str_and_repr_are_readable(report: Report) -> None:
    assert str(report) == format_report(report)
    assert "what would help most" not in str(report)
    assert f"modelled {report.step_ms:.3g} ms a step" in repr(report)


@pytest.mark.slow
def test_gain_of_auto_tune_is_shown(pricing: Pricing, report: Report) -> None:
    tuned = pricing.price_modes(replace(ASKED, auto_tune="ga"))
    before_us, after_us = tuned.tuned_us
    assert before_us - after_us == pytest.approx(1e3 * (report.device_ms - tuned.device_ms))
    assert after_us == pytest.approx(sum(t.us for t in tuned.tasks if t.task.engine == "cube"))
    assert after_us < before_us
    assert f"{before_us / 1e3:,.2f} ms with default tiles" in str(tuned)
    assert tuned.to_dict()["auto_tune"]["modelled_before_ms"] == before_us / 1e3
    assert report.tuning is None
    assert "auto_tune" not in str(report)


@pytest.mark.parametrize("fusion", [None, (3,)])
def test_all_reduces_are_reported_with_bytes_and_exposed_time(
    fusion: tuple[int, ...] | None, pricing: Pricing
) -> None:
    step = pricing.price_step(replace(ASKED, fusion=fusion))
    found = step.communication
    assert found is not None
    assert (found.devices, found.count) == (8, 1 if fusion is None else 2)
    assert found.nbytes == sum(nbytes for _, nbytes, _ in step.graph.gradients)
    assert found.share == pytest.approx(step.shares["communication"])
    alone_us = collective_us("all_reduce", found.nbytes, Group(8, 8), pricing.chip.hardware)
    if fusion is None:
        assert found.all_reduce_ms == pytest.approx(alone_us / 1e3)
        assert f"{found.nbytes / 1e6:,.1f} MB over 8 devices: {alone_us / 1e3:.2f} ms" in str(found)
    else:
        assert "MB in 2 over 8 devices" in str(found)
    assert pricing.price_step(replace(ASKED, devices=1)).communication is None
