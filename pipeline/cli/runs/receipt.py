"""`python -m pipeline receipt RUN_DIR`: what was trained, as a statement that others can check."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.value_text import count_noun
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import open_run_recipe
from pipeline.inspect.receipts.chain import find_broken
from pipeline.inspect.receipts.statement import format_statement, make_receipt, require_key, sign
from pipeline.inspect.replay import find_last_step
from pipeline.stages.record.run_directory import RECEIPT, RECIPE, describe_missing_run

SIGNATURE = ".sig"
"""Ending of a signature's file, after the receipt's name."""


def main(run_dir: Path, out: Path | None = None, sign_with: Path | None = None) -> CommandResult:
    """Write the receipt of a run, and with a key of ssh its signature beside it.

    Raises DataError if the run has neither a chain nor checkpoints, RecipeError for a private run,
    UsageError if the key isn't there, RunError if ssh-keygen refuses it.
    """
    if sign_with is not None:
        require_key(sign_with)
    if not (run_dir / RECIPE).is_file():
        raise DataError(describe_missing_run(run_dir))
    find_last_step(run_dir)
    file = run_dir / RECEIPT if out is None else out
    with Reporter() as reporter:
        opened = open_run_recipe(run_dir)
        if opened.recipe.privacy is not None:
            raise RecipeError("privacy: must be null for receipt, which names the rows by digests")
        receipt = make_receipt(opened, run_dir, reporter)
        broken = find_broken(receipt.records)
        if broken is not None:
            where = f"record {broken}, of step {receipt.records[broken].step:,}"
            raise DataError(f"{run_dir}: the chain of its receipt is broken at {where}")
        content = format_statement(receipt)
        signature = None if sign_with is None else sign(content, sign_with)
        with convert_write_errors(file):
            write_whole(file, content)
            signature_file = file.with_name(f"{file.name}{SIGNATURE}")
            # A signature of an earlier receipt doesn't fit this one.
            signature_file.unlink(missing_ok=True)
            if signature is not None:
                write_whole(signature_file, signature)
        links = f"{count_noun(len(receipt.links), 'link')} up to step {receipt.last_step:,}"
        made = "" if receipt.while_training else "; the run wrote none, so links are at checkpoints"
        reporter.print_stage("receipt", f"{file}: {links}{made}")
        reporter.print_stage("head", receipt.records[-1].digest)
        if signature is not None:
            reporter.print_stage("signed", f"{signature_file}, by {sign_with}")
        facts = {
            "receipt": str(file),
            "head": receipt.records[-1].digest,
            "links": len(receipt.links),
            "steps": receipt.last_step,
            "while_training": receipt.while_training,
            "signature": None if signature is None else str(signature_file),
        }
    return CommandResult(facts)
