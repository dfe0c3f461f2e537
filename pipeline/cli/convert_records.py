"""`python -m pipeline convert records OUT KEY=VALUE ...`: write ArrayRecord files (D-13)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.cache import cache_root
from pipeline.config.chosen import untrained
from pipeline.config.compose import compose_and_check
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.records.record_format import RecordsSpec
from pipeline.data.records.record_writer import check_free, write_records

USAGE = "python -m pipeline convert records OUT [--overwrite] dataset=NAME dataset.root=ROOT ..."
HELP = """usage: python -m pipeline convert records OUT [--overwrite] dataset=NAME [KEY=VALUE ...]

Write a dataset as ArrayRecord files, which dataset=records reads with random access.

  OUT            the folder to write
  --overwrite    replace the records that are there
  dataset=NAME   the dataset, by name or as the file of one's own
  KEY=VALUE      keys of a recipe, such as dataset.root=DIR

example: python -m pipeline convert records cifar dataset=cifar10 dataset.root=DIR
"""


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors as the rest of the program does."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError([f"convert records: {message}; usage: {USAGE}"])


def main(args: Sequence[str]) -> int:
    """Write the dataset that the arguments describe into the folder OUT; the exit status.

    The arguments after OUT are those of a run. Raises RecipeError for invalid arguments, DataError
    for unreadable data and RunError where OUT can't be written.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    parser = _Parser(prog="pipeline convert records", usage=USAGE, add_help=False)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(list(args))
    out = given.out.expanduser()
    if "=" in given.out.name:
        parser.error(f"OUT must come first, a folder to write; found {given.out}")
    recipe = compose_and_check(untrained(given.overrides))
    check_free(out, given.overwrite)
    reporter = Reporter()
    dataset = recipe.dataset
    with reporter.clock(f"reading {dataset.name}"):
        data = dataset.read(cache_root(recipe.cache))
    if data.table is not None or data.text is not None:
        kept = "columns of a table" if data.text is None else "tokenizer"
        problem = f"records keep no {kept}; must be a dataset of images or arrays"
        raise RecipeError([f"dataset = {dataset.name}: {problem}"])

    def tell(column: str, written: int, samples: int) -> None:
        reporter.stage("convert", f"{column}: {written:,} of {samples:,} samples")

    spec = write_records(out, dataset.name, data, overwrite=given.overwrite, notify=tell)
    reporter.stage("done", _line(out, spec))
    return 0


def _line(out: Path, spec: RecordsSpec) -> str:
    files = [
        file
        for split in (spec.train, spec.eval)
        for column in split.columns.values()
        for file in column.files
    ]
    size_mb = sum(file.size_bytes for file in files) / 1e6
    return (
        f"{out}: {spec.train.samples:,} training and {spec.eval.samples:,} evaluation samples of "
        f"{spec.source} in {len(files)} files, {size_mb:,.1f} MB; use it with dataset=records "
        f"dataset.root={out}"
    )
