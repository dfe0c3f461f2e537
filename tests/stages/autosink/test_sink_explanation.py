"""Text and JSON of `explain`, from made-up figures."""

from __future__ import annotations

import json
from dataclasses import replace

from pipeline.backends.sink_choice import Bounds, Cost, Costs, choose, choose_no_sink
from pipeline.core.files.atomic_write import format_json
from pipeline.stages.autosink.sink_explanation import (
    Achieved,
    Calendar,
    Dispatch,
    ExplainedRun,
    Explanation,
    Memory,
)

BOUNDS = Bounds(total=1760, periods=(440,), window_steps=1024, dispatch_s=1.0)
COSTS = Costs(1.5, (Cost("loop", 0.5, 0.9), Cost("soft", 0.2, 1.2)), 0.01)
CALENDAR = Calendar(
    {"evaluate": 4, "checkpoint": 0},
    ((440, "evaluate"), (880, "evaluate")),
    longest=440,
    total=1760,
)
MEASURED = Explanation(
    ExplainedRun("lenet5_digits", "cpu:0 cpu", 32, asked=200),
    BOUNDS,
    CALENDAR,
    choose(COSTS, BOUNDS),
    COSTS,
    Dispatch(604.4, 712.0),
    Memory(resident=True, data_bytes=97_784, batch_bytes=136, window_steps=1024),
    Achieved(off_ms=1.52, step_ms=0.91, rounds=5, error=0.02),
)

TEXT = """\
lenet5_digits on cpu:0 cpu, batch 32
  step        0.9 ms as one program, 1.2 ms step by step without waiting, in a long sink
  to start    604 us on the host for each step without sinks (90 % are below 712 us), for each \
sink 500 us as one program, 200 us step by step without waiting
  memory      the device holds all samples, 97.8 kB, and 1,024 batches as lists of their numbers, \
139.3 kB, whatever the sink; logs of a sink take 2.2 kB more
  events      evaluate 4 times in 1,760 steps; at most 440 steps between two
              step 440: evaluate; step 880: evaluate

  sink          ms/step    gain
  none           1.5000   1.00x
  1              1.4000   1.07x
  10             0.9500   1.58x
  100            0.9060   1.66x
  110            0.9045   1.66x  <- chosen
  200            0.9034   1.66x  <- the recipe's
  1,000          0.9014   1.66x

  chosen      sinks of 110 steps as one program: 0.9045 ms a step in sinks of 110, 1.5 without: \
1.66x; longer ones save less than 0.5 %
  predicted   1.658x, give or take 1.0 %
  achieved    1.670x, give or take 2.0 %: 0.91 ms a step, 1.52 without sinks, in 5 rounds; the \
prediction is off by -0.7 %"""


def test_explanation_text() -> None:
    assert str(MEASURED) == TEXT


def test_modelled_figures_are_marked_in_text_and_json() -> None:
    modelled = replace(
        MEASURED,
        modelled=True,
        dispatch=None,
        memory=None,
        achieved=None,
        track_record="off 42 %",
        time_range="1.2 ms if as tuned as the zoo",
    )
    text, document = str(modelled), modelled.to_dict()
    assert text.startswith("MODELLED, not measured: lenet5_digits on ")
    assert "\n  modelled    1.658x" in text
    assert "predicted" not in text
    assert "\n  range       1.2 ms if as tuned as the zoo\n  so far      off 42 %\n" in text
    assert document["track_record"] == "off 42 %"
    assert document["time_range"] == "1.2 ms if as tuned as the zoo"
    assert not {"track_record", "time_range"} & set(MEASURED.to_dict())
    assert not any(name.startswith("predicted") for name in document)
    assert document["modelled_ms"][110] == MEASURED.choice.step_ms


def test_streamed_samples_are_shown_in_the_memory_line() -> None:
    streamed = replace(MEASURED, memory=Memory(False, 512_000_000, 4_816_896, 53))
    assert (
        "  memory      the device holds 53 batches of samples, 255.3 MB, whatever the sink; logs "
        "of a sink take 2.2 kB more\n"
    ) in str(streamed)


def test_unmeasured_values_are_omitted() -> None:
    choice = choose_no_sink(9000.0, "a sink would have one step")
    alone = Explanation(MEASURED.run, BOUNDS, CALENDAR, choice)
    assert str(alone).splitlines() == [
        "lenet5_digits on cpu:0 cpu, batch 32",
        "  step        9000 ms without sinks",
        "  events      evaluate 4 times in 1,760 steps; at most 440 steps between two",
        "              step 440: evaluate; step 880: evaluate",
        "",
        "  chosen      no sinks: a sink would have one step",
    ]
    assert alone.predictions() == {}
    document = json.loads(format_json(alone.to_dict()))
    assert (document["sink"], document["predicted_gain"]) == (
        {"size": None, "mechanism": "none"},
        1.0,
    )


def test_json_has_the_facts_of_the_text() -> None:
    document = json.loads(format_json(MEASURED.to_dict()))
    assert document["recipe"] == "lenet5_digits"
    assert document["sink"] == {"size": 110, "mechanism": "loop"}
    assert list(document["predicted_ms"]) == ["1", "10", "100", "110", "200", "1000"]
    assert document["predicted_costs"]["loop"] == {"dispatch_ms": 0.5, "step_ms": 0.9}
    assert document["achieved_gain"] == 1.52 / 0.91
    assert document["dispatch_us"] == {"median_us": 604.4, "p90_us": 712.0}
    assert document["memory"]["window_steps"] == 1024
    assert document["events"]["counts"] == {"evaluate": 4, "checkpoint": 0}
    assert document["events"]["first"] == {"440": "evaluate", "880": "evaluate"}
