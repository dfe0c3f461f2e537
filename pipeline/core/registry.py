"""The registry of components: every class that a recipe can name, by kind and name.

The modules of the package's components are found in their text, without importing them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    TypeAdapter,
)
from pydantic._internal._mock_val_ser import set_model_mocks
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pipeline.core.errors import RecipeError
from pipeline.core.files.paths import PACKAGE, expand_home, parse_location
from pipeline.core.plugins.loading import FLAG, load_named
from pipeline.core.plugins.parts import COMPONENTS, import_unless_absent, load_entries

COMPONENT_MODULES = (
    "pipeline.backends.devices",
    "pipeline.engine.callbacks.metric_callbacks",
    "pipeline.engine.callbacks.trackers",
    "pipeline.data.ops",
    "pipeline.data.selections",
    "pipeline.data.sources",
    "pipeline.models.imported.model_specs",
    "pipeline.models.layers.initializers",
    "pipeline.models.layers.standard",
    "pipeline.models.networks",
    "pipeline.models.layers.tables",
    "pipeline.models.layers.token_mixers",
    "pipeline.models.layers.tokens",
    "pipeline.stages.runner.calibration",
    "pipeline.study.final_value.run_estimate",
    "pipeline.training.adversarial",
    "pipeline.training.contrastive",
    "pipeline.training.features.components",
    "pipeline.training.features.non_finite_steps",
    "pipeline.training.features.gradient_rules",
    "pipeline.training.features.loss_scales",
    "pipeline.training.sequences",
    "pipeline.training.number_losses",
    "pipeline.training.target_losses",
    "pipeline.training.optimizers.adaptive",
    "pipeline.training.optimizers.layerwise",
    "pipeline.training.losses",
    "pipeline.training.target_metrics",
    "pipeline.training.optimizers.first_order",
    "pipeline.training.phased_schedules",
    "pipeline.training.schedules",
    "pipeline.training.optimizers.thor.thor_spec",
)
"""Modules of components. A package stands for all its modules."""

_COMPONENT = re.compile(
    r'^@component\("(\w+)"\)\n.*?^    name: Literal\["([^"\n]+)"\]', re.MULTILINE | re.DOTALL
)
"""A component's kind and name."""


@cache
def read_index() -> Mapping[str, Mapping[str, str]]:
    """Return the module of each component of the package, by kind and name."""
    index: dict[str, dict[str, str]] = {}
    for module in list_modules():
        file = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        text = file.read_text("utf-8") if file.is_file() else ""
        for kind, name in _COMPONENT.findall(text):
            index.setdefault(kind, {})[name] = module
    return index


def list_modules() -> Iterator[str]:
    """Yield the modules of components, and of a package each module."""
    for name in COMPONENT_MODULES:
        folder = PACKAGE.parent.joinpath(*name.split("."))
        if not folder.is_dir():
            yield name
        for file in sorted(folder.glob("*.py")):
            if file.stem != "__init__":
                yield f"{name}.{file.stem}"


T = TypeVar("T")
Seq = Annotated[tuple[T, ...], Strict(False)]
"""A YAML list, read as a tuple; its items are checked strictly."""

FilePath = Annotated[Path, Strict(False), AfterValidator(expand_home)]
"""A path written as text; `~` is the home folder."""

Location = Annotated[FilePath, BeforeValidator(parse_location)]
"""A path, or an address such as s3://bucket/folder, which is copied into the cache."""


MAX_INT = 2**31 - 1
MAX_FLOAT = 3.4028234663852886e38
BOUNDS: Mapping[str, float] = {"int": MAX_INT, "float": MAX_FLOAT}
"""The largest int32 and float32, which are the types of numbers in programs."""

_SCHEMA_KEYS = frozenset(
    {"schema", "items_schema", "keys_schema", "values_schema", "definitions", "steps",
     "lax_schema", "strict_schema", "json_schema", "python_schema"}
)  # fmt: skip
"""Keys of a pydantic schema that hold a nested schema, or a list of them."""
_NAMED_SCHEMA_KEYS = frozenset(("fields", "choices"))
"""Keys of a pydantic schema that hold nested schemas by name."""


class Expected:
    """Marks a field of several types. For an invalid value, pydantic reports the single error
    `must be {text}` instead of an error for each type."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        message = f"must be {self.text}"
        return core_schema.custom_error_schema(
            handler(source), "expected", custom_error_message=message
        )


class Spec(BaseModel):
    """A frozen section of a recipe. Unknown keys, NaN, and texts such as "32" for 32 are refused.

    Numbers without other bounds are limited to the range of int32 and float32.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast(CoreSchema, add_bounds(handler(source)))

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        load_all()  # the schema lists all components
        return super().model_json_schema(*args, **options)


def add_bounds(schema: Any) -> Any:
    """Return a copy of a pydantic schema in which all numbers have the bounds of `BOUNDS`."""
    if isinstance(schema, list | tuple):
        return type(schema)(add_bounds(item) for item in schema)
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in BOUNDS:
        bound = BOUNDS[schema["type"]]
        upper = {} if schema.keys() & {"le", "lt"} else {"le": bound}
        lower = {} if schema.keys() & {"ge", "gt"} else {"ge": -bound}
        return {**schema, **upper, **lower}
    bounded = {key: add_bounds(schema[key]) for key in schema.keys() & _SCHEMA_KEYS}
    for key in schema.keys() & _NAMED_SCHEMA_KEYS:
        nested = schema[key]
        if isinstance(nested, dict):
            bounded[key] = {name: add_bounds(value) for name, value in nested.items()}
        else:
            bounded[key] = add_bounds(nested)
    return {**schema, **bounded}


S = TypeVar("S", bound=Spec)
_components: dict[str, dict[str, type[Spec]]] = {}
"""The registered components by kind and name."""


def component(kind: str) -> Callable[[type[S]], type[S]]:
    """Return a decorator that registers a class under `kind` and its field `name`'s default.

    A component may be registered after recipes were checked, and defined again in a notebook.
    Raises ValueError if another class already has the name.
    """

    def register(cls: type[S]) -> type[S]:
        name = cls.model_fields["name"].default
        if read_index().get(kind, {}).get(name) != cls.__module__:
            _import_shipped(kind, name)
        by_name = _components.setdefault(kind, {})
        earlier = by_name.get(name, cls)
        is_in_notebook = earlier.__module__ == cls.__module__ == "__main__"
        is_defined_again = is_in_notebook and earlier.__name__ == cls.__name__
        if earlier is not cls and not is_defined_again:
            raise ValueError(f"{kind} {name!r} is already {earlier.__module__}.{earlier.__name__}")
        by_name[name] = cls
        _make_validator.cache_clear()
        if load_all.cache_info().currsize:
            _reset_schemas()
        return cls

    return register


@cache
def load_all() -> None:
    """Load the components of the package, of other distributions and of plug-ins. From then on,
    schemas list all components. Raises RecipeError as `load_others` does."""
    load_others()
    for name in list_modules():
        _import_module(name)
    _reset_schemas()


@cache
def load_others() -> None:
    """Load the components of other distributions and of plug-ins. Raises RecipeError for a plug-in
    that can't be loaded, or that adds nothing."""
    load_entries(COMPONENTS)
    num_components = _count_others()
    # `load_named` imports a plug-in, yields it, and only then imports the next plug-in.
    for plugin in load_named():
        if _count_others() == num_components and not _has_exports(plugin.module):
            raise RecipeError(
                [f"{FLAG} {plugin.source}: registers no component and exports nothing"]
            )
        num_components = _count_others()


def _import_shipped(kind: str, name: str) -> None:
    """Import the module of a component of the package, if there is one."""
    module = read_index().get(kind, {}).get(name)
    if module is not None:
        _import_module(module)


def _import_module(name: str) -> None:
    import_unless_absent(name, partial(importlib.import_module, name))


def _count_others() -> int:
    """Return the number of components that the package doesn't have."""
    classes = (cls for by_name in _components.values() for cls in by_name.values())
    return sum(not is_shipped(cls) for cls in classes)


def is_shipped(cls: type[Spec]) -> bool:
    return cls.__module__.startswith("pipeline.")


def _has_exports(module: ModuleType) -> bool:
    """Return whether a module has a class or function for recipes' keys `import`.

    Imports of this package and of the standard library aren't exports.
    """
    if hasattr(module, "__getattr__"):
        return True  # It may import a class or function when its name is used.
    foreign_packages = {"pipeline", *sys.stdlib_module_names}
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value):
            continue
        package = str(getattr(value, "__module__", None)).partition(".")[0]
        if package not in foreign_packages:
            return True
    return False


def _reset_schemas() -> None:
    """Discard the schemas of all specs, since they lack a component that is registered later."""
    _make_validator.cache_clear()
    specs: list[type[Any]] = [Spec]
    while specs:
        cls = specs.pop()
        specs += cls.__subclasses__()
        if cls.__pydantic_complete__:
            cls.__pydantic_complete__ = False
            # pydantic builds the schema when the class is next used. `model_rebuild(force=True)`
            # would build all schemas now.
            serializer = cls.__pydantic_serializer__
            set_model_mocks(cls)
            # Objects exist that older versions of pydantic can't write with a mock.
            cls.__pydantic_serializer__ = serializer


def list_components(kind: str) -> Mapping[str, type[Spec]]:
    """Return all components of a kind by name, sorted."""
    load_others()
    for module in dict.fromkeys(read_index().get(kind, {}).values()):
        _import_module(module)
    return MappingProxyType(dict(sorted(_components.get(kind, {}).items())))


def list_other_components(kind: str) -> Mapping[str, type[Spec]]:
    """Return the components of a kind by name that the package doesn't have."""
    load_others()
    others = _components.get(kind, {}).items()
    return {name: cls for name, cls in sorted(others) if not is_shipped(cls)}


def find_component(kind: str, name: str) -> type[Spec] | None:
    """Return a component by kind and name; None if none has them."""
    load_others()
    if name not in _components.get(kind, {}):
        _import_shipped(kind, name)
    return _components.get(kind, {}).get(name)


def make_component(kind: str, name: str, **fields: Any) -> Any:
    """Make a component of a kind by its name and fields; other fields have their defaults. Raises
    ValueError for an unknown name or field."""
    specs = list_components(kind)
    if name not in specs:
        raise ValueError(f"there is no {kind} {name!r}; choose from {', '.join(specs)}")
    return specs[name].model_validate({"name": name, **fields})


def find_components(name: str) -> list[type[Spec]]:
    """Return the components called `name`, of any kind."""
    load_all()
    return [by_name[name] for by_name in _components.values() if name in by_name]


def find_kind(names: Iterable[str]) -> str | None:
    """Return the kind whose components have exactly these names, else None."""
    load_all()
    return next((kind for kind, by_name in _components.items() if set(by_name) == set(names)), None)


class ComponentOf:
    """Marks a field that holds a component of a kind: `Annotated[ModelSpec, ComponentOf("model")]`.

    In a recipe, the field is `{name: relu, ...}`, or `relu` if every other key has a default.
    Components are looked up when a value is validated, so components may hold components.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        if not load_all.cache_info().currsize:
            return core_schema.no_info_plain_validator_function(self._validate)
        choice = _OneOf(list_components(self.kind)).__get_pydantic_core_schema__(source, handler)
        return core_schema.no_info_before_validator_function(self._to_section, choice)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        if schema["type"] == "function-plain":
            load_all()
            schema = TypeAdapter(Annotated[Any, self]).core_schema
        return {"anyOf": [{"enum": list(list_components(self.kind))}, handler(schema)]}

    def _validate(self, value: Any) -> Any:
        """Return the component of a section, whose module is imported now."""
        section = self._to_section(value)
        is_section = isinstance(section, Mapping)
        name = section["name"] if is_section else getattr(section, "name", None)
        is_known = isinstance(name, str) and find_component(self.kind, name) is not None
        # The names of all components are for the message about an unknown name.
        return _make_validator(self.kind, name if is_known else None).validate_python(section)

    def _to_section(self, value: Any) -> Any:
        """Return `{name: relu}` for `relu`. Raises PydanticCustomError for an unnamed section."""
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "name" not in value:
            keys = set(value)
            specs = list_components(self.kind)
            fitting = [name for name, cls in specs.items() if keys <= set(cls.model_fields)]
            raise PydanticCustomError(
                "component_without_name", "must be a section with a `name`", {"fitting": fitting}
            )
        return value


@cache
def _make_validator(kind: str, name: str | None) -> TypeAdapter[Any]:
    """Return a validator of sections of one component, or else of all of a kind."""
    cls = None if name is None else find_component(kind, name)
    specs = list_components(kind) if cls is None or name is None else {name: cls}
    if cls is not None:
        # Fields of any type are written by the class itself, whose build is deferred.
        cls.model_rebuild()
    config = ConfigDict(strict=True, allow_inf_nan=False)
    return TypeAdapter(Annotated[Any, _OneOf(specs)], config=config)


class _OneOf:
    """Marks a field that holds one of several specs, chosen by `name`."""

    def __init__(self, specs: Mapping[str, type[Spec]]) -> None:
        # pydantic's union needs a choice. For a kind without components, this is a `Spec` named "",
        # which no section fits.
        self.specs = specs or {"": Spec}

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {name: handler.generate_schema(cls) for name, cls in self.specs.items()}
        return core_schema.tagged_union_schema(choices, discriminator="name")
