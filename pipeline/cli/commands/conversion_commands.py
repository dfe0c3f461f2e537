"""Commands that convert from one format into another."""

from __future__ import annotations

import shlex
from typing import Any

import click

from pipeline.cli.commands.command import Argument, CommandGroup, LazyCommand, Option, flag
from pipeline.cli.commands.parameters import (
    FilePath,
    OneOf,
    WholeNumber,
    overrides,
    path_argument,
)
from pipeline.core.errors import UsageError

MAX_SIZE = 999_999_999


class Size(WholeNumber):
    """A size of a sample. For NAME=VALUE, the error advises to use `--argument`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raises UsageError for another value."""
        if "=" in str(value):
            raise UsageError([str(value)], f"is now --argument {shlex.quote(str(value))}")
        return super().convert(value, param, ctx)


CONVERT = CommandGroup(
    "convert",
    "weights, data and networks, from one format into another",
    "Convert weights from one format and one set of names into another, a dataset into ArrayRecord "
    "files, or a network of PyTorch or ONNX into a recipe. `convert weights --help` and the others "
    "say more.",
    [
        LazyCommand(
            "convert weights",
            "weights of other frameworks, renamed",
            """Read weights, give them the names and layout of a recipe's network, and write them.
            Without a recipe they are written as they are.""",
            [
                path_argument(
                    "source",
                    ".safetensors, .ckpt, .pt, .pth, .npz, .index, .keras or .h5, or a run "
                    "directory, whose recipe counts.",
                ),
                path_argument("target", ".safetensors, .ckpt or .npz."),
                overrides(text="The recipe whose network they are for, and its keys."),
                Option(
                    "--rules",
                    type=OneOf(["auto", "none", "torch", "mindspore", "tensorflow"]),
                    was="rules",
                    help="Whose names SOURCE has; as checkpoint.rules.",
                ),
                flag(
                    "--partial",
                    text="Take what matches; as checkpoint.partial=true.",
                    was="partial",
                ),
                Option(
                    "--like",
                    type=FilePath(),
                    was="like",
                    help="Write them under the names of FILE.",
                ),
            ],
            example="convert weights theirs.pth ours.safetensors +recipe=resnet18_cifar10",
        ),
        LazyCommand(
            "convert records",
            "any dataset as ArrayRecord files",
            "Write a dataset as ArrayRecord files, which dataset=records reads with random access.",
            [
                path_argument("out", "The folder to write.", is_folder=True),
                overrides(
                    "dataset=NAME [KEY=VALUE ...]",
                    "The dataset, by name or as a custom file; keys of a recipe, such as "
                    "dataset.root=DIR.",
                ),
                flag("--overwrite", text="Replace the records that are there."),
            ],
            example="convert records cifar dataset=cifar10 dataset.root=DIR",
        ),
        LazyCommand(
            "convert model",
            "a network of PyTorch or ONNX as a recipe",
            """Write a torch.nn.Module, or the network of an ONNX file, as a recipe that needs
            neither torch nor the file, with its weights. If every module of it is a layer of this
            project, the recipe lists layers, so that lowerings, THOR, types by layer and the
            emulator apply to them. Else it names a graph file, and the first module that is no
            known layer is reported. Nothing is written unless the logits are those of PyTorch, or
            of the imported file.""",
            [
                Argument(
                    "module",
                    metavar="MODULE",
                    text="A class, a function or a module of a plug-in (--plugin FILE), as "
                    "my_nets:MyNet, or net.onnx.",
                ),
                path_argument(
                    "target",
                    "my_net.yaml; the weights are written to my_net.safetensors beside it. "
                    "my_net.torch.json writes the graph in any case.",
                ),
                Argument(
                    "sizes",
                    nargs=-1,
                    metavar="[SIZE ...]",
                    type=Size(1, MAX_SIZE),
                    text="Shape of a sample: channels, height and width. Without it: 3 "
                    "224 224, or the shape in the ONNX file.",
                ),
                Option(
                    "--argument",
                    "arguments",
                    multiple=True,
                    metavar="NAME=VALUE",
                    help="An argument of MODULE, as num_classes=10; may be given again. Of an "
                    "ONNX file: output=NAME, the tensor of logits.",
                ),
            ],
            example="--plugin torchvision.models convert model torchvision.models:resnet18 \\\n"
            "             resnet18.yaml 3 32 32 --argument num_classes=10",
        ),
    ],
)
