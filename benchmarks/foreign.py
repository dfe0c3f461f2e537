"""Networks of timm and transformers, imported: logits and losses beside PyTorch's, and refusals.

    python -m benchmarks.foreign --rows FILE        60 families of timm and 34 of transformers
    python -m benchmarks.foreign --networks timm/beit,transformers/llama
    python -m benchmarks.foreign_page --save        the page, of the rows of results/foreign.jsonl

Needs `pip install timm transformers` besides torch. The families and their variants are drawn by
`--seed`, the networks are small, and their weights are random: nothing is downloaded. For each
network, from the same weights with the same batches: the largest difference of logits in
evaluation, relative to the largest logit; the largest relative difference of the losses of three
steps of SGD in float32, beside the same of PyTorch's float32 to its float64; the seconds of a
processor for the import, and those for the compilation of the step. Draws of dropout are off, since
they differ. Each network has its own process, forked after the packages are imported, with limits.
With `--quick`, XLA compiles with optimization level 0.

`--float64` computes three steps of both in float64, and adds the largest difference of the losses
to the rows of earlier runs, beside the difference that samples moved by 1e-15 make to PyTorch's.
What rounding causes in float32 vanishes there or is as large, what a rule of an operator causes
isn't.

    python -m benchmarks.foreign --float64 --quick --networks timm/inception_v3
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax import Array, lax
from torch import nn

from benchmarks.foreign_networks import (
    ForeignNetwork,
    draw_families,
    import_foreign,
    make_network,
)
from benchmarks.foreign_page import COUNTS, ROWS, Comparison, read_rows, write_row
from benchmarks.imported_step import make_step
from benchmarks.measure import machine, today, versions
from pipeline.models.lowerings.problem import LoweringPolicy, Pair
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork, initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module
from pipeline.models.torch_graph.operators import convolution_ops

PACKAGES = ("jax", "jaxlib", "torch", "timm", "transformers")
RATE = 1e-3
STEPS = 3
BATCH = 4
MOVE = 1e-15
"""Standard deviation of the factors of moved samples, less 1: their last digits in float64."""
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA, which compile some networks in half of the time and make slower steps."""
Batches = Sequence[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Limits:
    """Limits of the process of a network."""

    processor_s: int
    memory_bytes: int


def main() -> None:
    """Compare, print a row of each network and write it among those of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the draw of families and weights")
    parser.add_argument("--networks", help="such as timm/beit,transformers/llama; all by default")
    parser.add_argument("--rows", type=Path, default=ROWS, help="default: %(default)s")
    parser.add_argument("--float64", action="store_true", help="both in float64, of former rows")
    parser.add_argument("--quick", action="store_true", help="compile without optimization")
    parser.add_argument("--limit-s", type=int, default=600, help="of a processor, for a network")
    parser.add_argument("--limit-gib", type=int, default=12, help="of memory, for a network")
    args = parser.parse_args()
    limits = Limits(args.limit_s, args.limit_gib << 30)
    if args.seed and args.rows == ROWS:
        parser.error(f"--seed {args.seed}: needs --rows, since {ROWS.name} has those of seed 0")
    names = args.networks.split(",") if args.networks else list_networks(args.seed)
    done = read_rows(args.rows)
    if args.float64 and (unknown := [name for name in names if name not in done]):
        parser.error(f"--float64: {', '.join(unknown)}: must be in the file of --rows")
    missing = [name for name in names if name not in done or args.networks]
    if args.float64:  # Rows without figures have no others in float64.
        missing = [name for name in names if not done[name].refusal]
    if missing:
        _import_all()
    conditions = f"{today()}, {describe_options(args)}; {machine()}; {versions(PACKAGES)}"
    for name in missing:
        options = QUICK if args.quick else {}
        earlier = done[name] if args.float64 else None
        row = compare_apart(name, args.seed, limits, options, earlier)
        row = row if earlier is not None else replace(row, conditions=conditions)
        write_row(args.rows, row)
        print(" | ".join(row.make_row()), flush=True)


def describe_options(args: argparse.Namespace) -> str:
    """Return the options that figures depend on, as one writes them."""
    quick = " --quick" if args.quick else ""
    return f"`--seed {args.seed} --limit-s {args.limit_s} --limit-gib {args.limit_gib}{quick}`"


def list_networks(seed: int) -> list[str]:
    """Return the names of the networks that a seed draws."""
    return [f"{package}/{name}" for package in COUNTS for name in draw_families(package, seed)]


def _import_all() -> None:
    """Import what networks need, so that forked processes have it; torch imports at an export."""
    for package in COUNTS:
        import_foreign(package)
    export_module(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).train(), (4,), origin="nn")


def compare_apart(
    name: str,
    seed: int,
    limits: Limits,
    options: Mapping[str, Any] = MappingProxyType({}),
    earlier: Comparison | None = None,
) -> Comparison:
    """Compare an imported network with PyTorch's in a forked process.

    A network whose process reaches a limit is refused. `options` are XLA's for the step. Of a
    comparison that is `earlier`, the losses in float64 are computed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, name, seed, limits, options, earlier)
    process = context.Process(target=_send_comparison, args=arguments)
    with warnings.catch_warnings():
        # JAX has no threads before its first array.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        process.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        package, _, family = name.partition("/")
        spent = f"{limits.processor_s} s of a processor, {limits.memory_bytes >> 30} GiB"
        reason = f"ended with status {process.exitcode} (limits: {spent})"
        if earlier is not None:
            print(f"{name}: float64 {reason}", file=sys.stderr)
            return earlier
        return Comparison(package, family, refusal=reason)
    finally:
        process.join()


def _send_comparison(
    sender: Connection,
    name: str,
    seed: int,
    limits: Limits,
    options: Mapping[str, Any],
    earlier: Comparison | None,
) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limits.processor_s, limits.processor_s))
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    if earlier is None:
        sender.send(compare(name, seed, options))
    else:
        sender.send(compare_in_float64(earlier, seed, options))


def compare(name: str, seed: int, options: Mapping[str, Any] = MappingProxyType({})) -> Comparison:
    """Compare an imported network with PyTorch's."""
    text, _, family = name.partition("/")
    package = next(package for package in COUNTS if package == text)
    try:
        network = make_network(package, family, seed)
    except Exception as error:
        return Comparison(package, family, refusal=f"isn't made: {_describe(error)}")
    try:
        return _compare(network, options)
    except Exception as error:
        return _begin(network, refusal=_describe(error))


def _describe(error: Exception) -> str:
    """Return the first line of an error."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{kind}{(str(error).splitlines() or [''])[0]}"[:300]


def _begin(network: ForeignNetwork, **figures: Any) -> Comparison:
    count = sum(parameter.numel() for parameter in network.module.parameters())
    return Comparison(
        network.package, network.family, network.variant, network.shape, count, **figures
    )


def _compare(network: ForeignNetwork, options: Mapping[str, Any]) -> Comparison:
    module = network.module
    started_at = time.process_time()
    graph = export_module(module, network.shape, origin=network.family, dtype=network.dtype)
    import_s = time.process_time() - started_at
    imported = TorchNetwork(graph, "float32")
    variables = initial_variables_of(graph)
    batches = list(network.draw_batches(STEPS, BATCH))
    x, _ = batches[0]
    apply = jax.jit(lambda variables, x: imported.apply(variables, x, train=False))
    forward = apply.lower(variables, to_samples(x)).compile(compiler_options=dict(options))
    logits = np.asarray(forward(variables, to_samples(x)))
    with torch.no_grad():
        expected = network.choose_logits(module.eval()(torch.from_numpy(x))).numpy()
    losses, compile_s = train_jax(imported, variables, batches, options)
    double = copy.deepcopy(network.module).double()
    in_64_bits = _try_float64(replace(network, module=double), batches)
    in_32_bits = train_torch(network, batches, torch.float32)
    return _begin(
        network,
        nodes=len(graph.training.nodes),
        # Features of a deep network with random weights may vanish.
        logits=float(np.abs(logits - expected).max() / (np.abs(expected).max() or 1.0)),
        losses=_find_largest(losses, in_32_bits),
        torch_losses=_find_largest(in_64_bits, in_32_bits),
        import_s=import_s,
        compile_s=compile_s,
    )


def compare_in_float64(
    earlier: Comparison, seed: int, options: Mapping[str, Any] = MappingProxyType({})
) -> Comparison:
    """Return a comparison with the differences of losses in float64.

    The process computes in float64 from here on.
    """
    jax.config.update("jax_enable_x64", True)
    # Operators name float32 for sums, which must be as wide as the rest.
    jnp.float32 = jnp.float64
    convolution_ops.lowered_conv2d = convolve_by_products  # type: ignore[assignment]
    package = next(package for package in COUNTS if package == earlier.package)
    network = make_network(package, earlier.family, seed)
    graph = export_module(network.module, network.shape, origin=network.family, dtype=network.dtype)
    variables = jax.tree.map(lambda x: np.asarray(x, np.float64), initial_variables_of(graph))
    batches = list(network.draw_batches(STEPS, BATCH))
    if network.dtype != "int64":
        batches = [(x.astype(np.float64), labels) for x, labels in batches]
    losses, _ = train_jax(TorchNetwork(graph, "float64"), variables, batches, options)
    random = np.random.default_rng(0)
    moved = [(_move(x, random), labels) for x, labels in batches]
    expected, of_moved = (
        train_torch(
            replace(network, module=copy.deepcopy(network.module).double()), each, torch.float64
        )
        for each in (batches, moved)
    )
    return replace(
        earlier,
        wide_losses=_find_largest(losses, expected),
        moved_losses=_find_largest(of_moved, expected),
    )


def convolve_by_products(
    images: Array,
    kernel: Array,
    *,
    strides: Pair,
    padding: Sequence[Pair],
    dilation: Pair,
    groups: int,
    policy: LoweringPolicy,
) -> Array:
    """Convolve NHWC by HWIO as a sum of a product for each position of the kernel, with the
    gradients that jax derives. XLA:CPU convolves in float64 by scalar loops."""
    del policy
    (top, bottom), (left, right) = padding
    pads = ((0, 0, 0), (top, bottom, 0), (left, right, 0), (0, 0, 0))
    padded = lax.pad(images, jnp.zeros((), images.dtype), pads)
    (down, across), (row_step, column_step) = strides, dilation
    rows, columns, channels, features = kernel.shape
    height = (padded.shape[1] - (rows - 1) * row_step - 1) // down + 1
    width = (padded.shape[2] - (columns - 1) * column_step - 1) // across + 1
    total = jnp.zeros((), images.dtype)
    for row, column in np.ndindex(rows, columns):
        y, x = row * row_step, column * column_step
        pixels = padded[:, y : y + (height - 1) * down + 1 : down]
        pixels = pixels[:, :, x : x + (width - 1) * across + 1 : across]
        if groups == 1:
            total = total + pixels @ kernel[row, column]
            continue
        by_group = pixels.reshape(*pixels.shape[:3], groups, channels)
        factors = kernel[row, column].reshape(channels, groups, features // groups)
        if channels == 1:
            total = total + by_group * factors[0]
        else:
            total = total + jnp.einsum("bhwgc,cgf->bhwgf", by_group, factors)
    return total.reshape(*total.shape[:3], features)


def _move(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return samples that are moved by `MOVE` of their values; tokens as they are."""
    return x if x.dtype == np.int64 else x * (1 + MOVE * random.normal(size=x.shape))


def _find_largest(losses: Sequence[float], expected: Sequence[float]) -> float:
    return float((np.abs(np.subtract(losses, expected)) / np.abs(expected)).max())


def to_samples(x: np.ndarray) -> np.ndarray:
    """Return samples as a network of this project reads them."""
    if x.dtype == np.int64:
        return x.astype(np.int32)
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x


def _try_float64(network: ForeignNetwork, batches: Batches) -> list[float]:
    """Return PyTorch's losses in float64; NaN if the network fixes float32."""
    try:
        return train_torch(network, batches, torch.float64)
    except RuntimeError:
        return [float("nan")] * STEPS


def train_torch(network: ForeignNetwork, batches: Batches, dtype: torch.dtype) -> list[float]:
    """Train a module, and return the loss of each step."""
    optimizer = torch.optim.SGD(network.module.train().parameters(), lr=RATE)
    losses = []
    for x, labels in batches:
        optimizer.zero_grad()
        samples = torch.from_numpy(x)
        samples = samples if network.dtype == "int64" else samples.to(dtype)
        logits = network.choose_logits(network.module(samples))
        targets = torch.from_numpy(labels).flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_jax(
    network: TorchNetwork, variables: Any, batches: Batches, options: Mapping[str, Any]
) -> tuple[list[float], float]:
    """Train an imported network by a step compiled with XLA's options.

    Return the loss of each step, and a processor's seconds to trace and compile the step.
    """
    optimizer = optax.sgd(RATE)
    step = make_step(network, optimizer)
    params, stats = jax.tree.map(jnp.asarray, (variables["params"], variables["batch_stats"]))
    state = optimizer.init(params)
    arrays = [(jnp.asarray(to_samples(x)), jnp.asarray(labels)) for x, labels in batches]
    started_at = time.process_time()
    lowered = jax.jit(step).lower(params, stats, state, *arrays[0])
    compiled = lowered.compile(compiler_options=dict(options))
    compile_s = time.process_time() - started_at
    losses = []
    for x, labels in arrays:
        params, stats, state, loss = compiled(params, stats, state, x, labels)
        losses.append(float(loss))
    return losses, compile_s


if __name__ == "__main__":
    main()
