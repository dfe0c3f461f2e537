"""`python -m pipeline verify RECEIPT`: whether a run was trained as its receipt says."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.commands.parameters import MAX_SEED
from pipeline.cli.runs.receipt import SIGNATURE
from pipeline.core.errors import DataError, UsageError
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import open_run_recipe
from pipeline.inspect.receipts.statement import Receipt, Signature, check_signature, read_receipt
from pipeline.inspect.receipts.verify_receipt import (
    Problem,
    Verification,
    check_chain,
    check_computed,
    check_files,
    draw_segments,
    format_verification,
    replay_segments,
    require_same_run,
)
from pipeline.inspect.replay import Replay
from pipeline.stages.record.run_directory import RECIPE

SUMMARIES = {
    "verified": "the run has the bits of its receipt",
    "broken": "the receipt doesn't fit itself, its signature or the files of the run",
    "differs": "training again gives other bits than the receipt has",
    "not comparable": "nothing shows that the receipt is true, or that it isn't",
}


def main(
    receipt_file: Path,
    run_dir: Path | None = None,
    share: str = "5%",
    seed: int | None = None,
    signers: Path | None = None,
    identity: str | None = None,
) -> CommandResult:
    """Verify the receipt of a run, and train a share of its segments again.

    Segments are drawn by `seed`, or by a seed that nobody could know before. Raises UsageError for
    wrong arguments, DataError if the receipt or the run can't be read. The exit status is 0 only if
    the receipt is verified.
    """
    part = parse_share(share)
    if identity is not None and signers is None:
        raise UsageError([f"--identity {identity}"], "must be with --signers, which has its key")
    receipt, content = read_receipt(receipt_file)
    folder = _find_run(receipt_file, run_dir)
    require_same_run(receipt, folder)
    signature_file = receipt_file.with_name(f"{receipt_file.name}{SIGNATURE}")
    signature = check_signature(content, signature_file, signers, identity)
    seed = secrets.randbelow(MAX_SEED) if seed is None else seed
    with Reporter() as reporter:
        verification = _verify(receipt, signature, folder, (part, seed), reporter)
        reporter.print_stage("signature", signature.text)
        for name, text in format_verification(verification):
            reporter.print_stage(name, text)
        verdict = verification.verdict
        reporter.print_stage(verdict, SUMMARIES[verdict])
    facts = {
        **verification.to_dict(),
        "signature": {
            "text": signature.text,
            "good": signature.is_good,
            "known": signature.is_known,
        },
    }
    return CommandResult(facts, exit_status=0 if verdict == "verified" else 1)


def _verify(
    receipt: Receipt,
    signature: Signature,
    run_dir: Path,
    draw: tuple[float, int],
    reporter: Reporter,
) -> Verification:
    """Do the checks that are possible; after a broken chain, no others."""
    share, seed = draw
    verification = Verification(receipt, seed)
    if not signature.is_good:
        verification.problems.append(Problem("broken", signature.text))
    if not check_chain(verification):
        return verification
    check_files(verification, run_dir)
    with Replay(open_run_recipe(run_dir), run_dir, reporter, advice="") as replay:
        check_computed(verification, replay)
        draw_segments(verification, share)
        with reporter.clock("training segments again"):
            replay_segments(verification, replay)
    return verification


def parse_share(text: str) -> float:
    """Return the share of a text such as 5% or 0.05. Raises UsageError for others."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise UsageError([f"--share {text}"], "must be a share above 0, such as 5%, up to 100%")
    return value


def _find_run(receipt_file: Path, run_dir: Path | None) -> Path:
    folder = receipt_file.parent if run_dir is None else run_dir
    if not (folder / RECIPE).is_file():
        name = "its folder" if run_dir is None else str(run_dir)
        raise DataError(f"{receipt_file}: {name} isn't the run; name it: --run RUN_DIR")
    return folder
