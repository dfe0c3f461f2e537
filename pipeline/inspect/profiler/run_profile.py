"""Profiling of one run: which steps are traced, and what is made of them when training is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.backends.base import Backend, Estimate, Executable
from pipeline.backends.feed.feed import RESIDENT_LIMIT_BYTES, split_bytes
from pipeline.backends.graph.hlo_program import FREE, HloProgram, parse_program
from pipeline.backends.sink_choice import choose, predict
from pipeline.config.cache import cache_root
from pipeline.config.precision import level_of
from pipeline.config.profile_spec import LEAST_STEPS
from pipeline.config.recipe import Recipe
from pipeline.config.run_length import event_periods
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.host.platforms import platform_of
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.engine.monitors.monitors import writing
from pipeline.engine.schedule import Event, RunSchedule
from pipeline.inspect.profiler.ascend_profile import modelled_profile
from pipeline.inspect.profiler.compilations import Compilation, Compilations, watch_compilations
from pipeline.inspect.profiler.measured_profile import (
    Measured,
    ProfiledRun,
    exceeds_peaks,
    measured_profile,
    program_memory,
    untraced,
)
from pipeline.inspect.profiler.peaks import peaks_of
from pipeline.inspect.profiler.profile_files import ProfileReport, write_profile
from pipeline.inspect.profiler.profiled_executable import ProfiledExecutable
from pipeline.inspect.profiler.trial import try_change
from pipeline.inspect.profiler.verdict import RESIDENT, EventCost, Evidence, SinkGain, decide
from pipeline.stages.autosink.choose_sink import measured_bounds, mechanisms_of
from pipeline.stages.autosink.dispatch_costs import TimedRuns, first_look, least_steps, measure
from pipeline.stages.build import Built
from pipeline.training.state import TrainState

STEPS = 60
MOST_EVENTS = 100_000
"""Events of a trace: more than 20 times as many take minutes to write and to read."""
TRACED_S, TRAINED_S = 2.0, 2.5
"""Seconds that the traced steps, and all steps of a run that is only profiled, should take."""
LONGEST_RUN = 2000
"""Most steps of a run that is only profiled."""
WARM_STEPS = 10
LOOKS = 2
"""Single steps that are timed before a run that is only profiled."""
SHORT_MS = 20.0
"""Steps that take longer lose nothing to their dispatch."""
SINKS_S = 1.0
EVALUATED_S = 1.0


def require_profilable(recipe: Recipe, platform: str, processes: int) -> None:
    """Raise RecipeError where a profile can't be made of a run."""
    problems = []
    if not platform_of(platform).is_traceable:
        problems.append(f"profile: {platform} can't be traced; a cpu, gpu or tpu can")
    if processes > 1:
        problems.append(f"profile: must be off in a run of {processes} processes")
    if recipe.profile.mode == "only" and recipe.train.resume is not None:
        problems.append(
            f"train.resume = {recipe.train.resume}: must be null with profile, which would end "
            "that run; profile.mode=on profiles it while it goes on"
        )
    if "train" not in recipe.stages:
        problems.append(f"stages = {list(recipe.stages)}: must have train, whose steps are traced")
    if problems:
        raise RecipeError(problems)


def only_profiled(built: Built) -> Built:
    """Return the run with no more steps than a profile of it takes."""
    schedule = built.run_schedule
    return replace(built, run_schedule=replace(schedule, total=min(schedule.total, LONGEST_RUN)))


@dataclass(frozen=True)
class TracedSteps:
    """The traced steps: `first + 1 .. first + steps`, of a run of `total` steps."""

    first: int
    steps: int
    total: int


class RunProfiler:
    """The profile of a run under way; `executable` and `built` take the place of the run's own."""

    def __init__(
        self,
        recipe: Recipe,
        schedule: RunSchedule,
        built: Built,
        executable: Executable,
        reporter: Reporter,
        done: int = 0,
    ) -> None:
        """Choose the steps after the first `done`; `schedule` is the run's before it was shortened.

        Raises RecipeError where it has too few steps.
        """
        self._recipe, self._schedule, self._reporter = recipe, schedule, reporter
        self._raw = executable
        self._program: HloProgram = parse_program(executable.program_text)
        step_s = self._look() if recipe.profile.mode == "only" else None
        chosen = choose_window(recipe, built, self._program, step_s, done)
        self._window = chosen
        self.built = replace(built, run_schedule=replace(built.run_schedule, total=chosen.total))
        self._watch: Compilations | None = None
        self.executable = ProfiledExecutable(
            executable, chosen.first, chosen.steps, self._say_traced
        )

    def _look(self) -> float:
        """Return the seconds of a step, roughly, timed on a state that is thrown away."""
        state, times = self._raw.init(), []
        for _ in range(LOOKS):
            began = time.perf_counter()
            state, _ = self._raw.run(state, 0, 1, "none")
            times.append(time.perf_counter() - began)
        return min(times)

    def _say_traced(self) -> None:
        first, steps = self._window.first, self._window.steps
        self._reporter.stage("profile", f"steps {first + 1:,} to {first + steps:,} are traced")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch what is compiled while the run trains, and end a trace that is under way."""
        with ExitStack() as stack:
            self._watch = stack.enter_context(watch_compilations())
            stack.callback(self.executable.end_trace)
            yield

    def conclude(
        self,
        dataset: Dataset,
        backend: Backend,
        estimate: Estimate | None,
        state: TrainState,
        run_dir: Path,
    ) -> ProfileReport:
        """Make the profile, report it, and write its files.

        Raises RecipeError where the trace has no operation, RunError where a file can't be written.
        """
        traced = sum(one.steps for one in self._dispatches())
        if self.executable.traced is None or traced < self._window.steps:
            # The run was stopped, or ended early.
            raise RunError(
                f"profile: the run ended after {traced} of {self._window.steps} traced steps"
            )
        device = backend.describe()["device"]
        if not self.executable.traced:
            raise RecipeError(
                [f"profile: the trace of {device} has no operations, so there is nothing to show"]
            )
        recipe = self._recipe
        with self._reporter.clock("reading the trace"):
            peaks = peaks_of(backend.device, cache_root(recipe.cache))
            memory = program_memory(getattr(getattr(self._raw, "programs", None), "train", None))
            compilations = self._later_compilations()
            run = ProfiledRun(
                recipe, device, self.executable, state, compilations, memory, self._program
            )
            found = measured_profile(run, peaks)
            if exceeds_peaks(found.profile):
                # They were measured while the machine was busy.
                peaks = peaks_of(backend.device, cache_root(recipe.cache), again=True)
                found = measured_profile(run, peaks)
            evidence = self._evidence(found, dataset, state)
            verdict = try_change(decide(evidence), recipe, dataset, backend, self._raw, evidence)
        profiles = [evidence.profile]
        modelled = modelled_profile(recipe, estimate)
        if modelled is not None:
            profiles.append(modelled)
        report = ProfileReport(tuple(profiles), verdict, found.traced, tuple(self._dispatches()))
        with writing(recipe.profile.output or run_dir / "profile"):
            folder = write_profile(report, recipe.profile.output or run_dir / "profile")
        self._reporter.say(str(report))
        self._reporter.stage("profile", f"table, profile.json, trace.json and picture in {folder}")
        return report

    def _dispatches(self) -> list[Any]:
        return [one for one in self.executable.dispatches if one.traced]

    def _later_compilations(self) -> tuple[Compilation, ...]:
        """Return what was compiled after the first dispatch and before the last one ended."""
        dispatches = self.executable.dispatches
        first, last = dispatches[0].end_s, dispatches[-1].end_s
        found = self._watch.found if self._watch is not None else []
        return tuple(one for one in found if first < one.ended_s < last)

    def _evidence(self, found: Measured, dataset: Dataset, state: TrainState) -> Evidence:
        recipe, profile = self._recipe, found.profile
        host = profile.host
        assert host is not None, "it was measured"
        dispatches = self.executable.dispatches
        feed = self._raw.feed
        reported = feed.report()
        if feed.kind == "stream" and reported.wait_ms_per_step is None:
            # It had short first windows alone, and waited for steps that it did not run, too.
            host = replace(host, wait=self._starved_ms(host.device))
            host = replace(host, step=host.device + host.wait + host.between)
        # Those of the steps whose time is told; a short run may have traced ones alone.
        timed = untraced(dispatches) or dispatches
        first_s, last_s = timed[0].end_s, timed[-1].end_s
        evidence = Evidence(
            profile=replace(profile, host=host, step_ms=host.step),
            host=host,
            feed=reported,
            sink_steps=self._schedule.sink_steps if recipe.train.sink else None,
            callbacks=tuple(spec.name for spec in recipe.train.callbacks),
            compilations=tuple(one for one in found.compilations if first_s < one.ended_s < last_s),
            compiled_steps=timed[-1].stop - timed[0].stop,
            streams_resident=_resident(recipe, dataset),
            precision=level_of(recipe),
        )
        if feed.kind == "resident" and host.device < SHORT_MS:
            evidence = replace(evidence, sink=self._sink_gain())
        return replace(evidence, events=self._event_cost(dataset, state))

    def _starved_ms(self, device_ms: float) -> float:
        """Return the wait for a step once all windows are read ahead: the reader's pace, measured
        on the first window read once more, less that of the device.

        When the run read it first, the reader was being imported and programs were compiling.
        """
        feed = self._raw.feed
        feed.close()
        waited_s = feed.waited_s
        try:
            window = feed.window(0)
        finally:
            feed.close()
        read_ms = 1000 * (feed.waited_s - waited_s) / max(1, window.stop - window.start)
        return max(0.0, read_ms - device_ms)

    def _sink_gain(self) -> SinkGain | None:
        """Measure which sink would be fastest, with a state that is thrown away."""
        recipe, schedule = self._recipe, self._schedule
        mechanisms = mechanisms_of(recipe.train.mechanism, self._raw)
        if least_steps(mechanisms) > schedule.total:
            return None
        try:
            with TimedRuns(recipe, schedule, self._raw, terminal=False) as trials:
                single_ms = first_look(trials)
                bounds = measured_bounds(recipe, schedule, self._raw)
                costs = measure(trials, single_ms, mechanisms, SINKS_S).costs
        except RunError:
            # Steps of the state that is thrown away may diverge.
            return None
        finally:
            self._raw.feed.close()
        choice = choose(costs, bounds)
        if choice.size is None or choice.gain <= 1 + costs.error:
            return None
        now_ms = costs.off_ms
        if recipe.train.sink and schedule.sink_steps is not None:
            cost = next(
                (one for one in costs.sinks if one.mechanism == choice.mechanism), costs.sinks[0]
            )
            now_ms = predict(cost, schedule.sink_steps, bounds)
        return SinkGain(choice.size, choice.step_ms, now_ms, costs.error)

    def _event_cost(self, dataset: Dataset, state: TrainState) -> EventCost | None:
        """Return what evaluations cost by step of the whole run; a part of one is timed."""
        recipe, schedule = self._recipe, self._schedule
        periods = event_periods(recipe, schedule.steps_per_pass)[Event.EVALUATE]
        count = len({step for n in periods for step in range(n, schedule.total + 1, n)})
        batches = dataset.eval_order.steps_per_pass
        if not count or not batches:
            return None
        self.executable.evaluate(state, 0, 1)
        began, done = time.perf_counter(), 0
        while done < batches and time.perf_counter() - began < EVALUATED_S:
            stop = min(batches, max(1, 2 * done))
            self.executable.evaluate(state, done, stop)
            done = stop
        each_ms = 1000 * (time.perf_counter() - began) * batches / done
        return EventCost(each_ms * count / schedule.total, count)


def choose_window(
    recipe: Recipe, built: Built, program: HloProgram, step_s: float | None, done: int = 0
) -> TracedSteps:
    """Choose the steps to trace. Raises RecipeError where the run is too short."""
    spec, schedule = recipe.profile, built.run_schedule
    steps = spec.steps
    if steps is None:
        executed = sum(one.opcode not in FREE for one in program.instructions.values())
        steps = min(STEPS, MOST_EVENTS // max(1, executed))
        if step_s:
            steps = min(steps, int(TRACED_S / step_s))
        steps = max(LEAST_STEPS, steps)
    sink = schedule.sink_steps or 1
    total = schedule.total
    wanted = int(TRAINED_S / step_s) if step_s else total - done
    if spec.start is not None:
        first = done + spec.start
    else:
        # The first sink warms the process up, where it is not most of the run.
        first = done + max(WARM_STEPS, min(sink, wanted // 2, total - done - 2 * steps))
    if step_s:
        total = min(total, done + max(first - done + 2 * steps, wanted))
    if first + steps > total:
        raise RecipeError(
            [
                f"profile: the run has {schedule.total:,} steps, too few to profile: "
                f"{steps} are traced after the first {first}; train longer, or set profile.start "
                f"and profile.steps ({LEAST_STEPS} at least)"
            ]
        )
    return TracedSteps(first, steps, total)


def _resident(recipe: Recipe, dataset: Dataset) -> str | None:
    """Return the change that puts a streamed split on the device; None where it doesn't fit."""
    fits = split_bytes(dataset.train) <= RESIDENT_LIMIT_BYTES
    return RESIDENT if fits and recipe.train.feed == "stream" else None
