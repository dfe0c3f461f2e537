"""Commands that convert from one format into another."""

from __future__ import annotations

import shlex
from typing import Any

import click

from pipeline.cli.commands.command import Argument, CommandGroup, LazyCommand, Option, flag
from pipeline.cli.commands.parameters import (
    MAX_COUNT,
    FilePath,
    OneOf,
    WholeNumber,
    overrides_argument,
    path_argument,
)
from pipeline.core.errors import UsageError


class Size(WholeNumber):
    """A size of a sample. The error for NAME=VALUE advises to write `--argument NAME=VALUE`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raises UsageError if it isn't a whole number in the range."""
        if "=" in str(value):
            raise UsageError([str(value)], f"is an option: --argument {shlex.quote(str(value))}")
        return super().convert(value, param, ctx)


CONVERT = CommandGroup(
    "convert",
    "weights, data and networks, from one format into another",
    "Convert weights from one format and one set of names into another, a dataset into ArrayRecord "
    "files, or a network of PyTorch or ONNX into a recipe. Each has its own help: "
    "`convert weights --help`.",
    [
        LazyCommand(
            "convert weights",
            "weights of other frameworks, renamed",
            """Convert weights to the names and layout of a recipe's network. Without a recipe only
            the format changes.""",
            [
                path_argument(
                    "source",
                    ".safetensors, .ckpt, .pt, .pth, .npz, .index, .keras or .h5, or a run "
                    "(default recipe: the run's).",
                ),
                path_argument("target", ".safetensors, .ckpt or .npz."),
                overrides_argument(text="The network's recipe, and its keys."),
                Option(
                    "--rules",
                    type=OneOf(["auto", "none", "torch", "mindspore", "tensorflow"]),
                    help="Framework whose names SOURCE has (sets checkpoint.rules).",
                ),
                flag("--partial", text="Take what matches (sets checkpoint.partial=true)."),
                Option(
                    "--like", type=FilePath(), help="Write the names, layout and dtypes of FILE."
                ),
            ],
            example="convert weights theirs.pth ours.safetensors +recipe=resnet18_cifar10",
        ),
        LazyCommand(
            "convert records",
            "any dataset as ArrayRecord files",
            "Write a dataset as ArrayRecord files, for dataset=records.",
            [
                path_argument("out", "The folder to write.", is_folder=True),
                overrides_argument(
                    "dataset=NAME [KEY=VALUE ...]",
                    "The dataset, and keys of a recipe, such as dataset.root=DIR.",
                ),
                flag("--overwrite", text="Replace existing records."),
            ],
            example="convert records cifar dataset=cifar10 dataset.root=DIR",
        ),
        LazyCommand(
            "convert model",
            "a network of PyTorch or ONNX as a recipe",
            """Write a torch.nn.Module or an ONNX file's network as a recipe with weights.
            The recipe lists layers, or names a graph file if no layer fits a module.""",
            [
                Argument(
                    "module",
                    metavar="MODULE",
                    text="A class, function or module of a plug-in, such as my_nets:MyNet, or an "
                    "ONNX file.",
                ),
                path_argument(
                    "target",
                    "my_net.yaml, weights beside it in my_net.safetensors; or my_net.torch.json "
                    "for a graph without recipe.",
                ),
                Argument(
                    "sizes",
                    nargs=-1,
                    metavar="[SIZE ...]",
                    type=Size(1, MAX_COUNT),
                    text="Channels, height and width of a sample (default: the ONNX file's, or 3 "
                    "224 224).",
                ),
                Option(
                    "--argument",
                    "arguments",
                    multiple=True,
                    metavar="NAME=VALUE",
                    help="An argument of MODULE, such as num_classes=10; repeatable. For ONNX: "
                    "output=NAME, the tensor of logits.",
                ),
            ],
            example="--plugin torchvision.models convert model torchvision.models:resnet18 \\\n"
            "             resnet18.yaml 3 32 32 --argument num_classes=10",
        ),
    ],
)
