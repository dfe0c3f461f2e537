"""Receipts of small runs: honest ones are verified, forged ones are found, others are refused."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe, run
from pipeline.__main__ import main
from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path
from pipeline.core.errors import DataError, PipelineError, RecipeError
from pipeline.inspect.receipts.chain import ChainRecord, extend_chain, read_chain
from pipeline.inspect.receipts.run_receipt import digest_evaluation
from pipeline.inspect.receipts.statement import read_logged
from tests.command_line import fork, receipt, verify
from tests.conftest import MLP, ROOT, compose_tiny

RECEIPT = (
    *MLP,
    "train.steps=12",
    "train.sink_size=5",
    "checkpoint.every_steps=4",
    "checkpoint.keep=9",
    "eval.every_steps=6",
    "receipt.every_steps=2",
)
ALL = "--share=100%"
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 4, 8 and 12, and links of every other step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(compose_tiny(cache, *RECEIPT), folder).status == "done"
    assert receipt([str(folder)]) == 0
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., Facts]:
    """Verify a run's receipt, and return the facts."""

    def check(run_dir: Path, *options: str) -> Facts:
        capsys.readouterr()
        status = verify([str(run_dir / "receipt.json"), "--seed=1", "--json", *options])
        facts: Facts = json.loads(capsys.readouterr().out)
        assert status == (0 if facts["verdict"] == "verified" else 1)
        return facts

    return check


def edit_chain(run_dir: Path, edit: Callable[[list[Any]], None]) -> None:
    """Change bodies of a receipt's chain, and make the chain whole again: a forger's work."""
    file = run_dir / "receipt.json"
    statement = json.loads(file.read_text())
    bodies = [record["body"] for record in statement["predicate"]["chain"]]
    edit(bodies)
    records: list[ChainRecord] = []
    for body in bodies:
        records.append(extend_chain(records, body))
    statement["predicate"]["chain"] = [record.to_dict() for record in records]
    statement["predicate"]["head"] = records[-1].digest
    links = [record.step for record in records if record.kind == "link"]
    statement["predicate"]["steps"] = links[-1]
    last = next(body for body in reversed(bodies) if body["kind"] == "link")
    statement["subject"][0]["digest"]["sha256"] = last["state"]
    for subject in statement["subject"][1:]:
        if (run_dir / subject["name"]).is_file():
            content = (run_dir / subject["name"]).read_bytes()
            subject["digest"]["sha256"] = hashlib.sha256(content).hexdigest()
    file.write_text(json.dumps(statement))


def test_honest_run_is_verified(trained: Path, check: Callable[..., Facts]) -> None:
    facts = check(trained, ALL)
    assert facts["verdict"] == "verified"
    assert facts["problems"] == facts["not_comparable"] == facts["notes"] == []
    assert facts["replayed"] == [[0, 4], [4, 8], [8, 12]]
    assert facts["checkpoints"] == [4, 8, 12]
    assert (facts["links"], facts["chance"]) == (7, 1)


def test_share_is_rounded_up_and_drawn_by_the_seed(
    trained: Path, check: Callable[..., Facts]
) -> None:
    drawn = set()
    for seed in range(8):
        facts = check(trained, "--share=5%", f"--seed={seed}")
        assert facts["verdict"] == "verified"
        (segment,) = facts["replayed"]
        drawn.add(tuple(segment))
        assert facts["chance"] == pytest.approx(1 / 3)
    assert drawn == {(0, 4), (4, 8), (8, 12)}
    assert check(trained, "--share=34%")["chance"] == pytest.approx(2 / 3)


def test_statement_has_the_fields_of_in_toto(trained: Path) -> None:
    statement = json.loads((trained / "receipt.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert list(statement) == ["_type", "subject", "predicateType", "predicate"]
    names = [subject["name"] for subject in statement["subject"]]
    assert names[:2] == ["state after step 12", "recipe.yaml"]
    sums = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"][1:]}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    checked = subprocess.run(["sha256sum", "-c"], cwd=trained, input=lines.encode(), check=False)
    assert checked.returncode == 0
    assert any(name.endswith("manifest.json") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [("train.sink_size=1",), ("train.sink=false",), ("train.sink_size=-1", "train.feed=stream")],
    ids=" ".join,
)
def test_sinks_change_no_record(
    trained: Path, cache: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run(compose_tiny(cache, *RECEIPT, *overrides), tmp_path / "run")
    expected = (trained / "receipt.jsonl").read_text()
    assert (tmp_path / "run" / "receipt.jsonl").read_text() == expected


@pytest.mark.parametrize("stop", [6, 7])
def test_resumed_run_has_the_chain_of_an_unbroken_one(
    trained: Path, cache: Path, tmp_path: Path, stop: int
) -> None:
    """Also if it stopped between two links, and after the log has lines of lost steps."""
    run_dir = tmp_path / "run"
    run(compose_tiny(cache, *RECEIPT, f"train.end_step={stop}"), run_dir)
    assert read_chain(run_dir / "receipt.jsonl")[-1].step == stop
    run(compose_tiny(cache, *RECEIPT, f"train.resume={run_dir}"), run_dir)
    chain = read_chain(run_dir / "receipt.jsonl")
    expected = read_chain(trained / "receipt.jsonl")
    # The length was another one, so a second origin says from which step on.
    assert [record.step for record in chain if record.kind == "origin"] == [0, stop]
    links = [dict(record.body) for record in chain if record.kind == "link"]
    expected_links = [dict(record.body) for record in expected if record.kind == "link"]
    # The stopped run was evaluated at its end, as its log says.
    if stop == 7:
        assert [step for step, _ in links[4].pop("evaluations")] == [7]
        assert expected_links[4].pop("evaluations") == []
    assert links == expected_links


@pytest.mark.medium
def test_run_resumed_with_other_sinks_is_verified(
    trained: Path, cache: Path, tmp_path: Path, check: Callable[..., Facts]
) -> None:
    """Neither a cut within a link nor the number of steps in one program changes a digest."""
    run_dir = tmp_path / "run"
    run(compose_tiny(cache, *RECEIPT, "train.end_step=5"), run_dir)
    resumed = (f"train.resume={run_dir}", "train.sink_size=2")
    run(compose_tiny(cache, *RECEIPT, *resumed, "train.end_step=9"), run_dir)
    run(compose_tiny(cache, *RECEIPT, f"train.resume={run_dir}", "train.sink_size=-1"), run_dir)
    assert receipt([str(run_dir)]) == 0
    facts = check(run_dir, ALL)
    assert facts["verdict"] == "verified", facts
    assert facts["problems"] == facts["not_comparable"] == []
    states = [
        [r.body["state"] for r in read_chain(folder / "receipt.jsonl") if r.kind == "link"]
        for folder in (trained, run_dir)
    ]
    assert states[0] == states[1]


@pytest.mark.slow
def test_resumed_run_with_another_length_is_verified_by_both(
    cache: Path, tmp_path: Path, check: Callable[..., Facts]
) -> None:
    """The learning rate depends on the length, and the resume isn't at a link's step."""
    run_dir = tmp_path / "run"
    recipe = [word for word in RECEIPT if "train.steps" not in word]
    falling = (*recipe, "schedule=cosine")
    run(compose_tiny(cache, *falling, "train.steps=7"), run_dir)
    run(compose_tiny(cache, *falling, "train.steps=12", f"train.resume={run_dir}"), run_dir)
    assert receipt([str(run_dir)]) == 0
    facts = check(run_dir, ALL)
    assert facts["verdict"] == "verified"
    assert facts["replayed"] == [[0, 4], [4, 8], [8, 12]]
    assert facts["notes"] == ["steps 1 to 7 with train.steps=7"]

    def claim_length(bodies: list[Any]) -> None:
        bodies[0]["length"]["steps"] = 8

    edit_chain(run_dir, claim_length)
    assert check(run_dir, ALL)["verdict"] == "differs"


def test_origin_hides_no_steps(copied: Path, check: Callable[..., Facts]) -> None:
    """A forger repeats the origin after a false state."""

    def hide(bodies: list[Any]) -> None:
        forge_state(bodies)
        bodies.insert(5, {**bodies[0], "step": 6})

    edit_chain(copied, hide)
    facts = check(copied, ALL)
    assert (facts["verdict"], facts["uncovered"]) == ("differs", [])


@pytest.mark.parametrize("keeps_checkpoint", [False, True])
def test_chain_without_its_first_state_is_not_verified(
    copied: Path, check: Callable[..., Facts], keeps_checkpoint: bool
) -> None:
    """The steps before the chain may be anything, whether or not it begins at a checkpoint."""

    def cut(bodies: list[Any]) -> None:
        del bodies[1:3]
        bodies[0]["step"] = 4
        empty = hashlib.sha256().hexdigest()
        bodies[1] |= {"rows": empty, "numbers": empty, "evaluations": []}

    edit_chain(copied, cut)
    if not keeps_checkpoint:
        shutil.rmtree(make_checkpoint_path(copied / FOLDER, 4))
    facts = check(copied, ALL)
    assert facts["verdict"] == "not comparable"
    assert facts["problems"] == []
    assert facts["uncovered"] == [[0, 4 if keeps_checkpoint else 8]]


@pytest.mark.slow
def test_killed_run_continues_its_chain(trained: Path, cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    shutil.rmtree(make_checkpoint_path(run_dir / FOLDER, 12))
    shutil.rmtree(make_checkpoint_path(run_dir / FOLDER, 8))
    (run_dir / "summary.json").unlink()
    run(compose_tiny(cache, *RECEIPT, f"train.resume={run_dir}"), run_dir)
    expected = (trained / "receipt.jsonl").read_text()
    assert (run_dir / "receipt.jsonl").read_text() == expected


@pytest.fixture(scope="module")
def forked(trained: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork of the trained run after step 8, with another decay and a receipt."""
    folder = tmp_path_factory.mktemp("forked") / "fork"
    keys = [f"cache.root={cache}", "train.steps=16", "train.ema.decay=null"]
    assert fork([f"{trained}@8", *keys, f"--out={folder}"]) == 0
    assert receipt([str(folder)]) == 0
    return folder


@pytest.mark.medium
def test_parent_covers_the_steps_before_a_fork(
    trained: Path, forked: Path, check: Callable[..., Facts], tmp_path: Path
) -> None:
    facts = check(forked, ALL)
    assert (facts["verdict"], facts["uncovered"]) == ("not comparable", [[0, 8]])
    parent = trained / "receipt.json"
    facts = check(forked, ALL, f"--parent={parent}")
    assert (facts["verdict"], facts["uncovered"]) == ("verified", [])
    assert facts["parent"]["verdict"] == "verified"
    assert facts["parent"]["replayed"] == [[0, 4], [4, 8], [8, 12]]
    with pytest.raises(DataError, match="begins at the start, so it has no parent"):
        verify([str(parent), f"--parent={parent}"])

    # A log of the fork with another loss in a step of its parent.
    copied = tmp_path / "fork"
    shutil.copytree(forked, copied)
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    fields = json.loads(lines[2])
    fields["loss"] = 0.5
    lines[2] = json.dumps(fields) + "\n"
    (copied / "metrics.jsonl").write_text("".join(lines))
    assert receipt([str(copied)]) == 0
    facts = check(copied, ALL, f"--parent={parent}")
    assert facts["verdict"] == "broken"
    assert "steps 3 to 4 differ from the parent's" in facts["problems"][0]["text"]


@pytest.mark.medium
def test_forged_parent_is_found(
    copied: Path, forked: Path, check: Callable[..., Facts], cache: Path, tmp_path: Path
) -> None:
    edit_chain(copied, forge_state)
    facts = check(forked, ALL, f"--parent={copied / 'receipt.json'}")
    assert (facts["verdict"], facts["parent"]["verdict"]) == ("differs", "differs")

    # An honest run of another seed isn't the parent.
    other = tmp_path / "other"
    run(compose_tiny(cache, *RECEIPT, "seed=5"), other)
    receipt([str(other)])
    facts = check(forked, ALL, f"--parent={other / 'receipt.json'}")
    assert (facts["verdict"], facts["parent"]["verdict"]) == ("broken", "verified")
    assert "isn't the one that the chain begins with" in facts["problems"][0]["text"]


@pytest.mark.medium
def test_devices_change_no_state(cache: Path, tmp_path: Path) -> None:
    chains = []
    for devices in (1, 2):
        recipe = compose_tiny(
            cache, *RECEIPT, "parallel.mode=data", "parallel.shards=2", "train.batch_size=32",
            f"parallel.devices={devices}",
        )  # fmt: skip
        run(recipe, tmp_path / str(devices))
        chains.append((tmp_path / str(devices) / "receipt.jsonl").read_text())
    assert chains[0] == chains[1]


def forge_state(bodies: list[Any]) -> None:
    """A state that training didn't give, after step 6, between two checkpoints."""
    bodies[4]["state"] = "0" * 64


def forge_number(bodies: list[Any]) -> None:
    bodies[4]["numbers"] = "0" * 64


def forge_rows(bodies: list[Any]) -> None:
    bodies[4]["rows"] = "0" * 64


def forge_recipe(bodies: list[Any]) -> None:
    bodies[0]["recipe"] = "0" * 64


def forge_data(bodies: list[Any]) -> None:
    bodies[0]["data"]["train"]["image"]["sha256"] = "0" * 64


def forge_start(bodies: list[Any]) -> None:
    bodies[1]["state"] = "0" * 64


def forge_metric(bodies: list[Any]) -> None:
    bodies[-1]["metrics"]["accuracy"] = 1.0


def forge_evaluation(bodies: list[Any]) -> None:
    bodies[4]["evaluations"] = [[6, "0" * 64]]


def forge_checkpoint_state(bodies: list[Any]) -> None:
    bodies[5]["state"] = "0" * 64


@pytest.mark.parametrize(
    ("edit", "verdict", "text"),
    [
        (forge_state, "differs", "steps 5 to 6, trained again, have another state"),
        (forge_number, "broken", "metrics.jsonl: steps 5 to 6 differ from the chain"),
        (forge_rows, "differs", "steps 5 to 6 read other rows by this recipe"),
        (forge_recipe, "differs", "recipe.yaml: isn't the recipe of the receipt"),
        (forge_data, "differs", "the training data aren't those of the receipt"),
        (forge_start, "differs", "the first state isn't that of the recipe"),
        (forge_metric, "broken", "accuracy of summary.json is"),
        (forge_evaluation, "broken", "evals.jsonl: the evaluation after step 6 differs"),
        (forge_checkpoint_state, "broken", "isn't the state of the link of step 8"),
    ],
)
def test_forged_chain_is_found(
    copied: Path, check: Callable[..., Facts], edit: Any, verdict: str, text: str
) -> None:
    edit_chain(copied, edit)
    facts = check(copied, ALL)
    assert facts["verdict"] == verdict
    assert any(text in problem["text"] for problem in facts["problems"])


def test_forged_segment_is_found_only_if_it_is_drawn(
    copied: Path, check: Callable[..., Facts]
) -> None:
    edit_chain(copied, forge_state)
    for seed in range(6):
        facts = check(copied, f"--seed={seed}")
        is_drawn = facts["replayed"] == [[4, 8]]
        assert facts["verdict"] == ("differs" if is_drawn else "verified")


def sign_as(forged: Path, honest: Path) -> None:
    """Claim the recipe, data, rows and first state of an honest run for a forged one.

    The chain is whole, and has true digests of the forged run's states, logs and metrics.
    """
    shutil.copy(honest / "recipe.yaml", forged)
    expected = [record.body for record in read_chain(honest / "receipt.jsonl")]

    def claim(bodies: list[Any]) -> None:
        assert len(bodies) == len(expected)
        bodies[0] = dict(expected[0])
        bodies[1]["state"] = expected[1]["state"]
        for body, true in zip(bodies, expected, strict=True):
            if body["kind"] == "link":
                body["rows"] = true["rows"]

    assert receipt([str(forged)]) == 0
    edit_chain(forged, claim)


@pytest.mark.medium
def test_whole_run_of_another_seed_is_found_by_any_segment(
    trained: Path, cache: Path, tmp_path: Path, check: Callable[..., Facts]
) -> None:
    """Without the digests that follow from the recipe; with these it is found at once."""
    forged = tmp_path / "run"
    run(compose_tiny(cache, *RECEIPT, "seed=99"), forged)
    assert receipt([str(forged)]) == 0
    honest_recipe = (trained / "recipe.yaml").read_bytes()
    (forged / "recipe.yaml").write_bytes(honest_recipe)
    edit_chain(forged, lambda bodies: None)
    texts = " ".join(problem["text"] for problem in check(forged)["problems"])
    assert "recipe.yaml: isn't the recipe of the receipt" in texts
    assert "the first state isn't that of the recipe" in texts
    assert "read other rows by this recipe" in texts
    sign_as(forged, trained)
    for seed in range(6):
        facts = check(forged, f"--seed={seed}")
        assert facts["verdict"] == "differs"
        (problem,) = facts["problems"]
        assert re.search("trained again, have (another state|other numbers)", problem["text"])


@pytest.mark.medium
def test_other_label_is_found_in_the_one_segment_that_reads_it(
    tmp_path: Path, check: Callable[..., Facts]
) -> None:
    """Of 48 rows, each is read once in 12 steps: one segment of three is false."""
    # With a file to evaluate: a split by class would move other rows too.
    file, other = tmp_path / "train.csv", tmp_path / "eval.csv"
    rows = [f"{age},{age * 7 % 3}\n" for age in range(60)]
    file.write_text("".join(["age,kind\n", *rows[:48]]))
    other.write_text("".join(["age,kind\n", *rows[48:]]))
    words = (
        "dataset=csv", f"dataset.root={file}", f"dataset.eval_path={other}",
        "dataset.target=kind", *RECEIPT,
        "train.batch_size=4", "train.epochs=null", "eval.every_epochs=null", "schedule=constant",
        "monitor.tensorboard=false",
    )  # fmt: skip
    honest, forged = tmp_path / "honest", tmp_path / "run"
    assert run(load_recipe("lenet5_digits", words), honest).status == "done"
    true = file.read_text()
    file.write_text(true.replace("\n31,1\n", "\n31,2\n"))
    run(load_recipe("lenet5_digits", words), forged)
    file.write_text(true)
    origins = [read_chain(folder / "receipt.jsonl")[0].body for folder in (honest, forged)]
    assert origins[0]["data"]["train"] != origins[1]["data"]["train"]
    sign_as(forged, honest)
    facts = check(forged, ALL)
    assert facts["verdict"] == "differs"
    found = [check(forged, f"--seed={seed}") for seed in range(8)]
    verdicts = {tuple(map(tuple, facts["replayed"])): facts["verdict"] for facts in found}
    assert sorted(verdicts.values()) == ["differs", "verified", "verified"]
    assert all(facts["chance"] == pytest.approx(1 / 3) for facts in found)


@pytest.mark.medium
def test_false_loss_in_the_log_is_found_only_if_its_segment_is_drawn(
    copied: Path, check: Callable[..., Facts]
) -> None:
    """Without its link's digest it is found at once."""
    log = copied / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[5]["step"] == 6
    lines[5]["loss"] = float(np.float32(lines[5]["loss"] * 0.9))
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    edit_chain(copied, lambda bodies: None)
    texts = [problem["text"] for problem in check(copied)["problems"]]
    assert texts == ["metrics.jsonl: steps 5 to 6 differ from the chain"]

    def claim(bodies: list[Any]) -> None:
        bodies[4]["numbers"] = read_logged(copied, 4, 6)["numbers"]

    edit_chain(copied, claim)
    for seed in range(6):
        facts = check(copied, f"--seed={seed}")
        is_drawn = facts["replayed"] == [[4, 8]]
        assert facts["verdict"] == ("differs" if is_drawn else "verified")


def test_changed_file_is_found(copied: Path, check: Callable[..., Facts]) -> None:
    log = copied / "metrics.jsonl"
    log.write_text(log.read_text().replace('"step": 3,', '"step": 3, "x": 1,'))
    facts = check(copied)
    assert [problem["text"] for problem in facts["problems"]] == [
        "metrics.jsonl: isn't the file that the receipt names"
    ]
    checkpoint = make_checkpoint_path(copied / FOLDER, 8)
    victim = max((path for path in checkpoint.rglob("*") if path.is_file()), key=_get_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    assert any(str(checkpoint) in problem["text"] for problem in check(copied)["problems"])


def claim_accuracy(run_dir: Path, *files: str) -> None:
    """Write a false final accuracy into files of a run."""
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["metrics"]["accuracy"] = 0.99
    (run_dir / "summary.json").write_text(json.dumps(summary))
    if "evals.jsonl" in files:
        lines = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
        lines[-1]["accuracy"] = 0.99
        (run_dir / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def add_step(run_dir: Path) -> None:
    """Append a line of a step that nobody trained to the log."""
    log = run_dir / "metrics.jsonl"
    line = json.loads(log.read_text().splitlines()[-1]) | {"step": 13}
    log.write_text(log.read_text() + json.dumps(line) + "\n")


def test_false_metrics_are_found_without_the_last_checkpoint(
    copied: Path, check: Callable[..., Facts]
) -> None:
    """The signer removes it, and writes a false accuracy everywhere."""
    shutil.rmtree(make_checkpoint_path(copied / FOLDER, 12))
    facts = check(copied, ALL)
    assert (facts["verdict"], facts["checkpoints"]) == ("verified", [4, 8])
    facts = check(copied, "--seed=2")
    assert (facts["replayed"], facts["verdict"]) == ([[4, 8]], "not comparable")
    assert facts["problems"] == []
    (text,) = facts["unproven"]
    assert text.startswith("the final metrics: the state of step 12 isn't in a checkpoint")

    def claim(bodies: list[Any]) -> None:
        bodies[-1]["metrics"]["accuracy"] = 0.99

    claim_accuracy(copied)
    edit_chain(copied, claim)
    facts = check(copied, ALL)
    assert facts["verdict"] == "differs"
    assert any("accuracy of the last state is" in problem["text"] for problem in facts["problems"])


def test_final_evaluation_is_in_the_chain(
    cache: Path, tmp_path: Path, check: Callable[..., Facts]
) -> None:
    """Also once a resumed run has replaced the end, and in the order of the steps."""
    run_dir = tmp_path / "run"
    rare = [word for word in RECEIPT if "eval.every" not in word]
    run(compose_tiny(cache, *rare, "train.end_step=8"), run_dir)
    end = read_chain(run_dir / "receipt.jsonl")[-1]
    assert [(end.kind, step) for step, _ in end.body["evaluations"]] == [("end", 8)]
    run(compose_tiny(cache, *rare, f"train.resume={run_dir}"), run_dir)
    records = read_chain(run_dir / "receipt.jsonl")
    evaluations = [(record.step, step) for record in records for step in _list_steps(record)]
    assert evaluations == [(8, 8), (12, 12)]
    assert records[-1].kind == "end"
    assert receipt([str(run_dir)]) == 0
    assert check(run_dir, ALL)["verdict"] == "verified"
    # A run may be killed between its last evaluation and its end, so this alone proves nothing.
    edit_chain(run_dir, lambda bodies: bodies.pop())
    facts = check(run_dir, ALL)
    assert (facts["verdict"], facts["problems"]) == ("not comparable", [])
    assert [text.split(":")[0] for text in facts["unproven"]] == [
        "the evaluation after step 12",
        "the final metrics of summary.json",
    ]


def _list_steps(record: ChainRecord) -> list[int]:
    return [step for step, _ in record.body.get("evaluations", [])]


def leave_out_evaluation(run_dir: Path) -> None:
    edit_chain(run_dir, lambda bodies: bodies[-2].update(evaluations=[]))


def repeat_evaluation(run_dir: Path) -> None:
    """Write another accuracy before the true line of the same step."""
    log = run_dir / "evals.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines.insert(-1, json.dumps(json.loads(lines[-1]) | {"accuracy": 0.99}) + "\n")
    log.write_text("".join(lines))


def remove_evaluation(run_dir: Path) -> None:
    log = run_dir / "evals.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (leave_out_evaluation, "the evaluation after step 12 isn't in the chain"),
        (repeat_evaluation, "the evaluation after step 12 differs from the chain"),
        (remove_evaluation, "the evaluation after step 12 is missing"),
    ],
)
def test_other_evaluations_are_found(
    copied: Path, check: Callable[..., Facts], change: Callable[[Path], None], text: str
) -> None:
    change(copied)
    facts = check(copied)
    assert facts["verdict"] == "broken"
    assert f"evals.jsonl: {text}" in [problem["text"] for problem in facts["problems"]]


@pytest.mark.parametrize("name", ["train_loss", "imagenet_accuracy", "precision"])
def test_invented_metrics_are_found(copied: Path, check: Callable[..., Facts], name: str) -> None:
    """In summary.json alone, and in the chain too."""
    summary = json.loads((copied / "summary.json").read_text())
    summary["metrics"][name] = 0.001
    (copied / "summary.json").write_text(json.dumps(summary))
    facts = check(copied)
    assert facts["verdict"] == "broken"
    assert f"{name} of summary.json is 0.001" in facts["problems"][0]["text"]

    def claim(bodies: list[Any]) -> None:
        bodies[-1]["metrics"][name] = 0.001

    edit_chain(copied, claim)
    facts = check(copied)
    assert facts["verdict"] == "differs"
    assert facts["problems"][0]["text"].startswith(name)


def test_false_figures_of_a_class_are_found(copied: Path, check: Callable[..., Facts]) -> None:
    """The signer writes them into the log and the chain; they aren't numbers by name."""
    log = copied / "evals.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[-1]["recall"]["per_class"]["3"] = 1.0
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    digest = digest_evaluation(12, lines[-1])
    texts = [problem["text"] for problem in check(copied)["problems"]]
    assert any(text.startswith("recall of summary.json is") for text in texts)
    summary = json.loads((copied / "summary.json").read_text())
    summary["metrics"]["recall"] = lines[-1]["recall"]
    (copied / "summary.json").write_text(json.dumps(summary))
    edit_chain(copied, lambda bodies: bodies[-2].update(evaluations=[[12, digest]]))
    facts = check(copied)
    assert facts["verdict"] == "differs"
    assert facts["problems"][0]["text"].startswith("the last state, evaluated again, has other")


@pytest.mark.slow
def test_robust_accuracy_is_not_claimed(
    cache: Path, tmp_path: Path, check: Callable[..., Facts]
) -> None:
    robust = "eval.robustness=[{attack: fgsm, norm: linf, radius: 0.1}]"
    run(compose_tiny(cache, *RECEIPT, robust), tmp_path)
    assert receipt([str(tmp_path)]) == 0
    assert "robust_accuracy" in json.loads((tmp_path / "summary.json").read_text())["metrics"]
    assert check(tmp_path)["verdict"] == "verified"


def test_step_in_the_log_excuses_no_changed_file(copied: Path, check: Callable[..., Facts]) -> None:
    add_step(copied)
    claim_accuracy(copied, "evals.jsonl")
    facts = check(copied)
    assert (facts["verdict"], facts["later_step"]) == ("broken", None)
    texts = [problem["text"].split(": ")[0] for problem in facts["problems"]]
    assert {"metrics.jsonl", "evals.jsonl"} <= set(texts)
    assert any("accuracy of summary.json is 0.99" in text for text in texts)
    # A checkpoint of a later step excuses later lines, not other ones.
    root = copied / FOLDER
    shutil.copytree(make_checkpoint_path(root, 12), make_checkpoint_path(root, 13))
    assert check(copied)["later_step"] is None, "its state is of step 12"


@pytest.mark.slow
def test_run_that_went_on_is_verified_up_to_its_receipt(
    copied: Path, cache: Path, check: Callable[..., Facts], capsys: pytest.CaptureFixture[str]
) -> None:
    longer = [word.replace("train.steps=12", "train.steps=16") for word in RECEIPT]
    run(compose_tiny(cache, *longer, f"train.resume={copied}"), copied)
    facts = check(copied, ALL)
    assert (facts["verdict"], facts["later_step"], facts["problems"]) == ("verified", 16, [])
    assert facts["notes"][-1] == "steps 1 to 12 with train.steps=12"
    assert [note.split(" ")[0] for note in facts["notes"][:-1]] == [
        "recipe.yaml",
        "metrics.jsonl",
        "evals.jsonl",
    ]
    verify([str(copied / "receipt.json"), "--seed=1"])
    assert "so its final metrics weren't compared" in " ".join(capsys.readouterr().out.split())
    for name, former, other in [
        ("metrics.jsonl", '"step": 3,', '"step": 3, "x": 1,'),
        ("evals.jsonl", '"accuracy": 0', '"accuracy": 1'),
        ("recipe.yaml", "seed: 1", "seed: 2"),
    ]:
        content = (copied / name).read_text()
        assert former in content
        (copied / name).write_text(content.replace(former, other, 1))
        texts = [problem["text"] for problem in check(copied)["problems"]]
        assert f"{name}: isn't the file that the receipt names" in texts
        (copied / name).write_text(content)


def _get_size(path: Path) -> int:
    return path.stat().st_size


def test_broken_chain_names_the_record(copied: Path, check: Callable[..., Facts]) -> None:
    file = copied / "receipt.json"
    statement = json.loads(file.read_text())
    statement["predicate"]["chain"][3]["body"]["state"] = "0" * 64
    file.write_text(json.dumps(statement))
    facts = check(copied)
    assert facts["verdict"] == "broken"
    (problem,) = facts["problems"]
    assert problem["text"] == "the chain is broken at record 3, the link of step 4"


def test_other_machine_is_not_comparable(
    copied: Path, check: Callable[..., Facts], capsys: pytest.CaptureFixture[str]
) -> None:
    """Never "differs", if the bits differ; equal bits are verified there, too, with a line."""

    def move(bodies: list[Any]) -> None:
        bodies[0]["environment"]["machine"]["processor"] = "another"

    edit_chain(copied, move)
    facts = check(copied, ALL)
    assert facts["verdict"] == "verified"
    assert facts["not_comparable"] == ["machine processor: another -> " + _read_processor(copied)]
    capsys.readouterr()
    assert verify([str(copied / "receipt.json"), "--seed=1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "says: written while training" in text
    assert "equal bits, though not as the receipt says: machine processor: another" in text
    edit_chain(copied, forge_state)
    assert check(copied, ALL)["verdict"] == "not comparable"


def _read_processor(run_dir: Path) -> str:
    provenance = json.loads((run_dir / "provenance.json").read_text())
    return str(provenance["processes"][0]["machine"]["processor"])


def test_run_without_receipts_gets_one_from_its_checkpoints(
    copied: Path, check: Callable[..., Facts], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [record.body for record in read_chain(copied / "receipt.jsonl")]
    (copied / "receipt.jsonl").unlink()
    assert receipt([str(copied)]) == 0
    assert "the run wrote none, so links are at checkpoints" in capsys.readouterr().out
    facts = check(copied, ALL)
    assert (facts["verdict"], facts["while_training"]) == ("verified", False)
    chain = json.loads((copied / "receipt.json").read_text())["predicate"]["chain"]
    links = [record["body"] for record in chain if record["body"]["kind"] == "link"]
    assert [link["step"] for link in links] == [0, 4, 8, 12]
    states = {body["step"]: body["state"] for body in expected if body["kind"] == "link"}
    assert all(states[link["step"]] == link["state"] for link in links)


def test_signature_is_of_the_whole_statement(
    copied: Path, tmp_path: Path, check: Callable[..., Facts]
) -> None:
    for name in ("key", "other"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True)
    assert check(copied)["signature"]["text"] == "isn't signed"
    assert receipt([str(copied), f"--sign-with={tmp_path / 'key'}"]) == 0
    signers, others = tmp_path / "signers", tmp_path / "others"
    signers.write_text(f"me@here {(tmp_path / 'key.pub').read_text()}")
    others.write_text(f"me@here {(tmp_path / 'other.pub').read_text()}")
    facts = check(copied, f"--signers={signers}")
    assert facts["signature"]["known"]
    assert facts["signature"]["text"].startswith("signed by me@here, ED25519 SHA256:")
    assert check(copied)["verdict"] == "verified"
    assert check(copied, f"--signers={others}")["verdict"] == "broken"
    signers.write_text(f'"Ada L" {(tmp_path / "key.pub").read_text()}')
    assert check(copied, f"--signers={signers}")["signature"]["text"].startswith("signed by Ada L,")
    assert check(copied, f"--signers={signers}", "--identity=you")["verdict"] == "broken"
    edit_chain(copied, lambda bodies: None)
    facts = check(copied)
    assert facts["verdict"] == "broken"
    assert "signature isn't good" in facts["problems"][0]["text"]
    (copied / "receipt.json.sig").unlink()
    assert check(copied, f"--signers={signers}")["verdict"] == "broken"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("training-run/v1", "training-run/v2"), "is a receipt of version v2; must be v1"),
        (("example.org", "example.com"), "isn't a receipt of a run: its predicateType is"),
        (('"chain"', '"chains"'), "must have subjects and a chain from its origin on"),
        (("{", "["), "isn't a receipt"),
    ],
)
def test_other_file_is_refused(copied: Path, change: tuple[str, str], text: str) -> None:
    file = copied / "receipt.json"
    file.write_text(file.read_text().replace(*change, 1))
    with pytest.raises(DataError, match=re.escape(text)):
        verify([str(file)])


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda bodies: bodies[2].update(evaluations=[[]]), "isn't a record of a chain"),
        (lambda bodies: bodies[2].update(evaluations=[[[1], 2]]), "isn't a record of a chain"),
        (lambda bodies: bodies[2].update(evaluations=5), "isn't a record of a chain"),
        (lambda bodies: bodies[-1].update(metrics={"loss": [1]}), "isn't a record of a chain"),
        (lambda bodies: bodies[-1].update(metrics=None), "isn't a record of a chain"),
        (lambda bodies: bodies[-1].update(step=2**62), "a chain from its origin on"),
        (lambda bodies: bodies.append(bodies[-1]), "a chain from its origin on"),
        (lambda bodies: bodies.insert(3, bodies[2]), "a chain from its origin on"),
    ],
)
def test_chain_of_a_stranger_is_refused(copied: Path, edit: Any, text: str) -> None:
    edit_chain(copied, edit)
    with pytest.raises(DataError, match=re.escape(text)):
        verify([str(copied / "receipt.json"), "--seed=1"])


@pytest.mark.parametrize(
    ("length", "text"),
    [
        ({"steps": 2**26}, "origin of step 0 has 67,108,864 steps; must be at most 10,000,000"),
        ({"steps": None, "epochs": 2**31 - 1}, "has a length of no recipe: "),
        ({"steps": None}, "has a length of no recipe: train: give exactly one of"),
    ],
)
def test_length_of_a_stranger_is_refused(copied: Path, length: Any, text: str) -> None:
    """A table of its learning rates would need all memory."""
    edit_chain(copied, lambda bodies: bodies[0]["length"].update(length))
    with pytest.raises(DataError, match=re.escape(text)) as caught:
        verify([str(copied / "receipt.json"), "--seed=1", ALL])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 3000, "x\0y", "\ud800", "../run/recipe.yaml", "/etc/hosts"])
def test_subject_that_is_no_file_of_the_run_is_no_file(
    copied: Path, check: Callable[..., Facts], name: str
) -> None:
    file = copied / "receipt.json"
    statement = json.loads(file.read_text())
    statement["subject"].append({"name": name, "digest": {"sha256": "0" * 64}})
    file.write_text(json.dumps(statement))
    facts = check(copied)
    texts = [problem["text"] for problem in facts["problems"]]
    assert any("isn't a file of the run" in text for text in texts) or "gone" in facts["notes"][0]


def test_chain_of_no_step_is_not_verified(copied: Path, check: Callable[..., Facts]) -> None:
    def cut(bodies: list[Any]) -> None:
        del bodies[2:]

    edit_chain(copied, cut)
    facts = check(copied, ALL)
    assert facts["verdict"] != "verified"
    assert (facts["segments"], facts["chance"]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("head", "f" * 64, "the stated head is ffff"),
        ("steps", 10**9, "the stated number of steps is 1000000000, the chain's 12"),
    ],
)
def test_stated_head_is_that_of_the_chain(
    copied: Path, check: Callable[..., Facts], name: str, value: object, text: str
) -> None:
    file = copied / "receipt.json"
    statement = json.loads(file.read_text())
    statement["predicate"][name] = value
    file.write_text(json.dumps(statement))
    facts = check(copied)
    assert facts["verdict"] == "broken"
    assert facts["problems"][0]["text"].startswith(text)


def test_wrong_arguments_are_refused(copied: Path, tmp_path: Path) -> None:
    file = copied / "receipt.json"
    for call, text in [
        (
            lambda: receipt([str(copied), "--sign-with=absent"]),
            "--sign-with absent: there is no such key",
        ),
        (lambda: receipt([str(tmp_path)]), "isn't a run directory"),
        (lambda: verify([str(tmp_path / "absent")]), "absent: there is no such receipt"),
        (lambda: verify([str(file), "--share=0"]), "--share 0: must be a share above 0"),
        (lambda: verify([str(file), "--share=101%"]), "--share 101%: must be a share above 0"),
        (lambda: verify([str(file), "--identity=me"]), "must be with --signers"),
    ]:
        with pytest.raises(PipelineError, match=re.escape(text)) as caught:
            call()
        assert caught.value.exit_status == 2
    shutil.copy(file, tmp_path / "receipt.json")
    with pytest.raises(DataError, match="name it: --run RUN_DIR"):
        verify([str(tmp_path / "receipt.json")])
    assert verify([str(tmp_path / "receipt.json"), f"--run={copied}", "--seed=1"]) == 0


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.on_nan=rollback", "train.on_nan: must be stop or skip with receipt.every_steps"),
        ("train.minutes=1", "train.minutes = 1: must be null with receipt.every_steps"),
    ],
)
def test_runs_that_undo_steps_have_no_chain(
    cache: Path, tmp_path: Path, override: str, text: str
) -> None:
    recipe = [word for word in RECEIPT if "minutes" not in override or "train.steps" not in word]
    with pytest.raises(RecipeError, match=text):
        run(compose_tiny(cache, *recipe, override), tmp_path / "run")


def test_digest_of_a_state_is_that_of_its_checkpoint(trained: Path) -> None:
    """Independent of the pipeline's reader: the digest is recomputed from the arrays of orbax."""
    from pipeline.checkpoint.restore import read_checkpoint
    from pipeline.inspect.receipts.chain import digest_arrays

    states = {
        record.step: record.body["state"]
        for record in read_chain(trained / "receipt.jsonl")
        if record.kind == "link"
    }
    arrays = read_checkpoint(make_checkpoint_path(trained / FOLDER, 8)).arrays
    assert digest_arrays(arrays) == states[8]
    changed = {path: np.array(array) for path, array in arrays.items()}
    path = next(name for name in changed if name.startswith("params/"))
    changed[path].reshape(-1).view(np.uint32)[0] ^= 1
    assert digest_arrays(changed) != states[8]


@pytest.mark.slow
def test_documented_commands_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "receipts.md").read_text()
    lines = re.findall(r"^    ((?:python -m pipeline|ssh-keygen) [^#\n]*)", text, re.MULTILINE)
    assert len(lines) == 9
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    for line in lines:
        words = shlex.split(line)
        if words[0] == "ssh-keygen" and "-Y" in words:
            words, place = words[: words.index("<")], tmp_path / "outputs" / "again"
            content = (place / words[-1].removesuffix(".sig")).read_bytes()
            done = subprocess.run(
                [word.replace("signers", str(tmp_path / "signers")) for word in words],
                cwd=place, input=content, capture_output=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        elif words[0] == "ssh-keygen":
            subprocess.run(words, check=True)
            public = (tmp_path / "key.pub").read_text()
            (tmp_path / "signers").write_text(f"ada@example.org {public}")
        else:
            assert main(words[3:]) == 0
