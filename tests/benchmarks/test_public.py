"""The public boards: p-values, versions, checksums, and the rows of their tables."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.public import __main__ as door
from benchmarks.public import cifar, mnist1d, optimizers, table_peers, table_sets, tables, ucr
from benchmarks.public.figures import (
    Published,
    SeedRuns,
    compute_p,
    find_other_version,
    read_run,
    read_seeds,
    require_versions,
)


def test_p_is_welchs_with_a_published_deviation() -> None:
    ours = [0.90, 0.93, 0.91, 0.95]
    others = np.array([0.94, 0.92, 0.97])
    figure = Published("FCN", others.mean(), "", float(others.std()), 3)
    expected = stats.ttest_ind(ours, others, equal_var=False, alternative="less").pvalue
    assert compute_p(ours, figure) == pytest.approx(expected)


def test_p_of_one_published_run_has_the_deviation_of_ours() -> None:
    ours = [0.90, 0.93, 0.91, 0.95]
    figure = Published("MLP", 0.96, "")
    t = (np.mean(ours) - 0.96) / (np.std(ours, ddof=1) * np.sqrt(1 / 4 + 1))
    assert compute_p(ours, figure) == pytest.approx(stats.t.cdf(t, 3))
    assert compute_p([0.9], figure) is None
    assert compute_p([1.0, 1.0], Published("FCN", 1.0, "")) == 1.0
    assert compute_p([0.9, 0.9], Published("FCN", 1.0, "")) == 0.0


def test_absent_package_names_the_line_of_pip(capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"numpy": metadata.version("numpy"), "no-such-package": "1.0"}
    with pytest.raises(SystemExit) as stopped:
        require_versions(versions)
    assert stopped.value.code == 2
    pip = f"pip install numpy=={versions['numpy']} no-such-package==1.0"
    assert capsys.readouterr().err == f"no-such-package is absent, not 1.0: {pip}\n"


def test_local_part_of_a_version_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cpu")
    assert find_other_version({"torch": "2.13.0"}) is None
    wanted = "torch is 2.13.0+cpu, not 2.13.1: pip install torch==2.13.1"
    assert find_other_version({"torch": "2.13.1"}) == wanted


def test_methods_with_other_packages_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"LightGBM": {"no-such-package": "1.0"}}
    monkeypatch.setattr(table_peers, "VERSIONS", versions)
    names = ["random forest", "LightGBM", "recipe=table"]
    assert tables.keep_installed(names, is_chosen=False) == ["random forest", "recipe=table"]
    line = "no-such-package is absent, not 1.0: pip install no-such-package==1.0\n"
    assert capsys.readouterr().err == f"LightGBM: left out; {line}"
    with pytest.raises(SystemExit) as stopped:
        tables.keep_installed(names, is_chosen=True)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == line


def test_loop_of_the_authors_needs_torch_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mnist1d, "VERSIONS", {"no-such-package": "1.0"})
    monkeypatch.setattr(mnist1d, "train_seeds", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("sys.argv", ["mnist1d", "--torch", "1"])
    with pytest.raises(SystemExit) as stopped:
        mnist1d.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("pip install no-such-package==1.0\n")


def test_runs_in_turn_have_a_row_each() -> None:
    alone, authors = SeedRuns((0.97, 0.975), 30.0), SeedRuns((0.93,), 21.0)
    rows = list(mnist1d.list_rows(SeedRuns((0.97,), 9.0), (alone, authors)))
    assert rows[-3][:4] == ["`mnist1d_cnn`, a seed alone", alone.describe(), "2", "15.0 each"]
    assert rows[-2][1:4] == ["0.930", "1", "21.0 each"]


def test_changed_tables_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = replace(table_sets.read_list()[0], sha256=hashlib.sha256(b"a,target\n").hexdigest())
    monkeypatch.setattr(table_sets, "read_list", lambda: [entry])
    (tmp_path / entry.file).write_text("a,target\n")
    assert table_sets.write_sets(tmp_path) == [entry]
    (tmp_path / entry.file).write_text("a,target\n1,2\n")
    with pytest.raises(SystemExit) as stopped:
        table_sets.write_sets(tmp_path)
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"{entry.name}: not the table of the list (sha256)\n"


def test_script_of_whitened_patches_is_found_from_any_folder() -> None:
    assert cifar.WHITENING.is_file()
    assert cifar.WHITENING.is_absolute()


def test_changed_series_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "aeon").mkdir()
    (tmp_path / "aeon" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        ucr.check_files(["GunPoint", "OSULeaf"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith("GunPoint, OSULeaf: not the series of aeon")


def test_row_of_a_set_has_the_mean_the_range_and_published_values(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    file.write_text("job,status,metrics.accuracy,train_s\n0,done,0.5,10\n1,done,0.7,20\n")
    runs = read_seeds(file)
    assert runs == SeedRuns((0.5, 0.7), 30.0)
    row = next(ucr.list_rows({"ArrowHead": runs}))
    assert row[:5] == ["ArrowHead", "0.600 (0.500 to 0.700)", "2", "15", "0.846"]
    assert row[6::2] == ["0.869", "0.843 ± 0.011"]
    assert next(ucr.list_rows({"BasicMotions": runs}))[6:8] == ["", ""]
    authors = {row[0]: row[4] for row in mnist1d.list_rows(runs, None)}
    assert float(authors["human"]) < float(authors["MLP"])


def test_run_has_its_accuracy_and_seconds() -> None:
    run_dir = Path(__file__).parents[1] / "golden" / "runs" / "1.0.0rc1" / "folds"
    accuracy, seconds = read_run(run_dir)
    assert 0 < accuracy <= 1
    assert seconds > 0


def test_job_that_is_not_done_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    file.write_text("job,status,metrics.accuracy,train_s\n0,done,0.5,1\n1,failed,,\n")
    with pytest.raises(ValueError, match="jobs 1 aren't done"):
        read_seeds(file)


def test_optimizers_have_verdicts_and_speeds() -> None:
    def stand(value: str, verdict: str, speedup: float | None) -> dict[str, object]:
        return {"value": value, "verdict": verdict, "speedup": speedup}

    workloads = [
        {"standings": [stand("adamw", "baseline", 1.0), stand("muon", "better", 4.0)]},
        {"standings": [stand("adamw", "baseline", 1.0), stand("muon", "tied", None)]},
    ]
    results = {"workloads": workloads, "score_by_steps": {"adamw": 0.5, "muon": 0.75}}
    rows = list(optimizers.list_rows(json.loads(json.dumps(results))))
    assert rows[1] == ["muon", "1, 1, 0", "2.00", "0.00 to 4.00", "1.1 to 1.4", "0.75"]


def test_recorded_runs_of_cifar_are_those_of_the_results() -> None:
    text = (Path(door.__file__).parents[1] / "results" / "long_runs.md").read_text()
    for accuracy, seconds in cifar.RECORDED:
        assert f"{accuracy:.4f} | {seconds:,}" in text
    assert all(f"{value:.4f}" in text for value in cifar.RECORDED_TORCH)
    assert all(f"{value:.4f}" in text for value in cifar.RECORDED_EPOCHS)


def test_summary_of_tables_ranks_complete_folds() -> None:
    names = ["recipe=table", "forest"]
    values = {"a": (0.9, 0.8), "b": (0.5, 0.5), "c": (0.1, None)}
    rows = [
        {"set": key, "fold": 0, "method": name, "task": "regression", "value": value, "seconds": 1}
        for key, pair in values.items()
        for name, value in zip(names, pair, strict=True)
    ]
    table = list(tables.summarise(rows[:-1], names))
    assert [row[1] for row in table] == ["1.25", "1.75"]  # c has no row of the forest
    assert [row[1] for row in tables.summarise(rows, names)] == ["1.17", "1.83"]
    assert [row[7] for row in tables.summarise(rows, names)] == ["", "1.000"]
    assert list(tables.list_values(rows, names))[2] == ["c", "R2", "0.100", "fails"]


def test_folds_of_a_set_are_one_value() -> None:
    """The forest is better on a, by the mean of two folds, and worse on b."""
    names = ["recipe=table", "forest"]
    values = {("a", 0): (0.6, 0.5), ("a", 1): (0.1, 0.9), ("b", 0): (0.4, 0.3)}
    rows = [
        {"set": key, "fold": fold, "method": name, "task": "regression", "value": value}
        | {"seconds": 1 + fold}
        for (key, fold), pair in values.items()
        for name, value in zip(names, pair, strict=True)
    ]
    ours, forest = tables.summarise(rows, names)
    assert (ours[1], forest[1], forest[6]) == ("1.50", "1.50", "1 of 2")
    assert (ours[3], ours[4], ours[5]) == ("0.1750", "1.2", "1.2")


def test_run_stops_after_its_processor_time() -> None:
    def compute() -> None:
        with tables.limit_cpu(0.05):
            while True:
                pass

    with pytest.raises(TimeoutError, match=r"0\.05 s of processor time"):
        compute()


def test_unknown_board_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        door.main(["imagenet"])
    assert stopped.value.code == 2
    assert "mnist1d|ucr|tables|optimizers|cifar" in capsys.readouterr().err


def test_table_whose_reader_leaves_prints_no_error() -> None:
    """As in `python -m benchmarks.public tables --show | head -1`."""
    script = (
        "import runpy, sys; from benchmarks.public import __main__ as door\n"
        "runpy.run_module = lambda *arguments, **options: print('x')\n"
        "sys.exit(door.main(['tables']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ended = subprocess.run([sys.executable, "-c", script], stdout=pipe, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (141, b"")
