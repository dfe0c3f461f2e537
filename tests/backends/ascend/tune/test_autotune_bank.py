"""The bank of AutoTune: its entries, and the folder that it stands in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.backends.ascend import price
from pipeline.backends.ascend.chip.options import OptionError
from pipeline.backends.ascend.tune import autotune
from pipeline.backends.ascend.tune.autotune import find_custom_bank, find_result_folder
from pipeline.core.files.knowledge_bank import read_bank
from tests.backends.ascend.dense_step import ALIGNED, WEIGHTS, step


def test_bank_is_used_or_tuned_again_and_keeps_the_better(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    plain = price(step, WEIGHTS, ALIGNED)
    stored = price(step, WEIGHTS, ALIGNED, tune_bank=bank)
    assert stored.tuning is not None
    assert stored.step_ms == plain.step_ms
    assert {task.status for task in stored.tuning.tasks} == {"bank_append"}
    assert read_bank(bank, dict)
    tuned = price(step, WEIGHTS, ALIGNED, tune_bank=bank, auto_tune="exhaustive")
    assert tuned.tuning is not None
    assert {task.status for task in tuned.tuning.tasks} <= {"bank_update", "bank_reserved"}
    assert "bank_update" in {task.status for task in tuned.tuning.tasks}
    again = price(step, WEIGHTS, ALIGNED, tune_bank=bank)
    assert again.tuning is not None
    assert {task.status for task in again.tuning.tasks} == {"bank_hit"}
    assert again.step_ms == tuned.step_ms < plain.step_ms


@pytest.mark.slow
def test_stored_defaults_do_not_prevent_tuning(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    price(step, WEIGHTS, ALIGNED, tune_bank=bank)
    tuned = price(step, WEIGHTS, ALIGNED, tune_bank=bank, auto_tune="ga").tuning
    alone = price(step, WEIGHTS, ALIGNED, auto_tune="ga").tuning
    assert tuned is not None
    assert alone is not None
    assert all(task.trials > 1 for task in tuned.tasks)
    assert {task.status for task in tuned.tasks} <= {"bank_update", "bank_reserved"}
    assert tuned.after_us == alone.after_us


@pytest.mark.slow
def test_repeat_tune_variable_works_without_a_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = tmp_path / "bank.json"
    price(step, WEIGHTS, ALIGNED, tune_bank=bank)
    monkeypatch.setenv("REPEAT_TUNE", "True")
    repeated = price(step, WEIGHTS, ALIGNED, tune_bank=bank).tuning
    assert repeated is not None
    assert all(task.trials > 1 for task in repeated.tasks)
    assert {operator["mode"] for operator in repeated.to_dict().values()} == {"rl,ga"}
    monkeypatch.setenv("REPEAT_TUNE", "yes")
    with pytest.raises(OptionError, match="REPEAT_TUNE = yes: must be true or false"):
        price(step, WEIGHTS, ALIGNED, tune_bank=bank)


@pytest.mark.slow
def test_combined_search_is_no_worse_than_rl() -> None:
    both = price(step, WEIGHTS, ALIGNED, auto_tune="RL,GA").tuning  # type: ignore[arg-type]
    alone = [price(step, WEIGHTS, ALIGNED, auto_tune=mode).tuning for mode in ("rl", "ga")]
    assert both is not None
    assert both.mode == "rl,ga"
    assert all(one is not None and both.after_us <= one.after_us + 1e-9 for one in alone[:1])


def test_tune_bank_path_variable_sets_the_bank_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    tmp_path.chmod(0o700)
    assert find_custom_bank(None) == str(tmp_path / "custom_bank.json")
    assert find_custom_bank(tmp_path / "own.json") == str(tmp_path / "own.json")
    assert find_result_folder(find_custom_bank(None)) == tmp_path
    assert find_result_folder(str(tmp_path / "own.json")) is None
    assert find_result_folder(None) is None
    price(step, WEIGHTS, ALIGNED)
    assert (tmp_path / "custom_bank.json").is_file()


def test_bank_in_a_missing_or_foreign_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path / "missing"))
    with pytest.raises(OptionError, match=r"TUNE_BANK_PATH = .*missing: must be a folder that"):
        price(step, WEIGHTS, ALIGNED)
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(OptionError, match="must be writable by you alone; everybody can write it"):
        price(step, WEIGHTS, ALIGNED)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(autotune, "find_foreign_owner", lambda found: "user ann")
    with pytest.raises(OptionError, match="must belong to you, not to user ann"):
        price(step, WEIGHTS, ALIGNED)
    assert os.listdir(tmp_path) == []
