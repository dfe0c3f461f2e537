"""Statement of a receipt: in-toto's statement about a run, as JSON, and a signature of ssh-keygen.

The statement follows in-toto's attestation framework, version 1 (`Statement`, in-toto.io). Subjects
are files of the run and the digest of its last state. The predicate, of this project's own type,
has the chain. The signature is a separate file in the format of OpenSSH (PROTOCOL.sshsig), as
`ssh-keygen -Y sign` writes it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    MANIFEST,
    list_saved_steps,
    make_checkpoint_path,
)
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.core.errors import DataError, RunError, UsageError, printable
from pipeline.core.files.bounded_read import parse_json, read_bytes
from pipeline.core.files.value_text import show
from pipeline.core.reporter import Reporter
from pipeline.data.copies.checksums import compute_checksum
from pipeline.engine.monitors.log_lines import EVALS, METRICS, read_lines
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe
from pipeline.inspect.receipts.chain import (
    MAX_BYTES,
    ChainRecord,
    Numbers,
    digest_arrays,
    digest_rows,
    digest_state,
    extend_chain,
    parse_record,
    read_chain,
)
from pipeline.inspect.receipts.run_receipt import digest_evaluation, make_origin, select_final
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.run_directory import CHAIN, RECIPE, read_outcome
from pipeline.stages.record.trained_run import read_run_recipe

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://example.org/recipe-pipeline/training-run/"
"""Type of the predicate without its version. It identifies the type; nothing is read there."""
VERSION = "v1"
NAMESPACE = "training-run@recipe-pipeline"
"""Namespace of signatures, so that one of another purpose doesn't fit."""
KEYGEN = "ssh-keygen"
KEYGEN_S = 60.0
STATE = "state"
"""Beginning of the name of the subject that is a state, not a file."""
_SIGNED_BY = re.compile(r"with (\S+) key (SHA256:\S+)")


@dataclass(frozen=True)
class Receipt:
    """A receipt: the chain of a run, and the subjects of its statement."""

    records: tuple[ChainRecord, ...]
    subjects: Mapping[str, str]
    """SHA-256 by name: files by their path in the run, and the last state."""
    while_training: bool
    """False: made from the files of a run that was trained without, so links are at checkpoints.
    The maker says so; nothing shows when a chain was made."""
    stated_head: str | None = None
    stated_steps: int | None = None
    """Both as a statement that was read has them; None for one that is made."""

    @property
    def links(self) -> list[ChainRecord]:
        return [record for record in self.records if record.kind == "link"]

    @property
    def origins(self) -> list[ChainRecord]:
        return [record for record in self.records if record.kind == "origin"]

    @property
    def end(self) -> ChainRecord | None:
        """The record of the final metrics; None if the run isn't done."""
        last = self.records[-1]
        return last if last.kind == "end" else None

    @property
    def last_step(self) -> int:
        return self.links[-1].step

    def to_statement(self) -> dict[str, Any]:
        """Return the in-toto statement."""
        return {
            "_type": STATEMENT,
            "subject": [
                {"name": name, "digest": {"sha256": digest}}
                for name, digest in self.subjects.items()
            ],
            "predicateType": PREDICATE + VERSION,
            "predicate": {
                "made": "while training" if self.while_training else "after training",
                "steps": self.last_step,
                "head": self.records[-1].digest,
                "chain": [record.to_dict() for record in self.records],
            },
        }


def parse_statement(content: bytes, where: str) -> Receipt:
    """Return the receipt in the bytes of a statement. Its chain may be broken.

    Raises DataError for bytes that aren't a statement of this type and version.
    """
    try:
        document = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{where}: isn't a receipt: {error}") from error
    kind = document.get("predicateType") if isinstance(document, dict) else None
    if not isinstance(kind, str) or not kind.startswith(PREDICATE):
        raise DataError(f"{where}: isn't a receipt of a run: its predicateType is {show(kind)}")
    if kind != PREDICATE + VERSION:
        version = show(kind.removeprefix(PREDICATE))
        raise DataError(f"{where}: is a receipt of version {version}; must be {VERSION}")
    match document:
        case {
            "_type": str(statement),
            "subject": [*subjects],
            "predicate": {
                "made": str(made),
                "steps": int(steps),
                "head": str(head),
                "chain": [*chain],
            },
        } if statement == STATEMENT:
            records = tuple(
                parse_record(entry, f"{where}, record {number}")
                for number, entry in enumerate(chain)
            )
            parsed = _parse_subjects(subjects, where)
            receipt = Receipt(records, parsed, made == "while training", head, steps)
            if _is_ordered(receipt):
                return receipt
    raise DataError(f"{where}: isn't a receipt: must have subjects and a chain from its origin on")


def _is_ordered(receipt: Receipt) -> bool:
    """Return whether a chain begins with its origin, has links of increasing steps, and no end but
    at the last of them."""
    records, links = receipt.records, receipt.links
    ends = [record for record in records if record.kind == "end"]
    return (
        bool(links)
        and records[0].kind == "origin"
        and all(a.step <= b.step for a, b in pairwise(records))
        and all(a.step < b.step for a, b in pairwise(links))
        and ends in ([], [records[-1]])
        and all(end.step == links[-1].step for end in ends)
    )


def _parse_subjects(subjects: Sequence[Any], where: str) -> dict[str, str]:
    parsed = {}
    for subject in subjects:
        match subject:
            case {"name": str(name), "digest": {"sha256": str(digest)}}:
                parsed[name] = digest
            case _:
                raise DataError(f"{where}: {show(subject):.80}: isn't a subject with a SHA-256")
    return parsed


def make_receipt(opened: OpenedRecipe, run_dir: Path, reporter: Reporter) -> Receipt:
    """Make the receipt of a run, from the chain that it wrote, or from its checkpoints.

    Raises DataError if neither has a link, or a file can't be read.
    """
    written = read_chain(run_dir / CHAIN) if (run_dir / CHAIN).is_file() else []
    while_training = any(record.kind == "link" for record in written)
    records = written if while_training else _chain_checkpoints(opened, run_dir, reporter)
    last = next(record for record in reversed(records) if record.kind == "link")
    subjects = {
        f"{STATE} after step {last.step}": str(last.body["state"]),
        **{
            name: compute_checksum(run_dir / name)
            for name in (RECIPE, METRICS, EVALS)
            if (run_dir / name).is_file()
        },
    }
    for step in list_saved_steps(run_dir / FOLDER):
        if step == last.step:
            manifest = make_checkpoint_path(run_dir / FOLDER, step) / MANIFEST
            subjects[str(manifest.relative_to(run_dir))] = compute_checksum(manifest)
    return Receipt(tuple(records), subjects, while_training)


def _chain_checkpoints(
    opened: OpenedRecipe, run_dir: Path, reporter: Reporter
) -> list[ChainRecord]:
    """Return a chain with a link at the start and at each checkpoint of a run."""
    processes = read_provenance(run_dir)
    if not processes:
        raise DataError(f"{run_dir}: has no receipt, and no provenance.json to make one from")
    steps = list_saved_steps(run_dir / FOLDER)
    if not steps:
        raise DataError(
            f"{run_dir}: has no receipt, and no checkpoints to make one from; train with "
            "receipt.every_steps=100"
        )
    select = opened.built.step_config.select_saved
    is_fork = any("fork" in process for process in processes)
    states: dict[int, str] = {}
    if not is_fork:
        states[0] = digest_state(opened.fresh_state(), select)
    for step in steps:
        try:
            checkpoint = read_checkpoint(make_checkpoint_path(run_dir / FOLDER, step))
        except DamagedError as error:
            reporter.warn(f"{error}; the receipt has no link there")
            continue
        states[step] = digest_arrays(checkpoint.arrays)
    first = min(states)
    origin = make_origin(read_run_recipe(run_dir), processes[-1], first)
    records = [extend_chain([], {**origin, "unsaved": None})]
    for step, state in sorted(states.items()):
        start = first if step == first else records[-1].step
        body = {
            "kind": "link",
            "step": step,
            "state": state,
            "rows": digest_rows(opened.dataset.train_order, start, step),
            **read_logged(run_dir, start, step),
        }
        records.append(extend_chain(records, body))
    outcome = read_outcome(run_dir)
    metrics = outcome.get("metrics")
    if outcome.get("status") == "done" and outcome.get("steps") == records[-1].step:
        metrics = metrics if isinstance(metrics, Mapping) else {}
        body = {
            "kind": "end",
            "step": records[-1].step,
            "evaluations": [],
            "metrics": select_final(metrics, read_evaluation(run_dir, records[-1].step)),
        }
        records.append(extend_chain(records, body))
    return records


def read_logged(run_dir: Path, start: int, stop: int) -> dict[str, Any]:
    """Return what a link says about the logs of the steps start + 1 to stop: the digest of numbers,
    and the digests of evaluations by step."""
    numbers = Numbers()
    evaluations = {}
    if (run_dir / METRICS).is_file():
        for line in read_lines(run_dir / METRICS):
            if start < line.step <= stop:
                numbers.add_line(line)
    if (run_dir / EVALS).is_file():
        for line in read_lines(run_dir / EVALS):
            if start < line.step <= stop:
                evaluations[line.step] = digest_evaluation(line.step, line.fields)
    pairs = [[step, digest] for step, digest in sorted(evaluations.items())]
    return {"numbers": numbers.finish(), "evaluations": pairs}


def read_evaluation(run_dir: Path, step: int) -> Mapping[str, Any]:
    """Return the metrics of the evaluation after a step, from the log; {} if it has none."""
    fields: Mapping[str, Any] = {}
    if (run_dir / EVALS).is_file():
        for line in read_lines(run_dir / EVALS):
            if line.step == step:
                fields = {name: value for name, value in line.fields.items() if name != "step"}
    return fields


def read_receipt(file: Path) -> tuple[Receipt, bytes]:
    """Read a receipt, and its bytes, which are signed. Raises DataError."""
    try:
        content = read_bytes(file, MAX_BYTES)
    except FileNotFoundError as error:
        raise DataError(
            f"{file}: there is no such receipt; `receipt RUN_DIR` writes one"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read: {error}") from error
    return parse_statement(content, str(file)), content


def format_statement(receipt: Receipt) -> bytes:
    """Return the bytes of a receipt's statement."""
    return (json.dumps(receipt.to_statement(), indent=1) + "\n").encode("ascii")


def require_key(key: Path) -> None:
    """Raise UsageError if a key of ssh, or ssh-keygen, isn't there."""
    if not key.is_file():
        rule = f"there is no such key; `{KEYGEN} -t ed25519 -f {key}` makes one"
        raise UsageError([f"--sign-with {key}"], rule)
    _require_keygen(f"--sign-with {key}")


def _require_keygen(option: str) -> None:
    if shutil.which(KEYGEN) is None:
        raise UsageError([option], f"needs {KEYGEN}, which isn't installed (openssh-client)")


def sign(content: bytes, key: Path) -> bytes:
    """Return the signature of bytes by a private key of ssh, or by a public one, whose private key
    an agent has. Raises RunError if ssh-keygen refuses the key."""
    done = _call_keygen(["-Y", "sign", "-f", str(key), "-n", NAMESPACE], content)
    if done.returncode != 0 or not done.stdout:
        raise RunError(f"{key}: {KEYGEN} can't sign with it: {_read_reason(done)}")
    return done.stdout


@dataclass(frozen=True)
class Signature:
    """Result of checking a signature."""

    is_good: bool
    text: str
    """Who has signed, or what is wrong."""
    is_known: bool = False
    """Whether the signer is in the file of allowed signers."""

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "good": self.is_good, "known": self.is_known}


def check_signature(
    content: bytes, signature: Path, signers: Path | None, identity: str | None
) -> Signature:
    """Check the signature of bytes.

    With a file of allowed signers, in the format of OpenSSH, the key must be in it, for `identity`
    if it isn't None. Without one, the key is only named. Raises UsageError without ssh-keygen.
    """
    if not signature.is_file():
        return Signature(signers is None, "isn't signed")
    _require_keygen(str(signature))
    words = ["-n", NAMESPACE, "-s", str(signature.absolute())]
    if signers is None:
        done = _call_keygen(["-Y", "check-novalidate", *words], content)
        if done.returncode != 0:
            return Signature(False, f"the signature isn't good: {_read_reason(done)}")
        return Signature(True, f"signed by {_find_key(done)}; --signers says whose key that is")
    if not signers.is_file():
        raise UsageError([f"--signers {signers}"], "there is no such file of allowed signers")
    names = [identity] if identity is not None else _find_principals(signature, signers)
    reason = "its key isn't in the file of allowed signers"
    for name in names:
        allowed = ["-f", str(signers), "-I", name]
        done = _call_keygen(["-Y", "verify", *allowed, *words], content)
        if done.returncode == 0:
            return Signature(True, f"signed by {printable(name)}, {_find_key(done)}", True)
        reason = _read_reason(done)
    return Signature(False, f"the signature isn't good: {reason}")


def _find_principals(signature: Path, signers: Path) -> list[str]:
    words = ["-Y", "find-principals", "-s", str(signature.absolute()), "-f", str(signers)]
    done = _call_keygen(words, b"")
    # A line each, since a quoted name may have spaces.
    return done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else []


def _call_keygen(words: Sequence[str], content: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [KEYGEN, *words], input=content, capture_output=True, timeout=KEYGEN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{KEYGEN}: {error}") from error


def _find_key(done: subprocess.CompletedProcess[bytes]) -> str:
    match = _SIGNED_BY.search(done.stdout.decode("utf-8", "replace"))
    return f"{match[1]} {match[2]}" if match else "a key"


def _read_reason(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
    lines = [line for line in text.splitlines() if line.strip()]
    return printable(lines[-1].strip()) if lines else f"exit status {done.returncode}"
