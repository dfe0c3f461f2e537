from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.metadata import (
    EXPERIMENT_TAG,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pipeline.core.errors import RunError
from pipeline.engine.callbacks.callback import Evaluation, SinkReport
from pipeline.engine.monitors.tensorboard import TensorBoard, draw_confusion
from pipeline.engine.monitors.tensorboard_files import add_captions
from pipeline.training.telemetry import Telemetry
from tests.engine.monitors.disk import files_end_at
from tests.engine.monitors.test_monitors import EVALUATION, Modelled
from tests.step_rows import telemetry_of

EVERYTHING = {"scalars": 0, "images": 0, "tensors": 0}


@contextmanager
def board(folder: Path, first: int = 0, *, unfinished: bool = False) -> Iterator[TensorBoard]:
    if not folder.parent.is_file():
        folder.mkdir(exist_ok=True)
    opened = TensorBoard(folder, first, batch_size=32, is_unfinished=unfinished)
    try:
        yield opened
    finally:
        opened.close()


def telemetry(start: int, steps: int) -> Telemetry:
    """Loss = step, rate = step / 8, gradient norm = step / 4, scale 128: exact in float32."""
    numbers = np.arange(start + 1, start + steps + 1)
    columns = [numbers, numbers / 8, numbers / 4, np.full(steps, 128), np.zeros(steps)]
    return telemetry_of(start, np.stack(columns, axis=1))


def read(folder: Path) -> EventAccumulator:
    """Read with TensorBoard's own reader, everything rather than a sample."""
    return EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


def scalars(folder: Path, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in read(folder).Scalars(tag)}


@pytest.mark.medium
def test_every_step_is_written(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.on_steps(telemetry(0, 3000), 1.0)
        writer.on_steps(telemetry(3000, 5), 1.0)
    accumulated = read(tmp_path)
    expected = {"loss": 1.0, "learning_rate": 1 / 8, "grad_norm": 1 / 4}
    for name, factor in expected.items():
        events = accumulated.Scalars(f"train/{name}")
        assert [event.step for event in events] == list(range(1, 3006))
        assert [event.value for event in events] == [factor * step for step in range(1, 3006)]
    assert {event.value for event in accumulated.Scalars("train/loss_scale")} == {128.0}


def test_skipped_steps_are_marked(tmp_path: Path) -> None:
    rows = np.array([[1, 0.1, 2.5, 8, 0], [1, 0.1, np.inf, 8, 1], [1, 0.1, 2.5, 4, 0]])
    with board(tmp_path) as writer:
        writer.on_steps(telemetry_of(10, rows), 1.0)
    assert scalars(tmp_path, "train/skipped") == {12: 1.0}
    assert scalars(tmp_path, "train/loss_scale") == {11: 8.0, 12: 8.0, 13: 4.0}


def test_single_steps_are_written_by_flush(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        for step in range(200):
            writer.on_steps(telemetry(step, 1), 0.01)
            writer.on_sink(SinkReport(step + 1, 1.0, 0.1, seconds=0.5, steps=1))
        writer.flush()
        assert list(scalars(tmp_path, "train/loss")) == list(range(1, 201))
        writer.on_steps(telemetry(200, 3), 0.01)
    assert list(scalars(tmp_path, "train/loss")) == list(range(1, 204))
    assert scalars(tmp_path, "train/images_per_s") == dict.fromkeys(range(1, 201), 64.0)


def test_events_have_the_time_of_their_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with board(tmp_path) as writer:
        for now in (100.0, 200.0):
            monkeypatch.setattr(
                "pipeline.engine.monitors.tensorboard.time",
                SimpleNamespace(time=lambda now=now: now),
            )
            writer.on_steps(telemetry(int(now), 2), 1.0)
    times = [event.wall_time for event in read(tmp_path).Scalars("train/loss")]
    assert times == [100.0, 100.0, 200.0, 200.0]


def test_write_error_names_the_folder(tmp_path: Path) -> None:
    with files_end_at(50), pytest.raises(RunError) as caught, board(tmp_path) as writer:
        writer.on_steps(telemetry(0, 1), 1.0)
    assert str(caught.value) == f"{tmp_path}: can't be written: File too large"


def test_file_instead_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "board"
    refused = pytest.raises(
        RunError, match=r"file/board/events[^/]*: can't be written: Not a directory"
    )
    with refused, board(folder) as writer:
        writer.on_steps(telemetry(0, 1), 1.0)


def test_sink_speed_is_written(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.on_sink(SinkReport(100, 1.0, 0.1, seconds=4.0, steps=100))
    assert scalars(tmp_path, "train/images_per_s") == {100: 800.0}


def test_evaluation_writes_metrics_and_confusion(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.on_eval(7, EVALUATION)
    for name, value in EVALUATION.scalars().items():
        assert scalars(tmp_path, f"eval/{name}") == {7: pytest.approx(value)}
    (image,) = read(tmp_path).Images("eval/confusion")
    shown = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert image.step == 7
    assert np.array_equal(shown, draw_confusion(EVALUATION.confusion))


def test_sample_images_are_scaled_separately(tmp_path: Path) -> None:
    images = np.zeros((2, 4, 4, 3), np.float32)
    images[0, 0, 0], images[1, 1, 1] = 5.0, -3.0
    with board(tmp_path) as writer:
        writer.add_images(images)
    (event,) = read(tmp_path).Images("train/images")
    shown = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    first, second = shown[:, :4], shown[:, 4:]
    assert first[0, 0].tolist() == [255] * 3
    assert first.astype(int).sum() == 255 * 3
    assert second[1, 1].tolist() == [0] * 3
    assert second.astype(int).sum() == 255 * 3 * 15


def test_constant_image_is_written(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.add_images(np.ones((1, 4, 4, 1), np.float32))
    assert len(read(tmp_path).Images("train/images")) == 1


def test_non_image_samples_are_skipped(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.add_images(np.ones((3, 39, 1, 2), np.float32))
    assert read(tmp_path).Tags()["images"] == []


def test_recipe_is_written_as_text(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.add_recipe({"name": "mine", "train": {"batch_size": 32}})
    (event,) = read(tmp_path).Tensors("recipe/text_summary")
    (text,) = event.tensor_proto.string_val
    assert text.decode() == "    name: mine\n    train:\n      batch_size: 32\n"


def test_sweep_job_has_its_hparams_row(tmp_path: Path) -> None:
    changed = {"train.sink_size": 10, "train.sink": True, "device": "cpu", "stages": ["data"]}
    with board(tmp_path) as writer:
        writer.add_hparams(changed, {"accuracy": 0.5})
    accumulated = read(tmp_path)
    tags = accumulated.SummaryMetadata
    data = {
        tag: HParamsPluginData.FromString(tags(tag).plugin_data.content)
        for tag in (EXPERIMENT_TAG, SESSION_START_INFO_TAG, SESSION_END_INFO_TAG)
    }
    row = data[SESSION_START_INFO_TAG].session_start_info.hparams
    assert {name: row[name].number_value for name in ("train.sink_size",)} == {
        "train.sink_size": 10
    }
    assert row["train.sink"].bool_value is True
    assert (row["device"].string_value, row["stages"].string_value) == ("cpu", "['data']")
    metrics = data[EXPERIMENT_TAG].experiment.metric_infos
    assert [info.name.tag for info in metrics] == ["eval/accuracy"]
    assert len(list(tmp_path.iterdir())) == 1


def test_resumed_run_purges_steps_after_its_start(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.on_steps(telemetry(0, 9), 1.0)
    with board(tmp_path, first=4) as writer:
        writer.on_steps(telemetry(4, 2), 1.0)
    assert list(scalars(tmp_path, "train/loss")) == [1, 2, 3, 4, 5, 6]


def test_confusion_is_shaded_by_row_share() -> None:
    picture = draw_confusion(np.zeros((30, 30), int))
    assert (picture.shape, picture.dtype) == ((30 * 24, 30 * 24, 3), np.uint8)
    assert (picture == 255).all()
    counts = np.zeros((30, 30), int)
    counts[2, 5], counts[3, 6], counts[3, 7] = 9, 1, 1
    picture = draw_confusion(counts)
    cell = picture.reshape(30, 24, 30, 24, 3)
    assert cell[2, 0, 5, 0].tolist() == [25, 102, 204]
    assert cell[3, 0, 6, 0].tolist() == cell[3, 0, 7, 0].tolist() == [140, 178, 229]


def test_confusion_cells_have_counts_with_few_classes() -> None:
    counts = np.array([[3, 0], [0, 0]])
    cell = draw_confusion(counts)[:24, :24]
    assert len(np.unique(cell.reshape(-1, 3), axis=0)) > 1


def test_confusion_cells_are_small_with_many_classes() -> None:
    assert draw_confusion(np.zeros((101, 101), int)).shape == (404, 404, 3)


def test_evaluation_with_many_classes_is_written(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.on_eval(1, Evaluation(EVALUATION.metrics, np.eye(120, dtype=int)))
    assert len(read(tmp_path).Images("eval/confusion")) == 1


def test_modelled_figures_have_separate_tags(tmp_path: Path) -> None:
    (tmp_path / "on").mkdir()
    with_estimate = TensorBoard(tmp_path / "on", 0, 32, Modelled())
    with board(tmp_path / "off") as without:
        for writer in (with_estimate, without):
            writer.on_sink(SinkReport(100, 1.0, 0.1, 2.0, 100))
            writer.on_sink(SinkReport(200, 1.0, 0.1, 2.0, 100))
    with_estimate.close()
    tags = set(read(tmp_path / "on").Tags()["scalars"])
    assert tags - set(read(tmp_path / "off").Tags()["scalars"]) == {
        *("modelled/step_ms", "modelled/step_ms_low", "modelled/step_ms_high"),
        *("modelled/samples_per_s", "modelled/elapsed_s"),
    }
    assert scalars(tmp_path / "on", "modelled/step_ms") == {100: 2.5, 200: 2.5}
    assert scalars(tmp_path / "on", "modelled/elapsed_s") == {100: 0.25, 200: 0.5}
    assert scalars(tmp_path / "on", "train/images_per_s") == {100: 1600.0, 200: 1600.0}


def test_train_and_eval_metric_share_one_chart(tmp_path: Path) -> None:
    metrics = {"accuracy": 0.5, "loss": 2.0, "count": 3, "train_accuracy": 0.75, "train_loss": 1.0}
    with board(tmp_path) as writer:
        for step in (4, 8):
            writer.on_eval(step, Evaluation(metrics, None))
    accumulated = read(tmp_path)
    assert scalars(tmp_path, "train/accuracy") == {4: 0.75, 8: 0.75}
    assert scalars(tmp_path, "eval/accuracy") == {4: 0.5, 8: 0.5}
    assert "train/loss" not in accumulated.Tags()["scalars"]  # every step has one
    (layout,) = accumulated.Tensors("custom_scalars__config__")
    found = Layout.FromString(layout.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for chart in found.category[0].chart}
    assert charts == {name: [f"train/{name}$", f"eval/{name}$"] for name in ("accuracy", "loss")}


def test_untrusted_names_and_labels_are_plain_text(tmp_path: Path) -> None:
    with board(tmp_path) as writer:
        writer.add_classes(["cat", "<b>\\n# dog"])
        writer.add_images(np.zeros((2, 4, 4, 1), np.float32), ["cat", "a name that is too long"])
        images, said = np.zeros((1, 4, 4, 3), np.uint8), ("dog, is cat",)
        writer.add_predictions(7, images, said, (True,))
    accumulated = read(tmp_path)
    (text,) = accumulated.Tensors("classes/text_summary")
    assert text.tensor_proto.string_val[0] == b"    0  cat\n    1  <b>\\n# dog"
    for tag, width in (("train/images", 192), ("eval/predictions", 96)):
        (event,) = accumulated.Images(tag)
        assert (event.width, event.height) == (width, 112)


def test_wrong_predictions_are_red() -> None:
    shown = add_captions(np.zeros((2, 8, 8, 1), np.uint8), ("one", "two"), (True, False))
    red = (shown[..., 0].astype(int) - shown[..., 2] > 60).any(axis=(1, 2))
    assert red.tolist() == [True, False]


def test_repeated_boundary_is_written_once_after_a_kill(tmp_path: Path) -> None:
    foreign = tmp_path / "events.out.tfevents.1.theirs.8"
    with board(tmp_path) as writer:
        writer.on_steps(telemetry(0, 8), 1.0)
        writer.on_sink(SinkReport(8, 1.0, 0.1, seconds=4.0, steps=8))
    foreign.write_bytes(next(tmp_path.glob("*.0")).read_bytes()[:30])
    for value in (1.0, 2.0):
        with board(tmp_path, first=8, unfinished=True) as writer:
            writer.on_eval(8, EVALUATION)
            writer.on_scalars(8, {"mine": value})
            writer.on_steps(telemetry(8, 4), 1.0)
    accumulated = read(tmp_path)
    (scalar,) = accumulated.Scalars("callback/mine")
    assert (scalar.step, scalar.value) == (8, 2.0)
    assert len(accumulated.Scalars("eval/loss")) == len(accumulated.Images("eval/confusion")) == 1
    assert len(accumulated.Scalars("train/images_per_s")) == 1
    assert [event.step for event in accumulated.Scalars("train/loss")] == list(range(1, 13))
    assert foreign.exists()


def test_completed_boundary_remains_after_a_resume(tmp_path: Path) -> None:
    for first in (0, 8, 8):
        with board(tmp_path, first) as writer:
            writer.on_eval(8, EVALUATION)
    assert len(read(tmp_path).Scalars("eval/loss")) == 3
