"""Check that a run's programs and its state fit into the memory of the host."""

from __future__ import annotations

import jax

from pipeline.backends.base import Backend, CompileReport
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.host.limits import find_usable_bytes
from pipeline.core.host.memory import return_free_pages
from pipeline.core.host.platforms import get_platform
from pipeline.stages.build import Built
from pipeline.training.parallel.microbatches import find_smaller_microbatches
from pipeline.training.parallel.state_sharing import make_state_sharing
from pipeline.training.state import count_bytes


def require_memory(recipe: Recipe, built: Built, backend: Backend, report: CompileReport) -> None:
    """Raise RunError if the largest program's temporaries and the state exceed the memory that this
    process can use.

    Only programs that run on the host are checked; a GPU's allocator refuses others.
    """
    programs = [program for program in report.programs if program.figures is None]
    if not programs or not get_platform(backend.device.platform).is_host:
        return
    placement = backend.placement
    num_local = sum(device.process_index == jax.process_index() for device in placement.devices)
    largest = max(programs, key=lambda program: program.temporary_bytes)
    temporary_bytes = num_local * largest.temporary_bytes
    sharing = make_state_sharing(
        recipe.parallel, built.state, built.step_config.features, placement.parts
    )
    state_bytes = count_bytes(built.state) if sharing is None else sharing.part_bytes
    needed_bytes = temporary_bytes + num_local * state_bytes
    if needed_bytes <= find_usable_bytes():
        return
    # Compiling took memory, which the heap keeps free.
    return_free_pages()
    usable_bytes = find_usable_bytes()
    if needed_bytes > usable_bytes:
        raise RunError(
            f"{recipe.model.name}: the program of the {largest.name} needs "
            f"{temporary_bytes / 1e6:,.0f} MB of temporaries beside {state_bytes / 1e6:,.0f} MB of "
            f"weights and optimizer, and {usable_bytes / 1e6:,.0f} MB are available; "
            f"{_advise(recipe, needed_bytes / max(1, usable_bytes), largest.name)}"
        )


def _advise(recipe: Recipe, excess: float, program: str) -> str:
    """Return the changes that make a program smaller by the factor `excess`."""
    if program == "evaluation":
        return "evaluate fewer samples at once by dataset.eval.batch_size"
    train = recipe.train
    advice = ["train.memory=auto computes as many samples at once as fit"]
    number = find_smaller_microbatches(train.batch_size, train.accumulate_steps, excess)
    if number is not None:
        advice.append(f"train.accumulate_steps={number} divides the batch")
    return f"{', '.join(advice)}, or choose a smaller train.batch_size than {train.batch_size:,}"
