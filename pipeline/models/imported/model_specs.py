"""Networks that a recipe imports from custom code: `model=flax`, `function`, `keras`.

The command line names the code with `--plugin`. A recipe alone never runs code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pipeline.core.plugins.loading import find_object
from pipeline.core.registry import component
from pipeline.models.layers.model_spec import InitRules, ModelSpec, replace_classes

if TYPE_CHECKING:
    from flax import linen as nn

    from pipeline.models.imported.imported_network import PureNetwork


class ImportedModelSpec(ModelSpec):
    """Base of networks of custom code.

    `import: nets:MyNet` names a class or a function, which is called with `arguments`. If it has a
    parameter `classes` or `num_classes`, the number of classes is passed too. If it has a parameter
    `dtype`, the recipe's dtype of activations is passed. `arguments` take precedence.
    """

    init: InitRules  # type: ignore[assignment]  # other keys have no effect
    arguments: dict[str, Any]
    """Arguments of the class or function. `$classes` is replaced by the number of classes."""
    # A field named by a keyword of Python can't be declared in another way.
    __annotations__["import"] = "str | None"

    @property
    def reference(self) -> str:
        """The value of `import`. Raises ValueError if it is null."""
        reference: str | None = getattr(self, "import")
        if reference is None:
            raise ValueError(
                f"import = null: must name the network as module:name, such as "
                f"model={self.name} model.import=nets:MyNet with --plugin nets.py"
            )
        return reference

    def require_code(self) -> None:
        self.find()

    def find(self) -> Any:
        """Return the object that `import` names.

        Raises ValueError, which begins with the key, if no plug-in has it.
        """
        reference = self.reference
        try:
            return find_object(reference)
        except ValueError as error:
            raise ValueError(f"import = {error}") from error

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Make an `ImportedNetwork`. Raises ValueError if the code can't be called as needed."""
        from pipeline.models.imported.imported_network import ImportedNetwork

        arguments = replace_classes(self.arguments, classes)
        network = self.adapt(self.find(), arguments, classes, dtype)
        return ImportedNetwork(network, self.reference, dtype)

    def list_inputs(self) -> tuple[str, ...] | None:
        """Return the names of several inputs in the signature of the code. None for one input, and
        if only the built network has the signature."""
        names = self.find_inputs(self.find())
        return tuple(names) if len(names) > 1 else None

    def find_inputs(self, target: Any) -> Sequence[str]:
        """Return the names of the inputs in a signature of `target`; () if it has none."""
        return ()

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, by the recipe or the code; one name without either."""
        if isinstance(self.inputs, str):
            return (self.inputs,)
        return tuple(self.inputs or self.list_inputs() or ("inputs",))

    @abstractmethod
    def adapt(
        self, target: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        """Return the network as pure functions. Raises ValueError for another kind of object."""


@component("model")
class FlaxModule(ImportedModelSpec):
    """A module of flax: a class of `flax.linen` or `flax.nnx`, or a function that returns one.

    It is called with its inputs, such as images (batch, height, width, channels) float32 or tokens
    int32 (batch, tokens): by name if `__call__` has parameters of these names, else by position.
    `train`, `training`, `is_training` and `deterministic` are passed too if it has these
    parameters. An nnx module is also switched by `train()` and `eval()`. It returns logits (batch,
    classes).
    Parameters are float32. Batch statistics are carried, and dropout draws from the recipe's seed.
    `init.rules` replaces the module's initialisers.
    """

    name: Literal["flax"] = "flax"

    def find_inputs(self, target: Any) -> Sequence[str]:
        from pipeline.models.imported.flax_modules import find_inputs

        return find_inputs(target)

    def adapt(
        self, target: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        from pipeline.models.imported.flax_modules import adapt_module

        return adapt_module(self.reference, target, arguments, classes, dtype, self.input_names)


@component("model")
class JaxFunction(ImportedModelSpec):
    """A network of plain JAX: functions that initialise and apply parameters.

    `import` names a pair `(init, apply)`, an object with these functions, such as
    `haiku.transform` returns, or a function that returns either for `arguments`. `init(key,
    images)` returns the parameters, a pytree of arrays, for images (1, height, width, channels)
    float32. An `init` for shapes, as in stax, must be wrapped. `apply(params, images)` returns
    logits (batch, classes). Both functions may have parameters `key` or `rng`, and `train`,
    `training`, `is_training` or `deterministic`. With a state, as of
    `haiku.transform_with_state`, `init` returns (params, state), and `apply(params, state, images)`
    returns (logits, state); the state is batch statistics.
    """

    name: Literal["function"] = "function"

    def find_inputs(self, target: Any) -> Sequence[str]:
        from pipeline.models.imported.jax_functions import find_inputs

        return find_inputs(target)

    def adapt(
        self, target: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        from pipeline.models.imported.jax_functions import adapt_functions

        return adapt_functions(self.reference, target, arguments, classes, dtype, self.input_names)


@component("model")
class KerasModel(ImportedModelSpec):
    """A model of Keras 3 on its JAX backend: a model, its class, or a function that returns it.

    It reads its inputs, such as images (batch, height, width, channels) float32; several by the
    names of a functional model's inputs or of `call`'s parameters. It returns logits (batch,
    classes). Its weights are named by their paths. Weights that Keras updates without gradients,
    such as the statistics of batch norm, are carried as batch statistics. Dropout draws from the
    recipe's seed, which is also Keras's seed while the model is built.
    """

    name: Literal["keras"] = "keras"

    def find_inputs(self, target: Any) -> Sequence[str]:
        from pipeline.models.imported.keras_models import find_inputs

        return find_inputs(target)

    def adapt(
        self, target: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        from pipeline.models.imported.keras_models import adapt_model

        return adapt_model(self.reference, target, arguments, classes, dtype)
