"""Report of a run: the predictions of its checkpoint for the evaluation split, as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.csv_file import format_csv
from pipeline.core.files.trusted_files import require_real_trees
from pipeline.core.pages.charts import draw_histogram, draw_scatter
from pipeline.core.pages.page import (
    GENERATOR,
    MAX_ROWS,
    Beside,
    Block,
    Charts,
    Drawing,
    Legend,
    Matrix,
    Page,
    RowTable,
    Sample,
    SampleGrid,
    Section,
    render_page,
)
from pipeline.data.inputs import Dataset
from pipeline.data.padding.buckets import SIZE
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops
from pipeline.engine.monitors.log_lines import EVALS, METRICS
from pipeline.inspect.report.evaluated import (
    MAX_MISTAKES,
    ClassCounts,
    ClassPredictions,
    LabelPredictions,
    MatchPredictions,
    NumberPredictions,
    PositionPredictions,
    Predictions,
    evaluate_samples,
    open_members,
)
from pipeline.inspect.report.origin import origin_sections
from pipeline.inspect.report.pictures import (
    PARTS,
    can_picture,
    draw_training_charts,
    join_masks,
    list_mask_colours,
    picture,
    png,
    sheet,
)
from pipeline.inspect.report.report_files import (
    CLASSES,
    CONFUSION,
    LABELS,
    NUMBERS,
    PREDICTIONS,
    confusion_rows,
    count_rows,
    csv_files,
    number_rows,
    replace_files,
)
from pipeline.inspect.report.suspicious_labels import (
    DUPLICATES,
    SUSPICIOUS,
    find_suspicious_labels,
    make_ledger_sections,
    read_ledger,
)
from pipeline.stages.data import load_data
from pipeline.stages.export.prediction import read_network
from pipeline.stages.record.member_runs import list_members
from pipeline.stages.record.run_directory import REPORT, require_run_dir
from pipeline.stages.record.run_record import read_arrays
from pipeline.stages.record.trained_run import TrainedRun

PAGE = "index.html"
MISTAKES = "mistakes.png"
CHARTS = ("loss.svg", "metric.svg", "learning_rate.svg", "scatter.svg", "residuals.svg")
TABLES = (PREDICTIONS, CLASSES, CONFUSION, NUMBERS, LABELS, SUSPICIOUS, DUPLICATES)
REPORT_FILES = (PAGE, MISTAKES, *TABLES, *CHARTS)
KIND = "report"
"""Kind of the page, which marks it as a report."""
MAX_MATRIX_CLASSES = 30
"""The page has confusion matrices of at most this many classes."""
MAX_SCATTER_CHARTS = 4
"""At most this many numbers have a chart."""
ORDERS: Mapping[type, str] = {
    ClassPredictions: "the least probable truth",
    PositionPredictions: "the largest wrong share",
    NumberPredictions: "the largest error, as a share of the number's standard deviation,",
    LabelPredictions: "the most wrong labels",
    MatchPredictions: "the largest rank of the partner",
}
"""Description of the predictions that are worst and come first, by the kind of predictions."""


@dataclass(frozen=True)
class WorstSample:
    """A sample with a wrong prediction; both texts are captions."""

    index: int
    predicted: str
    label: str


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written."""

    page: Path
    figures: Mapping[str, str]
    """The main figures by name, as text."""
    warning: str | None = None
    """Why its suspicious labels say little; None: they don't, or there are none."""


def write_report(sources: Sequence[Path], out: Path | None) -> WrittenReport:
    """Write the report of a run into `out`, by default into `report` of its directory.

    A source is a run directory, one of its checkpoints or a sweep; several runs are an ensemble.
    Files of an earlier report are replaced. Raises DataError if a run or its data can't be read,
    RecipeError if its recipe is outdated, and RunError if a file can't be written.
    """
    members = list_members(sources)
    run = read_network(members)
    run_dir = sources[0] if run.members else require_run_dir(members[0])
    if out is None:
        require_real_trees(run_dir, (REPORT,))
    elif _holds_other_files(out):
        raise DataError(f"{out}: must be an empty folder or an earlier report")
    folder = run_dir / REPORT if out is None else out
    steps = read_arrays(run_dir / METRICS)
    evaluations = read_arrays(run_dir / EVALS)
    dataset = load_data(run.recipe)
    predictions = evaluate_samples(run, dataset)
    charts = _draw_charts(steps, evaluations, predictions, dataset.targets.names)
    worst_samples = list(_list_worst_samples(predictions, dataset.targets.names))
    worst = _picture_samples(worst_samples, predictions, dataset, run.recipe.seed)
    figures = _format_figures(predictions, dataset)
    recipe = run.recipe
    mask_colours = _list_shown_colours(predictions, len(worst), dataset)
    sections = [
        *_make_sections(predictions, dataset.targets.names, charts),
        _make_worst_section(predictions, worst, mask_colours),
    ]
    warning = None
    files: dict[str, str | bytes] = {**csv_files(predictions, dataset.targets)}
    if run.members:
        subject = f"{run} on {recipe.dataset.name}"
        sections = [_compare_members(run, dataset, members, figures), *sections]
    else:
        subject = f"{recipe.model.name} on {recipe.dataset.name}, {run.step:,} steps"
        ledger = read_ledger(run, run_dir, dataset)
        if ledger is not None:
            findings = find_suspicious_labels(ledger, dataset)
            sections += make_ledger_sections(findings, dataset)
            figures |= findings.figures
            warning = findings.warning
            files |= {SUSPICIOUS: format_csv(findings.suspicious)}
            files |= {DUPLICATES: format_csv(findings.duplicates)} if findings.duplicates else {}
        sections += origin_sections(run_dir)
    page = Page(
        KIND,
        f"{recipe.name}: report",
        f"{subject}; evaluated on the {len(dataset.eval):,} samples of its evaluation split.",
        sections,
        figures,
        f"Checkpoint of step {run.step:,}. Every prediction is in {PREDICTIONS}.",
    )
    files |= {name: chart.to_file_text() for name, chart in charts.items()}
    if worst:
        captions = [(sample.predicted, sample.label) for sample, _ in worst]
        files[MISTAKES] = png(sheet([image for _, image in worst], captions, mask_colours))
    replace_files(folder, REPORT_FILES, {**files, PAGE: render_page(page)})
    return WrittenReport(folder / PAGE, figures, warning)


def _list_shown_colours(predictions: Any, num_images: int, dataset: Dataset) -> dict[str, str]:
    """Return the colours of the classes in the masks of the first images, by class; {} if there are
    no masks."""
    if not isinstance(predictions, PositionPredictions) or not predictions.worst_masks:
        return {}
    if not num_images:
        return {}
    masks = [mask for pair in predictions.worst_masks for mask in (pair.true, pair.predicted)]
    # Images of several sizes have masks that are padded.
    padding = [np.array([-1])] if SIZE in dataset.eval.columns else []
    return list_mask_colours([*masks[: 2 * num_images], *padding], dataset.targets.names)


def _compare_members(
    run: TrainedRun, dataset: Dataset, folders: Sequence[Path], figures: Mapping[str, str]
) -> Section:
    """Return the table of figures of an ensemble and of each member, on the same samples."""
    rows = [{"run": "ensemble", **figures}]
    for folder, (member, data) in zip(folders, open_members(run, dataset), strict=True):
        predictions = evaluate_samples(member, data)
        rows.append({"run": str(folder), **_format_figures(predictions, data)})
    caption = "The ensemble averages the predictions of these runs."
    return Section("Members", caption, [RowTable(rows)])


def _holds_other_files(folder: Path) -> bool:
    """Whether a path exists that is neither an empty folder nor an earlier report."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        return True
    names = {file.name for file in folder.iterdir()}
    page = folder / PAGE
    if not names:
        return False
    if not names <= set(REPORT_FILES) or not page.is_file():
        return True
    with page.open("rb") as file:
        return GENERATOR.format(KIND).encode() not in file.read(4096)


def _format_figures(predictions: Predictions, dataset: Dataset) -> dict[str, str]:
    """Return the main figures by name, as text."""
    samples = {"samples": f"{len(dataset.eval):,}"}
    match predictions:
        case ClassPredictions():
            counts = predictions.counts
            with np.errstate(divide="ignore"):
                loss = -np.log(predictions.label_probability).mean()
            top5 = {"top 5": f"{predictions.in_top5.mean():.4f}"} if len(counts.hits) > 5 else {}
            return {
                "accuracy": f"{counts.accuracy:.4f}",
                **top5,
                "cross-entropy": f"{loss:.4f}",
                "macro F1": f"{counts.ratios()[2].mean():.4f}",
                "wrong": f"{len(predictions.wrong):,}",
                **samples,
            }
        case PositionPredictions():
            counts = predictions.counts
            union = counts.actual + counts.predicted - counts.hits
            iou = (counts.hits[union > 0] / union[union > 0]).mean()
            return {
                "accuracy": f"{counts.accuracy:.4f}",
                "mean IoU": f"{iou:.4f}",
                dataset.label_unit: f"{int(counts.actual.sum()):,}",
                **samples,
            }
        case NumberPredictions():
            values = dict(zip(("MAE", "RMSE", "R²"), predictions.figures(), strict=True))
            naive_mae = dataset.targets.naive_mae
            naive = {} if naive_mae is None else {"seasonal naive MAE": f"{naive_mae:.5g}"}
            figures = {key: f"{value.mean():.5g}" for key, value in values.items()}
            return {**figures, **naive, **samples}
        case MatchPredictions():
            recalls = predictions.compute_recalls()
            texts = {f"recall at {k}": f"{recall:.4f}" for k, recall in recalls.items()}
            return {**texts, "median rank": f"{np.median(predictions.ranks):g}", **samples}
        case LabelPredictions():
            exact = (predictions.true == predictions.predicted).all(axis=1).mean()
            counts = predictions.counts
            label_count = int(counts.actual.sum() + counts.predicted.sum())
            return {
                "exact match": f"{exact:.4f}",
                "micro F1": f"{2 * int(counts.hits.sum()) / max(1, label_count):.4f}",
                "macro F1": f"{counts.ratios()[2].mean():.4f}",
                **samples,
            }


def _draw_charts(
    steps: Mapping[str, np.ndarray],
    evaluations: Mapping[str, np.ndarray],
    predictions: Predictions,
    names: Sequence[str],
) -> dict[str, Drawing]:
    """Draw the charts of a report; return them by file name."""
    charts: dict[str, Drawing | None] = {**draw_training_charts(steps, evaluations)}
    if isinstance(predictions, NumberPredictions):
        true = predictions.true[:, 0]
        predicted = predictions.predicted[:, 0]
        charts["scatter.svg"] = draw_scatter(f"{names[0]}: predicted", true, predicted)
        charts["residuals.svg"] = draw_histogram("residuals", predicted - true, "predicted - true")
    ordered = ((name, charts.get(name)) for name in CHARTS)
    return {name: chart for name, chart in ordered if chart is not None}


def _list_worst_samples(predictions: Predictions, names: Sequence[str]) -> Iterator[WorstSample]:
    """Yield the samples with the worst predictions, the worst first."""
    match predictions:
        case ClassPredictions():
            for row in predictions.wrong[:MAX_MISTAKES].tolist():
                predicted = predictions.predicted[row]
                true = predictions.labels[row]
                share = predictions.probability[row]
                label_share = predictions.label_probability[row]
                index = int(predictions.samples[row])
                label = f"is {names[true]} ({label_share:.1%})"
                yield WorstSample(index, f"{names[predicted]} ({share:.0%})", label)
        case PositionPredictions():
            for index in np.argsort(predictions.right, kind="stable")[:MAX_MISTAKES].tolist():
                share = predictions.right[index]
                if share < 1:
                    yield WorstSample(index, f"{1 - share:.1%} wrong", "")
        case NumberPredictions():
            errors = np.abs(predictions.predicted - predictions.true)
            scaled = errors / np.maximum(predictions.true.std(axis=0), 1e-30)
            for index in np.argsort(-scaled.max(axis=1), kind="stable")[:MAX_MISTAKES].tolist():
                column = int(scaled[index].argmax())
                predicted = predictions.predicted[index, column]
                true = predictions.true[index, column]
                text = f"{names[column]} {predicted:.4g}" if len(names) > 1 else f"{predicted:.4g}"
                yield WorstSample(index, text, f"is {true:.4g}")
        case MatchPredictions():
            for index in np.argsort(-predictions.ranks, kind="stable")[:MAX_MISTAKES].tolist():
                if predictions.ranks[index] > 1:
                    nearest = f"sample {predictions.nearest[index]} is nearest"
                    yield WorstSample(index, nearest, f"rank {predictions.ranks[index]:,}")
        case LabelPredictions():
            wrong = predictions.true != predictions.predicted
            distance = np.abs(predictions.true - predictions.probabilities)
            order = np.lexsort((-distance.max(axis=1), -wrong.sum(axis=1)))[:MAX_MISTAKES]
            for index in order.tolist():
                if not wrong[index].any():
                    return
                is_true = np.asarray(predictions.true[index], bool)
                extra = [f"+{names[i]}" for i in np.flatnonzero(wrong[index] & ~is_true).tolist()]
                lacking = [f"-{names[i]}" for i in np.flatnonzero(wrong[index] & is_true).tolist()]
                true_labels = [names[i] for i in np.flatnonzero(is_true).tolist()]
                label = f"is {', '.join(true_labels) or 'none'}"
                yield WorstSample(index, ", ".join([*extra, *lacking]), label)


def _picture_samples(
    worst: Sequence[WorstSample], predictions: Predictions, dataset: Dataset, seed: int
) -> list[tuple[WorstSample, Any]]:
    """Return the samples with their pictures, beside their masks if pixels have classes; empty if
    samples aren't images."""
    if not worst or dataset.raw_image is None or not can_picture(dataset.raw_image.shape):
        return []
    column = dataset.eval.columns[next(iter(dataset.raw_inputs))]
    rows = np.array([sample.index for sample in worst])
    images = np.asarray(column[rows])
    if not (isinstance(predictions, PositionPredictions) and predictions.worst_masks):
        return [(sample, picture(image)) for sample, image in zip(worst, images, strict=True)]
    if SIZE not in dataset.eval.columns:
        # The map ops may have moved the pixels of images and masks.
        columns = {name: np.asarray(values[rows]) for name, values in dataset.eval.columns.items()}
        mapped = apply_ops(np, dataset.eval_ops, columns, seed_words(seed), np.int32(0), rows)
        pixels = np.asarray(mapped[dataset.inputs.arrays[0].column])
        images = pixels if can_picture(pixels.shape[1:]) else images
    size = images.shape[1:3]
    pictures = []
    for sample, image, mask in zip(worst, images, predictions.worst_masks, strict=True):
        true, predicted = (_pad_mask(part, size) for part in (mask.true, mask.predicted))
        pair = join_masks(picture(image), true, predicted, len(dataset.targets))
        pictures.append((sample, pair))
    return pictures


def _pad_mask(mask: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return a mask, int (H, W), padded to a size with -1, which is no class."""
    pads = [(0, max(0, full - part)) for full, part in zip(size, mask.shape, strict=True)]
    return np.pad(mask.astype(np.int64), pads, constant_values=-1)


def _make_sections(
    predictions: Predictions,
    names: Sequence[str],
    charts: Mapping[str, Drawing],
) -> list[Section]:
    """Return the sections about training and predictions."""
    training = [charts[name] for name in CHARTS[:3] if name in charts]
    return [
        Section("Training", "", [Charts(training)] if training else []),
        *_make_task_sections(predictions, names),
    ]


def _make_worst_section(
    predictions: Predictions,
    worst: Sequence[tuple[WorstSample, Any]],
    mask_colours: Mapping[str, str],
) -> Section:
    """Return the section of the worst samples, with a legend if pixels have classes."""
    samples = [
        Sample(png(image), sample.predicted, sample.label, f"sample {sample.index}")
        for sample, image in worst
    ]
    shown = "The prediction, in colour, and the truth"
    blocks: list[Block] = []
    if mask_colours:
        shown = f"Each {', '.join(PARTS[:-1])} and {PARTS[-1]}"
        blocks.append(Legend(mask_colours))
    if samples:
        blocks.append(SampleGrid(samples, PARTS if mask_colours else ()))
    return Section("Worst predictions", f"{shown}; {ORDERS[type(predictions)]} first.", blocks)


def _make_task_sections(predictions: Predictions, names: Sequence[str]) -> list[Section]:
    match predictions:
        case ClassPredictions() | PositionPredictions():
            return _make_class_sections(predictions.counts, names)
        case MatchPredictions():
            rows = [{"k": k, "recall": r} for k, r in predictions.compute_recalls().items()]
            caption = "The share of pairs whose partner is among the k nearest of all samples."
            return [Section("Recall", caption, [RowTable(rows)])]
        case LabelPredictions():
            caption = "Predicted where the probability is above 0.5."
            return [Section("Labels", caption, [RowTable(count_rows(predictions.counts, names))])]
        case NumberPredictions():
            drawings: list[Drawing | None] = []
            for column, name in enumerate(names[:MAX_SCATTER_CHARTS]):
                true = predictions.true[:, column]
                predicted = predictions.predicted[:, column]
                drawings.append(draw_scatter(f"{name}: predicted", true, predicted))
                title = f"{name}: residuals"
                drawings.append(draw_histogram(title, predicted - true, "predicted - true"))
            charts = [chart for chart in drawings if chart is not None]
            pairs = [Charts(charts, pairs=True)] if charts else []
            return [
                Section("Numbers", "", [RowTable(number_rows(predictions, names))]),
                Section("Predicted against true", "", pairs),
            ]


def _make_class_sections(counts: ClassCounts, names: Sequence[str]) -> list[Section]:
    rows = count_rows(counts, names)
    order = "in the order of their labels"
    if len(rows) > MAX_ROWS:
        rows.sort(key=lambda row: row["f1"])
        order = f"the {MAX_ROWS} with the lowest F1; all in {CLASSES}"
    blocks: list[Block] = []
    if counts.confusion is not None and len(names) <= MAX_MATRIX_CLASSES:
        blocks.append(Matrix(names, counts.confusion.tolist()))
    if mistakes := confusion_rows(counts, names):
        blocks.append(RowTable(mistakes))
    caption = "True classes in rows, predicted ones in columns; the most frequent mistakes."
    return [
        Section("Classes", f"Classes {order}.", [RowTable(rows)]),
        Section("Confusion", caption, [Beside(blocks)] if blocks else []),
    ]
