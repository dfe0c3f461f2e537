"""Each use of JAX's private modules still does in this version what it is used for."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pipeline.core.host import jax_private

ROOT = Path(__file__).parents[3]
FOLDER, LEAST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
LEAST_BYTES = "jax_persistent_cache_min_entry_size_bytes"


class Kept(dict[str, bytes]):
    """A cache in memory with the methods that JAX calls."""

    _path = Path("kept")

    def put(self, key: str, value: bytes) -> None:
        self[key] = value


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    names = (FOLDER, LEAST, LEAST_BYTES)
    before = {name: jax.config.values[name] for name in names}
    file_cache = jax_private.compilation_cache.get_file_cache
    cache = Kept()
    for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
        jax.config.update(name, value)
    jax_private.use_program_files(lambda path: (cache, path))
    yield cache
    jax_private.compilation_cache.get_file_cache = file_cache
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_sine(scope: str = "") -> Any:
    def sine(x: Any) -> Any:
        with jax.named_scope(scope or "plain"):
            return jnp.sin(x) + 2.5

    return jax.jit(sine).lower(jax.ShapeDtypeStruct((7,), np.float32)).compile()


def test_programs_are_stored_in_the_configured_cache(kept: Kept) -> None:
    compile_sine()
    assert len(kept) == 1
    assert jax_private.find_opened_program_files(jax.devices("cpu")[0].client) is kept


def test_thread_can_disable_program_storage(kept: Kept) -> None:
    with jax_private.keep_from_cache():
        compile_sine()
    assert not kept


def test_names_can_be_part_of_the_cache_key(kept: Kept) -> None:
    compile_sine("first")
    compile_sine("second")
    assert len(kept) == 1
    with jax_private.with_names_in_cache_key():
        compile_sine("first")
        compile_sine("second")
    assert len(kept) == 3


def test_machine_code_matches_jax_serialization(kept: Kept) -> None:
    compiled = compile_sine()
    (content,) = kept.values()
    loaded = compiled._executable.xla_executable
    assert jax_private.is_machine_code(loaded)
    assert not jax_private.is_machine_code(compiled)
    device = jax.devices("cpu")[0]
    read = device.client.deserialize_executable(jax_private.read_machine_code(content), [device])
    assert jax_private.is_machine_code(read)


def test_pickler_output_matches_jax_serialization() -> None:
    compiled = compile_sine()
    content = io.BytesIO()
    unloaded = compiled._executable._unloaded_executable
    pickled = (unloaded, compiled.args_info, compiled._no_kwargs)
    jax_private.ExecutablePickler(content).dump(pickled)
    device = jax.devices("cpu")[0]
    reader = jax_private.ExecutableUnpickler(
        io.BytesIO(content.getvalue()), device.client, [device]
    )
    read, args_info, no_kwargs = reader.load()
    assert type(read) is type(unloaded)
    assert str(read.load().in_avals) == str(compiled._executable.in_avals)
    assert (str(args_info), no_kwargs) == (str(compiled.args_info), compiled._no_kwargs)


def test_plugin_logger_equals_xla_bridge_logger() -> None:
    assert jax_private.xla_bridge.logger.name == jax_private.PLUGIN_LOGGER


def test_compile_logger_names_the_function() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(jax_private.COMPILE_LOGGER)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        compile_sine()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any(line.startswith("Compiling jit(sine)") for line in lines)


@pytest.mark.medium
def test_devices_are_opened_at_first_use() -> None:
    script = (
        "import jax; from pipeline.core.host import jax_private as p;"
        "print(p.has_open_devices(), p.count_joined_processes(), p.get_coordination_client());"
        "print(p.has_open_devices()); jax.devices(); print(p.has_open_devices())"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.splitlines() == ["False 1 None", "False", "True"], ran.stderr


def test_jax_private_modules_are_used_in_one_module() -> None:
    others = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "pipeline").rglob("*.py")
        if "jax._src" in file.read_text() and file != Path(jax_private.__file__)
    }
    assert others == set()


def test_rank_and_client_are_none_without_other_processes() -> None:
    assert jax_private.read_joined_process() is None
    assert jax_private.get_coordination_client() is None


def test_text_of_a_differentiated_array_has_no_format() -> None:
    """Formats, `float`, `complex`, lists and NumPy read values: tests of `array_values`."""
    jax_private.make_values_readable()
    texts = []

    def show(x: jax.Array) -> jax.Array:
        texts.extend([f"{x}", f"{x:.2f}", f"{np.asarray(x)}"])
        return x

    jax.grad(show)(0.125)
    assert texts[1:] == ["0.12", "0.125"]
    assert "0.125" in texts[0]


def test_equal_operations_of_a_lowered_program_are_merged() -> None:
    def add_twice(x: Any) -> Any:
        return jnp.exp(x) + 2 * jnp.exp(x)

    lowered = jax.jit(add_twice).lower(jax.ShapeDtypeStruct((3,), np.float32))
    before = lowered.as_text().count("stablehlo.exponential")
    jax_private.merge_equal_operations(lowered)
    assert (before, lowered.as_text().count("stablehlo.exponential")) == (2, 1)
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_allclose(lowered.compile()(x), 3 * np.exp(x), rtol=1e-6)
