from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.cli.commands.root import ROOT
from pipeline.cli.find_rate import _format_advice, draw_rate_curve
from pipeline.core.errors import UsageError
from pipeline.study.rate_search import RateCurve, suggest_rate
from tests.conftest import MLP, TINY


@pytest.mark.medium
def test_rate_is_printed_and_losses_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "rates.html"
    arguments = ["find-rate", "+recipe=lenet5_digits", *TINY, *MLP, f"cache.root={tmp_path}"]
    assert ROOT([*arguments, "--steps", "60", "--out", str(page), "--json"]) == 0
    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert f"try train.optimizer.lr={facts['rate']:.2g}" in output.err
    assert facts["rate"] < facts["lowest_at"]
    assert len(facts["losses"]) == len(facts["rates"]) <= 60
    text = page.read_text()
    assert "<svg" in text
    assert f"{facts['rate']:.2g}" in text
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ""] == ["rates.html"]


def test_chart_has_rates_as_its_axis_and_marks_the_suggestion() -> None:
    rates = np.geomspace(1e-6, 10.0, 200)
    decades = np.log10(rates)
    losses = np.where(decades < -1, 2.3 - np.clip(decades + 3, 0, 2) * 0.5, 1.3 + decades + 1)
    curve = RateCurve(rates, losses, 200)
    suggestion = suggest_rate(curve)
    chart = draw_rate_curve(curve, suggestion)
    assert chart is not None
    texts = {text.text: text for text in chart.marks.iter("text")}
    ticks = ["1e-06", "1e-05", "0.0001", "0.001", "0.01", "0.1", "1", "10"]
    assert [name for name in texts if name in ticks] == ticks
    assert {"learning rate", "lowest", "diverges"} < set(texts)
    assert f"suggested: {suggestion.rate:.2g}" in texts
    lines = [line for line in chart.marks.iter("line") if line.get("class") == "ideal"]
    places = [float(line.get("x1", "nan")) for line in lines]
    first, last = (float(texts[name].get("x", "nan")) for name in ("1e-06", "10"))
    marked = (suggestion.rate, suggestion.lowest_at, suggestion.diverges_at)
    shares = [(np.log10(rate) + 6) / 7 for rate in reversed(marked) if rate is not None]
    assert places == pytest.approx([first + share * (last - first) for share in shares], abs=0.01)


def test_advice_is_scaled_back_if_the_recipe_scales_rates() -> None:
    recipe = load_recipe("lenet5_digits", ["train.batch_size=32"])
    assert _format_advice(0.02, recipe) == "train.optimizer.lr=0.02"
    recipe = load_recipe(
        "lenet5_digits", ["train.batch_size=32", "train.optimizer.lr_for_batch=256"]
    )
    assert _format_advice(0.02, recipe) == (
        "train.optimizer.lr=0.16 train.optimizer.lr_for_batch=256"
    )


@pytest.mark.parametrize("steps", ["19", "0", "many"])
def test_too_few_steps_are_refused(steps: str) -> None:
    with pytest.raises(UsageError, match=f"--steps {steps}: must be a whole number from 20"):
        ROOT(["find-rate", "+recipe=lenet5_digits", "--steps", steps])


@pytest.mark.parametrize("command", ["find-rate", "better"])
@pytest.mark.parametrize("out", [".", "missing/page.html", "a" * 300])
def test_page_in_no_folder_is_refused_before_training(
    out: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=rf"--out {out[:99]}.*: must be a file in a folder that"):
        ROOT([command, "+recipe=lenet5_digits", "--out", out])
