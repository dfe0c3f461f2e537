"""Losses of one training in float32, here and elsewhere, against the same in float64.

    python -m benchmarks.parity given FOLDER --root DIR      # weights and batches, written here
    python -m benchmarks.parity ours FOLDER --root DIR
    python -m benchmarks.parity torch FOLDER                 # float32, and float64 as the judge
    python -m benchmarks.parity mindspore FOLDER
    python -m benchmarks.parity table FOLDER

Every side starts from the same weights and takes the same batches of MNIST in the same order, with
Momentum 0.9 and a rate at which the loss falls within the first 100 steps. Images are divided by
255 in float32 (and padded to 32x32 for LeNet-5), which is the same bits everywhere, so that what
differs is the training alone. `table` prints for each side after how many steps its loss first
differs from the judge's by more than a relative 1e-6, 1e-5, ...: the lowest of the seeds, and the
highest. Each side runs where its framework is installed; their files meet in FOLDER.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

STEPS, SEEDS, MOMENTUM = 1000, (1, 2), 0.9
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


Side = Callable[[Path, Path, str, int], Iterator[tuple[str, Mapping[str, Any]]]]


def _recipe(root: Path, case: str, seed: int) -> Any:
    from pipeline import load_recipe

    name, rate, keys = CASES[case]
    eval_ops = next(key for key in keys if "ops" in key).replace("train", "eval", 1)
    return load_recipe(
        name,
        [
            *(*keys, eval_ops, *_INIT, "optimizer=momentum", "schedule=constant"),
            *(f"train.optimizer.lr={rate}", f"train.optimizer.momentum={MOMENTUM}"),
            *(f"train.steps={STEPS}", f"seed={seed}", f"dataset.root={root}"),
            *("dataset.train.shuffle=false", "eval.every_passes=null"),
            *("monitor.tensorboard=false", "stages=[data,build,compile,train]"),
        ],
    )


def given(folder: Path, root: Path, case: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The initial weights; with the first seed the images uint8 and labels of all steps too."""
    import jax

    from pipeline.core.reporter import Reporter
    from pipeline.stages.build import build
    from pipeline.stages.data import load_data

    recipe, reporter = _recipe(root, case, seed), Reporter()
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    leaves = jax.tree.leaves_with_path(built.step.init(built.seed).params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    yield "given", dict(zip(paths, (np.asarray(leaf) for _, leaf in leaves), strict=True))
    rows = dataset.train_order.batches(0, STEPS).indices
    columns: Mapping[str, Any] = dataset.train.columns
    shape = (*rows.shape, *columns["image"].shape[1:])
    images = columns["image"][rows.ravel()].reshape(shape)
    labels = columns["label"][rows.ravel()].reshape(rows.shape).astype(np.int32)
    yield "batches", {"images": images, "labels": labels}


def ours(folder: Path, root: Path, case: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The losses of a run here."""
    import json

    from pipeline import run

    with tempfile.TemporaryDirectory() as run_dir:
        run(_recipe(root, case, seed), Path(run_dir))
        lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    yield "ours", {"losses": [json.loads(line)["loss"] for line in lines]}


def torch_losses(
    folder: Path, root: Path, case: str, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The losses of PyTorch in float32 and in float64."""
    import torch
    from torch.nn import functional

    weights, images, labels = _read(folder, case, seed)
    for dtype in (torch.float32, torch.float64):
        tensors = {
            name: torch.tensor(_as_elsewhere(name, array), dtype=dtype, requires_grad=True)
            for name, array in weights.items()
        }

        def logits(x: Any, w: Mapping[str, Any] = tensors) -> Any:
            if case == "lenet5":
                for layer in ("conv_0", "conv_1"):
                    x = functional.conv2d(x, w[f"{layer}/kernel"], w.get(f"{layer}/bias"))
                    x = functional.max_pool2d(functional.relu(x), 2)
            x = x.flatten(1)
            for layer in range(3):
                x = functional.linear(x, w[f"dense_{layer}/kernel"], w[f"dense_{layer}/bias"])
                x = functional.relu(x) if layer < 2 else x
            return x

        rate = CASES[case][1]
        optimizer = torch.optim.SGD(tensors.values(), rate, momentum=MOMENTUM)
        losses = []
        for batch, label in zip(images, labels, strict=True):
            x = torch.from_numpy(_inputs(case, batch)).to(dtype)
            loss = functional.cross_entropy(logits(x), torch.from_numpy(label).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield f"torch_{str(dtype).removeprefix('torch.')}", {"losses": losses}


def mindspore_losses(
    folder: Path, root: Path, case: str, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The losses of MindSpore in graph mode."""
    import mindspore
    from mindspore import Tensor, nn

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    weights, images, labels = _read(folder, case, seed)
    cells: list[Any] = []
    for name, array in weights.items():
        layer, _, what = name.partition("/")
        if what != "kernel":
            continue
        turned = Tensor(_as_elsewhere(name, array))
        bias = weights.get(f"{layer}/bias")
        biased = {} if bias is None else {"bias_init": Tensor(bias)}
        if layer.startswith("conv"):
            out, into, size, _ = turned.shape
            about = {"pad_mode": "valid", "has_bias": bias is not None}
            conv = nn.Conv2d(into, out, size, weight_init=turned, **about, **biased)
            cells += [conv, nn.ReLU(), nn.MaxPool2d(2, 2)]
        else:
            cells += [nn.Flatten()] if layer == "dense_0" else [nn.ReLU()]
            cells.append(nn.Dense(*turned.shape[::-1], weight_init=turned, **biased))
    network = nn.SequentialCell(*cells)
    optimizer = nn.Momentum(network.trainable_params(), CASES[case][1], MOMENTUM)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    cell = nn.TrainOneStepCell(nn.WithLossCell(network, loss), optimizer)
    cell.set_train()
    losses = [
        float(cell(Tensor(_inputs(case, batch)), Tensor(label)).asnumpy())
        for batch, label in zip(images, labels, strict=True)
    ]
    yield "mindspore", {"losses": losses}


_SIDES: Mapping[str, Side] = {
    "given": given,
    "ours": ours,
    "torch": torch_losses,
    "mindspore": mindspore_losses,
}


def _read(folder: Path, case: str, seed: int) -> tuple[Weights, np.ndarray, np.ndarray]:
    """Weights by path in the order of the layers; images (steps, batch, H, W, 1); labels."""
    with np.load(folder / f"{case}_{seed}_given.npz") as file:
        weights = {name: file[name] for name in sorted(file.files)}
    with np.load(folder / f"{case}_{seed}_batches.npz") as file:
        return weights, file["images"], file["labels"]


def _inputs(case: str, images: np.ndarray) -> np.ndarray:
    """Images uint8 (n, H, W, 1) as float32 (n, 1, H', W'), the bits that the map ops give."""
    pad = 2 if case == "lenet5" else 0
    padded = np.pad(images[..., 0], ((0, 0), (pad, pad), (pad, pad)))
    return (padded.astype(np.float32) * np.float32(1 / 255))[:, None]


def _as_elsewhere(name: str, array: np.ndarray) -> np.ndarray:
    """A kernel as other frameworks have it: (out, in), (out, in, height, width); others as is.

    LeNet-5's first dense layer has its inputs by channel there.
    """
    if not name.endswith("/kernel"):
        return array
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(3, 2, 0, 1))
    if len(array) == 400:
        array = array.reshape(5, 5, 16, -1).transpose(2, 0, 1, 3).reshape(400, -1)
    return np.ascontiguousarray(array.T)


def table(folder: Path) -> Iterator[str]:
    """The rows of a Markdown table."""
    levels = " | ".join(f"{level:g}" for level in LEVELS)
    yield f"| network | loss at 1, 100, {STEPS} | side | {levels} |"
    yield f"| --- | --- | --- |{' --- |' * len(LEVELS)}"
    for case in CASES:
        judged = {seed: _losses(folder, case, seed, JUDGE) for seed in SEEDS}
        first = judged[SEEDS[0]]
        fall = ", ".join(f"{first[step - 1]:.3g}" for step in (1, 100, STEPS))
        for side in ("ours", "torch_float32", "mindspore"):
            there = [s for s in SEEDS if (folder / f"{case}_{s}_{side}.npz").exists()]
            parts = [
                _first_above(_losses(folder, case, seed, side), judged[seed], level)
                for level in LEVELS
                for seed in there
            ]
            if there:
                cells = [
                    _range(parts[n : n + len(there)]) for n in range(0, len(parts), len(there))
                ]
                yield f"| {case} | {fall} | {side} | {' | '.join(cells)} |"


def _losses(folder: Path, case: str, seed: int, side: str) -> np.ndarray:
    with np.load(folder / f"{case}_{seed}_{side}.npz") as file:
        return np.asarray(file["losses"], np.float64)


def _first_above(losses: np.ndarray, judged: np.ndarray, level: float) -> int | None:
    """The first step, from 1, that differs relatively by more than `level`; None without any."""
    above = np.flatnonzero(np.abs(losses - judged) > level * np.abs(judged))
    return int(above[0]) + 1 if len(above) else None


def _range(steps: list[int | None]) -> str:
    known = sorted(step for step in steps if step is not None)
    last = f"> {STEPS}" if len(known) < len(steps) else str(known[-1])
    return f"{known[0]} to {last}" if known and str(known[0]) != last else last


if __name__ == "__main__":
    main()
