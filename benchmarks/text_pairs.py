"""Recall of the recipe of two towers, beside chance and the cosines of TF-IDF.

    python -m benchmarks.text_pairs --save

Both read the same words. TF-IDF has the frequencies of the training split.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe, run
from pipeline.data.sources.text_csv import SHIPPED_PAIRS, TextPairs, mark_eval_rows
from pipeline.data.text.text_columns import read_text_columns
from pipeline.data.text.tokenizer import split_words

RECIPE = "two_towers_docstrings"
RECALLS = (1, 5, 10)
QUIET = ("monitor.tensorboard=false", "monitor.log_level=warning", "eval.every_epochs=null")


def main() -> None:
    """Print, and with --save publish, a row for chance, TF-IDF and the towers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    add_save(parser, "text_pairs.md")
    args = parser.parse_args()
    count, baseline = measure_tf_idf()
    towers = np.array([_train(seed) for seed in range(1, args.seeds + 1)])
    rows = [
        ["by chance", *(f"{k / count:.4f}" for k in RECALLS)],
        ["cosine of TF-IDF", *(f"{recall:.4f}" for recall in baseline)],
        [f"{RECIPE}, mean of {args.seeds} seeds", *(f"{mean:.4f}" for mean in towers.mean(0))],
        ["least", *(f"{least:.4f}" for least in towers.min(0))],
        ["largest", *(f"{largest:.4f}" for largest in towers.max(0))],
    ]
    head = heading("Pairs of texts", "python -m benchmarks.text_pairs", ["jax"])
    note = f"Shares of the {count} held-out functions whose docstring is among the nearest k."
    titles = ["", *(f"k = {k}" for k in RECALLS)]
    publish("\n".join([head, note, "", table(titles, rows)]), args.save)


def measure_tf_idf() -> tuple[int, list[float]]:
    """Return the number of held-out pairs, and the recall of TF-IDF at each of `RECALLS`."""
    dataset = load_recipe(RECIPE).dataset
    assert isinstance(dataset, TextPairs), "the recipe's dataset is of pairs"
    rows = read_text_columns(SHIPPED_PAIRS, ("function", "docstring"))
    is_eval = mark_eval_rows([""] * len(rows), dataset.eval_fraction)
    texts = [
        text for row, held_out in zip(rows, is_eval, strict=True) if not held_out for text in row
    ]
    frequencies = Counter(word for text in texts for word in set(split_words(text)))
    vocabulary = {word: number for number, word in enumerate(frequencies)}
    weights = np.log((1 + len(texts)) / (1 + np.array(list(frequencies.values())))) + 1
    evaluated = [rows[row] for row in np.flatnonzero(is_eval)]

    def embed(texts: Sequence[str]) -> np.ndarray:
        counts = np.zeros((len(texts), len(vocabulary)))
        for row, text in enumerate(texts):
            for word in split_words(text):
                if word in vocabulary:
                    counts[row, vocabulary[word]] += 1
        values = counts * weights
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        return values / np.where(lengths == 0, 1, lengths)

    cosines = embed([a for a, _ in evaluated]) @ embed([b for _, b in evaluated]).T
    partner = np.diag(cosines)[:, None]
    numbers = np.arange(len(cosines))
    is_before = (cosines > partner) | ((cosines == partner) & (numbers < numbers[:, None]))
    before = is_before.sum(axis=1)
    return len(evaluated), [float((before < k).mean()) for k in RECALLS]


def _train(seed: int) -> list[float]:
    """Return the recall of the towers at each of `RECALLS`."""
    with tempfile.TemporaryDirectory() as folder:
        summary = run(load_recipe(RECIPE, [f"seed={seed}", *QUIET]), Path(folder))
    return [summary.metrics[f"recall_at_{k}"] for k in RECALLS]


if __name__ == "__main__":
    main()
