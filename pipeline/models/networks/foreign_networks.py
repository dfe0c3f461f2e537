"""Networks of other frameworks: a module of PyTorch, a graph exported from one, an ONNX file.

A module is in a plug-in. Any framework may have written an ONNX file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import isfunction
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.registry import FilePath, Seq, component
from pipeline.data.inputs import DOCUMENT, MASK, PADDING_MASK
from pipeline.models.layers.model_spec import CLASSES, ModelSpec, replace_classes

if TYPE_CHECKING:
    from flax import linen as nn

_Reference = Annotated[str, Field(max_length=200)] | None


def _allow_seed_reference(schema: dict[str, Any]) -> None:
    """Let the JSON schema, which editors read, accept `${seed}` as a seed."""
    number = dict(schema)
    schema.clear()
    schema["anyOf"] = [number, {"const": "${seed}"}]


def _name_position(value: Any) -> Any:
    """Return a position as a text, since the command line and YAML read 1 as a number."""
    return str(value) if type(value) is int else value


@component("model")
class TorchModule(ModelSpec):
    """A `torch.nn.Module`, exported into a graph that JAX computes and trains.

    `import` names a class, a function that makes a module, or a module itself, such as
    `torchvision.models:resnet18`. The command line must name its file or package with `--plugin`.
    `graph` names a file instead, which is data and needs no `--plugin`. Training starts from the
    module's weights; of `init` only `rules` are used. If `forward` has several parameters without a
    default, they are inputs, from the columns of their names or `model.inputs`.
    """

    # A field named by a keyword of Python can't be declared in another way.
    __annotations__["import"] = "Annotated[_Reference, Field(default=None)]"
    name: Literal["torch"] = "torch"
    graph: FilePath | None = None
    """File of a graph that `convert model` wrote, such as `net.torch.json`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the constructor; `$classes` stands for the dataset's number of classes, which a
    parameter `classes` or `num_classes` gets by default."""
    output: Annotated[str, Field(max_length=500), BeforeValidator(_name_position)] | None = None
    """Name of the logits, if `forward` returns several tensors: a key, a field or a position; null:
    `logits`, or the only tensor."""
    seed: Annotated[NonNegativeInt, Field(json_schema_extra=_allow_seed_reference)] = 0
    """Seed for initial weights, which torch draws in the constructor."""
    input_shape: Seq[PositiveInt] | None = None
    """Shape of a sample for the module; null: the shape of the column, of images (channels, height,
    width)."""
    input_dtype: Literal["float32", "int64"] | None = None
    """Type of the samples for the module; null: int64 for tokens and other whole numbers, else
    float32."""
    batch: PositiveInt | None = None
    """The only batch size that the module computes; null: it computes any."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        imported = getattr(self, "import")
        if imported is not None and self.graph is not None:
            raise ValueError("has both import and graph; one must be null")
        if self.output is not None and self.graph is not None:
            raise ValueError("has both output and graph, which has one output; one must be null")
        return self

    def list_inputs(self) -> tuple[str, ...] | None:
        """Return the names of several inputs in the signature of the module's `forward`. None for
        one, for a graph, and if only the module that a function makes has the signature."""
        from pipeline.models.imported.calls import list_inputs

        target = self._find_target()
        forward = getattr(target, "forward", None)
        if not callable(forward):
            return None
        names = list_inputs(forward, 1 if isinstance(target, type) else 0)
        return tuple(names) if len(names) > 1 else None

    def require_code(self) -> None:
        from pipeline.core.plugins.loading import find_object

        imported = getattr(self, "import")
        try:
            if imported is not None:
                find_object(imported)
        except ValueError as error:
            raise ValueError(f"import = {error}") from error

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return the network, which makes and exports a module for its first images.

        Raises ValueError without a module or a graph, and if no plug-in has the module.
        """
        from pipeline.models.torch_graph.computation.torch_network import (
            GraphFile,
            GraphSource,
            ImportedModule,
            TorchNetwork,
        )

        imported = getattr(self, "import")
        source: GraphSource
        if self.graph is not None:
            source = GraphFile(self.graph)
        elif imported is not None:
            # Commands of a done run, such as infer, don't check the recipe again.
            self.require_code()
            arguments = {**self._list_class_counts(), **self.arguments}
            source = ImportedModule(
                imported,
                json.dumps(replace_classes(arguments, classes)),
                self.seed,
                self.input_shape,
                self.input_dtype,
                self.batch,
                self.output,
                self._list_input_names(),
            )
        else:
            raise ValueError(
                "has no network; must have import, such as torchvision.models:resnet18, or graph, "
                "such as net.torch.json"
            )
        return TorchNetwork(source, dtype)

    def _list_input_names(self) -> tuple[str, ...]:
        """Return the network's names of `model.inputs` in their order; () without it."""
        if self.inputs is None or isinstance(self.inputs, str):
            return ()
        names = tuple(self.inputs)
        if isinstance(self.inputs, Mapping):
            return names
        return tuple(MASK if name in (PADDING_MASK, DOCUMENT) else name for name in names)

    def _list_class_counts(self) -> dict[str, str]:
        """Return the parameters of the constructor for the number of classes."""
        from pipeline.models.imported.calls import CLASS_COUNTS, list_parameters

        target = self._find_target()
        if not (isinstance(target, type) or isfunction(target)):
            return {}
        return {name: CLASSES for name in list_parameters(target) if name in CLASS_COUNTS}

    def _find_target(self) -> Any:
        """Return what `import` names; None without it, and if it can't be imported, for which
        exporting raises an error."""
        from pipeline.core.plugins.loading import find_object

        imported = getattr(self, "import")
        try:
            return None if imported is None else find_object(imported)
        except ValueError:
            return None


@component("model")
class OnnxNetwork(ModelSpec):
    """The network of an ONNX file, which JAX computes and trains.

    The file is data and needs neither onnx nor `--plugin`. Training starts from its weights; of
    `init` only `rules` are used. Batch norm and dropout train. A file with several inputs reads the
    columns of their names, or those of `model.inputs`.
    """

    name: Literal["onnx"] = "onnx"
    file: FilePath | None = None
    """The file, `net.onnx`; external data lies in its folder."""
    output: Annotated[str, Field(max_length=500)] | None = None
    """Name of the tensor of logits; null: the file's output, or what its last softmax reads."""

    def list_inputs(self) -> tuple[str, ...] | None:
        """Return the names of several inputs of the file; None for one, and without a file."""
        from pipeline.models.torch_graph.onnx.import_onnx import list_onnx_inputs

        if self.file is None:
            return None
        names = list_onnx_inputs(self.file, self.output)
        return names if len(names) > 1 else None

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return the network, which reads the file for its first images.

        Raises ValueError without a file.
        """
        from pipeline.models.torch_graph.computation.torch_network import OnnxFile, TorchNetwork

        if self.file is None:
            raise ValueError("file = null: must name the file, as model.file=net.onnx")
        return TorchNetwork(OnnxFile(self.file, self.output), dtype)
