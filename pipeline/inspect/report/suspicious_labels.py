"""Training labels that are probably wrong, from the ledger of a run; samples that occur twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.pages.page import Block, RowTable, Sample, SampleGrid, Section
from pipeline.data.columns import Split
from pipeline.data.inputs import Dataset
from pipeline.data.padding.buckets import SIZE, PaddedColumn
from pipeline.data.selections import hash_samples
from pipeline.data.text.text_format import SPECIAL_TOKENS, TextFormat
from pipeline.inspect.report.pictures import can_picture, picture, png
from pipeline.stages.record.continuity import find_changed_data
from pipeline.stages.record.provenance import fingerprint_columns, read_provenance
from pipeline.stages.record.trained_run import TrainedRun
from pipeline.stages.sample_pictures import format_label
from pipeline.training.features.ledger import EARLY_READINGS, SampleLedger, make_ledger

SUSPICIOUS = "suspicious_labels.csv"
DUPLICATES = "duplicates.csv"
MAX_SHOWN = 50
"""The page has at most this many suspicious labels."""
MAX_CELLS = 5
"""A row on the page shows at most this many columns of a table."""
LEARNT_SKILL = 0.1
"""A network has learnt if its skill is above this number (docs/decisions.md)."""
MAX_CHARACTERS = 200
"""A text on the page has at most this many characters."""


@dataclass(frozen=True)
class LedgerRows:
    """Findings about training samples as rows of CSV files, by column."""

    suspicious: Sequence[Mapping[str, Any]]
    """A row for each training sample, the most suspicious label first."""
    duplicates: Sequence[Mapping[str, Any]]
    """A row for each sample that equals a training sample before it, byte for byte."""
    warning: str | None = None
    """Why the rank of the labels says little; None: it doesn't."""

    @property
    def figures(self) -> dict[str, str]:
        """The main figures by name, as text."""
        negative = sum(row["margin"].startswith("-") for row in self.suspicious)
        never = sum(row["readings"] > 0 and not row["learnt"] for row in self.suspicious)
        shared = sum(row["split"] == "eval" for row in self.duplicates)
        return {
            "margin below 0": f"{negative:,}",
            "never learnt": f"{never:,}",
            "in both splits": f"{shared:,}",
        }


def read_ledger(run: TrainedRun, run_dir: Path, dataset: Dataset) -> SampleLedger | None:
    """Return the ledger of a run's checkpoint, as arrays of NumPy; None if the run kept none.

    Raises DataError if the checkpoint has another ledger, or if the training data have changed.
    """
    if not run.ledger:
        return None
    samples = len(dataset.train)
    expected = vars(make_ledger(samples))
    types = {name: (array.shape, array.dtype) for name, array in run.ledger.items()}
    is_of_data = types == {name: (array.shape, array.dtype) for name, array in expected.items()}
    if not is_of_data or not np.isin(run.ledger["rival"], range(len(dataset.targets))).all():
        raise DataError(f"{run_dir}: its ledger isn't of the {samples:,} training samples")
    recorded = [
        {"data": {"train": data["train"]}}
        for process in read_provenance(run_dir)
        if isinstance(data := process.get("data"), dict) and "train" in data
    ]
    train = {name: asdict(entry) for name, entry in fingerprint_columns(dataset.train).items()}
    if changes := find_changed_data(recorded, {"train": train}):
        lines = "; ".join(changes)
        raise DataError(f"{run_dir}: its ledger is of other training data: {lines}")
    arrays: dict[str, Any] = dict(run.ledger)
    return SampleLedger(**arrays)


def compute_margins(ledger: SampleLedger) -> np.ndarray:
    """Return the mean margin of each sample, float64 (n,); 0 if no step has read it."""
    readings = np.maximum(np.asarray(ledger.readings), 1)
    margins: np.ndarray = np.asarray(ledger.margin_sum, np.float64) / readings
    return margins


def compute_early_norms(ledger: SampleLedger) -> np.ndarray:
    """Return the mean of the early norms of p - y of each sample, float64 (n,), 0 to sqrt(2)."""
    readings = np.clip(np.asarray(ledger.readings), 1, EARLY_READINGS)
    norms: np.ndarray = np.asarray(ledger.early_gradient_sum, np.float64) / readings
    return norms


def score_labels(ledger: SampleLedger) -> np.ndarray:
    """Return how suspicious each label is, float64 (n,), 0 to 1; -1 if no step has read it.

    It is the mean of two numbers: the sigmoid of the negative margin, and the early norm divided by
    its largest value. The margin shows more wrong labels than the norm. If a network learns wrong
    labels by heart, only the norm shows them.
    """
    doubt = (1 - np.tanh(compute_margins(ledger) / 2)) / 2
    scores = (doubt + compute_early_norms(ledger) / np.sqrt(2)) / 2
    return np.where(np.asarray(ledger.readings) > 0, scores, -1.0)


def describe_unlearnt(ledger: SampleLedger, dataset: Dataset) -> str | None:
    """Return a sentence about a network that has hardly learnt; None if it has learnt.

    The skill is the share of samples with a margin above 0, beyond the share of the most frequent
    class: 0 if the network always predicts that class, and 1 if it fits all labels.
    """
    is_read = np.asarray(ledger.readings) > 0
    if not is_read.any():
        return "No step has read a training sample, so the labels aren't ranked."
    labels = np.asarray(dataset.train.columns["label"][:])[is_read]
    classes = labels if labels.ndim == 1 else labels.argmax(axis=-1)
    fitted = float((compute_margins(ledger)[is_read] > 0).mean())
    most_frequent = float(np.bincount(classes).max() / len(classes))
    # Of a single class all labels fit.
    skill = (fitted - most_frequent) / (1 - most_frequent) if most_frequent < 1 else 0.0
    if skill > LEARNT_SKILL:
        return None
    return (
        f"The network has hardly learnt: {fitted:.1%} of the training labels fit, and "
        f"{most_frequent:.1%} are of the most frequent class; their rank is near chance, until it "
        "is trained longer or with another learning rate."
    )


def find_suspicious_labels(ledger: SampleLedger, dataset: Dataset) -> LedgerRows:
    """Rank the training samples by `score_labels`, the most suspicious first."""
    columns = {name: np.asarray(array) for name, array in vars(ledger).items()}
    readings = columns["readings"]
    margins = compute_margins(ledger)
    norms = compute_early_norms(ledger)
    scores = score_labels(ledger)
    order = np.argsort(-scores, kind="stable")
    numbers = dataset.train.list_rows()
    labels = _format_labels(dataset, dataset.train)
    rivals = columns["rival"]
    rows = [
        {
            "index": int(numbers[row]),
            "label": labels[row],
            "suggested_label": dataset.targets.names[rivals[row]] if readings[row] else "",
            "suspicion": f"{scores[row]:.6f}" if readings[row] else "",
            "margin": f"{margins[row]:.6g}" if readings[row] else "",
            "last_loss": f"{columns['loss'][row]:.6g}" if readings[row] else "",
            "early_norm_of_p_minus_y": f"{norms[row]:.6g}" if readings[row] else "",
            "readings": int(readings[row]),
            "learnt": int(columns["learnt"][row]),
            "forgotten": int(columns["forgotten"][row]),
        }
        for row in order.tolist()
    ]
    return LedgerRows(rows, list(_list_duplicates(dataset)), describe_unlearnt(ledger, dataset))


def make_ledger_sections(rows: LedgerRows, dataset: Dataset) -> list[Section]:
    """Return the sections of a page about suspicious labels, unlearnt and repeated samples."""
    suspicious = rows.suspicious[:MAX_SHOWN]
    caption = (f"{rows.warning} " if rows.warning else "") + (
        f"The {len(suspicious)} training labels that fit least, each with the label that fits "
        "better. The margin is the logit of the label minus the largest other one, on average over "
        f"training. All are in {SUSPICIOUS}. dataset.exclude reads a copy of this file that holds "
        "only the samples to leave out."
    )
    never: dict[str, list[int]] = {}
    for row in rows.suspicious:
        never.setdefault(str(row["label"]), []).append(row["readings"] > 0 and not row["learnt"])
    unlearnt: list[dict[str, Any]] = [
        {"class": name, "never learnt": sum(flags), "of": len(flags)}
        for name, flags in sorted(never.items(), key=lambda item: -sum(item[1]))
        if any(flags)
    ]
    return [
        Section("Suspicious labels", caption, [_show_samples(suspicious, dataset)]),
        Section(
            "Never learnt",
            "Training samples that were predicted wrongly whenever a step read them.",
            [RowTable(unlearnt)] if unlearnt else [],
        ),
        Section(
            "Equal samples",
            f"Samples with equal bytes: in both splits, or twice in training; all in {DUPLICATES}.",
            [RowTable(rows.duplicates[:MAX_SHOWN])] if rows.duplicates else [],
        ),
    ]


def _format_labels(dataset: Dataset, split: Split) -> list[str]:
    return [format_label(label, dataset.targets) for label in np.asarray(split.columns["label"][:])]


def _list_duplicates(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield a row for each copy of an earlier training sample, evaluation samples first."""
    first_rows: dict[bytes, int] = {}
    repeated = []
    for row, digest in enumerate(_hash_split(dataset, dataset.train)):
        first_row = first_rows.setdefault(digest, row)
        if first_row != row:
            repeated.append((first_row, "train", row))
    shared = [
        (first_rows[digest], "eval", row)
        for row, digest in enumerate(_hash_split(dataset, dataset.whole_eval))
        if digest in first_rows
    ]
    splits = {"train": dataset.train, "eval": dataset.whole_eval}
    numbers = {key: split.list_rows() for key, split in splits.items()}
    labels = {key: _format_labels(dataset, split) for key, split in splits.items()}
    for first_row, name, row in (*shared, *repeated):
        yield {
            "index": int(numbers["train"][first_row]),
            "label": labels["train"][first_row],
            "split": name,
            "index_of_equal": int(numbers[name][row]),
            "label_of_equal": labels[name][row],
        }


def _hash_split(dataset: Dataset, split: Split) -> Iterator[bytes]:
    """Yield a hash of what the network reads of each sample."""
    columns: list[Any] = [split.columns[name] for name in dataset.raw_inputs]
    hashes = [
        hash_samples(column.values if isinstance(column, PaddedColumn) else column)
        for column in columns
    ]
    return map(b"".join, zip(*hashes, strict=True))


def _show_samples(rows: Sequence[Mapping[str, Any]], dataset: Dataset) -> Block:
    """Return the samples of rows as pictures, or as rows if they aren't images."""
    number_rows = {number: row for row, number in enumerate(dataset.train.list_rows().tolist())}
    split = dataset.train
    samples = np.array([number_rows[row["index"]] for row in rows])
    columns = {name: np.asarray(split.columns[name][samples]) for name in dataset.raw_inputs}
    values = next(iter(columns.values()))
    if dataset.raw_image is not None and can_picture(values.shape[1:]):
        return SampleGrid(
            [
                Sample(
                    png(picture(value)),
                    f"{row['suggested_label']}?",
                    f"is {row['label']} ({_shorten(row['margin'])})",
                    f"sample {row['index']}",
                )
                for row, value in zip(rows, values, strict=True)
            ]
        )
    contents: list[Mapping[str, Any]] = [{} for _ in rows]
    if dataset.text is not None:
        sizes = np.asarray(split.columns[SIZE])[samples] if SIZE in split.columns else None
        lengths = [value.shape[0] for value in values] if sizes is None else sizes[:, 0].tolist()
        contents = [
            {"text": _decode(dataset.text, value.reshape(-1)[:length])}
            for value, length in zip(values, lengths, strict=True)
        ]
    labels = [
        {
            "index": row["index"],
            "label": row["label"],
            "suggested": row["suggested_label"],
            "margin": _shorten(row["margin"]),
        }
        for row in rows
    ]
    if dataset.table is not None:
        heads = [f"{number.name} (column)" for number in dataset.table.numeric[:MAX_CELLS]]
        cells = [
            {head: f"{number:.4g}" for head, number in zip(heads, value, strict=False)}
            for value in values
        ]
        labels = [{**label, **row} for label, row in zip(labels, cells, strict=True)]
    return RowTable([{**content, **label} for content, label in zip(contents, labels, strict=True)])


def _shorten(margin: str) -> str:
    """Return a margin of the file with three digits; "" stays as it is."""
    return f"{float(margin):.3g}" if margin else ""


def _decode(text: TextFormat, tokens: np.ndarray) -> str:
    """Return the beginning of a text from its tokens; unknown words are …"""
    numbers = tokens.tolist()
    if text.adds_special:
        # Special tokens come before the tokenizer's, and aren't shown.
        special = len(SPECIAL_TOKENS)
        numbers = [number - special for number in numbers if number >= special]
    return text.tokenizer.decode(numbers)[:MAX_CHARACTERS]
