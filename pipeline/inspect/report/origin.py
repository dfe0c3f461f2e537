"""Sections of a report about a run's lineage, its robustness, its profile and its dumps.

The files of profiles and dumps may come from a stranger, so only texts and numbers are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.checkpoint.restore import FOLDER, list_saved_steps
from pipeline.core.errors import DataError, shorten
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.tree_diff import find_value
from pipeline.core.pages.page import Beside, Block, RowTable, Section, Words
from pipeline.inspect.dumps.dump_files import ABOUT
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.run_directory import DUMP, FUZZ, LEAKAGE, ROBUSTNESS, read_descendants
from pipeline.study.runs.page import join_ops, name_data
from pipeline.study.runs.recorded_run import RecordedRun, read_run

PROFILES = ("profile.json", "profile/profile.json")
TABLES = ("phases", "layers")
"""Tables of a profile that a report has."""
ROBUST_FACTS = ("step", "samples", "clean", "robust_accuracy")
ATTACK_COLUMNS = (
    *("attack", "norm", "radius", "steps", "restarts"),
    *("accuracy", "confidence", "mean_l2", "mean_linf"),
)
"""Figures and columns of an evaluation under attacks that a report has."""
USER_FACTS = "monitor.lineage."
"""Prefix of the keys with the user's facts about a run."""
MAX_PROFILES = 4
MAX_ROWS = 30
MAX_COLUMNS = 8
MAX_DUMPS = 50
MAX_DUMP_PATHS = 10_000


def origin_sections(run_dir: Path) -> list[Section]:
    """Return the sections from lineage to dumps; all except lineage may be without content."""
    run = read_run(run_dir, run_dir, curves=False)
    lineage = "From the data of the run to its exports, in the order of time."
    dumps = list(_list_dumps(run_dir))
    return [
        Section("Lineage", lineage, [RowTable(list(_list_lineage(run)))]),
        _show_robustness(run_dir),
        Section(
            "Leakage",
            "How well attacks recognise training samples.",
            _show_table(run_dir / LEAKAGE, "attacks"),
        ),
        Section(
            "Faults",
            "Accuracy with flipped bits, zeros and changed signs of weights.",
            _show_table(run_dir / FUZZ / "fuzz.json", "faults"),
        ),
        Section("Profile", "", _show_profile(run_dir)),
        Section("Dumps", "Tensors of a step, by layer.", [RowTable(dumps)] if dumps else []),
    ]


def _list_lineage(run: RecordedRun) -> Iterator[dict[str, str]]:
    """Yield rows: the origin of a run, its processes, and the exports and runs that use it."""

    def row(kind: str, name: str, time: str = "") -> dict[str, str]:
        return {"what": kind, "name": name, "when": time[:16].replace("T", " ")}

    yield row("data", " ".join(filter(None, (name_data(run), run.data))))
    for split in ("train", "eval"):
        if (size := run.figures.get(f"{split}_samples")) is not None:
            yield row(f"{split} samples", f"{size:,.0f}")
    for key, value in run.keys.items():
        if key.startswith(USER_FACTS):
            yield row(key.removeprefix(USER_FACTS), str(value))
    if ops := join_ops(run):
        yield row("map ops", ops)
    if "restored" in run.sources:
        yield row("weights of", run.sources["restored"])
    try:
        processes = read_provenance(run.run_dir)
    except DataError:
        processes = []
    for number, process in enumerate(processes):
        commit = str(find_value(process, ("code", "git", "commit"), ""))[:10]
        kind = "resumed" if number else "run"
        name = run.name if not number else run.sources.get("resumed", "")
        if number and number < len(processes) - 1:
            # The summary has only the step at which the newest process resumed.
            name = ""
        text = ", ".join(filter(None, (name, f"code {commit}" if commit else "")))
        yield row(kind, text, str(process.get("begun", "")))
    steps = list_saved_steps(run.run_dir / FOLDER)
    if steps:
        yield row("checkpoints", ", ".join(f"step {step:,}" for step in steps))
    for descendant in read_descendants(run.run_dir):
        yield row(f"{descendant.made} as", descendant.to, descendant.at)


def _show_table(path: Path, key: str) -> list[Block]:
    rows = _list_plain_rows((_read_object(path) or {}).get(key))
    return [RowTable(rows)] if rows else []


def _show_robustness(run_dir: Path) -> Section:
    """Return the section with the tables of attacks and corruptions, and the masked gradients."""
    tree = _read_object(run_dir / ROBUSTNESS) or {}
    attacks = tree.get("attacks")
    rows = [
        {name.replace("_", " "): cell for name, cell in _format_cells(row, ATTACK_COLUMNS).items()}
        for row in (attacks[:MAX_ROWS] if isinstance(attacks, list) else ())
        if isinstance(row, Mapping)
    ]
    tables = filter(None, (rows, _list_plain_rows(tree.get("corruptions"))))
    signs = tree.get("masked_gradients")
    texts = [sign for sign in signs if isinstance(sign, str)] if isinstance(signs, list) else []
    blocks: list[Block] = [RowTable(table) for table in tables]
    blocks += [Words(f"Masked gradients: {sign}") for sign in texts[:MAX_ROWS]]
    facts = _join_facts(tree, ROBUST_FACTS)
    return Section("Robustness", f"Accuracy under attacks: {facts}.", blocks)


def _show_profile(run_dir: Path) -> list[Block]:
    """Return the verdict of a profile, and its tables of phases and layers."""
    trees = filter(None, (_read_object(run_dir / name) for name in PROFILES))
    tree: Mapping[str, Any] = next(trees, {})
    text = find_value(tree, ("verdict", "text"))
    profiles = tree.get("profiles")
    blocks: list[Block] = [Words(text)] if isinstance(text, str) else []
    for profile in profiles[:MAX_PROFILES] if isinstance(profiles, list) else ():
        if isinstance(profile, Mapping):
            blocks += _list_blocks(profile)
    return blocks


def _list_blocks(profile: Mapping[str, Any]) -> list[Block]:
    tables = [RowTable(rows) for name in TABLES if (rows := _list_plain_rows(profile.get(name)))]
    if not tables:
        return []
    facts = _join_facts(profile, ("source", "device", "batch_size", "step_ms"))
    return [*([Words(facts)] if facts else []), Beside(tables)]


def _list_plain_rows(value: Any) -> list[dict[str, Any]]:
    """Return the rows of a table from a list of objects; other values have no rows."""
    if not isinstance(value, list):
        return []
    rows = [item for item in value[:MAX_ROWS] if isinstance(item, Mapping)]
    names = [str(name) for name in rows[0] if _is_plain(rows[0][name])] if rows else []
    columns = names[:MAX_COLUMNS]
    return [
        {name.replace("_", " "): _format_cell(row.get(name)) for name in columns}
        for row in rows
        if columns
    ]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _format_cells(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return the values of these names as text; "" for lists, sections and missing values."""
    return {name: _format_cell(tree[name]) if _is_plain(tree.get(name)) else "" for name in names}


def _join_facts(tree: Mapping[str, Any], names: Sequence[str]) -> str:
    cells = _format_cells(tree, names).items()
    return ", ".join(f"{name.replace('_', ' ')} {cell}" for name, cell in cells if cell)


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return shorten(text, 80)


def _list_dumps(run_dir: Path) -> Iterator[dict[str, str]]:
    root = run_dir / DUMP
    # Folders are named by step, and shorter names come first, so that 9 comes before 10.
    paths = () if root.is_symlink() else islice(root.glob(f"**/{ABOUT}"), MAX_DUMP_PATHS)
    files = sorted(paths, key=lambda file: (len(str(file)), str(file)))
    for file in files[:MAX_DUMPS]:
        keys = ("step", "content", "precision", "loss", "run_loss", "stopped")
        facts = _format_cells(_read_object(file) or {}, keys)
        yield {"dump": str(file.parent.relative_to(run_dir)), **facts}


def _read_object(file: Path) -> Mapping[str, Any] | None:
    """Return the JSON object in a file; None if it is missing, damaged or another value."""
    if not file.is_file():
        return None
    try:
        tree = read_json(file)
    except (OSError, ValueError, DataError):
        return None
    return tree if isinstance(tree, Mapping) else None
