"""Copies of a run's checkpoints in MindSpore's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from pipeline.checkpoint.checkpointer import Copies
from pipeline.engine.monitors.tensorboard import encode_graph
from pipeline.stages.export.mindspore_checkpoints import MindSporeCopies
from pipeline.stages.runner.evaluations import Evaluations
from pipeline.stages.runner.run_feature import RunFeature


class CheckpointCopies(RunFeature):
    """Copies in MindSpore's format of the checkpoints of a run with `checkpoint.prefix` or
    `checkpoint.directory`."""

    @contextmanager
    def copy_checkpoints(self, evaluations: Evaluations) -> Iterator[Sequence[Copies]]:
        """Open the copies, and write the graph of the network beside them."""
        run = evaluations.run
        context = run.context
        schedule = run.built.run_schedule
        spec = context.recipe.checkpoint
        copies = MindSporeCopies(
            context.run_dir,
            spec.directory,
            spec.prefix or context.recipe.model.name,
            schedule.sink_steps or schedule.steps_per_epoch,
            optimizer=spec.optimizer,
        )
        key = "directory" if spec.prefix is None else "prefix"
        nodes = evaluations.trace_graph(f"checkpoint.{key}")
        if nodes is not None:
            # Encoded on the thread that writes for TensorBoard: two threads can't import its
            # package.
            monitor = evaluations.observers.monitor
            copies.write_graph(monitor.submit_and_wait(partial(encode_graph, nodes)))
        yield (copies,)
