"""The memory decides how many shards are computed at once, and no bit of the results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from pipeline.backends.xla import XlaExecutable
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.inspect.dumps.opened_recipe import build_recipe, make_silent_reporter
from pipeline.stages import fit_memory
from pipeline.stages.fit_memory import FittedExecutable, begin_at_once, compile_to_fit
from tests.whole_run import run

Tiny = Callable[..., Recipe]
MEMORY = ("train.memory=auto", "train.steps=14", "eval.every_steps=7", "checkpoint.every_steps=7")
SMALL = (
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 2}, relu, flatten,"
    "{name: dense, features: $classes}]",
)
"""A network that compiles in a third of the time of LeNet-5."""
SHORT = "RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes."


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, 4)


def at_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let a run begin with a number of shards at once."""
    monkeypatch.setattr(fit_memory, "count_most_at_once", lambda *_: count)


def read_losses(run_dir: Path) -> list[tuple[Any, ...]]:
    """Read all that doesn't depend on the length of a sink."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def read_memory(run_dir: Path) -> dict[str, Any]:
    memory: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())["memory"]
    return memory


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_losses_have_the_bits_of_shards_at_any_memory_and_sink(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(*SMALL, "parallel.mode=data", *MEMORY[1:]), tmp_path / "data")
    losses = read_losses(tmp_path / "data")
    assert len(losses) == 14
    for count, sink_size in ((1, 1), (2, 7), (4, 14), (8, 7)):
        at_once(monkeypatch, count)
        run_dir = tmp_path / f"{count}"
        run(tiny(*SMALL, *MEMORY, f"train.sink_size={sink_size}"), run_dir)
        assert read_losses(run_dir) == losses
        assert read_memory(run_dir)["samples_at_once"] == count * 2
    evaluations = {(tmp_path / name / "evals.jsonl").read_bytes() for name in ("data", "1", "8")}
    assert len(evaluations) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_resumed_run_may_have_other_memory(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(*SMALL, *MEMORY), tmp_path / "unbroken")
    run(tiny(*SMALL, *MEMORY, "train.end_step=7"), tmp_path / "resumed")
    at_once(monkeypatch, 1)
    resume = f"train.resume={tmp_path / 'resumed'}"
    run(tiny(*SMALL, "train.memory=100GB", *MEMORY[1:], resume), tmp_path / "resumed")
    assert read_memory(tmp_path / "resumed")["memory"] == "100GB"
    logs = {(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("unbroken", "resumed")}
    assert len(logs) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_run_out_of_memory_continues_with_half_as_many_at_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls fail after they have computed their results, which would be lost otherwise."""
    run(tiny(*SMALL, *MEMORY), tmp_path / "enough")
    step_errors = iter([jax.errors.JaxRuntimeError(SHORT)])
    evaluation_errors = iter([MemoryError("a page")])
    run_steps, evaluate = XlaExecutable.run, XlaExecutable.evaluate

    def run_steps_short_of_memory(self: XlaExecutable, *arguments: Any) -> Any:
        result = run_steps(self, *arguments)
        for error in step_errors:
            raise error
        return result

    def evaluate_short_of_memory(self: XlaExecutable, *arguments: Any, **options: Any) -> Any:
        result = evaluate(self, *arguments, **options)
        for error in evaluation_errors:
            raise error
        return result

    run(tiny(*SMALL, *MEMORY, "train.end_step=7"), tmp_path / "short")
    monkeypatch.setattr(XlaExecutable, "run", run_steps_short_of_memory)
    monkeypatch.setattr(XlaExecutable, "evaluate", evaluate_short_of_memory)
    run(tiny(*SMALL, *MEMORY, f"train.resume={tmp_path / 'short'}"), tmp_path / "short")
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert (tmp_path / "short" / name).read_bytes() == (tmp_path / "enough" / name).read_bytes()
    assert read_memory(tmp_path / "short")["halved"] == [
        f"8 -> 4 samples at once: step 8: {SHORT}",
        "4 -> 2 samples at once: evaluation: a page",
    ]


@pytest.mark.medium
@pytest.mark.mlp
def test_single_shard_out_of_memory_ends_the_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch, 1)

    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(SHORT)

    monkeypatch.setattr(XlaExecutable, "run", fail)
    with pytest.raises(RunError) as error:
        run(tiny(*MEMORY, "train.sink_size=7"), tmp_path)
    assert str(error.value) == (
        f"train.memory = auto: step 1: {SHORT}, for 2 samples at once, a shard of a batch; give "
        "more memory, or start a new run with more parallel.shards than 8"
    )
    assert error.value.exit_status == 1


@pytest.mark.slow
@pytest.mark.mlp
def test_other_errors_of_the_device_are_raised(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch, 1)

    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(XlaExecutable, "run", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: broken"):
        run(tiny(*MEMORY, "train.sink_size=7"), tmp_path)


@pytest.mark.medium
@pytest.mark.mlp
def test_too_little_memory_for_a_shard_ends_the_run_before_its_first_step(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch, 1)
    with pytest.raises(RunError, match=r"are needed, 0 MB are at hand, for 2 samples at once"):
        run(tiny("train.memory=1MB", *MEMORY[1:]), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.mlp
def test_scarce_memory_halves_before_a_step(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch, 2)
    sizes = iter([10**9])
    monkeypatch.setattr(fit_memory, "find_usable_bytes", lambda _: next(sizes, 1_000_000))
    monkeypatch.setattr(fit_memory, "CHECK_PERIOD_S", -1.0)
    run(tiny(*MEMORY), tmp_path)
    assert read_memory(tmp_path)["halved"] == ["4 -> 2 samples at once: step 1: 1 MB are at hand"]


@pytest.mark.slow
@pytest.mark.mlp
def test_measurements_take_the_shards_of_the_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain`, `forecast` and the trial of a profile compile what a run would compute."""
    silent = make_silent_reporter()
    opened = build_recipe(tiny(*MEMORY), silent)
    begun = begin_at_once(opened.recipe, opened.built, opened.backend)
    assert begun.at_once == 4
    assert begin_at_once(tiny(), opened.built, opened.backend).at_once == 1
    at_hand = iter([2 * 10**6])
    monkeypatch.setattr(fit_memory, "RESERVED_BYTES", 0)
    monkeypatch.setattr(
        FittedExecutable, "needed_bytes", property(lambda self: self.samples_at_once * 10**6 // 2)
    )
    monkeypatch.setattr(fit_memory, "find_usable_bytes", lambda _: next(at_hand))
    figures: dict[str, Any] = {}
    executable = compile_to_fit(
        opened.recipe, opened.dataset, opened.built, opened.backend, silent, figures
    )
    assert isinstance(executable, FittedExecutable)
    assert executable.samples_at_once == 4, "half of the 8 that need 4 MB"
    executable.halve("step 9: memory is short")
    assert (figures["samples_at_once"], figures["needed_bytes"]) == (2, 10**6)
    executable.loader.close()


@pytest.mark.parametrize(
    ("value", "size"), [("4GB", 4 * 10**9), ("512MiB", 2**29), ("1.5TB", 15 * 10**11)]
)
def test_memory_is_a_size(tiny: Tiny, value: str, size: int) -> None:
    recipe = tiny(f"train.memory={value}")
    assert recipe.train.memory_bytes == size
    assert Recipe.model_validate(recipe.whole_tree()) == recipe
    assert recipe.parallel.mode == "data"
    assert recipe.parallel.shards == 8


@pytest.mark.parametrize(
    "value", ["0", "0GB", "-1", "3000000000", "much", "4 potatoes", "true", "[1]", "1e999"]
)
def test_other_values_are_refused(tiny: Tiny, value: str) -> None:
    with pytest.raises(RecipeError, match=r"train.memory = .*must be auto or a size, as in 4GB"):
        tiny(f"train.memory={value}")
