"""Where runs, exports and repetitions came from, and which data runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.stages.record.run_directory import Descendant
from pipeline.study.runs.page import (
    DataUse,
    Link,
    join_ops,
    list_data_uses,
    list_links,
    name_data,
)
from pipeline.study.runs.recorded_run import RecordedRun

ROOT = Path("/runs")


def recorded(name: str, **fields: Any) -> RecordedRun:
    values: dict[str, Any] = {
        "status": "done",
        "begun": "",
        "keys": {},
        "figures": {},
        "curves": {},
        "data": "",
        "commits": (),
        "sources": {},
        **fields,
    }
    return RecordedRun(name=name, run_dir=ROOT / name, **values)


def test_weights_are_linked_by_run_name_or_path() -> None:
    runs = [
        recorded("first"),
        recorded("second", sources={"restored": str(ROOT / "first")}),
        recorded("third", sources={"restored": "/elsewhere/run", "resumed": "step 40"}),
    ]
    assert list_links(runs) == [
        Link("first", "gave its weights to", "second"),
        Link("/elsewhere/run", "gave its weights to", "third"),
        Link("third", "was resumed", "step 40"),
    ]


def test_descendants_of_a_run_are_linked() -> None:
    made = (Descendant("exported", "/exports/net"), Descendant("reproduced", str(ROOT / "again")))
    assert list_links([recorded("first", made=made), recorded("again")]) == [
        Link("first", "was exported as", "/exports/net"),
        Link("first", "was reproduced as", "again"),
    ]


def test_unrecorded_repetition_is_recognised_by_name() -> None:
    again = recorded("0102_lenet5_reproduced")
    assert list_links([again]) == [Link("lenet5", "was repeated by", again.name)]
    noted = (Descendant("reproduced", str(again.run_dir)),)
    assert Link("lenet5", "was repeated by", again.name) not in list_links(
        [recorded("first", made=noted), again]
    )


def test_runs_share_data_if_dataset_fingerprint_and_ops_are_equal() -> None:
    keys = {
        "dataset.name": "idx",
        "dataset.root": "/data/mnist",
        "dataset.train.ops.0.name": "resize",
        "dataset.train.ops.1.name": "rescale",
    }
    runs = [
        recorded("other", data="b", keys=keys),
        recorded("one", data="a", keys=keys),
        recorded("two", data="a", keys=keys),
    ]
    assert name_data(runs[0]) == "idx of mnist"
    assert join_ops(runs[0]) == "resize, rescale"
    assert list_data_uses(runs) == [
        DataUse("idx of mnist", "a", "resize, rescale", ("one", "two")),
        DataUse("idx of mnist", "b", "resize, rescale", ("other",)),
    ]


def test_run_without_a_readable_recipe_has_unknown_data() -> None:
    assert name_data(recorded("broken")) == "?"
    assert join_ops(recorded("broken")) == ""
