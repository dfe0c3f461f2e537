from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.cli.commands.root import ROOT
from pipeline.cli.find_rate import _format_advice
from pipeline.core.errors import UsageError
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
