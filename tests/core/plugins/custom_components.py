"""Components of tests: a metric, and callbacks that ask for things and note what they are told.

`KILL=event:step` in the environment ends the process there, as `kill -9` does.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Literal

import numpy as np

from pipeline.api import Callback, CallbackSpec, MetricSpec, component


@component("metric")
class Margin(MetricSpec):
    """The mean distance between the two highest logits."""

    name: Literal["margin"] = "margin"

    def zero(self, classes: int) -> Any:
        return {"sum": np.float32(0), "count": np.int32(0)}

    def sums(self, logits: Any, labels: Any, mask: Any) -> Any:
        import jax.numpy as jnp

        ordered = jnp.sort(logits, axis=-1)
        gaps = ordered[:, -1] - ordered[:, -2]
        return {"sum": jnp.where(mask, gaps, 0).sum(), "count": mask.sum()}

    def value(self, sums: Any) -> float:
        return float(sums["sum"] / sums["count"])


class _Listening(Callback):
    """Notes every event in its state, and in a file when training is done."""

    def __init__(self) -> None:
        self.told: list[list[Any]] = []

    def on_begin(self, run: Any) -> None:
        if not run.resumed and type(self) is _Asking:
            run.evaluate_at(13)
            run.save_at(27)

    def on_steps(self, run: Any, telemetry: Any) -> None:
        self.told += [["step", step] for step in range(telemetry.start + 1, run.step + 1)]
        _kill("steps", run.step)

    def on_sink(self, run: Any, report: Any) -> None:
        self.told.append(["sink", report.step])
        _kill("sink", run.step)

    def on_eval(self, run: Any, step: int, evaluation: Any) -> None:
        self.told.append(["eval", step, round(evaluation.scalars()["margin"], 6)])
        _kill("eval", step)

    def on_checkpoint(self, run: Any, step: int) -> None:
        self.told.append(["checkpoint", step])
        _kill("checkpoint", step)

    def on_end(self, run: Any, status: str) -> None:
        if status == "done":
            (run.run_dir / f"told_{type(self).__name__}.json").write_text(json.dumps(self.told))

    def state(self) -> Any:
        return {"told": self.told}

    def restore(self, state: Any) -> None:
        self.told = list(state["told"])


class _Asking(_Listening):
    """Changes rates and parameters, and asks for events."""

    def on_sink(self, run: Any, report: Any) -> None:
        run.log("rate", run.learning_rate)
        if report.step == 16:
            run.scale_learning_rate(0.3)
            run.set_parameters({"dense_1/bias": np.arange(10) / 10})
        if report.step == 32:
            run.set_learning_rate(0.004)
        super().on_sink(run, report)

    def on_eval(self, run: Any, step: int, evaluation: Any) -> None:
        run.log("evaluations", sum(event[0] == "eval" for event in self.told))
        super().on_eval(run, step, evaluation)


class _Logging(Callback):
    """Keeps a sum of all losses."""

    def __init__(self) -> None:
        self._sum = 0.0

    def on_steps(self, run: Any, telemetry: Any) -> None:
        for loss in telemetry.loss.tolist():
            self._sum += loss

    def on_sink(self, run: Any, report: Any) -> None:
        run.log("sum of losses", self._sum)

    def state(self) -> Any:
        return self._sum

    def restore(self, state: Any) -> None:
        self._sum = state


def _kill(event: str, step: int) -> None:
    name, _, first_step = os.environ.get("KILL", ":0").partition(":")
    if name == event and step >= int(first_step):
        os.kill(os.getpid(), signal.SIGKILL)


@component("callback")
class Listening(CallbackSpec):
    """Of a recipe."""

    name: Literal["listening"] = "listening"

    def build(self) -> Callback:
        return _Listening()


@component("callback")
class Asking(CallbackSpec):
    """Of a recipe."""

    name: Literal["asking"] = "asking"

    def build(self) -> Callback:
        return _Asking()


@component("callback")
class Logging(CallbackSpec):
    """Of a recipe."""

    name: Literal["logging"] = "logging"

    def build(self) -> Callback:
        return _Logging()
