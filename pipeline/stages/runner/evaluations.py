"""Evaluations of a run: during training and at its end, with what TensorBoard shows of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.core.errors import first_line
from pipeline.data.dataset import Dataset
from pipeline.engine.callbacks.events import Evaluation
from pipeline.engine.history import History
from pipeline.engine.monitors.class_table import class_table, never_predicted
from pipeline.engine.monitors.observers import Observers
from pipeline.stages.build import Built
from pipeline.stages.data import sample_images
from pipeline.stages.evaluate import EvalOptions, evaluate
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.stages.sample_pictures import mask_pictures, predict_samples, sample_labels
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.state import TrainState


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run's states, and the samples and predictions that it shows."""

    run: CompiledRun
    observers: Observers

    @property
    def context(self) -> RunContext:
        """The recipe, directory and services of the run."""
        return self.run.context

    @property
    def dataset(self) -> Dataset:
        """The splits of the run."""
        return self.run.dataset

    @property
    def built(self) -> Built:
        """The step of the run."""
        return self.run.built

    @cached_property
    def _draw_masks(self) -> Callable[[TrainState], np.ndarray] | None:
        shows = self.context.shows_pictures
        return mask_pictures(self.context.recipe, self.dataset, self.built) if shows else None

    def unless_stopped(self, state: TrainState) -> Evaluation | None:
        """Evaluate a state of training; None where a signal to stop comes first."""
        agree, signals = self.context.ranks.agree, self.context.options.signals
        found = self._evaluate(state, agree, lambda: agree(lambda: signals.stop is not None))
        if found is not None:
            self._show_masks(state)
        return found

    def at_once(self, state: TrainState) -> Evaluation | None:
        """Evaluate a state for a callback, in the first process alone."""
        return self._evaluate(state, decide_alone)

    def conclude(self, state: TrainState, history: History) -> None:
        """Evaluate the final state, unless training has just done so, and record the result.

        A signal interrupts it.
        """
        context, recipe, observers = self.context, self.context.recipe, self.observers
        evaluation = history.evaluated.get(history.step)
        if evaluation is None:
            evaluation = self._evaluate(state, context.ranks.agree)
            assert evaluation is not None, "nobody gives it up"
            self._show_masks(state)
            observers.monitor.on_eval(history.step, evaluation)
        self._show_classes(evaluation)
        # `train_loss` stays that of the last step.
        context.summary.metrics = {**evaluation.metrics, **context.summary.metrics}
        observers.add_hparams(context.options.changed or _main_parameters(recipe), evaluation)
        if context.ranks.is_first and recipe.monitor.tensorboard:
            shown = predict_samples(recipe, self.built.parts, state, self.dataset)
            if shown is not None:
                observers.show_predictions(history.step, shown.images, shown.captions, shown.wrong)
            self._show_embeddings(state)

    def _show_classes(self, evaluation: Evaluation) -> None:
        """Print the figures of each class, where there are few, and warn of those never predicted.

        Tokens are no classes that anyone would look through.
        """
        if not self.context.ranks.is_first or self.dataset.targets.task != "classification":
            return
        reporter, monitor = self.context.reporter, self.observers.monitor
        for line in class_table(evaluation):
            monitor.submit(partial(reporter.stage, "", line))
        if (problem := never_predicted(evaluation)) is not None:
            monitor.submit(partial(reporter.warn, problem))

    def _show_embeddings(self, state: TrainState) -> None:
        if not self.context.recipe.monitor.embeddings:
            return
        # Few runs ask for them.
        from pipeline.stages.sample_pictures import embed_samples

        parts = self.built.parts
        try:
            embedded = embed_samples(self.context.recipe, parts, state, self.dataset)
        except Exception as error:  # a network of the user's own may do anything
            self.context.reporter.warn(f"monitor.embeddings: {first_line(error)}")
            return
        if embedded is None:
            self.context.reporter.warn(
                "monitor.embeddings: there are none of labels of positions, of images in buckets, "
                "and of networks without layers"
            )
            return
        self.observers.show_embeddings(embedded.vectors, embedded.labels, embedded.images)

    def show_start(self) -> None:
        """Show what training starts from: samples and classes, and the graph of the network."""
        self._show_samples()
        self._show_graph()

    def _show_graph(self) -> None:
        """Show the graph of the network, where the recipe asks for it."""
        if not self.context.recipe.monitor.graph or not self.context.shows_pictures:
            return
        from pipeline.stages.network_graph import network_graph

        try:
            nodes = network_graph(self.built.parts, self.built.state)
        except Exception as error:  # training is worth more than a picture of it
            problem = f"{type(error).__name__}: {first_line(error)}"
            self.context.reporter.warn(f"monitor.graph: the network has none: {problem}")
            return
        self.observers.show_graph(nodes)

    def _show_samples(self) -> None:
        """Show the classes and the first training samples."""
        recipe, dataset = self.context.recipe, self.dataset
        self.observers.show_classes(dataset.classes)
        self.observers.show_samples(sample_images(recipe, dataset), sample_labels(recipe, dataset))

    def _evaluate(
        self, state: TrainState, agree: Agree, is_given_up: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        recipe = self.context.recipe
        options = EvalOptions(
            recipe.train.dispatch_seconds,
            self.built.parts.metrics,
            on_train=recipe.eval.on_train,
        )
        return evaluate(self.run.executable, state, self.dataset, options, is_given_up, agree)

    def _show_masks(self, state: TrainState) -> None:
        if self._draw_masks is not None:
            self.observers.show_masks(int(state.step), self._draw_masks(state))


def _main_parameters(recipe: Recipe) -> dict[str, Any]:
    """Return the keys by which a run that is no job of a sweep stands in the hparams table."""
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
