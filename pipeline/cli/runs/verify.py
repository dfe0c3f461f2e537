"""`python -m pipeline verify RECEIPT`: whether a run was trained as its receipt says."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.commands.parameters import MAX_SEED
from pipeline.cli.runs.receipt import SIGNATURE
from pipeline.core.errors import DataError, UsageError
from pipeline.core.files.value_text import count_noun, join_first
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import open_run_recipe
from pipeline.inspect.receipts.recorded_checks import (
    Problem,
    Verification,
    check_chain,
    check_files,
    check_parent,
    require_parent,
)
from pipeline.inspect.receipts.statement import Receipt, Signature, check_signature, read_receipt
from pipeline.inspect.receipts.verify_receipt import (
    check_computed,
    draw_segments,
    replay_segments,
    require_same_run,
)
from pipeline.inspect.replay import Replay
from pipeline.stages.record.run_directory import RECIPE

MAX_NAMED = 6
"""Most segments and reasons in a line."""
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
    *,
    parents: Sequence[Path] = (),
) -> CommandResult:
    """Verify the receipt of a run, and train a share of its segments again.

    Segments are drawn by `seed`, or by a seed that nobody could know before. `parents` are the
    receipt of the run that a fork began with, of that run's parent, and so on. Raises UsageError
    for wrong arguments, DataError if a receipt or a run can't be read. The exit status is 0 only if
    the receipt, and its parents, are verified.
    """
    part = parse_share(share)
    if identity is not None and signers is None:
        raise UsageError([f"--identity {identity}"], "must be with --signers, which has its key")
    claims = [_read_claim(receipt_file, run_dir, signers, identity)]
    # Another run may have another signer.
    claims += [_read_claim(parent, None, signers, None) for parent in parents]
    for child, parent in pairwise(claims):
        require_parent(child.receipt, parent.receipt, str(parent.file))
    seed = secrets.randbelow(MAX_SEED) if seed is None else seed
    facts: dict[str, Any] = {}
    verification: Verification | None = None
    with Reporter() as reporter:
        for claim in reversed(claims):
            verification = _verify(claim, verification, (part, seed), reporter)
            if len(claims) > 1:
                reporter.print_stage("receipt", str(claim.file))
            reporter.print_stage("signature", claim.signature.text)
            for name, text in format_verification(verification):
                reporter.print_stage(name, text)
            reporter.print_stage(verification.verdict, summarize(verification))
            parent_facts = {"parent": facts} if facts else {}
            facts = {**verification.to_dict(), "signature": claim.signature.to_dict()}
            facts |= parent_facts
    return CommandResult(facts, exit_status=0 if facts["verdict"] == "verified" else 1)


class _Claim(NamedTuple):
    """A receipt, its signature and its run."""

    file: Path
    receipt: Receipt
    signature: Signature
    run_dir: Path


def _read_claim(
    file: Path, run_dir: Path | None, signers: Path | None, identity: str | None
) -> _Claim:
    receipt, content = read_receipt(file)
    folder = _find_run(file, run_dir)
    require_same_run(receipt, folder)
    signature_file = file.with_name(f"{file.name}{SIGNATURE}")
    return _Claim(
        file, receipt, check_signature(content, signature_file, signers, identity), folder
    )


def _verify(
    claim: _Claim, parent: Verification | None, draw: tuple[float, int], reporter: Reporter
) -> Verification:
    """Do the checks that are possible; after a broken chain, no others."""
    share, seed = draw
    run_dir = claim.run_dir
    verification = Verification(claim.receipt, seed)
    if not claim.signature.is_good:
        verification.problems.append(Problem("broken", claim.signature.text))
    if not check_chain(verification):
        return verification
    check_files(verification, run_dir)
    with Replay(open_run_recipe(run_dir), run_dir, reporter, advice="") as replay:
        check_computed(verification, replay)
        draw_segments(verification, share)
        with reporter.clock("training segments again"):
            replay_segments(verification, replay)
    if parent is not None:
        check_parent(verification, parent, run_dir)
    return verification


def format_verification(verification: Verification) -> Iterator[tuple[str, str]]:
    """Yield the lines of a verification: a name and a text."""
    receipt = verification.receipt
    links = count_noun(len(receipt.links), "link")
    steps_text = f"{links}, steps {receipt.links[0].step:,} to {receipt.last_step:,}"
    # Anyone can write either.
    made = "while training" if receipt.while_training else "after training, from checkpoints alone"
    yield "chain", f"{steps_text}; says: written {made}"
    for note in verification.notes:
        yield "note", note
    if verification.drawn:
        steps = sum(segment.stop - segment.start for segment in verification.drawn)
        names = join_first(list(map(str, verification.drawn)), MAX_NAMED)
        total = len(verification.segments)
        yield (
            "replayed",
            f"{len(verification.drawn)} of {count_noun(total, 'segment')} (steps {names}), "
            f"{steps:,} of {receipt.last_step:,} steps, drawn by seed {verification.seed}",
        )
        chances = [f"{n}: {verification.compute_chance(n):.1%}" for n in (1, 2, 5) if n <= total]
        yield (
            "chance",
            f"that a forged segment is among them, by number forged: {chances}".replace("'", "")
            .replace("[", "")
            .replace("]", ""),
        )
    for segment in verification.uncovered:
        yield "uncovered", f"steps {segment}: can't be repeated, for no state before is known"
    for text in verification.unproven:
        yield "unproven", text
    for problem in verification.problems:
        yield problem.kind, problem.text
    causes = join_first(verification.causes, MAX_NAMED, "; ")
    if verification.verdict == "not comparable":
        yield "reason", (verification.problems and causes) or "not all of it can be shown"
    elif verification.verdict == "verified" and causes:
        yield "note", f"equal bits, though not as the receipt says: {causes}"


def summarize(verification: Verification) -> str:
    """Return a text about the verdict, with what wasn't compared."""
    text = SUMMARIES[verification.verdict]
    if verification.verdict != "verified" or verification.later_step is None:
        return text
    return (
        f"{text} up to step {verification.receipt.last_step:,}; summary.json is of a later step, "
        "so its final metrics weren't compared"
    )


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
