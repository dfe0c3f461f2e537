"""Losses of one training in float32, in three frameworks, against the same in float64.

    python -m benchmarks.parity given FOLDER --root DIR      # writes weights and batches
    python -m benchmarks.parity ours FOLDER --root DIR
    python -m benchmarks.parity torch FOLDER                 # float32, and float64 as the judge
    python -m benchmarks.parity mindspore FOLDER
    python -m benchmarks.parity table FOLDER

Every side starts from the same weights and trains on the same batches of MNIST in the same order,
with Momentum 0.9 and a rate at which the loss falls within the first 100 steps. Images are divided
by 255 in float32 (and padded to 32x32 for LeNet-5), with the same bits everywhere, so that only the
training differs. `table` prints the step at which the loss of each side first differs from the
judge's loss by more than a relative 1e-6, 1e-5, ...: the lowest of the seeds, and the highest. Each
side needs its framework; their files meet in FOLDER.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 1000
SEEDS = (1, 2)
MOMENTUM = 0.9
LEVELS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
JUDGE = "torch_float64"
_RESCALE = "{name: rescale, factor: 0.00392156862745098, shift: 0.0}"
_PAD = "{name: pad, padding: [2, 2, 2, 2]}"
_INIT = ("model.init.conv=he_uniform", "model.init.dense=he_uniform", "model.init.bias=zeros")
CASES: Mapping[str, tuple[str, float, tuple[str, ...]]] = {
    "mlp": ("mlp_mnist", 0.05, ("train.batch_size=64", f"dataset.train.ops=[{_RESCALE}]")),
    "lenet5": (
        "lenet5_mnist",
        0.02,
        ("train.batch_size=32", f"dataset.train.ops=[{_PAD}, {_RESCALE}]"),
    ),
}
"""A recipe, the learning rate, and overrides, by network."""
Weights = Mapping[str, np.ndarray]


def main() -> None:
    """Compute one side's losses, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=("given", "ours", "torch", "mindspore", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, help="folder of MNIST's four files")
    args = parser.parse_args()
    if args.side == "table":
        print("\n".join(table(args.folder)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        for seed in SEEDS:
            for name, arrays in _SIDES[args.side](args.folder, args.root, case, seed):
                np.savez(args.folder / f"{case}_{seed}_{name}.npz", **arrays)
                print(case, seed, name, flush=True)


Files = Iterator[tuple[str, Mapping[str, Any]]]
"""Arrays by name, for each file to write."""
Side = Callable[[Path, Path, str, int], Files]


def _make_recipe(root: Path, case: str, seed: int) -> Any:
    from pipeline import load_recipe

    name, rate, keys = CASES[case]
    eval_ops = next(key for key in keys if "ops" in key).replace("train", "eval", 1)
    return load_recipe(
        name,
        [
            *(*keys, eval_ops, *_INIT, "optimizer=momentum", "schedule=constant"),
            *(f"train.optimizer.lr={rate}", f"train.optimizer.momentum={MOMENTUM}"),
            *(f"train.steps={STEPS}", f"seed={seed}", f"dataset.root={root}"),
            *("dataset.train.shuffle=false", "eval.every_epochs=null"),
            *("monitor.tensorboard=false", "stages=[data,build,compile,train]"),
        ],
    )


def draw_inputs(folder: Path, root: Path, case: str, seed: int) -> Files:
    """Yield the initial weights, and the batches of all steps: images uint8, and labels."""
    import jax
    import jax.numpy as jnp

    from pipeline.core.reporter import Reporter
    from pipeline.stages.build import build
    from pipeline.stages.data import load_data

    recipe = _make_recipe(root, case, seed)
    reporter = Reporter()
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    leaves = jax.tree.leaves_with_path(built.step.init(jnp.asarray(built.seed)).params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    yield "given", dict(zip(paths, (np.asarray(leaf) for _, leaf in leaves), strict=True))
    rows = dataset.train_order.batches(0, STEPS).indices
    columns: Mapping[str, Any] = dataset.train.columns
    shape = (*rows.shape, *columns["image"].shape[1:])
    images = columns["image"][rows.ravel()].reshape(shape)
    labels = columns["label"][rows.ravel()].reshape(rows.shape).astype(np.int32)
    yield "batches", {"images": images, "labels": labels}


def run_ours(folder: Path, root: Path, case: str, seed: int) -> Files:
    """Yield the losses of a run of this project."""
    import json

    from pipeline import run

    with tempfile.TemporaryDirectory() as run_dir:
        run(_make_recipe(root, case, seed), Path(run_dir))
        lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    yield "ours", {"losses": [json.loads(line)["loss"] for line in lines]}


def train_torch(folder: Path, root: Path, case: str, seed: int) -> Files:
    """Yield the losses of PyTorch in float32 and in float64."""
    import torch
    from torch.nn import functional

    weights, images, labels = _read(folder, case, seed)
    for dtype in (torch.float32, torch.float64):
        tensors = {
            name: torch.tensor(_convert_array(name, array), dtype=dtype, requires_grad=True)
            for name, array in weights.items()
        }

        def compute_logits(x: Any, w: Mapping[str, Any] = tensors) -> Any:
            if case == "lenet5":
                for layer in ("conv_0", "conv_1"):
                    x = functional.conv2d(x, w[f"{layer}/kernel"], w.get(f"{layer}/bias"))
                    x = functional.max_pool2d(functional.relu(x), 2)
            x = x.flatten(1)
            for number in range(3):
                x = functional.linear(x, w[f"dense_{number}/kernel"], w[f"dense_{number}/bias"])
                x = functional.relu(x) if number < 2 else x
            return x

        rate = CASES[case][1]
        optimizer = torch.optim.SGD(tensors.values(), rate, momentum=MOMENTUM)
        losses = []
        for batch, label in zip(images, labels, strict=True):
            x = torch.from_numpy(_convert_images(case, batch)).to(dtype)
            loss = functional.cross_entropy(compute_logits(x), torch.from_numpy(label).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield f"torch_{str(dtype).removeprefix('torch.')}", {"losses": losses}


def train_mindspore(folder: Path, root: Path, case: str, seed: int) -> Files:
    """Yield the losses of MindSpore in graph mode."""
    import mindspore
    from mindspore import Tensor, nn

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    weights, images, labels = _read(folder, case, seed)
    cells: list[Any] = []
    for name, array in weights.items():
        layer, _, part = name.partition("/")
        if part != "kernel":
            continue
        kernel = Tensor(_convert_array(name, array))
        bias = weights.get(f"{layer}/bias")
        bias_options = {} if bias is None else {"bias_init": Tensor(bias)}
        if layer.startswith("conv"):
            out, into, size, _ = kernel.shape
            options = {"pad_mode": "valid", "has_bias": bias is not None, **bias_options}
            conv = nn.Conv2d(into, out, size, weight_init=kernel, **options)
            cells += [conv, nn.ReLU(), nn.MaxPool2d(2, 2)]
        else:
            cells += [nn.Flatten()] if layer == "dense_0" else [nn.ReLU()]
            cells.append(nn.Dense(*kernel.shape[::-1], weight_init=kernel, **bias_options))
    network = nn.SequentialCell(*cells)
    optimizer = nn.Momentum(network.trainable_params(), CASES[case][1], MOMENTUM)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    cell = nn.TrainOneStepCell(nn.WithLossCell(network, loss), optimizer)
    cell.set_train()
    losses = [
        float(cell(Tensor(_convert_images(case, batch)), Tensor(label)).asnumpy())
        for batch, label in zip(images, labels, strict=True)
    ]
    yield "mindspore", {"losses": losses}


_SIDES: Mapping[str, Side] = {
    "given": draw_inputs,
    "ours": run_ours,
    "torch": train_torch,
    "mindspore": train_mindspore,
}


def _read(folder: Path, case: str, seed: int) -> tuple[Weights, np.ndarray, np.ndarray]:
    """Read weights by path in the order of layers; images (steps, batch, H, W, 1); labels."""
    with np.load(folder / f"{case}_{seed}_given.npz") as file:
        weights = {name: file[name] for name in sorted(file.files)}
    with np.load(folder / f"{case}_{seed}_batches.npz") as file:
        return weights, file["images"], file["labels"]


def _convert_images(case: str, images: np.ndarray) -> np.ndarray:
    """Return images uint8 (n, H, W, 1) as float32 (n, 1, H', W'), bits as by the map ops."""
    pad = 2 if case == "lenet5" else 0
    padded = np.pad(images[..., 0], ((0, 0), (pad, pad), (pad, pad)))
    return (padded.astype(np.float32) * np.float32(1 / 255))[:, None]


def _convert_array(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array as other frameworks order it: kernels (out, in) or (out, in, height, width).

    The first dense layer of LeNet-5 has its inputs by channel there.
    """
    if not name.endswith("/kernel"):
        return array
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(3, 2, 0, 1))
    if len(array) == 400:
        array = array.reshape(5, 5, 16, -1).transpose(2, 0, 1, 3).reshape(400, -1)
    return np.ascontiguousarray(array.T)


def table(folder: Path) -> Iterator[str]:
    """Yield the rows of a Markdown table."""
    levels = " | ".join(f"{level:g}" for level in LEVELS)
    yield f"| network | loss at 1, 100, {STEPS} | side | {levels} |"
    yield f"| --- | --- | --- |{' --- |' * len(LEVELS)}"
    for case in CASES:
        exact = {seed: _read_losses(folder, case, seed, JUDGE) for seed in SEEDS}
        first = exact[SEEDS[0]]
        fall = ", ".join(f"{first[step - 1]:.3g}" for step in (1, 100, STEPS))
        for side in ("ours", "torch_float32", "mindspore"):
            seeds = [s for s in SEEDS if (folder / f"{case}_{s}_{side}.npz").exists()]
            losses = {seed: _read_losses(folder, case, seed, side) for seed in seeds}
            if losses:
                cells = [
                    _format_range([_find_first_above(losses[s], exact[s], level) for s in seeds])
                    for level in LEVELS
                ]
                yield f"| {case} | {fall} | {side} | {' | '.join(cells)} |"


def _read_losses(folder: Path, case: str, seed: int, side: str) -> np.ndarray:
    with np.load(folder / f"{case}_{seed}_{side}.npz") as file:
        return np.asarray(file["losses"], np.float64)


def _find_first_above(losses: np.ndarray, exact: np.ndarray, level: float) -> int | None:
    """Return the first step, from 1, that differs relatively by more than `level`, or None."""
    above = np.flatnonzero(np.abs(losses - exact) > level * np.abs(exact))
    return int(above[0]) + 1 if len(above) else None


def _format_range(steps: list[int | None]) -> str:
    reached = sorted(step for step in steps if step is not None)
    last = f"> {STEPS}" if len(reached) < len(steps) else str(reached[-1])
    return f"{reached[0]} to {last}" if reached and str(reached[0]) != last else last


if __name__ == "__main__":
    main()
