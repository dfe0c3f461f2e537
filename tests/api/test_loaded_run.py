"""Runs read back: parameters, history, predictions and plots."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import pipeline
from pipeline.core.errors import DataError
from tests import outcome
from tests.conftest import compose_tiny
from tests.whole_run import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("loaded") / "run"
    run(compose_tiny(cache, "model=mlp", "model.hidden=[8]", "eval.every_steps=15"), run_dir)
    return run_dir


@pytest.mark.slow
def test_loaded_run_has_the_saved_parameters(trained: Path) -> None:
    loaded = pipeline.load_run(trained)
    saved = outcome.arrays(trained)
    assert loaded.step == 45
    for path, array in loaded.parameters.items():
        np.testing.assert_array_equal(array, saved[f"params/{path}"])
    losses = [line["loss"] for line in outcome.read_lines(trained / "metrics.jsonl")]
    np.testing.assert_array_equal(loaded.history.steps["loss"], losses)
    assert loaded.history.evaluations["step"].tolist() == [15, 30, 45]
    assert loaded.recipe.model.name == "mlp"
    images = loaded.recipe.dataset.read(Path()).eval.columns
    answers = loaded.predict(images["image"][:]).argmax(axis=-1)
    right = np.mean(answers == np.asarray(images["label"][:]))
    assert right == pytest.approx(outcome.read_summary(trained)["metrics"]["accuracy"])


@pytest.mark.medium
def test_plots_have_both_curves(trained: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed: pip install '.[plot]'")
    figure = pipeline.load_run(trained).plot()
    assert [axis.get_title() for axis in figure.axes] == ["loss", "accuracy", "learning rate"]
    assert [len(axis.lines) for axis in figure.axes] == [2, 1, 1]


@pytest.mark.medium
def test_notebook_shows_the_metrics_of_a_run(trained: Path) -> None:
    loaded = pipeline.load_run(trained)
    accuracy = loaded.history.evaluations["accuracy"][-1]
    loss = loaded.history.evaluations["loss"][-1]
    facts = f"lenet5_digits of step 45, accuracy {accuracy:.4g}, loss {loss:.4g}; {trained}"
    assert repr(loaded) == f"<LoadedRun {facts}>"
    html = loaded._repr_html_()
    assert f"&lt;LoadedRun {facts}&gt;" in html
    assert "<style" not in html, "it would apply to the whole notebook"
    sources = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', html)
    pictures = [ElementTree.fromstring(base64.b64decode(source)) for source in sources]
    titles = [picture.get("aria-label") for picture in pictures]
    assert titles == ["loss", "accuracy", "learning rate"]
    lines = [list(picture.iter("{http://www.w3.org/2000/svg}polyline")) for picture in pictures]
    assert [len(charted) for charted in lines] == [2, 1, 1]


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="isn't a run directory"):
        pipeline.load_run(tmp_path)
