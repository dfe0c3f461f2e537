"""Opening a run, and its ends before the first stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.reporter import Reporter
from pipeline.stages.record import recorded_recipe
from pipeline.stages.record.run_directory import RunFolder
from pipeline.stages.record.summary import Summary
from pipeline.stages.runner import open_run
from pipeline.stages.runner.context import RunContext, RunOptions
from tests.whole_run import run

Compose = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "no step yet; the run begins again with"),
        ([200, 1400], "step 1,400; the run goes on from there with"),
    ],
)
def test_advice_says_which_step_is_saved(
    tiny: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps: list[int],
    text: str,
) -> None:
    monkeypatch.setattr(open_run, "list_saved_steps", lambda _: steps)
    open_run.advise_to_resume(tiny(), RunOptions(), tmp_path, Reporter())
    saved, resume = capsys.readouterr().out.splitlines()
    assert (saved, resume) == (f"saved      {text}", f"resume     train.resume={tmp_path}")


@pytest.mark.medium
def test_directory_whose_recipe_could_not_be_written_can_be_used(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    recipe = tiny("stages=[data]")
    with monkeypatch.context() as patch:
        patch.setattr(recorded_recipe, "write_whole", fail)
        with pytest.raises(RunError, match=r"recipe\.yaml: Permission denied"):
            run(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert run(recipe, tmp_path / "run").status == "done"


@pytest.mark.parametrize("has_recipe", [True, False])
def test_run_that_a_signal_ends_has_a_summary_beside_its_recipe(
    has_recipe: bool, tiny: Compose, tmp_path: Path
) -> None:
    if has_recipe:
        (tmp_path / "recipe.yaml").touch()
    summary = Summary("name", "cpu", 0, (), str(tmp_path))
    options = RunOptions(tmp_path)
    context = RunContext(tiny(), options, RunFolder(tmp_path), Reporter(), summary)
    open_run._end_interrupted(context)
    assert (tmp_path / "summary.json").exists() is has_recipe
