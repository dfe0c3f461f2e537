"""Evaluations of a run, during training and at its end, and samples for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax

from pipeline.backends.base import Estimate
from pipeline.checkpoint.host_state import HostState
from pipeline.config.observer_settings import make_observer_settings
from pipeline.config.recipe import Recipe
from pipeline.core.errors import first_line
from pipeline.core.files.value_text import count_noun
from pipeline.core.host.process_start import collect_seldom
from pipeline.core.host.signals import Interrupted
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.history import History
from pipeline.engine.monitors.metrics_log import require_logs
from pipeline.engine.monitors.monitors import describe_never_predicted, format_class_table
from pipeline.engine.monitors.observers import Observers, open_observers
from pipeline.stages.evaluate import EvalOptions, evaluate
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.parallel.state_sharing import gather_arrays
from pipeline.training.state import TrainState

if TYPE_CHECKING:
    from pipeline.engine.monitors.tensorboard import BoardNode
    from pipeline.stages.sample_pictures import Draw

SETTLING_STEPS = 500
"""Steps after which running averages with a momentum of 0.99 hardly depend on their start: 0.99^500
is 0.7 %."""


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run's states, with samples and predictions for TensorBoard."""

    run: CompiledRun
    observers: Observers
    history: History
    """The history of training; of a run that only evaluates, its step."""

    @cached_property
    def _drawers(self) -> list[Draw]:
        context = self.run.context
        if not context.shows_pictures:
            return []
        # Imported here, as in other methods, since runs without TensorBoard don't need it.
        from pipeline.stages.sample_pictures import make_drawers

        return make_drawers(context.recipe, self.run.dataset, self.run.built)

    def evaluate_unless_stopped(self, state: TrainState) -> Evaluation | None:
        """Evaluate a state of training; None if a signal to stop comes first."""
        agree = self.run.context.ranks.agree
        signals = self.run.context.options.signals
        evaluation = self._evaluate(state, agree, lambda: agree(lambda: signals.stop is not None))
        if evaluation is not None:
            self._show_pictures(state)
        return evaluation

    def evaluate_alone(self, state: TrainState) -> Evaluation | None:
        """Evaluate a state for a callback, only in the first process."""
        return self._evaluate(state, decide_alone)

    def conclude(self, state: TrainState) -> None:
        """Evaluate the final state, unless training has just evaluated it, and record the result.

        A signal interrupts the evaluation.
        """
        context = self.run.context
        _check_signals(context)
        observers = self.observers
        recipe = context.recipe
        history = self.history
        evaluation = history.evaluated.get(history.step)
        if evaluation is None:
            signals = context.options.signals
            agree = context.ranks.agree
            is_stopped = partial(agree, lambda: signals.stop is not None)
            evaluation = self._evaluate(state, agree, is_stopped)
            if evaluation is None:
                raise Interrupted(agree(lambda: signals.reason))
            self._show_pictures(state)
            observers.monitor.on_eval(history.step, evaluation)
            history.evaluated = {history.step: evaluation}
        self._show_classes(evaluation, history.step)
        # Metrics that the summary has already, such as `train_loss`, stay.
        context.summary.metrics = {**evaluation.metrics, **context.summary.metrics}
        parameters = context.options.changed or _list_main_parameters(recipe)
        observers.show(lambda board: board.add_hparams(parameters, evaluation.scalars()))
        if not recipe.monitor.tensorboard:
            return
        # Every process must take part in the gathering. Only the first continues after it.
        state = gather_arrays(state)
        if not context.shows_pictures:
            return
        from pipeline.stages.sample_pictures import predict_samples

        config = self.run.built.step_config
        show = predict_samples(recipe, config, state, self.run.dataset, history.step)
        if show is not None:
            observers.show(show)
        if recipe.monitor.embeddings:
            self._show_embeddings(state)

    def _show_classes(self, evaluation: Evaluation, step: int) -> None:
        """Print the figures of each class if there are few; warn of never predicted classes."""
        context = self.run.context
        if not context.ranks.is_first or self.run.dataset.targets.task != "classification":
            return
        for line in format_class_table(evaluation):
            self.observers.monitor.submit(partial(context.reporter.print_stage, "", line))
        if (problem := describe_never_predicted(evaluation)) is not None:
            names = str(jax.tree.structure(self.run.built.state.collections))
            if step < SETTLING_STEPS and "mean" in names:  # other buffers don't settle
                problem += (
                    f"; after {count_noun(step, 'step')} running statistics may still be far from "
                    "the data's: batch norm with a momentum of 0.99 needs some hundred steps"
                )
            self.observers.monitor.submit(partial(context.reporter.warn, problem))

    def _show_embeddings(self, state: TrainState) -> None:
        """Show the embeddings of samples; a failure is a warning."""
        context = self.run.context
        from pipeline.stages.sample_pictures import embed_samples

        config = self.run.built.step_config
        try:
            show = embed_samples(context.recipe, config, state, self.run.dataset)
        except Exception as error:  # a custom network can raise any error
            context.reporter.warn(f"monitor.embeddings: {first_line(error)}")
            return
        if show is None:
            context.reporter.warn(
                "monitor.embeddings: must be 0 for labels of positions, for images in buckets and "
                "for networks without layers"
            )
            return
        self.observers.show(show)

    def show_start(self) -> None:
        """Show classes, training samples and the graph of the network before training."""
        context = self.run.context
        dataset = self.run.dataset
        recipe = context.recipe
        if not recipe.monitor.tensorboard:
            return
        from pipeline.stages.sample_pictures import format_sample_labels, sample_images

        images = sample_images(recipe, dataset)
        labels = format_sample_labels(recipe, dataset)
        self.observers.show(lambda board: board.add_classes(dataset.classes))
        self.observers.show(lambda board: board.add_images(images, labels))
        if not recipe.monitor.graph or not context.shows_pictures:
            return
        nodes = self.trace_graph("monitor.graph")
        if nodes is not None:
            self.observers.show(lambda board: board.add_graph(nodes))

    def trace_graph(self, key: str) -> list[BoardNode] | None:
        """Return the graph of the network; None, with a warning about `key`, if that fails."""
        # Imported here, since few runs need it.
        from pipeline.stages.layer_table import trace_network_graph

        try:
            return trace_network_graph(self.run.built.step_config, self.run.built.state)
        except Exception as error:  # training goes on without the graph
            problem = f"{type(error).__name__}: {first_line(error)}"
            self.run.context.reporter.warn(f"{key}: the network has no graph: {problem}")
            return None

    def _evaluate(
        self, state: TrainState, agree: Agree, is_stopped: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        recipe = self.run.context.recipe
        run = self.run
        options = EvalOptions(
            recipe.train.dispatch_seconds,
            run.built.step_config.metrics,
            on_train=recipe.eval.on_train,
        )
        evaluation = evaluate(run.executable, state, run.dataset, options, is_stopped, agree)
        if evaluation is None:
            return None
        measured = run.context.features.measure(run, state)
        return replace(evaluation, metrics={**evaluation.metrics, **measured})

    def _show_pictures(self, state: TrainState) -> None:
        """Show predicted masks, and images that a generator makes."""
        for draw in self._drawers:
            self.observers.show(draw(state))


@contextmanager
def open_evaluations(
    run: CompiledRun, step: int, estimate: Estimate | None, host: HostState
) -> Iterator[Evaluations]:
    """Open the logs and the other observers of a run after `step` steps, for its evaluations.

    `host` is the state of the host in the checkpoint of a resumed run. Its logs are the last thing
    that is checked. The writes that wait for all checks follow.
    """
    context = run.context
    marks = host.logs if context.resuming else None
    require_logs(context.run_dir, step, marks)
    context.folder.accepted.release()
    with _open_observers(run, step, estimate, host) as observers:
        context.summary.logs = observers.log_flaws()
        evaluations = Evaluations(run, observers, History(step))
        if "train" in context.recipe.stages:
            collect_seldom()
            evaluations.show_start()
        yield evaluations


def _open_observers(
    run: CompiledRun, step: int, estimate: Estimate | None, host: HostState
) -> Observers:
    """Open the observers of the first process; other processes have none."""
    context = run.context
    recipe = context.recipe
    if not context.ranks.is_first:
        return Observers([], None)
    settings = replace(
        make_observer_settings(recipe),
        has_scalars=bool(recipe.train.callbacks or context.options.callbacks),
        is_unfinished=host.unfinished_boundary is not None,
        unit=run.dataset.unit,
        estimate=estimate,
        lock=context.lock,
    )
    schedule = run.built.run_schedule
    reporter = context.reporter
    marks = host.logs if context.resuming else None
    return open_observers(settings, context.run_dir, schedule, step, reporter, marks)


def _check_signals(context: RunContext) -> None:
    """Raise Interrupted in all processes if the first process got a signal to stop."""
    signals = context.options.signals
    stop = context.ranks.agree(lambda: signals.stop)
    if stop is not None:
        signals.stop = stop
        signals.check()


def _list_main_parameters(recipe: Recipe) -> dict[str, Any]:
    """Return the hparams for TensorBoard of a run that isn't a job of a sweep."""
    train = recipe.train
    return {
        "model": recipe.model.name,
        "dataset": recipe.dataset.name,
        "loss": train.loss.name,
        "train.optimizer": train.optimizer.name,
        "train.optimizer.lr": train.optimizer.lr,
        "train.schedule": train.schedule.name,
        "train.batch_size": train.batch_size,
        "train.precision": train.precision,
        "seed": recipe.seed,
    }
