"""Tables of the documents' own runs: what they are made from, and what is run next."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import parity, quickstart, thor_gain


def test_quickstart_table_has_a_row_per_framework_and_initialiser() -> None:
    lines = [
        json.dumps({"framework": "ours", "init": "x", "seed": n, "course": [[a, 0.5], [0.9, 0.25]]})
        for n, a in enumerate((0.8, 0.84, 0.85))
    ]
    assert list(quickstart.table([*lines, ""]))[2:] == [
        "| the documents | not said | 85.3% | 0.529 | 90.2% | 0.335 |",
        "| ours, 3 seeds | x | 84.00% (80.00% to 85.00%) | 0.500 (0.500 to 0.500) | "
        "90.00% (90.00% to 90.00%) | 0.250 (0.250 to 0.250) |",
    ]


def test_parity_returns_the_first_step_above_the_tolerance() -> None:
    judged = np.array([2.0, 2.0, -4.0])
    off = judged + np.array([0, 0.1, 0.3])
    assert parity._find_first_above(off, judged, 0.04) == 2
    assert parity._find_first_above(off, judged, 0.06) == 3
    assert parity._find_first_above(judged, judged, 0.0) is None
    assert parity._format_range([300, 100, None]) == "100 to > 1000"
    assert parity._format_range([None, None]) == "> 1000"
    assert parity._format_range([7, 7]) == "7"


def test_torch_kernels_have_their_outputs_first() -> None:
    generator = np.random.default_rng(0)
    kernel = generator.normal(size=(5, 5, 1, 6))
    assert parity._convert_array("conv_0/kernel", kernel).shape == (6, 1, 5, 5)
    # A dense layer after (5, 5, 16) images, flattened by channel elsewhere.
    dense, image = generator.normal(size=(400, 120)), generator.normal(size=(5, 5, 16))
    turned = parity._convert_array("dense_0/kernel", dense)
    expected = image.reshape(-1) @ dense
    np.testing.assert_allclose(turned @ image.transpose(2, 0, 1).reshape(-1), expected)


TASK = {"accuracy": 0.8, "epochs": 8, "blocks": 3, "share": 1}


def asked(results: Path, **other: float) -> Namespace:
    return Namespace(results=results, **{**TASK, **other})


def done(setting: tuple[str, ...], step: int | None, last: float, seed: int = 1) -> str:
    line = {"setting": setting, "seed": seed, "reached_step": step, "last": last, **TASK}
    return json.dumps({**line, "steps_per_pass": 100, "processor_s": 7.0})


def test_best_setting_per_optimizer_is_run_with_other_seeds(
    tmp_path: Path,
) -> None:
    """And what is done is not done again."""
    results = tmp_path / "results.jsonl"
    slow, fast, never = thor_gain.SETTINGS["momentum"]
    thors = thor_gain.SETTINGS["thor"]
    lines = [done(slow, 300, 0.8), done(fast, 200, 0.8), done(never, None, 0.79)]
    lines += [
        done(setting, None, end) for setting, end in zip(thors, (0.5, 0.7, 0.6), strict=False)
    ]
    results.write_text("\n".join(lines) + "\n")
    assert next(thor_gain._list_open(asked(results), [1, 2])) == (thors[3], 1)
    lines.append(done(thors[3], None, float("nan")))
    results.write_text("\n".join(lines) + "\n")
    assert list(thor_gain._list_open(asked(results), [1, 2])) == [(fast, 2), (thors[1], 2)]
    results.write_text("\n".join([*lines, done(fast, 250, 0.8, 2), done(thors[1], 90, 0.8, 2)]))
    assert list(thor_gain._list_open(asked(results), [1, 2])) == []
    _, momentum, thor = thor_gain.compare_medians(thor_gain._read_lines(asked(results)))
    assert (momentum.split(), thor.split()) == (["momentum", "2.25"], ["thor", "inf"])
    rows = list(thor_gain.table(thor_gain._read_lines(asked(results))))
    assert rows[3] == "| momentum, lr=0.1 | 1, 2 | 2.00, 2.50 | 0.8000, 0.8000 | 7 |"
    # To another accuracy nothing has been trained.
    assert thor_gain._read_lines(asked(results, accuracy=0.6)) == []


def test_thor_runs_start_with_the_first_setting(tmp_path: Path) -> None:
    none = asked(tmp_path / "none")
    assert thor_gain._read_lines(none) == []
    first = next(thor_gain._list_open(none, [1]))
    assert first == (thor_gain.SETTINGS["momentum"][0], 1)


@pytest.mark.parametrize("name", ["momentum", "thor"])
def test_optimizer_settings_are_unique(name: str) -> None:
    assert len(set(thor_gain.SETTINGS[name])) == len(thor_gain.SETTINGS[name])
