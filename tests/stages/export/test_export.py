"""Exports that can't be made or read end in one message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import export

from pipeline.core.errors import DataError, RunError
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.export import export as module
from pipeline.stages.export.export import DESCRIPTION, PROGRAM, WEIGHTS, export_run, read_export


def test_layer_that_refuses_without_a_word_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(weights: Any, samples: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(module, "make_predict", lambda run: predict)
    samples = SimpleNamespace(pack=lambda make: make(SimpleNamespace(shape=(2,), dtype="float32")))
    run: Any = SimpleNamespace(samples=samples, arrays={}, recipe=SimpleNamespace(name="mine"))
    with pytest.raises(RunError, match=r"^mine: can't be exported .*: NotImplementedError$"):
        export_run(run, tmp_path, None)


def test_program_of_other_arguments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "parse_samples", lambda *words: SimpleNamespace(text=None))
    (tmp_path / DESCRIPTION).write_text('{"format": 1}')
    write_weights(tmp_path / WEIGHTS, {"kernel": np.zeros(3, np.float32)})
    number = jax.ShapeDtypeStruct((), np.int32)
    program = export.export(jax.jit(lambda *numbers: numbers[0]))(number, number, number)
    (tmp_path / PROGRAM).write_bytes(program.serialize())
    with pytest.raises(DataError, match=f"{PROGRAM}; export the run again"):
        read_export(tmp_path)


@pytest.mark.parametrize(
    ("description", "shown"), [("{}", "null"), ('{"format": 2}', "2"), ('{"format": "1"}', "'?1'?")]
)
def test_description_of_another_version_is_refused(
    tmp_path: Path, description: str, shown: str
) -> None:
    (tmp_path / DESCRIPTION).write_text(description)
    with pytest.raises(DataError, match=rf"{DESCRIPTION}: .* format = {shown}: must be 1; export"):
        read_export(tmp_path)


def test_program_of_the_next_token_that_fails_leaves_an_earlier_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: Any) -> Any:
        raise NotImplementedError("no cache of these")

    monkeypatch.setattr(module, "make_predict", lambda run: lambda weights, samples: samples)
    monkeypatch.setattr(
        module, "make_cached_decoder", lambda run: SimpleNamespace(step=refuse, shapes={})
    )
    samples = SimpleNamespace(
        pack=lambda make: make(SimpleNamespace(shape=(2,), dtype="float32")), text=object()
    )
    run: Any = SimpleNamespace(samples=samples, arrays={}, recipe=SimpleNamespace(name="mine"))
    (tmp_path / DESCRIPTION).write_text("earlier")
    (tmp_path / PROGRAM).write_text("earlier")
    with pytest.raises(RunError, match=r"^mine: its next token can't be exported: no cache of"):
        export_run(run, tmp_path, None)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        DESCRIPTION: "earlier",
        PROGRAM: "earlier",
    }
