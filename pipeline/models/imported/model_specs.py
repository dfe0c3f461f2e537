"""Networks that a recipe imports from the user's own code: `model=flax`, `function`, `keras`.

The command line names that code with `--plugin`; a recipe alone runs none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pipeline.core.plugins.loading import find_object
from pipeline.core.registry import part
from pipeline.models.layers.model_spec import InitRules, ModelSpec
from pipeline.models.layers.standard import CLASSES

if TYPE_CHECKING:
    from flax import linen as nn

    from pipeline.models.imported.imported_network import PureNetwork


class ImportedModelSpec(ModelSpec):
    """Base of the networks that are code of the user's own.

    `import: nets:MyNet` names a class or a function. It is called with `arguments`, and besides
    with the number of classes where it has a parameter `classes` or `num_classes`, and with the
    recipe's type of activations where it has a parameter `dtype`, unless `arguments` give them.
    """

    init: InitRules  # type: ignore[assignment]  # all others are its own
    arguments: dict[str, Any]
    """Values in which `$classes` stands for the dataset's number of classes."""
    # A keyword of Python, which no class can have as a field in another way.
    __annotations__["import"] = "str | None"

    @property
    def reference(self) -> str:
        """The value of `import`. Raises ValueError where it is null."""
        given: str | None = getattr(self, "import")
        if given is None:
            raise ValueError(
                f"import = null: must name the network as module:name, as model={self.name} "
                "model.import=nets:MyNet with --plugin nets.py"
            )
        return given

    def find(self) -> Any:
        """Return what `import` names.

        Raises ValueError, which begins with the key, where the command line loads nothing like it.
        """
        reference = self.reference
        try:
            return find_object(reference)
        except ValueError as error:
            raise ValueError(f"import = {error}") from error

    def build(self, classes: int, dtype: str) -> nn.Module:
        """An `ImportedNetwork`. Raises ValueError where the user's code can't be called so."""
        from pipeline.models.imported.imported_network import ImportedNetwork

        arguments = _with_classes(self.arguments, classes)
        adapted = self.adapt(self.find(), arguments, classes, dtype)
        return ImportedNetwork(adapted, self.reference, dtype)

    @abstractmethod
    def adapt(
        self, found: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        """The network as pure functions. Raises ValueError for what is none of this kind."""


@part("model")
class FlaxModule(ImportedModelSpec):
    """A module of flax: a class of `flax.linen` or `flax.nnx`, or a function that returns one.

    It is called with images (batch, height, width, channels) float32 and with those of `train`,
    `training`, `is_training` and `deterministic` that its `__call__` takes; an nnx module is
    switched by `train()` and `eval()` besides. It returns logits (batch, classes). Parameters
    are float32; batch statistics are carried, and dropout draws from the recipe's seed. Its
    initialisers are its own, except for `init.rules`.
    """

    name: Literal["flax"] = "flax"

    def adapt(
        self, found: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        """The module as pure functions. Raises ValueError for what is no module."""
        from pipeline.models.imported.flax_modules import adapt_module

        return adapt_module(self.reference, found, arguments, classes, dtype)


@part("model")
class JaxFunction(ImportedModelSpec):
    """A network of plain JAX: functions that initialise and apply parameters.

    `import` names a function that is called with `arguments` and returns a pair `(init, apply)` or
    an object with these two, as `haiku.transform` does; or such an object itself. `init(key,
    images)` gives the parameters, arrays in any pytree, for images (1, height, width, channels)
    float32; that of stax, which takes a shape, must be wrapped. `apply(params, images)` gives
    logits (batch, classes). Either may also take `key` or `rng`, and `train`, `training`,
    `is_training` or `deterministic`, by these names. There are no batch statistics.
    """

    name: Literal["function"] = "function"

    def adapt(
        self, found: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        """The functions as a network. Raises ValueError for what are none."""
        from pipeline.models.imported.jax_functions import adapt_functions

        return adapt_functions(self.reference, found, arguments, classes, dtype)


@part("model")
class KerasModel(ImportedModelSpec):
    """A model of Keras 3 on its JAX backend: a function that returns one, a class, or a model.

    It reads images (batch, height, width, channels) float32 and returns logits (batch, classes).
    Its weights are named by their paths. Those that Keras updates without gradients, such as the
    statistics of batch norm, are carried as batch statistics; dropout draws from the recipe's seed,
    which is Keras's own seed while the model is built.
    """

    name: Literal["keras"] = "keras"

    def adapt(
        self, found: Any, arguments: Mapping[str, Any], classes: int, dtype: str
    ) -> PureNetwork:
        """The model as pure functions. Raises ValueError for another backend, or no model."""
        from pipeline.models.imported.keras_models import adapt_model

        return adapt_model(self.reference, found, arguments, classes, dtype)


def _with_classes(value: Any, classes: int) -> Any:
    """The value with the number of classes for each `$classes` in it."""
    if isinstance(value, Mapping):
        return {key: _with_classes(inner, classes) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_classes(inner, classes) for inner in value]
    return classes if value == CLASSES else value
